"""Checkpointed regions: the ops of one call of ``torch.utils.checkpoint``, with the collectives that lowering put among them.

    x ---- halo ---- conv ---- sum ---- norm ---- relu ---- halo ---- conv
           |______________ region 0 ______________|

Autograd keeps what enters a region and what arrived in it from other ranks, and runs the region again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from halofx.compiler.emit import is_getitem
from halofx.compiler.facts import calls, source_of
from halofx.compiler.primitives import COLLECTIVES, vary_all
from halofx.compiler.program import Program


def regions(program: Program) -> dict[fx.Node, int]:
    """The region of every node that is in one.

    Ops have theirs from capture (``meta["region"]``); what lowering inserted belongs to the region of all its users, or else
    to that of its source. What serves nothing but new values of buffers stays outside: it takes no gradient.
    """
    found = {node: int(node.meta["region"]) for node in program.graph.nodes if "region" in node.meta}
    if not found:
        return found
    needed = _ancestors(program.outputs())
    found = {node: number for node, number in found.items() if node in needed}
    for node in reversed(program.graph.nodes):
        users = {found.get(user) for user in node.users}
        if node not in found and _lowered(node) and len(users) == 1 and None not in users:
            found[node] = users.pop()  # type: ignore[assignment]
    for node in program.graph.nodes:
        if node not in found and node in needed and _lowered(node) and source_of(node) in found:
            found[node] = found[source_of(node)]
    return found


def _ancestors(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    found, stack = set[fx.Node](), list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


def _lowered(node: fx.Node) -> bool:
    """Whether a node is a collective or an output of something, whose first argument is one value."""
    if is_getitem(node):
        return not calls(source_of(node), vary_all)
    return calls(node, *COLLECTIVES) and not calls(node, vary_all)
