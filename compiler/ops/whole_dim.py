"""Ops that look along one dim as a whole, and leave the others alone: sorting, order statistics, running sums.

    sort over c of [n, c, d@depth]          c whole, n and d as they come: no message
    sort over d of [n, c, d@depth]          d gathered, sorted on every rank, split again by what follows

That holds for all of them but histograms with given bounds, whose counts add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor

from halofx.compiler.ops.dims import names, pattern, wrap
from halofx.compiler.ops.reduce import dims_of, kept
from halofx.compiler.ops.samples import integers, random_dim, random_shape, ties
from halofx.compiler.rules import Call, Sample, Spec, rule

aten = torch.ops.aten


def _samples(functions: Mapping[str, Any], makes: Sequence[Any], rng: Random) -> Sample:
    """One of ``f(x, dim)``."""
    shape, name = random_shape(rng), rng.choice(list(functions))
    dim, make = random_dim(rng, len(shape)), rng.choice(makes)
    return Sample(lambda x: functions[name](x, dim), (shape,), {0: make} if make else {}, f"{name} {dim}")


# along a dim that stays


@rule(
    aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable, aten.msort.default,
    samples=partial(
        _samples,
        {
            "sort": torch.sort, "argsort": torch.argsort,
            "stable": lambda x, d: torch.sort(x, dim=d, stable=True, descending=True),
            "argsort_stable": lambda x, d: torch.argsort(x, dim=d, stable=True), "msort": lambda x, d: torch.msort(x),
        },
        (None, integers(0, 4)),
    ),
)  # fmt: skip
def sort(call: Call) -> Spec:
    """The numbers along d in order, with where they were; d whole"""
    return _along(call, call.args.get("dim", 0), saves=("output",))


@rule(
    aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default, aten.cummax.default, aten.cummin.default,
    samples=partial(
        _samples,
        {n: getattr(torch, n) for n in ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")},
        (None, ties),
    ),
)  # fmt: skip
def cumulative(call: Call) -> Spec:
    """y[k, d] = sum, product, ... over the i <= d of x[k, i]; d whole"""
    return _along(call, call["dim"], saves=("self", "output"))


def _along(call: Call, dim: int, **more: Any) -> Spec:
    x = call["self"]
    same = pattern(x.ndim, (wrap(dim, x.ndim),))
    return Spec({"self": same}, [same] * len(call.outs), flops=x.numel, **more)


# along a dim that goes


@rule(
    aten.median.dim, aten.nanmedian.dim, aten.mode.default, aten.kthvalue.default,
    samples=partial(
        _samples,
        {
            "median": lambda x, d: torch.median(x, d), "nanmedian": lambda x, d: torch.nanmedian(x, d, keepdim=True),
            "mode": torch.mode, "kthvalue": lambda x, d: torch.kthvalue(x, (x.shape[d] + 1) // 2, d, keepdim=True),
        },
        (None, integers(0, 3)),
    ),
)  # fmt: skip
def order_statistic(call: Call) -> Spec:
    """The middle, the most frequent, the k-th smallest of x[k, d] over d, with where it is; d whole"""
    x = call["self"]
    dims = dims_of(call["dim"], x.ndim)
    out = kept(x.ndim, dims, call["keepdim"])
    return Spec({"self": pattern(x.ndim, dims)}, [out, out], flops=x.numel, saves=("output",))


@rule(
    aten.median.default, aten.nanmedian.default,
    samples=partial(_samples, {"median": lambda x, d: x.median(), "nanmedian": lambda x, d: x.nanmedian()}, (None, ties)),
)  # fmt: skip
def median(call: Call) -> Spec:
    """The middle of all numbers, whole"""
    x = call["self"]
    return Spec({"self": pattern(x.ndim, range(x.ndim))}, [""], flops=x.numel, saves=("self", "output"))


@rule(
    aten.topk.default,
    samples=partial(
        _samples, {"topk": lambda x, d: torch.topk(x, (x.shape[d] + 1) // 2, d, largest=x.dim() > 2)}, (None,)
    ),
)
def topk(call: Call) -> Spec:
    """The k largest of x[k, d] over d, with where they are; d whole"""
    x = call["self"]
    dim = wrap(call["dim"], x.ndim)
    out = kept(x.ndim, (dim,), True)
    return Spec({"self": pattern(x.ndim, (dim,))}, [out, out], flops=x.numel, saves=("output",))


def _quantile_of(name: str, x: Tensor, dim: int) -> Tensor:
    op = getattr(torch, name)
    q: Any = 0.3 if x.numel() % 2 else torch.tensor([0.1, 0.7, 0.9], dtype=x.dtype)
    return op(x, q) if x.numel() % 3 == 0 else op(x, q, dim, keepdim=x.numel() % 5 == 0)  # type: ignore[no-any-return]


@rule(
    aten.quantile.default, aten.quantile.scalar, aten.nanquantile.default, aten.nanquantile.scalar,
    samples=partial(_samples, {n: partial(_quantile_of, n) for n in ("quantile", "nanquantile")}, (None,)),
)  # fmt: skip
def quantile(call: Call) -> Spec:
    """The number below which a share q of x[k, d] over d lies; d whole"""
    x, q = call["self"], call.tensors.get("q")
    dims = dims_of(call["dim"], x.ndim)
    lead = ". " * (q.ndim if q is not None else 0)
    ins = {"self": pattern(x.ndim, dims), "q": lead}
    return Spec(ins, [lead + kept(x.ndim, dims, call["keepdim"])], flops=x.numel, saves=("self",))


def _trapezoids(x: Tensor, dim: int) -> Tensor:
    places = torch.arange(x.shape[dim], dtype=x.dtype) ** 2
    kind = x.numel() % 4
    if kind == 3:
        return torch.cumulative_trapezoid(x, dim=dim)
    return (
        torch.trapezoid(x, places, dim=dim)
        if kind == 0
        else (torch.trapz if kind == 1 else torch.trapezoid)(x, dim=dim)
    )


@rule(
    aten.trapz.dx, aten.trapz.x, aten.trapezoid.dx, aten.trapezoid.x, aten.cumulative_trapezoid.dx, aten.cumulative_trapezoid.x,
    samples=partial(_samples, {"trapezoid": _trapezoids}, (None,)),
)  # fmt: skip
def trapezoid(call: Call) -> Spec | None:
    """y[k] = sum over d of (x[k, d] + x[k, d+1]) / 2 times the distance; d whole"""
    y, at = call["y"], call.tensors.get("x")
    if at is not None and at.ndim != 1:
        return None
    dim = wrap(call["dim"], y.ndim)
    out = kept(y.ndim, (dim,), "cumulative" in call.target._schema.name)
    return Spec(
        {"y": pattern(y.ndim, (dim,)), "x": "."}, [out], flops=3 * y.numel, saves=("y",) if at is not None else ()
    )


# all of them


def _histogram(x: Tensor, dim: int) -> Tensor:
    return torch.histc(x, 5) if x.numel() % 3 == 0 else torch.histc(x, 6, -1.5, 1.0)


@rule(aten.histc.default, samples=partial(_samples, {"histc": _histogram}, (None,)))
def histc(call: Call) -> Spec:
    """y[b] = number of x in bin b; whole where the smallest and largest x bound the bins"""
    x = call["self"]
    if call["min"] == call["max"]:
        return Spec({"self": pattern(x.ndim, range(x.ndim))}, ["."], flops=2 * x.numel, detached=("self",))
    return Spec({"self": " ".join(names(x.ndim))}, ["."], reduce="sum", flops=2 * x.numel, detached=("self",))
