"""Reading and writing the facts that passes keep on nodes, past getitem nodes and single outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from halofx.compiler.emit import is_getitem, operand_nodes
from halofx.compiler.layout import Layout
from halofx.compiler.primitives import COLLECTIVES, redistribute
from halofx.compiler.redistribution import Redistribution
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


def source_of(node: fx.Node) -> fx.Node:
    """The value that a collective (or a getitem) takes."""
    source = node.args[0]
    assert isinstance(source, fx.Node), node
    return source


def sources_of(node: fx.Node) -> list[fx.Node]:
    """The parameters of a `vary_all`."""
    return list(node.all_input_nodes)


def axes_of(node: fx.Node) -> tuple[str, ...]:
    """The axes of an `all_reduce`, `vary` or `vary_all`."""
    axes = node.args[1]
    assert isinstance(axes, tuple), node
    return tuple(str(axis) for axis in axes)


def ends_of(node: fx.Node) -> tuple[int, int]:
    """The stages from and to which a `transfer` goes."""
    _, source, target = node.args
    assert isinstance(source, int) and isinstance(target, int), node
    return source, target


def move_of(node: fx.Node) -> Redistribution | None:
    """The movement of a `redistribute` node, None for any other node."""
    return node.meta["move"] if node.op == "call_function" and node.target is redistribute else None


def calls(node: fx.Node, *targets: Any) -> bool:
    """Whether a node is a call of one of the targets."""
    return node.op == "call_function" and node.target in targets


def _pick(node: fx.Node, key: str) -> Any:
    if is_getitem(node):
        return source_of(node).meta[key][node.args[1]]
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


def attached_operands(node: fx.Node) -> dict[str, fx.Node]:
    """The operands of an op into which it may send a cotangent, by key."""
    spec = bound_of(node).spec
    detached = spec.detached if spec is not None else ()
    return {
        key: source
        for key, source in operand_nodes(node).items()
        if key.partition(".")[0] not in detached and differentiable(source)
    }


def differentiable(node: fx.Node) -> bool:
    """Whether a cotangent may ever flow into this value: parameters, inputs, and what is computed from them."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return False
    return bool(node.meta.get("grad", True))
