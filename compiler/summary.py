"""Totals of a program: messages and bytes by kind and axis, flops, memory, stages. Counts are over all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from halofx.compiler.balance import fullest, stage_costs
from halofx.compiler.cost import human, messages, messages_back
from halofx.compiler.emit import is_getitem, name_of
from halofx.compiler.facts import axes_of, bound_of, is_op
from halofx.compiler.primitives import redistribute, reduce_scatter, transfer
from halofx.compiler.program import Program


@dataclass
class Traffic:
    """Messages and bytes of one kind along some axes, summed over all ranks, in one direction."""

    kind: str
    axes: tuple[str, ...]
    messages: int = 0
    bytes: int = 0


@dataclass
class Summary:
    """Totals of a program over all ranks; see `summary`."""

    ranks: int
    forward: list[Traffic] = field(default_factory=list)
    backward: list[Traffic] = field(default_factory=list)
    flops: int = 0
    activations: int = 0  # bytes on the fullest rank
    parameters: int = 0  # bytes on the fullest rank
    stages: list[str] = field(default_factory=list)  # a line for each stage of a pipeline

    def __str__(self) -> str:
        lines = [f"{'':<9} {'kind':<16} {'axes':<22} {'messages':>9} {'bytes':>10} {'bytes / rank':>13}   (all ranks)"]
        for title, rows in (("forward", self.forward), ("backward", self.backward)):
            for t in rows or [Traffic("nothing", ())]:
                per = human(t.bytes / self.ranks)
                axes = " ".join(t.axes)
                lines.append(f"{title:<9} {t.kind:<16} {axes:<22} {t.messages:>9} {human(t.bytes):>10} {per:>13}")
        lines.append(f"forward flops {self.flops / 1e9:.2f} G in all, {self.flops / self.ranks / 1e9:.2f} G a rank")
        lines.append(
            f"kept for backward {human(self.activations)}, parameters {human(self.parameters)} on the fullest rank"
        )
        return "\n".join(lines + self.stages)


def summary(program: Program) -> Summary:
    """Messages and bytes by kind and axes, forward and backward, and flops; `halofx.compiler.balance` has the memory."""
    result = Summary(program.world.size)
    for node in program.graph.nodes:
        if node.op == "call_function" and not is_op(node) and not is_getitem(node):
            kind, axes = _kind(node)
            _add(result.forward, kind, axes, *messages(program, node))
            _add(
                result.backward,
                "sum_gradients" if kind.startswith("vary") else kind,
                axes,
                *messages_back(program, node),
            )
        if is_op(node):
            spec = bound_of(node).spec
            result.flops += spec.flops or 0 if spec is not None else 0
    result.activations, result.parameters = fullest(program)
    if program.stages is not None and program.stages.count > 1:
        costs = stage_costs(program)
        total = sum(c.seconds for c in costs)
        result.stages = [c.line(total) for c in costs]
    return result


def _kind(node: fx.Node) -> tuple[str, tuple[str, ...]]:
    if node.target is redistribute:
        return node.meta["move"].kind, (node.meta["move"].axis,)
    if node.target is reduce_scatter:
        return name_of(node.target), (node.meta["move"].axis,)
    if node.target is transfer:
        return name_of(node.target), ("pipe",)
    return name_of(node.target), axes_of(node)


def _add(found: list[Traffic], kind: str, axes: tuple[str, ...], count: int, size: int) -> None:
    if not count:
        return
    entry = next((t for t in found if t.kind == kind and t.axes == axes), None)
    if entry is None:
        found.append(entry := Traffic(kind, axes))
    entry.messages += count
    entry.bytes += size
