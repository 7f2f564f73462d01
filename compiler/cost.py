"""What a program moves, computes and keeps, read off its nodes without running it. Counts are over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import fx

from halofx.compiler.emit import is_getitem, operand_nodes
from halofx.compiler.facts import (
    axes_of,
    bound_of,
    calls,
    is_op,
    is_tensor,
    layout_of,
    move_of,
    shape_of,
    source_of,
    sources_of,
    val,
)
from halofx.compiler.index_map import length
from halofx.compiler.interval import blocks
from halofx.compiler.mesh import Mesh
from halofx.compiler.primitives import all_reduce, redistribute, reduce_scatter, transfer, vary, vary_all
from halofx.compiler.program import Program
from halofx.compiler.redistribution import Redistribution
from halofx.compiler.regions import regions


def human(size: float) -> str:
    """Bytes for people: ``4.0 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


FLOPS, BYTES = 5e10, 8e9
"""What a core computes and moves in a second, about; only their ratio matters where stages are balanced."""


def seconds(node: fx.Node, mesh: Mesh) -> float:
    """How long a rank takes for an op, forward and backward, in the manner of a roofline."""
    bound = bound_of(node)
    operands = [*bound.call.tensors.values(), *bound.call.outs]
    moved = sum(o.numel * o.dtype.itemsize for o in operands)
    flops = bound.spec.flops or 0 if bound.spec is not None else 0
    share = math.prod(mesh[axis] for axis in node.meta["split"].values())
    return 3 * (flops / FLOPS + moved / BYTES) / share


def messages(program: Program, node: fx.Node) -> tuple[int, int]:
    """(messages, bytes) that a node sends in one forward pass, over all ranks; an all-reduce counts one a rank."""
    if calls(node, redistribute, reduce_scatter):
        return _moved(program.mesh, node, back=calls(node, reduce_scatter))
    if calls(node, transfer):
        return _reduced(program.mesh, source_of(node))
    if calls(node, all_reduce):
        rows = program.mesh.count(axes_of(node)) if node.args[2] == "moments" else 1
        return _once(program, _reduced(program.mesh, source_of(node), rows), bool(node.meta.get("after")))
    return 0, 0


def messages_back(program: Program, node: fx.Node) -> tuple[int, int]:
    """(messages, bytes) that a node sends in one backward pass, over all ranks."""
    if not node.meta.get("needs_grad", True):
        return 0, 0
    if calls(node, redistribute, reduce_scatter):
        return _moved(program.mesh, node, back=calls(node, redistribute))
    if calls(node, vary, transfer):
        return _reduced(program.mesh, source_of(node))
    if calls(node, vary_all):
        sizes = [val(p).numel() * val(p).element_size() for p in sources_of(node) if p.meta.get("needs_grad", True)]
        count = (program.mesh.size, sum(sizes) * program.mesh.size) if sizes else (0, 0)
        return _once(program, count, True)
    return 0, 0


def _once(program: Program, count: tuple[int, int], once: bool) -> tuple[int, int]:
    """The mesh of a stage counts every micro-batch; some messages serve all of them."""
    micro = program.stages.micro if once and program.stages is not None else 1
    return count[0] // micro, count[1] // micro


def _reduced(mesh: Mesh, source: fx.Node, rows: int = 1) -> tuple[int, int]:
    """Messages and bytes if every rank that holds something of a value sends it once."""
    layout, shape = layout_of(source), held_extents(source)
    split = [(n, mesh[axis]) for n, axis in zip(shape, layout.split, strict=True) if axis]
    repeat = mesh.size // math.prod(parts for _, parts in split)
    sending = math.prod(sum(1 for b in blocks(n, parts) if b) for n, parts in split) if math.prod(shape) else 0
    return sending * repeat, math.prod(shape) * rows * val(source).element_size() * repeat


def held_extents(node: fx.Node) -> tuple[int, ...]:
    """For every dim the indices held by all coordinates together: more than the global extent where there are halos."""
    move = move_of(node)
    if move is not None:
        held = list(held_extents(source_of(node)))
        if move.have is not None:
            held[move.have] = move.have_extent
        held[move.dim] = length(move.reads[0]) if move.need is None else sum(length(r) for r in move.reads)
        return tuple(held)
    return shape_of(node)


def _moved(mesh: Mesh, node: fx.Node, back: bool) -> tuple[int, int]:
    """Bytes of the pieces, times what the other dims hold over the other axes."""
    move: Redistribution = node.meta["move"]
    source = source_of(node)
    layout, held = layout_of(source), held_extents(source)
    moved_dims = {d for d in (move.have, move.need) if d is not None}
    pairs, count = move.traffic[2:] if back else move.traffic[:2]
    other = [(n, a) for d, (n, a) in enumerate(zip(held, layout.split, strict=True)) if d not in moved_dims]
    used = {a for _, a in other if a}
    repeat = math.prod(mesh[a] for a in mesh.axes if a != move.axis and a not in used)
    filled = math.prod(sum(1 for b in blocks(n, mesh[a]) if b) for n, a in other if a)
    return pairs * filled * repeat, count * math.prod(n for n, _ in other) * repeat * val(source).element_size()


def kept_by(program: Program) -> Iterator[tuple[fx.Node, int]]:
    """The values that autograd keeps for the backward pass, with their bytes on the fullest rank, of one micro-batch."""
    return ((node, saved_bytes(program, node)) for node in _kept(program))


def _kept(program: Program) -> Iterator[fx.Node]:
    """The values that autograd keeps for the backward pass, each once: what the rules say that ops save."""
    kept: dict[fx.Node, None] = {}
    inside = regions(program)
    for node in program.graph.nodes:
        if node in inside:
            kept.update(dict.fromkeys(_entering(node, inside)))
            continue
        if not is_op(node) or not node.meta.get("needs_grad", True):
            continue
        spec = bound_of(node).spec
        for key in spec.saves if spec is not None else ("output",):
            for source in [node] if key == "output" else _named(node, key):
                while is_tensor(source) and not _is_state(source):
                    kept[source] = None
                    if move_of(source) is None:
                        break
                    source = source_of(source)  # a moved tensor is kept as what it came from, and what arrived
    return iter(kept)


def _named(node: fx.Node, key: str) -> list[fx.Node]:
    return [n for k, n in operand_nodes(node).items() if k == key or k.startswith(f"{key}.")]


def _entering(node: fx.Node, inside: dict[fx.Node, int]) -> list[fx.Node]:
    """What is kept of a node in a checkpointed region: tensors from outside, and what arrived by a movement."""
    sources = [s for s in node.all_input_nodes if inside.get(s) != inside[node] and is_tensor(s) and not _is_state(s)]
    return [*sources, node] if move_of(node) is not None else sources


def _is_state(node: fx.Node) -> bool:
    """Whether a value is a parameter or buffer, on its own or on its way through a `vary`."""
    while is_getitem(node) or calls(node, vary, vary_all):
        source = source_of(node)
        node = sources_of(source)[int(node.args[1])] if calls(source, vary_all) else source  # type: ignore[arg-type]
    return "state" in node.meta


def saved_bytes(program: Program, node: fx.Node) -> int:
    """The bytes kept of a value on the fullest rank (coordinate 0 of every axis has the largest block).

    Of a moved tensor only what arrived: the tensor that it came from is kept on its own (`runtime/recall.py`).
    """
    local = _held(program, node)
    if move_of(node) is not None:
        local = max(0, local - _held(program, source_of(node)))
    return local * val(node).element_size()


def _held(program: Program, node: fx.Node) -> int:
    """The elements of a value on the fullest rank, halos included, but not what is filled in at the border."""
    local = list(layout_of(node).local_shape(shape_of(node), program.mesh, 0))
    for move in _moves(node):
        local[move.dim] = max(sum(run.count for run in read if run.start is not None) for read in move.reads)
    return math.prod(local)


def _moves(node: fx.Node) -> Iterator[Redistribution]:
    while (move := move_of(node)) is not None:
        yield move
        node = source_of(node)
