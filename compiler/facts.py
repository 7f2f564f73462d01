"""Reading and writing the facts that passes keep on nodes, past getitem nodes and single outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from halofx.compiler.emit import is_getitem
from halofx.compiler.layout import Layout
from halofx.compiler.primitives import COLLECTIVES
from halofx.compiler.rules import Bound

Homes = tuple[str | None, ...]
"""For every dim of a tensor the axis that would split it if it could be split everywhere."""


def val(node: fx.Node) -> torch.Tensor:
    """The fake global tensor of a node with one output."""
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor), node
    return value


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The global shape of a node with one output."""
    return tuple(val(node).shape)


def is_tensor(node: fx.Node) -> bool:
    """Whether a node's value is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def is_op(node: fx.Node) -> bool:
    """Whether a node is a call of the model's own: neither a mere getitem nor something that lowering put in."""
    return node.op == "call_function" and not is_getitem(node) and node.target not in COLLECTIVES


def bound_of(node: fx.Node) -> Bound:
    """The bound rule of an op."""
    bound: Bound = node.meta["bound"]
    return bound


def _pick(node: fx.Node, key: str) -> Any:
    if is_getitem(node):
        source, index = node.args
        return source.meta[key][index]  # type: ignore[union-attr]
    return node.meta[key][0]


def homes_of(node: fx.Node) -> Homes:
    """The homes of a tensor-valued node."""
    homes: Homes = _pick(node, "homes")
    return homes


def layout_of(node: fx.Node) -> Layout:
    """The layout of a tensor-valued node."""
    layout: Layout = _pick(node, "layout")
    return layout


def set_layout(node: fx.Node, *layouts: Layout) -> None:
    """Set the layouts of a node's outputs."""
    node.meta["layout"] = layouts


def differentiable(node: fx.Node) -> bool:
    """Whether a cotangent may ever flow into this value: parameters, inputs, and what is computed from them."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return False
    return bool(node.meta.get("grad", True))
