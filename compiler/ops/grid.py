"""Sampling at given places: the sampled volume may be read anywhere, so every rank gets all of it; what is made is split.

grid_sample(x, grid)       y[n, c, o] = x[n, c] at grid[n, o]        o at home where the same dim of x is
"""

from __future__ import annotations

from random import Random

import torch
import torch.nn.functional as F

from halofx.compiler.index_map import Everything
from halofx.compiler.rules import Call, Local, Sample, Spec, rule

aten = torch.ops.aten
SPACE = ("d", "h", "w")


def _grid_samples(rng: Random) -> Sample:
    n, batch, channels = rng.randint(2, 3), rng.randint(1, 2), rng.randint(1, 2)
    mode = rng.choice(["bilinear", "nearest", "bicubic"][: 3 if n == 2 else 2])
    padding, aligned = rng.choice(["zeros", "border", "reflection"]), rng.random() < 0.5
    shape = (batch, channels, *(rng.randint(1, 6) for _ in range(n)))
    to = [rng.randint(1, 6) for _ in range(n)]
    grid = {1: lambda s: torch.rand(s, dtype=torch.float64) * 2.6 - 1.3}
    if rng.random() < 0.3:
        theta = (batch, n, n + 1)

        def warp(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return F.grid_sample(x, F.affine_grid(t, [batch, channels, *to], aligned), mode, padding, aligned)

        return Sample(warp, (shape, theta), grid, f"affine_grid {mode} {padding} {aligned}")
    return Sample(
        lambda x, g: F.grid_sample(x, g, mode, padding, aligned), (shape, (batch, *to, n)), grid,
        f"grid_sample {mode} {padding} {aligned}",
    )  # fmt: skip


@rule(aten.grid_sampler.default, aten.grid_sampler_2d.default, aten.grid_sampler_3d.default, samples=_grid_samples)
def grid_sample(call: Call) -> Spec:
    """y[n, c, o] = sum over the 2^k corners around grid[n, o] of their share of x[n, c]"""
    x = call["input"]
    names = SPACE[5 - x.ndim :]
    space = " ".join(names)
    return Spec(
        {"input": f"n c {space}", "grid": f"n {space} ."},
        [f"n c {space}"],
        maps={f"input.{name}": Everything() for name in names},
        flops=3 * 2 ** len(names) * call.outs[0].numel,
        saves=("input", "grid"),
    )


@rule(aten.affine_grid_generator.default, samples=_grid_samples)
def affine_grid(call: Call) -> Spec:
    """y[n, o] = theta[n] (o, 1)"""
    dims = len(call["size"]) - 2
    return Spec(
        {"theta": "n . ."},
        [" ".join(["n", *"." * (dims + 1)])],
        local=_own_batch,
        flops=2 * call.outs[0].numel * dims,
        saves=("theta",),
    )


def _own_batch(local: Local) -> Call:
    return local.call.with_(size=[local.shape()[0], *local.call["size"][1:]])
