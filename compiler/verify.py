"""Invariants of a program, checked after every pass: an error here is a bug of halofx, never of the model."""

from __future__ import annotations

from torch import fx

from halofx.compiler.emit import label_of, operand_nodes
from halofx.compiler.facts import (
    attached_operands,
    axes_of,
    bound_of,
    calls,
    is_op,
    is_tensor,
    layout_of,
    move_of,
    source_of,
)
from halofx.compiler.index_map import IDENTITY, Indices, block_reads, span
from halofx.compiler.interval import Interval
from halofx.compiler.primitives import all_reduce, redistribute, reduce_scatter, transfer, vary, vary_all
from halofx.compiler.program import Program

LOWERED = ("insert_movements", "merge_movements")
"""After these every op's inputs must be held as the op reads them; after later passes cotangents must be complete too."""


def verify(program: Program, step: str) -> None:
    """Check what must hold after the pass ``step``; raises AssertionError naming the node."""
    lowered = step in LOWERED or any(name in program.listings for name in LOWERED)
    marked = step == "insert_varies" or "insert_varies" in program.listings
    for node in program.graph.nodes:
        if is_op(node) and "split" in node.meta and lowered:
            for key, source in operand_nodes(node).items():
                _held_as_read(program, node, key, source)
                if marked:
                    _marked(node, key, source)
        if lowered and is_tensor(node) and node.op == "call_function":
            assert not layout_of(node).partial or _summed(node), f"{step}: {label_of(node)} is used before it is summed"


def _summed(node: fx.Node) -> bool:
    return all(calls(user, all_reduce, reduce_scatter, transfer) for user in node.users)


def _held_as_read(program: Program, node: fx.Node, key: str, source: fx.Node) -> None:
    """The layout of an input agrees with the split of the op, dim by dim, and its blocks with the index maps."""
    bound, layout = bound_of(node), layout_of(source)
    for dim, axis in enumerate(layout.split):
        name = bound.name_of(key, dim)
        wanted = node.meta["split"].get(name) if name is not None else None
        extent = bound.call.tensors[key].shape[dim]
        every = span(Interval(0, extent))
        if axis is not None and wanted is None and axis in node.meta["split"].values():
            held = _moved(source, dim, axis)
            assert held is not None and all(read == every for read in held), f"{label_of(node)}: {key}"
            continue
        if wanted is None or name is None:
            assert axis is None, f"{label_of(node)} reads {key} dim {dim} whole, it is held over {axis}"
            continue
        factor = bound.factors[name]
        index_map = next(m for k, d, m in factor.ins if k == key and d == dim)
        parts = program.mesh[wanted]
        reads = block_reads(index_map, factor.extent, extent, parts)
        whole, canonical = _kind(reads, extent, parts)
        if axis is None and whole:
            continue
        assert axis == wanted, f"{label_of(node)} reads {key} dim {dim} split over {wanted}, it is held over {axis}"
        held = _moved(source, dim, wanted)
        as_read = canonical if held is None else reads == held
        assert as_read, f"{label_of(node)}: {key} dim {dim} is not as read"


def _kind(reads: tuple[Indices, ...], extent: int, parts: int) -> tuple[bool, bool]:
    """Whether everybody reads everything, and whether everybody reads its own block."""
    own = block_reads(IDENTITY, extent, extent, parts)
    every = span(Interval(0, extent))
    return all(read == every for read in reads), reads is own or reads == own


def _moved(node: fx.Node, dim: int, axis: str) -> tuple[object, ...] | None:
    """What a movement has brought to the coordinates of an axis of one dim; None where they hold their own blocks."""
    while calls(node, redistribute, transfer, vary):
        move = move_of(node)
        if move is not None and move.need == dim and move.axis == axis:
            return tuple(move.reads)
        node = source_of(node)
    return None


def _marked(node: fx.Node, key: str, source: fx.Node) -> None:
    """A value that is the same on all ranks of an axis meets shards of that axis only through `vary`."""
    missing = set(node.meta["split"].values()) - layout_of(source).axes
    if not missing or key not in attached_operands(node):
        return
    found: set[str] = set()
    while source.op == "call_function" and not is_op(source):
        if calls(source, vary, vary_all):
            found |= set(axes_of(source))
        source = source.all_input_nodes[0]
    assert missing <= found, f"{label_of(node)} uses {key} on shards of {missing} without vary"
