"""Random numbers and what is made of them. A rank makes those of its own indices; see `halofx.compiler.random_functions`.

The pass `seed_random` puts these functions in the place of the random ops of torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from halofx.compiler import random_functions as functions
from halofx.compiler.ops.pointwise import broadcast
from halofx.compiler.ops.samples import positive, random_shape
from halofx.compiler.random_ops import OwnWay
from halofx.compiler.rules import Call, Local, Sample, Spec, fallback_rule, rule

STEP = torch.tensor(1)
"""``rng`` in the first call of a net of seed 0: what the one-device side of a sample draws with."""


def _either(torch_way: Callable[..., Any], our_way: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's random function where the net is captured; on one device what the net makes of it."""
    return lambda *xs: (torch_way if isinstance(xs[0], FakeTensor) else our_way)(*xs)


def _keep(x: Tensor, p: float, dims: int | None = None) -> Tensor:
    like = x if dims is None else x.new_empty(*x.shape[:dims], *(1,) * (x.ndim - dims))
    return functions.draw_like(like, STEP, 0, "bernoulli", 1.0 - p, 0.0, torch.bool)


def _drawn(x: Tensor, kind: str, a: float, b: float) -> Tensor:
    return functions.draw_like(x, STEP, 0, kind, a, b, x.dtype)


def _dropout_samples(rng: Random) -> Sample:
    shape, p = random_shape(rng, 2, 5), rng.choice([0.2, 0.5, 0.9, 1.0])
    spatial = len(shape) - 2
    if spatial and rng.random() < 0.4:
        name, dims = f"dropout{spatial}d", 2
        torch_way = getattr(F, name)
    else:
        name, dims, torch_way = "dropout", None, F.dropout
    ours = lambda x: functions.dropout(x, _keep(x, p, dims), p)  # noqa: E731
    return Sample(_either(lambda x: torch_way(x, p), ours), (shape,), label=f"{name} {p}")


@rule(functions.dropout, samples=_dropout_samples)
def dropout(call: Call) -> Spec:
    """y = x mask / (1 - p)"""
    return replace(broadcast(call), flops=2 * call.outs[0].numel, saves=("mask",))


def _alpha_samples(rng: Random) -> Sample:
    shape, p = random_shape(rng, 2, 5), rng.choice([0.2, 0.5, 1.0])
    dims = 2 if rng.random() < 0.5 and len(shape) > 2 else None
    torch_way = F.alpha_dropout if dims is None else F.feature_alpha_dropout
    ours = lambda x: functions.alpha_dropout(x, _keep(x, p, dims), p)  # noqa: E731
    return Sample(_either(lambda x: torch_way(x, p, True), ours), (shape,), label=f"alpha dropout {p}")


@rule(functions.alpha_dropout, samples=_alpha_samples)
def alpha_dropout(call: Call) -> Spec:
    """y = a (x where mask, else -alpha) + b"""
    return replace(broadcast(call), flops=3 * call.outs[0].numel, saves=("mask",))


def _rrelu_samples(rng: Random) -> Sample:
    ours = lambda x: functions.rrelu(x, _drawn(x, "uniform", 0.1, 0.4))  # noqa: E731
    return Sample(_either(lambda x: F.rrelu(x, 0.1, 0.4, training=True), ours), (random_shape(rng),), label="rrelu")


@rule(functions.rrelu, samples=_rrelu_samples)
def rrelu(call: Call) -> Spec:
    """y = x where x > 0, else x noise"""
    return replace(broadcast(call), flops=2 * call.outs[0].numel, saves=("noise",))


def _bernoulli_samples(rng: Random) -> Sample:
    ours = lambda p: functions.bernoulli(p, STEP, 0) * p  # noqa: E731
    return Sample(_either(lambda p: torch.bernoulli(p) * p, ours), (random_shape(rng),), {0: positive}, "bernoulli")


@rule(functions.bernoulli, samples=_bernoulli_samples)
def bernoulli(call: Call) -> Spec:
    """y = 1 with probability x, else 0"""
    return replace(broadcast(call), local=_placed)


def _normal_samples(rng: Random) -> Sample:
    shape = random_shape(rng)
    ours = lambda m, s: functions.normal(m, s, _drawn(m, "normal", 0.0, 1.0)) + m  # noqa: E731
    return Sample(_either(lambda m, s: torch.normal(m, s) + m, ours), (shape, shape), {1: positive}, "normal")


@rule(functions.normal, samples=_normal_samples)
def normal(call: Call) -> Spec:
    """y = mean + std noise, without gradient"""
    return replace(broadcast(call), flops=2 * call.outs[0].numel)


def _draw_samples(rng: Random) -> Sample:
    choices: list[tuple[str, float, float, Callable[[Tensor], Tensor]]] = [
        ("uniform", 0.0, 1.0, torch.rand_like), ("normal", 0.0, 1.0, torch.randn_like),
        ("uniform", -1.0, 2.0, lambda x: torch.empty_like(x).uniform_(-1, 2)),
        ("normal", 1.0, 2.0, lambda x: torch.empty_like(x).normal_(1, 2)),
        ("exponential", 2.0, 0.0, lambda x: torch.empty_like(x).exponential_(2.0)),
        ("log_normal", 0.0, 0.5, lambda x: torch.empty_like(x).log_normal_(0.0, 0.5)),
        ("cauchy", 0.0, 1.0, lambda x: torch.empty_like(x).cauchy_()),
        ("geometric", 0.3, 0.0, lambda x: torch.empty_like(x).geometric_(0.3)),
        ("integers", -2, 7, lambda x: torch.randint_like(x, -2, 7)),
        ("bernoulli", 0.3, 0.0, lambda x: torch.empty_like(x).bernoulli_(0.3)),
    ]  # fmt: skip
    kind, a, b, torch_way = rng.choice(choices)
    ours = lambda x: _drawn(x, kind, a, b) * x  # noqa: E731
    return Sample(_either(lambda x: torch_way(x) * x, ours), (random_shape(rng),), label=kind)


@rule(functions.draw_like, samples=_draw_samples)
def draw_like(call: Call) -> Spec:
    """y[g] = function of (rng, op, g), g the global index"""
    return replace(broadcast(call), local=_placed, flops=12 * call.outs[0].numel)


def _placed(local: Local) -> Call:
    """Tell the function which part of the global tensor it makes."""
    shape = local.call.outs[0].shape
    place = tuple((local.out(f"d{i}").start, n) for i, n in enumerate(shape))
    return local.call.with_(place=place)


def _future_samples(rng: Random) -> Sample:
    shape = random_shape(rng, 2, 4)
    return Sample(
        _either(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, is_causal=True, scale=1.0),
            lambda q, k, v: functions.dropout(_weights(q, k), _keep(_weights(q, k), 0.5), 0.5) @ v,
        ),
        (shape, shape, shape), label="causal attention with dropout",
    )  # fmt: skip


def _weights(q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k.mT
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf).softmax(-1)


@rule(functions.mask_future, samples=_future_samples)
def mask_future(call: Call) -> Spec:
    """y[i, j] = x[i, j] where j <= i, else minus infinity"""
    return replace(broadcast(call), local=_placed)


def _whole_samples(rng: Random) -> Sample:
    n, double = rng.randint(1, 7), torch.float64
    cpu = torch.device("cpu")
    kinds: list[tuple[Callable[[], Tensor], Callable[[], Tensor]]] = [
        (lambda: torch.randperm(n), lambda: functions.permutation(n, STEP, 0, torch.int64, cpu)),
        (
            lambda: torch.randn(n, dtype=double),
            lambda: functions.draw([n], STEP, 0, "normal", 0.0, 1.0, double, cpu),
        ),
        (
            lambda: torch.randint(-3, 9, (n,)),
            lambda: functions.draw([n], STEP, 0, "integers", -3, 9, torch.int64, cpu),
        ),
    ]
    torch_way, our_way = rng.choice(kinds)
    shape = (*random_shape(rng, 1, 3), n)
    return Sample(_either(lambda x: x * torch_way(), lambda x: x * our_way()), (shape,), label="a random constant")


@rule(functions.draw, functions.permutation, samples=_whole_samples)
def draw(call: Call) -> Spec:
    """Whole, and equal, on every rank"""
    return Spec(ins={"rng": ""}, outs=[" ".join("." * call.outs[0].ndim)], flops=12 * call.outs[0].numel)


fallback_rule(lambda target: isinstance(target, OwnWay), lambda call: None)
