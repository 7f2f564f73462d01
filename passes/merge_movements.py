"""Move a value once: equal movements of one value become one node, and a value is summed or marked once.

before    a.h0: halo_exchange(x, lo=1, hi=1)    b.h0: halo_exchange(x, lo=1, hi=1)
after     a.h0: halo_exchange(x, lo=1, hi=1)    b reads a.h0
"""

from __future__ import annotations

from typing import Any

from torch import fx

from halofx.compiler.primitives import redistribute
from halofx.compiler.program import Program


def merge_movements(program: Program) -> None:
    """Replace every movement that an earlier node already makes."""
    seen: dict[Any, fx.Node] = {}
    for node in list(program.graph.nodes):
        if node.op != "call_function" or node.target is not redistribute:
            continue
        key = node.args
        if key in seen:
            node.replace_all_uses_with(seen[key])
            program.graph.erase_node(node)
        else:
            seen[key] = node
