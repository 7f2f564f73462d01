"""The law, checked on one op: the distributed run equals the one-device run, forward and backward, in float64.

``check(sample, rng)`` splits random dims of a sample's inputs over a random mesh, runs it on threads and compares outputs and
input gradients with one device. `tests/test_laws.py` feeds it from the ``samples`` of every entry of the op table.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import halofx
from halofx.compiler.rules import Sample

TOLERANCE = 1e-10
MESHES = (
    {"depth": 2}, {"depth": 3}, {"depth": 4}, {"height": 2, "width": 2}, {"data": 2, "depth": 2}, {"depth": 2, "height": 2, "width": 2},
    {"depth": 3, "height": 2}, {"width": 5},
)  # fmt: skip


class Op(nn.Module):
    """One function of tensors as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


@dataclass(frozen=True)
class Case:
    """A sample with a mesh, the layout of every input, and what thin dims do."""

    sample: Sample
    mesh: halofx.Mesh
    layouts: dict[str, tuple[str | None, ...]]
    thin: str

    def __str__(self) -> str:
        shapes = ", ".join(
            str([f"{n}@{a}" if a else n for n, a in zip(s, self.layouts[f"args.{i}"], strict=True)])
            for i, s in enumerate(self.sample.shapes)
        )
        return f"{self.sample.label}: {shapes} on {self.mesh}, thin={self.thin}"


def draw(sample: Sample, rng: Random) -> Case:
    """A random split: axes on random dims of the first input; inputs that look like it follow, the others have any or none."""
    mesh = halofx.Mesh(**rng.choice(MESHES))
    first = sample.shapes[0]
    dims = rng.sample(range(len(first)), min(len(first), len(mesh.axes)))
    mesh = halofx.Mesh(**{axis: mesh[axis] for axis in mesh.axes[: len(dims)]})
    split: list[str | None] = [None] * len(first)
    for axis, dim in zip(mesh.axes, dims, strict=True):
        split[dim] = axis
    layouts: dict[str, tuple[str | None, ...]] = {"args.0": tuple(split)}
    for i, shape in enumerate(sample.shapes[1:], 1):
        follow = len(shape) <= len(first) and rng.random() < 0.5
        aligned = tuple(
            a if follow and n == m and a else None
            for n, m, a in zip(shape, first[len(first) - len(shape) :], split[len(first) - len(shape) :], strict=False)
        )
        if len(aligned) != len(shape) or not any(aligned):
            aligned = _anyhow(shape, mesh, rng)
        layouts[f"args.{i}"] = aligned
    return Case(sample, mesh, layouts, rng.choice(["whole", "split"]))


def _anyhow(shape: tuple[int, ...], mesh: halofx.Mesh, rng: Random) -> tuple[str | None, ...]:
    """Some axes on some dims, mostly none: filters over ranks, say."""
    split: list[str | None] = [None] * len(shape)
    if shape and mesh.axes and rng.random() < 0.4:
        for axis in rng.sample(mesh.axes, rng.randint(1, len(mesh.axes))):
            free = [d for d, a in enumerate(split) if a is None]
            if free:
                split[rng.choice(free)] = axis
    return tuple(split)


def inputs_of(sample: Sample, seed: int) -> list[Tensor]:
    """The global inputs of a sample: float64 standard normal unless it makes them itself."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i, shape in enumerate(sample.shapes):
        if i in sample.make:
            with torch.random.fork_rng():
                torch.manual_seed(seed + i)
                made.append(sample.make[i](torch.Size(shape)))
        else:
            made.append(torch.randn(shape, generator=generator, dtype=torch.float64))
    return made


def _floats(values: list[Any]) -> list[Tensor]:
    return [v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.requires_grad]


def _dot(outputs: list[Any], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 17)
    terms = [(y * torch.randn(y.shape, generator=generator, dtype=torch.float64)).sum() for y in _floats(outputs)]
    return torch.stack(terms).sum()


def check(case: Case, seed: int = 0) -> None:
    """Raise AssertionError with the case when the distributed run differs from one device."""
    sample, globals_ = case.sample, inputs_of(case.sample, seed)
    xs = [x.requires_grad_() if x.is_floating_point() else x for x in globals_]
    expected = tree_flatten(sample.function(*[x.clone() for x in xs]))[0]
    differentiable = bool(_floats(expected))
    grads = torch.autograd.grad(_dot(expected, seed), _floats(xs), allow_unused=True) if differentiable else ()
    net = halofx.compile(Op(sample.function), case.mesh, inputs=globals_, layouts=case.layouts, thin=case.thin)

    def run(rank: int) -> tuple[list[Any], list[Any]]:
        shards = [net._cut(x.detach(), f"args.{i}") for i, x in enumerate(xs)]
        shards = [s.requires_grad_() if s.is_floating_point() else s for s in shards]
        whole = [net.gather(y) if isinstance(y, Tensor) else y for y in tree_flatten(net(*shards))[0]]
        if not differentiable:
            return whole, []
        return whole, list(torch.autograd.grad(_dot(whole, seed), _floats(shards), allow_unused=True))

    results = halofx.launch(run, case.mesh, timeout=20)
    for rank, (outputs, shard_grads) in enumerate(results):
        where = f"{case}, rank {rank}"
        for y, e in zip(outputs, expected, strict=True):
            close(y, e, f"{where}: output")
        floats = [f"args.{i}" for i, x in enumerate(xs) if x.is_floating_point()] if differentiable else []
        for name, g, e in zip(floats, shard_grads, grads, strict=True):
            layout = net.instances.input_layout(name, e.shape if e is not None else ()) if e is not None else None
            if e is None:
                assert g is None or not g.any(), f"{where}: gradient of {name} where one device has none"
                continue
            from halofx.runtime.shards import take

            close(
                g if g is not None else torch.zeros(()),
                take(e, layout, case.mesh, rank),
                f"{where}: gradient of {name}",
            )


def close(actual: Any, expected: Any, where: str) -> None:
    """Equal to a relative error of 1e-10 (integers exactly); NaN equals NaN."""
    if not isinstance(expected, Tensor):
        assert actual == expected, f"{where}: {actual} is not {expected}"
        return
    assert actual.shape == expected.shape, f"{where}: shape {tuple(actual.shape)} is not {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{where}: dtype {actual.dtype} is not {expected.dtype}"
    if not expected.is_floating_point():
        assert torch.equal(actual, expected), f"{where}: {actual} is not {expected}"
        return
    scale = max(1.0, float(expected.detach().abs().nan_to_num(0, 0, 0).max())) if expected.numel() else 1.0
    torch.testing.assert_close(
        actual, expected, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True, msg=lambda m: f"{where}: {m}"
    )
