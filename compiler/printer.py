"""The listing: one line a node, global shape with ``@axis`` on split dims and ``+axis`` for pending sums."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from halofx.compiler.cost import human, messages
from halofx.compiler.coverage import why_whole
from halofx.compiler.emit import is_getitem, label_of, name_of
from halofx.compiler.facts import axes_of, calls, is_op, layout_of, move_of, source_of, sources_of
from halofx.compiler.layout import Layout
from halofx.compiler.localize import common_arguments
from halofx.compiler.primitives import all_reduce, redistribute, reduce_scatter, transfer, vary, vary_all
from halofx.compiler.program import Program
from halofx.compiler.rules import bind_arguments, signature

SHORT = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
    torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


WIDTH = 44
"""Types longer than this do not push the others to the right."""


def listing(program: Program) -> str:
    """The whole program as text. Parameters appear where they are used; what only updates buffers is summed up in one line."""
    aside = _bookkeeping(program)
    rows = [
        (_stage(program, node), row) for node in program.graph.nodes if node not in aside for row in _row(program, node)
    ]
    name = max((len(row[0]) for _, row in rows), default=0)
    kind = min(WIDTH, max((len(row[1]) for _, row in rows), default=0))
    lines = [f"mesh {program.mesh}" if program.stages is None else _stages_line(program)]
    here = ""
    for stage, (a, b, c, d) in rows:
        if stage not in ("", here):
            here = stage
            lines.append(f"-- {stage}")
        lines.append(f"{a + ':':<{name + 1}} {b:<{kind}} {c}".rstrip() + (f"    {d}" if d else ""))
    if program.updates:
        lines.append(
            f"updates: {len(program.updates)} buffers, {', '.join(program.updates[:3])}{', ...' * (len(program.updates) > 3)}"
        )
    return "\n".join(lines + [f"note: {note}" for note in program.notes])


def _stages_line(program: Program) -> str:
    """``mesh pipe=2 data=2 depth=2, 4 micro-batches (1f1b)``"""
    stages = program.stages
    assert stages is not None
    return f"mesh {stages.mesh}, {stages.micro} micro-batch{'es' * (stages.micro > 1)} ({stages.schedule})"


def _stage(program: Program, node: fx.Node) -> str:
    """``stage 1 on pipe 1``; empty where there is one stage, and for what every stage has."""
    stages = program.stages
    if stages is None or node.op in ("placeholder", "get_attr", "output"):
        return ""
    after = "after all micro-batches" if node.meta.get("after") else ""
    if stages.count == 1 or "stage" not in node.meta:
        return after
    place = f"stage {node.meta['stage']} on pipe {stages.coordinate(node.meta['stage'])}"
    return f"{place}, {after}" if after else place


def _bookkeeping(program: Program) -> set[fx.Node]:
    """The nodes that serve nothing but new values of buffers, and send nothing."""
    needed: set[fx.Node] = set()
    stack = [n for n in program.graph.nodes if n.op == "placeholder"] + list(program.outputs())
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    aside = {n for n in program.graph.nodes if n not in needed and n.op != "output"}
    return aside if not any(messages(program, n)[0] for n in aside) else set()


def _row(program: Program, node: fx.Node) -> Iterator[tuple[str, str, str, str]]:
    if "state" in node.meta or is_getitem(node):
        return
    if node.op == "output":
        yield "return", "", ", ".join(_name(n) for n in program.outputs()), ""
        return
    yield label_of(node), type_of(node), expression(program, node), traffic(program, node)


def type_of(node: fx.Node) -> str:
    """``f32[1, 8, 16@depth]``: dtype, global shape and layout."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        if node.target is vary_all:
            return f"{len(value)} parameters"
        layouts = node.meta.get("layout", (None,) * len(value))
        return "(" + ", ".join(_type(v, la) for v, la in zip(value, layouts, strict=True)) + ")"
    if not isinstance(value, torch.Tensor):
        return ""
    known = "layout" in node.meta or (is_getitem(node) and "layout" in source_of(node).meta)
    return _type(value, layout_of(node) if known else None)


def _type(value: torch.Tensor, layout: Layout | None) -> str:
    shape = tuple(value.shape)
    return SHORT.get(value.dtype, str(value.dtype)) + (layout or Layout.whole(len(shape))).show(shape)


def expression(program: Program, node: fx.Node) -> str:
    """What a node computes, as a call."""
    if node.op == "placeholder":
        return "input"
    if node.op == "get_attr":
        return "constant"
    if calls(node, redistribute):
        return _movement(node)
    if calls(node, reduce_scatter):
        move = node.meta["move"]
        return f"reduce_scatter({_name(source_of(node))}, dim={move.dim}, axis={move.axis})"
    if calls(node, transfer):
        return f"transfer({_name(source_of(node))}, stage {node.args[1]} to {node.args[2]})"
    if calls(node, all_reduce, vary):
        extra = f", {node.args[2]}" if node.target is all_reduce and node.args[2] != "sum" else ""
        extra += ", each micro-batch" if node.meta.get("each") and node.target is all_reduce else ""
        return f"{name_of(node.target)}({_name(source_of(node))}, axes=({', '.join(axes_of(node))}){extra})"
    if calls(node, vary_all):
        names = [_name(n) for n in sources_of(node)]
        shown = names if len(names) <= 3 else [*names[:2], f"... {len(names) - 3} more", names[-1]]
        return f"sum_gradients({', '.join(shown)}, axes=({', '.join(axes_of(node))}))"
    return f"{name_of(node.target)}({', '.join(_arguments(program, node))})"


def _arguments(program: Program, node: fx.Node) -> Iterator[str]:
    """Tensors by name; other arguments as keywords where they differ from the defaults."""
    local = common_arguments(program, node)
    for (name, default), value in zip(
        signature(node.target), bind_arguments(node.target, node.args, node.kwargs).values(), strict=True
    ):
        value = local.get(name, value)
        if isinstance(value, fx.Node):
            yield _name(value)
        elif isinstance(value, (tuple, list)) and any(isinstance(v, fx.Node) for v in value):
            yield "(" + ", ".join(_name(v) for v in value) + ")"
        elif not _equal(value, default):
            yield f"{name}={_literal(value)}"


def _equal(value: Any, default: Any) -> bool:
    if isinstance(value, (list, tuple)) and isinstance(default, (list, tuple, int)):
        single = default if isinstance(default, (list, tuple)) else (default,) * len(value)
        return tuple(value) == tuple(single) or (len(single) == 1 and set(value) == set(single))
    return type(value) is type(default) and bool(value == default)


def _literal(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(_literal(v) for v in value) + ("," if len(value) == 1 else "") + ")"
    return SHORT.get(value, str(value)) if isinstance(value, torch.dtype) else str(value)


def _name(value: Any) -> str:
    if not isinstance(value, fx.Node):
        return str(value)
    if is_getitem(value) and source_of(value).target is not vary_all:
        return f"{label_of(source_of(value))}[{value.args[1]}]"
    return label_of(value)


def _movement(node: fx.Node) -> str:
    move, source = node.meta["move"], _name(node.args[0])
    if move.kind == "all_to_all":
        return f"all_to_all({source}, axis={move.axis}, dim={move.have}->{move.need})"
    parts = [source, f"dim={move.dim}", f"axis={move.axis}"]
    if move.kind == "halo_exchange":
        lo, hi = move.halo()
        parts += [f"lo={lo}", f"hi={hi}"]
        if any(run.start is None for read in move.reads for run in read):
            parts.append(f"fill={move.fill:g}")
    return f"{move.kind}({', '.join(parts)})"


def traffic(program: Program, node: fx.Node) -> str:
    """``2 msg   4.0 KiB``: messages and bytes of a node in one forward pass, over all ranks; of a gather also why."""
    count, size = messages(program, node)
    return f"{count} msg   {human(size)}{_why(program, node)}" if count else ""


def _why(program: Program, node: fx.Node) -> str:
    """``    for head: linear needs dim 1 of input whole``, after a gather."""
    move = move_of(node)
    if move is None or move.kind != "all_gather":
        return ""
    for user in node.users:
        reason = why_whole(program, user, move.axis) if is_op(user) else None
        if reason:
            return f"    for {label_of(user)}: {reason}"
    return ""
