"""Choose which factors of every op are split, and so the layout of every value: the canonical plan.

A factor is split over its home axis where the op allows it and there are at least as many indices as ranks; elsewhere the
level leaves the split (``thin="split"`` keeps it down to empty shards).

    conv (d, h at home on depth, height; 16 x 3 planes, depth=4, height=4)   split {d: depth}     layout [1, 8, 16@depth, 3]
"""

from __future__ import annotations

from torch import fx

from halofx.compiler.emit import operand_nodes
from halofx.compiler.facts import bound_of, homes_of, is_op, layout_of, set_layout, shape_of
from halofx.compiler.index_map import Strided, Table
from halofx.compiler.layout import Layout
from halofx.compiler.program import Program
from halofx.passes.infer_homes import split_homes


def plan_splits(program: Program) -> None:
    """Set ``split`` (factor -> axis), ``fetched`` and ``layout`` on every op."""
    for node in program.graph.nodes:
        if node.op == "placeholder" and "input" in node.meta:
            set_layout(node, _input_layout(program, node))
        elif node.op in ("placeholder", "get_attr"):
            set_layout(node, Layout.whole(node.meta["val"].dim()))
        elif is_op(node):
            _plan(program, node)


def wide(program: Program, extent: int, axis: str) -> bool:
    """Whether a dim of this extent stays split over an axis."""
    parts = program.mesh[axis]
    return parts > 1 and (extent >= parts or program.options.get("thin") == "split")


def _input_layout(program: Program, node: fx.Node) -> Layout:
    """Inputs are given in shards, however thin."""
    return Layout(tuple(a if a and program.mesh[a] > 1 else None for a in homes_of(node)))


def _plan(program: Program, node: fx.Node) -> None:
    bound = bound_of(node)
    if bound.spec is None:
        node.meta["split"], node.meta["fetched"] = {}, frozenset()
        set_layout(node, *(Layout.whole(out.ndim) for out in bound.call.outs))
        return
    split = {
        name: axis
        for name, axis in split_homes(node).items()
        if bound.factors[name].splittable and wide(program, bound.factors[name].extent, axis)
    }
    node.meta["split"] = split
    node.meta["fetched"] = _fetched(node, split)
    partial = tuple(axis for name, axis in split.items() if bound.factors[name].reduces)
    set_layout(
        node,
        *(Layout(tuple(split.get(t.strip("[]")) for t in pattern.split()), partial) for pattern in bound.spec.outs),
    )


def _fetched(node: fx.Node, split: dict[str, str]) -> frozenset[str]:
    """Factors that leave their split here and read few indices: only these are fetched, not the whole dim."""
    bound, nodes = bound_of(node), operand_nodes(node)
    return frozenset(
        name
        for name, factor in bound.factors.items()
        if name not in split and factor.splittable and len(factor.ins) == 1
        for key, dim, index_map in factor.ins
        if isinstance(index_map, (Strided, Table)) and layout_of(nodes[key]).split[dim] is not None
        if factor.extent < shape_of(nodes[key])[dim]
    )
