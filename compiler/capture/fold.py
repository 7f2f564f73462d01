"""Compute what depends on no input once, at compile time, and drop what nobody uses.

    %arange = arange(4)
    %mul    = mul(%arange, 2)        ->     %const = get_attr[const]      constants["const"] = tensor([0, 2, 4, 6])
    %add    = add(%x, %mul)                 %add   = add(%x, %const)

Random ops are never folded, nor is what gets large: its small inputs become constants and it stays an op.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from halofx.compiler.capture.record import READS
from halofx.compiler.errors import CompileError, at

LARGEST_CONSTANT = 2**22
"""Results of more elements than this stay ops (16 MiB of float32)."""


def check_reads(graph: fx.Graph) -> None:
    """Prove that no value that Python read depends on an input, a parameter or chance; then drop the reads.

    A tensor made from constants is real during the recording, and stays so when something of the input is written to
    it: ``m = torch.zeros(3); m[0] = x.sum(); if m.any(): ...`` reads numbers that mean nothing.
    """
    kinds: dict[fx.Node, str] = {}
    for node in list(graph.nodes):
        kinds[node] = kind = _kind(node, kinds)
        if not is_read(node):
            continue
        if kind:
            raise CompileError(
                f"the forward reads the value of a tensor that depends on {kind}{at(str(node.meta['place']))}; branch "
                f"on shapes instead, use torch.where or a mask of fixed size{node.meta['place'].way_round}"
            )
        graph.erase_node(node)


def is_read(node: fx.Node) -> bool:
    """Whether a node hands a value to Python."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in READS


def is_random(node: fx.Node) -> bool:
    """Whether an op draws random numbers."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _kind(node: fx.Node, kinds: dict[fx.Node, str]) -> str:
    """What a value depends on, for an error; nothing for a constant."""
    if node.op == "placeholder":
        return "a parameter or buffer" if "state" in node.meta else "the input"
    found = {kinds[n] for n in node.all_input_nodes} | ({"a random number"} if is_random(node) else set())
    return next((k for k in ("the input", "a parameter or buffer", "a random number") if k in found), "")


def fold(graph: fx.Graph, constants: dict[str, Tensor]) -> dict[str, Tensor]:
    """Replace constant sub-graphs by constants; returns those that the graph uses, named ``const``, ``const_1``, ..."""
    foldable: set[fx.Node] = set()
    for node in graph.nodes:
        if _is_foldable(node, foldable):
            foldable.add(node)
    values: dict[fx.Node, Any] = {}
    for node in list(graph.nodes):
        if node in foldable and isinstance(node.meta["val"], Tensor) and any(u not in foldable for u in node.users):
            value = _evaluate(node, values, constants)
            values[_to_constant(node, value)] = value
    drop_dead(graph)
    return _collect(graph)


def _is_foldable(node: fx.Node, foldable: set[fx.Node]) -> bool:
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or is_random(node) or any(n not in foldable for n in node.all_input_nodes):
        return False
    vals = node.meta["val"] if isinstance(node.meta["val"], tuple) else (node.meta["val"],)
    return all(v.numel() <= LARGEST_CONSTANT for v in vals if isinstance(v, Tensor))


def _evaluate(node: fx.Node, values: dict[fx.Node, Any], constants: dict[str, Tensor]) -> Any:
    """The value of a foldable node, computing what it needs first (no recursion: chains can be long)."""
    stack = [node]
    while stack:
        top = stack[-1]
        missing = [n for n in top.all_input_nodes if n not in values]
        if top in values or not missing:
            stack.pop()
            if top not in values:
                values[top] = constants[str(top.target)] if top.op == "get_attr" else _call(top, values)
        stack += missing
    return values[node]


def _call(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
    with torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _to_constant(node: fx.Node, value: Tensor) -> fx.Node:
    """A get_attr node with the value, in the place of a node."""
    with node.graph.inserting_before(node):
        new = node.graph.create_node("get_attr", "const")
    new.meta.update(node.meta, value=value)
    new.meta.pop("marked", None)
    node.replace_all_uses_with(new)
    return new


def _collect(graph: fx.Graph) -> dict[str, Tensor]:
    """Name the constants in the order in which they are used."""
    found: dict[str, Tensor] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            node.target = f"const_{len(found)}" if found else "const"
            found[node.target] = node.meta.pop("value")
    return found


def drop_dead(graph: fx.Graph) -> None:
    """Erase ops and state that nothing uses; inputs stay, they are bound by position."""
    for node in reversed(list(graph.nodes)):
        keep = node.op == "output" or (node.op == "placeholder" and "input" in node.meta)
        if not node.users and not keep:
            graph.erase_node(node)
