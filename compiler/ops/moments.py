"""Variance and standard deviation: every rank takes the moments of its part, one collective merges them.

    x over d        rank 0: x0 x1 x2                rank 1: x3 x4
    moments         (3, mean, M2)                   (2, mean, M2)         M2 = sum of (x - mean)^2
    merged          (5, mean, M2) on both           Chan, Golub, LeVeque 1983: no cancellation at large means
    var             M2 / (5 - correction)

Norms have statistics of their own (`halofx.compiler.ops.norm_parts`), in float64 and frugal. These here are those of torch, for
which equal numbers have no variance at all: the gradient of a standard deviation divides by it.
"""

from __future__ import annotations

from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halofx.compiler.ops.dims import names, pattern
from halofx.compiler.ops.reduce import dims_of, kept, number_reduced, wide_dtype
from halofx.compiler.ops.samples import random_dim, random_dims, random_shape, ties
from halofx.compiler.rules import Call, Operand, Sample, Spec, rule

if TYPE_CHECKING:
    from halofx.compiler.emit import Emit

aten = torch.ops.aten


def moments(self: Tensor, dims: tuple[int, ...]) -> Tensor:
    """(count, mean, sum of squares around the mean) of a part over ``dims``: [3, .., 1, ..], halves in float32.

    Exact for equal numbers: their mean is the number, their squares are zero.
    """
    x = self.to(wide_dtype(self.dtype))
    if not x.numel():
        zero = x.sum(dims, True)
        return torch.stack([zero, zero, zero])
    var, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    count = x.numel() // mean.numel()
    return torch.stack([torch.full_like(mean, count), mean, var * count])


@rule(moments)
def _moments(call: Call) -> Spec:
    x = call["self"]
    out = f". {kept(x.ndim, call['dims'], True)}"
    return Spec({"self": " ".join(names(x.ndim))}, [out], reduce="moments", flops=4 * x.numel, saves=("self",))


def spread(
    self: Tensor, dims: tuple[int, ...], keepdim: bool, correction: float, root: bool, dtype: torch.dtype
) -> Tensor:
    """The variance, or its root, from merged moments [3, .., 1, ..]; the root of zero has the gradient 0."""
    var = self[2] / (self[0].detach() - correction)
    if root:
        still = var == 0
        var = torch.where(still, 0, torch.where(still, 1, var).sqrt())
    return _finish(var, dims, keepdim, dtype)


def center(self: Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype) -> Tensor:
    """The mean from merged moments [3, .., 1, ..]."""
    return _finish(self[1], dims, keepdim, dtype)


def _finish(x: Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype) -> Tensor:
    return (x if keepdim else x.squeeze(dims)).to(dtype)


@rule(spread, center)
def _of_moments(call: Call) -> Spec:
    x, dims = call["self"], call["dims"]
    ndim = x.ndim - 1
    out = kept(ndim, dims, call["keepdim"])
    return Spec({"self": f". {kept(ndim, dims, True)}"}, [out], flops=2 * call.outs[0].numel)


# the ops of ATen


def _samples(op: Any, rng: Random) -> Sample:
    shape, keep = random_shape(rng), rng.random() < 0.5
    dims: Any = rng.choice([None, random_dim(rng, len(shape)), random_dims(rng, len(shape))])
    how: dict[str, Any] = rng.choice([{}, {"correction": rng.choice([0, 1, 2, 0.5])}, {"unbiased": rng.random() < 0.5}])
    if dims is None and rng.random() < 0.5:
        how.pop("correction", None)
        call = lambda x: op(x, **how)  # noqa: E731
    elif "unbiased" in how and dims is None:
        call = lambda x: op(x, how["unbiased"])  # noqa: E731
    else:
        call = lambda x: op(x, dim=dims, keepdim=keep, **how)  # noqa: E731
    make = rng.choice([{}, {}, {0: ties}, {0: constant}])
    return Sample(call, (shape,), make, f"{op.__name__} {dims} {keep} {how}")


def constant(shape: torch.Size) -> Tensor:
    """One number throughout, of which torch finds the mean exactly on all its paths: no variance."""
    return torch.full(shape, 0.5, dtype=torch.float64)


@rule(aten.var.default, aten.var.dim, aten.var.correction, samples=partial(_samples, torch.var))
def var(call: Call) -> Spec:
    """y[k] = 1/(D - correction) sum over d < D of (x[k, d] - mean[k])^2"""
    return _spec(call, 1, root=False)


@rule(aten.std.default, aten.std.dim, aten.std.correction, samples=partial(_samples, torch.std))
def std(call: Call) -> Spec:
    """y[k] = the root of var(x)[k]"""
    return _spec(call, 1, root=True)


@rule(aten.var_mean.default, aten.var_mean.dim, aten.var_mean.correction, samples=partial(_samples, torch.var_mean))
def var_mean(call: Call) -> Spec:
    """(var, mean) of x over d"""
    return _spec(call, 2, root=False)


@rule(aten.std_mean.default, aten.std_mean.dim, aten.std_mean.correction, samples=partial(_samples, torch.std_mean))
def std_mean(call: Call) -> Spec:
    """(std, mean) of x over d"""
    return _spec(call, 2, root=True)


def _correction(call: Call) -> float:
    """What is taken from the count: 1 by default."""
    given = call.args.get("correction")
    if given is not None:
        return float(given)
    return 1.0 if call.args.get("unbiased", True) else 0.0


def _spec(call: Call, outs: int, root: bool) -> Spec:
    x = call["self"]
    dims = dims_of(call.args.get("dim"), x.ndim)
    out = kept(x.ndim, dims, bool(call.args.get("keepdim", False)))
    # Without a degree of freedom torch has its own infinities and NaNs: those of the op itself.
    known = x.dtype.is_floating_point and number_reduced(call) > _correction(call)
    rewrite = partial(_from_moments, root=root) if known else None
    ins = {"self": pattern(x.ndim, dims)}
    return Spec(ins, [out] * outs, decompose=rewrite, flops=4 * x.numel, saves=("self", "output"))


def _from_moments(call: Call, emit: Emit, root: bool) -> Operand | tuple[Operand, Operand]:
    x = call["self"]
    dims, keepdim = dims_of(call.args.get("dim"), x.ndim), bool(call.args.get("keepdim", False))
    found = emit(moments, x, dims)
    out = emit(spread, found, dims, keepdim, _correction(call), root, x.dtype)
    if len(call.outs) == 1:
        return out  # type: ignore[no-any-return]
    return out, emit(center, found, dims, keepdim, x.dtype)
