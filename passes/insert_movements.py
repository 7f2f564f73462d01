"""Make every difference between what a node's input holds and what the node reads a movement.

before    enc.conv: conv3d(x, w)                          reads planes 2o-1 .. 2o+1 of x, split over depth
after     enc.conv.h0: redistribute(x, depth: blocks -> what each coordinate reads)
          enc.conv: conv3d(enc.conv.h0, w)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from torch import fx

from halofx.compiler.emit import label_of, operand_nodes, set_operands
from halofx.compiler.facts import bound_of, is_op, layout_of, set_layout, shape_of
from halofx.compiler.index_map import IDENTITY, Indices, block_reads, span
from halofx.compiler.interval import Interval
from halofx.compiler.layout import Layout
from halofx.compiler.mesh import Mesh
from halofx.compiler.primitives import redistribute
from halofx.compiler.program import Program
from halofx.compiler.redistribution import Redistribution

Need = dict[str, tuple[int | None, int, tuple[Indices, ...]]]
"""axis -> (dim that differs between ranks or None, the dim read, indices by coordinate)"""


def insert_movements(program: Program) -> None:
    """Insert ``redistribute`` nodes before every op, and bring what leaves the graph into the layout that it must have."""
    for node in list(program.graph.nodes):
        if is_op(node):
            _feed(program, node)
    outputs, updates = program.results()
    if program.options.get("loss"):
        outputs = tuple(_leave(program, node, {}) for node in outputs)
    buffers = {str(n.meta["state"]): n for n in program.placeholders("state")}
    wanted = [_blocks_of(program, buffers.get(name)) for name in program.updates]
    updates = tuple(_leave(program, node, need) for node, need in zip(updates, wanted, strict=True))
    program.output_node().args = ((outputs, updates),)


def _leave(program: Program, node: fx.Node, need: Need) -> fx.Node:
    with program.graph.inserting_before(program.output_node()):
        return move(program, node, need, f"{label_of(node)}.whole", 0.0)


def _blocks_of(program: Program, buffer: fx.Node | None) -> Need:
    """The layout of a buffer as a need; None is a buffer that is only written, and whole."""
    if buffer is None:
        return {}
    split = [(dim, axis) for dim, axis in enumerate(layout_of(buffer).split) if axis]
    extents = shape_of(buffer)
    return {a: (d, d, block_reads(IDENTITY, extents[d], extents[d], program.mesh[a])) for d, a in split}


def _feed(program: Program, node: fx.Node) -> None:
    bound, changes, count = bound_of(node), dict[str, fx.Node](), 0
    for key, source in operand_nodes(node).items():
        need = needs(program.mesh, node, key)
        fill = bound.spec.fill_of(key) if bound.spec is not None else 0.0
        with program.graph.inserting_before(node):
            moved = move(program, source, need, f"{label_of(node)}.h", fill, count)
        if moved is not source:
            changes[key] = moved
        while moved is not source:
            moved, count = cast(fx.Node, moved.args[0]), count + 1
    if changes:
        set_operands(node, changes)


def needs(mesh: Mesh, node: fx.Node, key: str) -> Need:
    """What an op wants of one of its inputs, by axis; an axis that is absent is wanted whole."""
    bound, found = bound_of(node), Need()
    if bound.spec is None:
        return found
    source = operand_nodes(node)[key]
    for dim, held in enumerate(layout_of(source).split):  # a dim read whole by ranks that differ along its axis
        name = bound.name_of(key, dim)
        if held is not None and held in node.meta["split"].values() and name not in node.meta["split"]:
            everything = span(Interval(0, bound.call.tensors[key].shape[dim]))
            found[held] = (dim, dim, (everything,) * mesh[held])
    for name, factor in bound.factors.items():
        for at, dim, index_map in factor.ins:
            if at != key:
                continue
            extent = bound.call.tensors[key].shape[dim]
            axis, held = node.meta["split"].get(name), layout_of(source).split[dim]
            if axis is not None:
                found[axis] = (dim, dim, block_reads(index_map, factor.extent, extent, mesh[axis]))
            elif name in node.meta["fetched"] and held is not None:
                read = index_map.read(Interval(0, factor.extent), extent)
                found[held] = (None, dim, (read,) * mesh[held])
    return found


def move(program: Program, source: fx.Node, need: Need, label: str, fill: float, first: int = 0) -> fx.Node:
    """The node that holds ``source`` as needed: one movement an axis, axes that free a dim before axes that take it.

    Where axes wait for each other, as in ``x + x.T`` split both ways, one is gathered first.
    """
    layout, shape, node = layout_of(source), list(shape_of(source)), source
    todo = {axis: plan for axis in program.mesh.axes if (plan := _step(program.mesh, axis, layout, shape, need))}
    todo = dict(sorted(todo.items(), key=lambda item: item[1].spreads))  # what makes the tensor larger comes last
    while todo:
        free = (a for a, r in todo.items() if r.need is None or layout.split[r.need] in (None, a))
        axis = next(free, None)
        if axis is None:
            axis, taken = next((a, r) for a, r in todo.items() if r.have is not None)
            todo[axis], plan = replace(taken, have=None, have_extent=0), _gathered(taken)
        else:
            plan = todo.pop(axis)
        node = _insert(program, node, plan, f"{label}{first}", fill)
        layout = layout_of(node)
        first += 1
    return node


def _gathered(plan: Redistribution) -> Redistribution:
    """The movement to every rank of what a movement begins with."""
    reads = (span(Interval(0, plan.have_extent)),) * plan.parts
    return replace(plan, need=None, need_extent=0, reads=reads)


def _step(mesh: Mesh, axis: str, layout: Layout, shape: list[int], need: Need) -> Redistribution | None:
    if mesh[axis] == 1:
        return None
    have = layout.dim(axis)
    differs, dim, reads = need.get(axis, (None, have, ()))
    if have is None and differs is None:
        return None
    assert dim is not None
    everything = (span(Interval(0, shape[dim])),) * mesh[axis]
    if have is None and reads == everything:
        return None  # held whole, and every rank reads all of it: a value like any whole one, `vary` sees to it
    reads = reads or everything
    plan = Redistribution(
        axis, mesh[axis], have, differs, shape[have] if have is not None else 0,
        shape[differs] if differs is not None else 0, reads,
    )  # fmt: skip
    return None if have == differs and plan.canonical else plan


def _insert(program: Program, source: fx.Node, plan: Redistribution, label: str, fill: float) -> fx.Node:
    if fill:
        plan = Redistribution(
            plan.axis, plan.parts, plan.have, plan.need, plan.have_extent, plan.need_extent, plan.reads, fill
        )
    node = program.graph.call_function(redistribute, (source, cast(Any, plan)))
    layout = layout_of(source)
    split = [None if axis == plan.axis else axis for axis in layout.split]
    if plan.need is not None:
        split[plan.need] = plan.axis
    node.meta.update(val=source.meta["val"], label=label, source=source.meta.get("source"), move=plan)
    set_layout(node, Layout(tuple(split), layout.partial))
    return node
