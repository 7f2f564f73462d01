"""Prove a model on a mesh: run it on threads against one device, and where they differ, find the first node that does.

check(model, inputs, mesh)     compile  ->  what happens  ->  run both  ->  exact | differs, first at this node | refused
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from halofx.api import build
from halofx.compare import Difference, compare, eps_of, first_gradient, first_value, op_of, tolerance_of, where
from halofx.compiler.capture.state import roots_of, state_of
from halofx.compiler.cost import Summary, human, summary
from halofx.compiler.coverage import Coverage, coverage, entry, losses
from halofx.compiler.emit import label_of
from halofx.compiler.errors import CompileError, HalofxError, at
from halofx.compiler.mesh import Mesh
from halofx.compiler.printer import expression
from halofx.compiler.program import Program
from halofx.compiler.rules import find_rule
from halofx.runtime.launch import launch
from halofx.runtime.observe import Seen, run_rank, tensors_of

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
    job = _Job(model, tuple(inputs), dict(kwargs or {}), loss, tuple(targets), options)
    try:
        _run(result, job, tolerance, timeout)
    except HalofxError as error:
        result.status, result.verdict = "refused", _one_line(error)
    return result


@dataclass
class _Job:
    """A model with its inputs, and how to compile it."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[..., Any] | None
    targets: tuple[Any, ...]
    options: dict[str, Any]

    def __post_init__(self) -> None:
        self.state = state_of(roots_of(self.model, self.loss))
        self.tensors = [t.detach() for t in tensors_of((self.args, self.kwargs, self.targets))]

    def refuse(self) -> None:
        """Raise `CompileError` for what cannot be compared: no values, NaN, tensors on several devices."""
        everything = {**self.state, **{f"input tensor {i}": t for i, t in enumerate(self.tensors)}}
        for name, tensor in everything.items():
            if tensor.device.type == "meta":
                raise CompileError(f"{name} is on the meta device and has no values to compare; build it on the CPU")
            if tensor.is_floating_point() and bool(tensor.isnan().any()):
                raise CompileError(f"{name} holds NaN, which equals nothing; check with finite values")
        devices = {tensor.device: name for name, tensor in everything.items()}
        if len(devices) > 1:
            places = " and ".join(f"{name} on {device}" for device, name in list(devices.items())[:2])
            raise CompileError(f"{places}: the model and its inputs are on different devices; move one with .to(...)")

    def program(self, mesh: Mesh) -> Program:
        options = {"thin": "whole", "batchnorm": "global", **self.options}
        return build(self.model, self.args, self.kwargs, mesh, loss=self.loss, targets=self.targets, options=options)

    def alone(
        self, tensors: Sequence[Tensor], cotangents: list[Tensor | None] | None, inputs: Sequence[str]
    ) -> tuple[Seen, list[Tensor | None]]:
        """The model itself on one device, and the cotangents (drawn when not given); buffers are put back."""
        before = {n: b.detach().clone() for n, b in self.state.items() if not isinstance(b, nn.Parameter)}
        grads = {n: p.requires_grad for n, p in self.state.items() if isinstance(p, nn.Parameter)}
        try:
            with torch.enable_grad():
                return self._alone(tensors, cotangents, [n for n, needed in grads.items() if needed], inputs)
        finally:
            with torch.no_grad():
                for name, value in before.items():
                    self.state[name].detach().copy_(value)

    def _alone(
        self,
        tensors: Sequence[Tensor],
        cotangents: list[Tensor | None] | None,
        wanted: Sequence[str],
        inputs: Sequence[str],
    ) -> tuple[Seen, list[Tensor | None]]:
        leaves = [t.clone().requires_grad_() if t.is_floating_point() or t.is_complex() else t for t in tensors]
        args, kwargs, targets = _replace((self.args, self.kwargs, self.targets), leaves)
        out = self.model(*args, **kwargs)
        outs = tensors_of(out if self.loss is None else self.loss(out, *targets))
        cotangents = draw(outs) if cotangents is None else cotangents
        seen = Seen({f"output {i}": y.detach() for i, y in enumerate(outs)})
        for name, tensor in self.state.items():  # now: a checkpointed block would update them again in the backward pass
            if not isinstance(tensor, nn.Parameter):
                seen.tensors[f"buffer {name}"] = tensor.detach().clone()
        parameters = {f"gradient of {n}": self.state[n] for n in wanted}
        pulls = [(y, c) for y, c in zip(outs, cotangents, strict=True) if c is not None and y.requires_grad]
        if pulls:
            xs = {f"gradient of input {n}": x for n, x in zip(inputs, leaves, strict=True) if x.requires_grad}
            asked = {**parameters, **xs}
            ys, cs = zip(*pulls, strict=True)
            grads = torch.autograd.grad(ys, list(asked.values()), cs, allow_unused=True)
            seen.tensors |= {n: g for n, g in zip(asked, grads, strict=True) if g is not None}
        return seen, cotangents


def _names(program: Program) -> list[str]:
    return [str(n.meta["input"]) for n in program.placeholders("input")]


def draw(outs: Sequence[Tensor]) -> list[Tensor | None]:
    """Random cotangents for the outputs that take one."""
    generator = torch.Generator().manual_seed(17)
    made: list[Tensor | None] = []
    for y in outs:
        c = torch.randn(y.shape, generator=generator, dtype=torch.float64)
        made.append(c.to(y.device, y.dtype) if y.is_floating_point() or y.is_complex() else None)
    return made


def _replace(tree: Any, leaves: Sequence[Tensor]) -> Any:
    flat, spec = torch.utils._pytree.tree_flatten(tree)
    supply = iter(leaves)
    return torch.utils._pytree.tree_unflatten([next(supply) if isinstance(v, Tensor) else v for v in flat], spec)


def _run(result: Check, job: _Job, tolerance: float | None, timeout: float) -> None:
    clock = time.perf_counter()

    def lap(what: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        result.seconds[what], clock = now - clock, now

    job.refuse()
    program = result.program = job.program(result.mesh)
    lap("capture and compile")
    result.coverage, result.summary = coverage(program), summary(program)
    single = job.program(Mesh())
    result.alone = summary(single).activations
    clock = time.perf_counter()
    expected, cotangents, by_model = _expected(job, single, timeout)
    lap("one device")
    seen = launch(lambda _: run_rank(program, job.state, job.tensors, cotangents), result.mesh, timeout=timeout)
    lap(f"{result.mesh.size} threads")
    limit = tolerance if tolerance is not None else tolerance_of(program)
    found = list(compare(program, expected, seen))
    loose = (
        {} if all(d.error <= limit for d in found) or not by_model else _movement(job, program, expected, cotangents)
    )
    unstable = sorted({name for name, moved in loose.items() if moved > UNSTABLE})
    found = [d for d in found if d.name not in unstable]
    beyond = [d for d in found if not d.error <= max(limit, 30 * loose.get(d.name, 0.0))]
    if beyond:
        worst = max(beyond, key=lambda d: d.error)
        result.status, result.error = "differs", worst.error
        result.verdict = _bisect(result, job, single, cotangents, limit, timeout, worst)
        return
    result.error = max((d.error for d in found), default=0.0)
    result.status, result.verdict = "exact", _counts(program, expected, result.error, unstable)


UNSTABLE = 1e-5
"""Relative movement (of 2 units in the last place of the inputs) from which on a result hangs on chance, and is not compared."""


def _expected(job: _Job, single: Program, timeout: float) -> tuple[Seen, list[Tensor | None], bool]:
    """What one device makes: the model itself, or one rank where random numbers are drawn."""
    if single.placeholders("rng"):
        outs = [n.meta["val"] for n in single.outputs()]
        cotangents = draw([torch.empty(v.shape, dtype=v.dtype) for v in outs])
        seen = launch(lambda _: run_rank(single, job.state, job.tensors, cotangents), 1, timeout=timeout)[0]
        return seen, cotangents, False
    try:
        seen, cotangents = job.alone(job.tensors, None, _names(single))
    except Exception as error:
        raise CompileError(f"the model fails on one device with {type(error).__name__}: {error}") from error
    return seen, cotangents, True


def _movement(job: _Job, program: Program, expected: Seen, cotangents: list[Tensor | None]) -> dict[str, float]:
    """How far each result of the one-device model itself moves when its inputs move by two units in the last place.

    A ReLU of what is zero but for rounding, or a choice between equals, has no other answer than chance.
    """
    eps, moved = eps_of(program), dict[str, float]()
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        tensors = [
            t * (1 + 2 * eps * torch.randint(-1, 2, t.shape, generator=generator).to(t)) if t.is_floating_point() else t
            for t in job.tensors
        ]
        other, _ = job.alone(tensors, cotangents, _names(program))
        for d in compare(program, expected, [other], whole=True):
            moved[d.name] = max(moved.get(d.name, 0.0), d.error)
    return moved


def _counts(program: Program, expected: Seen, error: float, unstable: Sequence[str]) -> str:
    kinds = [sum(name.startswith(kind) for name in expected.tensors) for kind in ("output", "gradient", "buffer")]
    dtypes = {str(v.dtype)[6:] for n, v in expected.tensors.items() if n.startswith("output")}
    sick = sum(bool(v.isnan().any()) for n, v in expected.tensors.items() if v.is_floating_point())
    parts = [
        f"{n} {word}{'s' * (n != 1)}" for n, word in zip(kinds, ("output", "gradient", "buffer"), strict=True) if n
    ]
    mode = "train" if program.training else "eval"
    return (
        f"{' and '.join(filter(None, [', '.join(parts[:-1]), *parts[-1:]]))} of {program.mesh.size} ranks equal one device, "
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


def _bisect(
    result: Check,
    job: _Job,
    single: Program,
    cotangents: list[Tensor | None],
    limit: float,
    timeout: float,
    worst: Difference,
) -> str:
    """Run again with an eye on every node, and name the first that differs."""
    program = result.program
    assert program is not None
    reference: dict[str, Tensor] = {}
    pulled: dict[str, Tensor] = {}

    def keep(into: dict[str, Tensor]) -> Callable[[fx.Node, Tensor], None]:
        return lambda node, value: into.__setitem__(label_of(node), value)

    alone = launch(
        lambda _: run_rank(single, job.state, job.tensors, cotangents, keep(reference), keep(pulled)),
        1,
        timeout=timeout,
    )
    if not single.placeholders("rng"):
        expected, _ = job.alone(job.tensors, cotangents, _names(single))
        wrong = next((d for d in compare(single, expected, alone) if not d.error <= limit), None)
        if wrong is not None:
            return (
                f"{wrong.name} of the captured program differs from the model by {wrong.error:.1e} before it is split"
            )
    found = first_value(program, reference, job.state, job.tensors, cotangents, limit, timeout)
    backward = found is None
    if found is None:
        found = first_gradient(program, pulled, job.state, job.tensors, cotangents, limit, timeout)
    if found is None:
        return f"{worst.name} on rank {worst.rank} by {worst.error:.1e}, though no node before it differs"
    node, difference = found
    result.details += _about(program, node, difference, backward)
    what = f"the gradient of {label_of(node)}" if backward and node.op != "call_function" else label_of(node)
    side = "in the backward pass of " if backward and node.op == "call_function" else "at "
    return f"first {side}{what}, relative error {difference.error:.1e} on rank {difference.rank}{at(node.meta.get('source'))}"


def _about(program: Program, node: fx.Node, difference: Difference, backward: bool) -> list[str]:
    op = op_of(node)
    lines = [f"{label_of(node)} = {expression(program, op)}"]
    rule = find_rule(op.target)
    if rule is not None:
        split = ", ".join(f"{f} over {a}" for f, a in op.meta.get("split", {}).items()) or "nothing"
        lines.append(f"  rule    {rule.where}, which splits {split}")
    if backward:
        lines.append(
            "  forward is right; what its backward hands to its operands is not: see `reads`, `maps` and `local` of the rule"
        )
    return [*lines, f"  at      {where(program, difference)}"]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
