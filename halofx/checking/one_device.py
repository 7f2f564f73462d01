"""The model on one device: what `check` compares with, and how far that itself moves with the last bit of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from halofx.api import build
from halofx.checking.compare import compare, eps_of, error_of
from halofx.compiler.capture.state import put_back, roots_of, state_of
from halofx.compiler.emit import label_of
from halofx.compiler.errors import CompileError
from halofx.compiler.mesh import Mesh
from halofx.compiler.program import Program
from halofx.runtime.launch import launch
from halofx.runtime.observe import Seen, leaf, run_rank, tensors_of

SHAKES = 3
"""How often the inputs are moved by two units in the last place."""


@dataclass
class Job:
    """A model with its global inputs, and how to compile it."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[..., Any] | None
    targets: tuple[Any, ...]
    options: dict[str, Any]
    timeout: float

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

    def alone(self) -> Program:
        """The program for one rank."""
        return self.program(Mesh(), microbatches=1, schedule=None, stages=None)

    def program(self, mesh: Mesh, **changes: Any) -> Program:
        """The program for a mesh; ``changes`` are options that replace the user's."""
        options = {"thin": "whole", "batchnorm": "global", **self.options, **changes}
        return build(self.model, self.args, self.kwargs, mesh, loss=self.loss, targets=self.targets, options=options)


@dataclass
class OneDevice:
    """One device: the model itself, or where it draws random numbers halofx on one rank, which draws those of every mesh."""

    job: Job
    program: Program  # for one rank
    cotangents: list[Tensor | None] = field(default_factory=list)

    @cached_property
    def random(self) -> bool:
        """Whether the model draws random numbers."""
        return bool(self.program.placeholders("rng"))

    @cached_property
    def expected(self) -> Seen:
        """Outputs, gradients and buffers, by name. Raises `CompileError` for what the model itself raises."""
        outs = [n.meta["val"] for n in self.program.outputs()]
        self.cotangents = draw([torch.empty(v.shape, dtype=v.dtype) for v in outs])
        device = next((t.device for t in [*self.job.tensors, *self.job.state.values()]), torch.device("cpu"))
        self.cotangents = [c.to(device) if c is not None else None for c in self.cotangents]
        return self.run(self.job.tensors)

    def run(self, tensors: Sequence[Tensor]) -> Seen:
        """The results for other inputs."""
        if self.random:
            return self.one_rank(tensors)
        try:
            return _alone(self.job, self.program, tensors, self.cotangents)
        except Exception as error:
            raise CompileError(f"the model fails on one device with {type(error).__name__}: {error}") from error

    def one_rank(self, tensors: Sequence[Tensor], **watch: Any) -> Seen:
        """What the captured program makes on one rank."""
        job, program = self.job, self.program
        return launch(
            lambda _: run_rank(program, job.state, tensors, self.cotangents, **watch), 1, timeout=job.timeout
        )[0]

    def shaken(self) -> Iterator[list[Tensor]]:
        """The inputs, moved at random by two units in the last place, a few times."""
        eps, generator = eps_of(self.program), torch.Generator().manual_seed(3)
        for _ in range(SHAKES):
            yield [
                t * (1 + 2 * eps * torch.randint(-1, 2, t.shape, generator=generator).to(t))
                if t.is_floating_point()
                else t
                for t in self.job.tensors
            ]

    def movement(self) -> dict[str, float]:
        """How far each result moves with the inputs.

        A ReLU of what is zero but for rounding, or a choice between equals, has no other answer than chance.
        """
        moved: dict[str, float] = {}
        for tensors in self.shaken():
            for d in compare(self.program, self.expected, [self.run(tensors)], whole=True):
                moved[d.name] = max(moved.get(d.name, 0.0), d.error)
        return moved

    def observe(self, tensors: Sequence[Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The values of all nodes, and the gradients with respect to them, by label."""
        values, gradients = dict[str, Tensor](), dict[str, Tensor]()
        self.one_rank(
            tensors,
            value=lambda node, value: values.__setitem__(label_of(node), value),
            gradient=lambda node, value: gradients.__setitem__(label_of(node), value),
        )
        return values, gradients

    def observed_movement(
        self, values: dict[str, Tensor], gradients: dict[str, Tensor]
    ) -> tuple[dict[str, float], ...]:
        """How far each value and gradient moves with the inputs, by label."""
        moved: tuple[dict[str, float], ...] = ({}, {})
        for tensors in self.shaken():
            for into, before, after in zip(moved, (values, gradients), self.observe(tensors), strict=True):
                for label, value in before.items():
                    if label in after:
                        into[label] = max(into.get(label, 0.0), error_of(after[label], value)[0])
        return moved


def draw(outs: Sequence[Tensor]) -> list[Tensor | None]:
    """Random cotangents for the outputs that take one."""
    generator = torch.Generator().manual_seed(17)
    made: list[Tensor | None] = []
    for y in outs:
        c = torch.randn(y.shape, generator=generator, dtype=torch.float64)
        made.append(c.to(y.device, y.dtype) if y.is_floating_point() or y.is_complex() else None)
    return made


def _alone(job: Job, program: Program, tensors: Sequence[Tensor], cotangents: Sequence[Tensor | None]) -> Seen:
    """Run the model itself; whatever that changes about it is put back."""
    roots = roots_of(job.model, job.loss)
    buffers = {n: b.detach() for n, b in job.state.items() if not isinstance(b, nn.Parameter)}
    before = {n: b.clone() for n, b in buffers.items()}
    try:
        with put_back(roots), torch.enable_grad():
            return _step(job, program, roots, tensors, cotangents)
    finally:
        for name, value in before.items():
            buffers[name].copy_(value)


def _step(
    job: Job, program: Program, roots: dict[str, nn.Module], tensors: Sequence[Tensor], cotangents: Sequence[Tensor | None]
) -> Seen:  # fmt: skip
    """Forward, and backward from the cotangents of the outputs."""
    leaves = [leaf(t) for t in tensors]
    args, kwargs, targets = _replace((job.args, job.kwargs, job.targets), leaves)
    out = job.model(*args, **kwargs)
    outs = tensors_of(out if job.loss is None else job.loss(out, *targets))
    seen = Seen({f"output {i}": y.detach() for i, y in enumerate(outs)})
    # Now, because a checkpointed block would update them again in the backward pass.
    after = {n: t for n, t in state_of(roots).items() if not isinstance(t, nn.Parameter) and n in job.state}
    seen.tensors |= {f"buffer {n}": t.detach().clone() for n, t in after.items()}
    parameters = {n: p for n, p in job.state.items() if isinstance(p, nn.Parameter) and p.requires_grad}
    inputs = {f"input {n.meta['input']}": x for n, x in zip(program.placeholders("input"), leaves, strict=True)}
    asked = {**parameters, **{n: x for n, x in inputs.items() if x.requires_grad}}
    pulls = [(y, c) for y, c in zip(outs, cotangents, strict=True) if c is not None and y.requires_grad]
    if pulls and asked:
        ys, cs = zip(*pulls, strict=True)
        grads = torch.autograd.grad(ys, list(asked.values()), cs, allow_unused=True)
        seen.tensors |= {f"gradient of {n}": g for n, g in zip(asked, grads, strict=True) if g is not None}
    return seen


def _replace(tree: Any, leaves: Sequence[Tensor]) -> Any:
    flat, spec = tree_flatten(tree)
    supply = iter(leaves)
    return tree_unflatten([next(supply) if isinstance(v, Tensor) else v for v in flat], spec)
