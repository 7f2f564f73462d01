"""All about one node: what it moves between which ranks, what every rank holds, what it costs."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator

from torch import fx

from halofx.compiler.cost import human, messages, messages_back
from halofx.compiler.coverage import why_whole
from halofx.compiler.emit import label_of
from halofx.compiler.errors import HalofxError
from halofx.compiler.facts import is_op, is_tensor, layout_of, shape_of, val
from halofx.compiler.index_map import Run
from halofx.compiler.interval import blocks
from halofx.compiler.primitives import redistribute
from halofx.compiler.printer import expression, type_of
from halofx.compiler.program import Program

SHOWN = 16
"""Ranks that are listed one by one."""


def explain(program: Program, label: str) -> str:
    """The text for one node; raises `HalofxError` when no node has this label."""
    node = next((n for n in program.graph.nodes if label_of(n) == label or n.name == label), None)
    if node is None:
        near = difflib.get_close_matches(label, [label_of(n) for n in program.graph.nodes], n=3)
        raise HalofxError(f"no node {label!r} in the listing" + (f"; did you mean {', '.join(near)}?" if near else ""))
    return "\n".join(_lines(program, node))


def _lines(program: Program, node: fx.Node) -> Iterator[str]:
    yield f"{label_of(node)}: {type_of(node)}  {expression(program, node)}"
    if node.meta.get("source"):
        yield f"  from      {node.meta['source']}"
    if node.op == "call_function" and node.target is redistribute:
        yield from _pieces(program, node)
    if is_op(node):
        split = ", ".join(f"{f} over {a}" for f, a in node.meta.get("split", {}).items())
        yield f"  split     {split or 'nothing: every rank runs the whole op'}"
        for axis in program.mesh.axes:
            if "split" in node.meta and (reason := why_whole(program, node, axis)):
                yield f"  whole     over {axis}: {reason}"
        spec = node.meta["bound"].spec
        if "region" in node.meta:
            yield f"  kept      nothing: checkpointed region {node.meta['region']} runs again in the backward pass"
        if spec is None:
            yield "  rule      none: the inputs are gathered"
        elif spec.flops:
            yield f"  flops     {spec.flops:,} in all"
    for title, (count, size) in (("forward", messages(program, node)), ("backward", messages_back(program, node))):
        if count:
            yield f"  {title:<9} {count} messages, {human(size)} over all ranks"
    if is_tensor(node) and "layout" in (node.args[0].meta if _item(node) else node.meta):  # type: ignore[union-attr]
        yield from _shards(program, node)


def _item(node: fx.Node) -> bool:
    return node.op == "call_function" and "layout" not in node.meta


def _pieces(program: Program, node: fx.Node) -> Iterator[str]:
    """``0->1[15:16] 1->2[31:32]``: sender, receiver, global indices of the dim."""
    move = node.meta["move"]
    for c, read in enumerate(move.reads[:SHOWN]):
        yield f"  {move.axis} {c:<3} reads dim {move.dim} at {' '.join(_run(r) for r in read) or 'nothing'}"
    found = []
    for src in range(min(move.parts, SHOWN)):
        for t in move.forward(src).sends:
            inside = dict(t.take)[move.dim]
            base = _start(program, move.axis, move.have_extent, src) if move.have == move.dim else 0
            found.append(f"{src}->{t.peer}{_run(Run((inside.start or 0) + base, inside.count, inside.step))}")
    yield f"  pieces    {' '.join(found) or 'none: every rank has what it reads'}"


def _start(program: Program, axis: str, extent: int, coordinate: int) -> int:
    return blocks(extent, program.mesh[axis])[coordinate].start


def _run(run: Run) -> str:
    if run.start is None:
        return f"fill x {run.count}"
    if run.step == 1:
        return f"[{run.start}:{run.start + run.count}]"
    if run.step == 0:
        return f"[{run.start}] x {run.count}"
    return f"[{run.start}:{run.start + run.count * run.step}:{run.step}]"


def _shards(program: Program, node: fx.Node) -> Iterator[str]:
    mesh, layout, shape = program.mesh, layout_of(node), shape_of(node)
    for rank in range(min(mesh.size, SHOWN)):
        local = list(layout.local_shape(shape, mesh, rank))
        where = " ".join(f"{a}={c}" for a, c in mesh.coordinates(rank).items())
        if node.target is not redistribute:
            yield f"  rank {rank:<4} {where}: {local}, {human(math.prod(local) * val(node).element_size())}"
    if mesh.size > SHOWN:
        yield f"  ... and {mesh.size - SHOWN} more ranks"
