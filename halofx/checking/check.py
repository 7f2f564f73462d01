"""Prove a model on a mesh: run it on threads against one device, and where they differ, find the first node that does.

check(model, inputs, mesh)     compile  ->  what happens  ->  run both  ->  exact | differs, first at this node | refused
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import fx, nn

from halofx.checking.compare import compare, tolerance_of, where
from halofx.checking.first import UNSTABLE, First, find_first, op_of
from halofx.checking.one_device import Job, OneDevice
from halofx.compiler.cost import human
from halofx.compiler.coverage import Coverage, coverage, entry, losses
from halofx.compiler.emit import label_of
from halofx.compiler.errors import CompileError, HalofxError, at
from halofx.compiler.facts import is_op
from halofx.compiler.mesh import Mesh
from halofx.compiler.printer import expression
from halofx.compiler.program import Program
from halofx.compiler.rules import find_rule
from halofx.compiler.summary import Summary, summary
from halofx.runtime.launch import launch
from halofx.runtime.observe import NodeError, Seen, run_rank

Status = Literal["exact", "differs", "refused"]


@dataclass
class Check:
    """What `check` found; prints as a report whose last line is the verdict."""

    mesh: Mesh
    status: Status = "refused"
    verdict: str = ""  # one line
    details: list[str] = field(default_factory=list)  # of the first node that differs
    error: float = 0.0  # the largest relative error of outputs, gradients and buffers
    program: Program | None = None  # compiled for the mesh
    coverage: Coverage = field(default_factory=Coverage)
    summary: Summary | None = None
    alone: int = 0  # bytes that one device keeps for backward
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Whether the model on the mesh equals the model on one device."""
        return self.status == "exact"

    def __str__(self) -> str:
        return "\n".join([*self.report(), *self.details, f"{self.status}: {self.verdict}"])

    def report(self) -> list[str]:
        """What happens to the model on the mesh: ops, splits, messages, memory, times."""
        if self.program is None or self.summary is None:
            return []
        found, total = self.coverage, self.summary
        missing = sum(len(nodes) for nodes in found.unruled.values())
        lines = [f"mesh      {self.mesh}, {self.mesh.size} ranks as threads"]
        ruled = f"{found.ops} ops, " + (f"{missing} without a rule (they run whole)" if missing else "all with a rule")
        lines.append(f"ops       {ruled}")
        lines.append(f"split     {found.share:.1%} of the activation bytes")
        lines += [f"  whole   {line}" for line in losses(found)]
        moves = ", ".join(f"{n} {kind}" for kind, n in sorted(found.movements.items(), key=lambda i: -i[1]))
        lines.append(f"moved     {moves or 'nothing'}")
        for title, rows in (("forward", total.forward), ("backward", total.backward)):
            count, size = sum(t.messages for t in rows), sum(t.bytes for t in rows)
            lines.append(f"{title:<9} {count} messages, {human(size)} over all ranks")
        part = f", {total.activations / self.alone:.3f} of one device" if self.alone else ""
        lines.append(f"memory    {human(total.activations)} kept for backward on the fullest rank{part}")
        lines.append("time      " + ", ".join(f"{what} {s:.1f} s" for what, s in self.seconds.items()))
        for target, nodes in found.unruled.items():
            lines.append(f"to split {target}, write its entry in compiler/ops/ (or beside your model):")
            lines += entry(nodes[0]).splitlines()
        return lines


def check(
    model: nn.Module,
    inputs: Sequence[Any],
    mesh: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[..., Any] | None = None,
    targets: Sequence[Any] = (),
    tolerance: float | None = None,
    timeout: float = 600.0,
    **options: Any,
) -> Check:
    """Compare a model on a mesh, its ranks run as threads, with the same model on one device.

    Outputs (or the loss), the gradients of all parameters and inputs, and the buffers after one step are compared; with
    dropout and other random ops one device means halofx on one rank, which draws the same numbers. float64 tells rounding
    from mistakes best: ``check(model.double(), ...)``. The model is left as it was.

    Args:
        model: in the mode, train or eval, to check; on the CPU or another device, not on ``meta``.
        inputs: the GLOBAL inputs, real tensors (or nested lists, tuples, dicts of them), one entry a positional argument.
        mesh: a `Mesh`, or a mapping of axis sizes.
        kwargs: keyword arguments of the model.
        loss, targets: ``loss(output, *targets)`` is compared instead of the output.
        tolerance: the largest relative error that counts as rounding; by default 1e-10 for float64, 2e-4 for float32.
        timeout: seconds that a rank may wait for a message.
        options: as for `halofx.compile` (``layouts``, ``thin``, ``strict``, ``batchnorm``).

    Returns a `Check`; raises nothing for a model that cannot be compiled or run: the verdict says why.
    """
    mesh = mesh if isinstance(mesh, Mesh) else Mesh(**dict(mesh))
    result = Check(mesh)
    job = Job(model, tuple(inputs), dict(kwargs or {}), loss, tuple(targets), options, timeout)
    try:
        _run(result, job, tolerance)
    except HalofxError as error:
        result.status, result.verdict = "refused", " ".join(str(error).split())
    return result


def _run(result: Check, job: Job, tolerance: float | None) -> None:
    clock = _Clock(result.seconds)
    job.refuse()
    program = result.program = job.program(result.mesh)
    clock.lap("capture and compile")
    result.coverage, result.summary = coverage(program), summary(program)
    if program.stages is not None:
        _refuse_each(program)
    alone = OneDevice(job, job.alone())
    result.alone = summary(alone.program).activations
    clock.skip()
    expected = alone.expected
    clock.lap("one device")
    try:
        seen = launch(
            lambda _: run_rank(program, job.state, job.tensors, alone.cotangents), result.mesh, timeout=job.timeout
        )
    except HalofxError:
        raise
    except Exception as error:
        _failed(result, alone, error)
        return
    clock.lap(f"{result.mesh.size} threads")
    limit = tolerance if tolerance is not None else tolerance_of(program)
    found = list(compare(program, expected, seen))
    loose = {} if all(d.error <= limit for d in found) else alone.movement()
    unstable = sorted({name for name, moved in loose.items() if moved > UNSTABLE})
    found = [d for d in found if d.name not in unstable]
    beyond = [d for d in found if not d.error <= max(limit, 30 * loose.get(d.name, 0.0))]
    worst = max(beyond or found, key=lambda d: d.error, default=None)
    result.error = worst.error if worst is not None else 0.0
    if worst is None or not beyond:
        result.status, result.verdict = "exact", _counts(program, expected, result.error, unstable)
        return
    result.status = "differs"
    result.verdict = _changed(alone, limit) or _first(result, find_first(_flat(program, job), alone, limit))
    result.verdict += f"; {worst.name} is {worst.error:.1e} off"


def _refuse_each(program: Program) -> None:
    """Batch norms of micro-batches have no counterpart on one device that takes the whole batch."""
    each = next((n for n in program.graph.nodes if is_op(n) and n.meta.get("each")), None)
    if each is not None:
        raise CompileError(
            f"{label_of(each)}{at(each.meta.get('source'))} has the statistics of each micro-batch, one device those of the "
            "whole batch; check with microbatches=1, or in eval mode"
        )


def _flat(program: Program, job: Job) -> Program:
    """The program without a pipeline, to be watched node by node."""
    return program if program.stages is None else job.program(program.world.within(1), microbatches=1, stages=None)


def _failed(result: Check, alone: OneDevice, error: Exception) -> None:
    """A rank failed where one device does not: run again node by node to see where."""
    program = result.program
    assert program is not None
    result.status, result.verdict = "differs", f"a rank fails with {type(error).__name__}: {error}"
    first = None
    try:
        first = find_first(_flat(program, alone.job), alone, tolerance_of(program))
    except NodeError as found:
        result.verdict = str(found)
        if found.node is not None:
            result.details += _rule_of(program, found.node)
    except Exception:  # in the backward pass of what is right so far: the error itself has to do
        pass
    if first is not None:
        result.verdict = f"{_first(result, first)}; {result.verdict}"


def _rule_of(program: Program, node: fx.Node) -> list[str]:
    """What a node computes, and the entry that says how it splits."""
    op = op_of(node)
    lines = [f"{label_of(node)} = {expression(program, op)}"]
    rule = find_rule(op.target)
    if rule is not None:
        split = ", ".join(f"{f} over {a}" for f, a in op.meta.get("split", {}).items()) or "nothing"
        lines.append(f"  rule    {rule.where}, which splits {split}")
    return lines


def _changed(alone: OneDevice, limit: float) -> str | None:
    """What the captured program on one rank makes of the model, if that already differs."""
    one = alone.one_rank(alone.job.tensors)
    wrong = next((d for d in compare(alone.program, alone.expected, [one]) if not d.error <= limit), None)
    if wrong is None or (wrong.name in (moved := alone.movement()) and moved[wrong.name] > UNSTABLE):
        return None
    return f"{wrong.name} of the captured program differs from the model by {wrong.error:.1e} before it is split"


def _first(result: Check, found: First | None) -> str:
    """The line for the first node that differs; what is known of it goes to the details."""
    if found is None:
        return "at the end, though no node before differs"
    assert result.program is not None
    node, difference = found.node, found.difference
    result.details += _rule_of(result.program, node)
    if found.backward:
        result.details.append("  forward is right; what its backward hands to its operands is not")
    result.details.append(f"  at      {where(result.program, difference)}")
    side = "in the backward pass of" if found.backward else "at"
    error = f"relative error {difference.error:.1e} on rank {difference.rank}"
    return f"first {side} {label_of(node)}, {error}{at(node.meta.get('source'))}"


class _Clock:
    """Seconds between one lap and the next."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds, self.last = seconds, time.perf_counter()

    def lap(self, what: str) -> None:
        now = time.perf_counter()
        self.seconds[what], self.last = now - self.last, now

    def skip(self) -> None:
        self.last = time.perf_counter()


def _counts(program: Program, expected: Seen, error: float, unstable: Sequence[str]) -> str:
    kinds = [sum(name.startswith(kind) for name in expected.tensors) for kind in ("output", "gradient", "buffer")]
    dtypes = {str(v.dtype)[6:] for n, v in expected.tensors.items() if n.startswith("output")}
    sick = sum(bool(v.isnan().any()) for n, v in expected.tensors.items() if v.is_floating_point())
    parts = [
        f"{n} {word}{'s' * (n != 1)}" for n, word in zip(kinds, ("output", "gradient", "buffer"), strict=True) if n
    ]
    mode = "train" if program.training else "eval"
    return (
        f"{' and '.join(filter(None, [', '.join(parts[:-1]), *parts[-1:]]))} of {program.world.size} ranks equal one device, "
        f"largest relative error {error:.1e} ({mode}, {', '.join(sorted(dtypes))})"
        + (f"; {sick} of them hold NaN on one device too" if sick else "")
        + (
            f"; not compared, as one device itself moves with the last bit of its input: {_few(unstable)}"
            if unstable
            else ""
        )
    )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
