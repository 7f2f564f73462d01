"""Softmax, its logarithm and log-sum-exp: over a split dim the maximum and the sum are all-reduced.

    x over d        rank 0: x0 x1 | rank 1: x2
    m = max         m               m             (detached: the result does not depend on it)
    e = exp(x - m)  e0 e1         | e2
    s = sum e       s               s
    softmax         e0/s e1/s     | e2/s

Halves are computed in float32, as torch does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halofx.compiler.ops.dims import pattern, wrap
from halofx.compiler.ops.extreme import global_peak
from halofx.compiler.ops.pointwise import broadcast
from halofx.compiler.ops.reduce import dims_of, kept, wide_dtype
from halofx.compiler.ops.samples import random_dim, random_dims, random_shape, tied_with_infinities, ties
from halofx.compiler.rules import Call, Operand, Sample, Spec, rule

if TYPE_CHECKING:
    from halofx.compiler.emit import Emit

aten = torch.ops.aten


def _samples(functions: Sequence[Any], rng: Random) -> Sample:
    shape, function = random_shape(rng), rng.choice(functions)
    dim = random_dim(rng, len(shape))
    dtype = rng.choice([None, None, torch.float64])
    make = rng.choice([{}, {0: ties}, {0: tied_with_infinities}])
    return Sample(lambda x: function(x, dim, dtype=dtype), (shape,), make, f"{function.__name__} {dim} {dtype}")


def _lse_samples(rng: Random) -> Sample:
    shape = random_shape(rng)
    dims: Any = rng.choice([random_dim(rng, len(shape)), random_dims(rng, len(shape))])
    keep, make = rng.random() < 0.5, rng.choice([{}, {0: ties}, {0: tied_with_infinities}])
    return Sample(lambda x: torch.logsumexp(x, dims, keep), (shape,), make, f"logsumexp {dims} {keep}")


@rule(
    aten.softmax.int, aten._softmax.default, aten.special_softmax.default,
    samples=partial(_samples, (torch.softmax, F.softmax, F.softmin, torch.special.softmax)),
)  # fmt: skip
def softmax(call: Call) -> Spec:
    """y[k, d] = exp(x[k, d]) / sum over d of exp(x[k, d])"""
    return _softmax_spec(call, _softmax)


@rule(
    aten.log_softmax.int, aten._log_softmax.default, aten.special_log_softmax.default,
    samples=partial(_samples, (torch.log_softmax, F.log_softmax, torch.special.log_softmax)),
)  # fmt: skip
def log_softmax(call: Call) -> Spec:
    """y[k, d] = x[k, d] - log sum over d of exp(x[k, d])"""
    return _softmax_spec(call, _log_softmax)


def _softmax_spec(call: Call, decompose: Any) -> Spec:
    x = call["self"]
    same = pattern(x.ndim, (wrap(call["dim"], x.ndim),))
    return Spec({"self": same}, [same], decompose=decompose, flops=5 * x.numel, saves=("output",))


def _shifted(x: Operand, dims: tuple[int, ...], emit: Emit) -> tuple[Operand, Operand, Operand]:
    """(x - m, exp(x - m), its sum), in float32 for the halves as torch does inside."""
    centered = emit(shift, x, global_peak(x, dims, emit), dims)
    grown = emit(aten.exp.default, centered)
    return centered, grown, emit(aten.sum.dim_IntList, grown, dims, True)


def shift(self: Tensor, peak: Tensor, dims: tuple[int, ...]) -> Tensor:
    """``self - peak``, halves in float32."""
    dtype = wide_dtype(self.dtype)
    return self.to(dtype) - peak.to(dtype)


@rule(shift)
def _shift(call: Call) -> Spec:
    x = call["self"]
    whole = pattern(x.ndim)
    return Spec({"self": whole, "peak": kept(x.ndim, call["dims"], True)}, [whole], flops=x.numel)


def _cast(x: Operand, dtype: torch.dtype, emit: Emit) -> Operand:
    return x if x.dtype == dtype else emit(aten.to.dtype, x, dtype)


def _softmax(call: Call, emit: Emit) -> Operand:
    out = call.outs[0].dtype
    x = _cast(call["self"], out, emit)
    _, grown, total = _shifted(x, (wrap(call["dim"], x.ndim),), emit)
    return _cast(emit(aten.div.Tensor, grown, total), out, emit)


def _log_softmax(call: Call, emit: Emit) -> Operand:
    out = call.outs[0].dtype
    x = _cast(call["self"], out, emit)
    centered, _, total = _shifted(x, (wrap(call["dim"], x.ndim),), emit)
    return _cast(emit(aten.sub.Tensor, centered, emit(aten.log.default, total)), out, emit)


@rule(aten.logsumexp.default, aten.special_logsumexp.default, samples=_lse_samples)
def logsumexp(call: Call) -> Spec | None:
    """y[k] = log sum over d of exp(x[k, d])"""
    x = call["self"]
    dims = dims_of(call["dim"], x.ndim)
    rewrite = _logsumexp if x.dtype.is_floating_point else None
    return Spec(
        {"self": pattern(x.ndim, dims)}, [kept(x.ndim, dims, call["keepdim"])],
        decompose=rewrite, flops=4 * x.numel, saves=("self", "output"),
    )  # fmt: skip


def _logsumexp(call: Call, emit: Emit) -> Operand:
    x, dims = call["self"], dims_of(call["dim"], call["self"].ndim)
    m = emit(finite, global_peak(x, dims, emit))
    total = emit(aten.sum.dim_IntList, emit(aten.exp.default, emit(shift, x, m, dims)), dims, True)
    return emit(log_plus, total, m, dims, call["keepdim"])  # type: ignore[no-any-return]


def finite(self: Tensor) -> Tensor:
    """``self`` with 0 for infinities, so that inf - inf does not arise."""
    return self.masked_fill(self.isinf(), 0)


rule(finite)(broadcast)


def log_plus(total: Tensor, peak: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """``log(total) + peak`` without the dims of extent 1 unless kept."""
    y = (total.log() + peak.to(total.dtype)).to(peak.dtype)
    return y if keepdim else y.squeeze(dims)


@rule(log_plus)
def _log_plus(call: Call) -> Spec:
    x, dims = call["total"], call["dims"]
    ones = kept(x.ndim, dims, True)
    return Spec({"total": ones, "peak": ones}, [kept(x.ndim, dims, call["keepdim"])], flops=2 * x.numel)
