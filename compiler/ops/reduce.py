"""Sums and what is made of sums: every rank reduces its own part, one all-reduce adds the parts up.

    sum over d     rank 0 | rank 1           mean over d of 7
    x  d:          0 1 2 3 | 4 5 6           0 1 2 3 | 4 5 6
                   s0      | s1              s0 / 7  | s1 / 7            the extent is the global one
                   s0 + s1 on both           s0 / 7 + s1 / 7

An empty part adds zero and takes part in the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halofx.compiler.ops.dims import names, pattern, wrap_all
from halofx.compiler.ops.samples import Make, booleans, integers, random_dim, random_dims, random_shape, tied_with_nan
from halofx.compiler.rules import Call, Local, Operand, Sample, Spec, rule

if TYPE_CHECKING:
    from halofx.compiler.emit import Emit

aten = torch.ops.aten
HALVES = (torch.float16, torch.bfloat16)


def dims_of(dim: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """The dims that an argument such as ``dim=-1``, ``[0, 2]`` or None (all) names, in order.

    >>> dims_of(-1, 4), dims_of([2, 0], 4), dims_of(None, 2), dims_of(0, 0)
    ((3,), (0, 2), (0, 1), ())
    """
    if ndim == 0:
        return ()
    if dim is None or (not isinstance(dim, int) and not dim):
        return tuple(range(ndim))
    return tuple(sorted(set(wrap_all(dim, ndim))))


def kept(ndim: int, dims: Sequence[int], keepdim: bool) -> str:
    """The pattern of the output of a reduction over ``dims``.

    >>> kept(3, (1,), False), kept(3, (1,), True)
    ('d0 d2', 'd0 . d2')
    """
    return " ".join("." if i in dims else n for i, n in enumerate(names(ndim)) if keepdim or i not in dims)


def summed(call: Call, **more: Any) -> Spec:
    """The spec of a reduction that adds up: of ``self`` over ``dim`` (all dims without one)."""
    x = call["self"]
    dims = dims_of(call.args.get("dim"), x.ndim)
    out = kept(x.ndim, dims, bool(call.args.get("keepdim", False)))
    return Spec(ins={"self": " ".join(names(x.ndim))}, outs=[out], flops=x.numel, **({"reduce": "sum"} | more))


def number_reduced(call: Call) -> int:
    """How many numbers go into each number of the output."""
    x = call["self"]
    return math.prod(x.shape[d] for d in dims_of(call.args.get("dim"), x.ndim))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums are held: float32 for the halves."""
    return torch.float32 if dtype in HALVES else dtype


# samples


def _samples(functions: Sequence[Any], make: Sequence[Make | None], rng: Random) -> Sample:
    """A call of one of the functions ``f(x, dim, keepdim)``; dim None, one or several."""
    shape, function, how = random_shape(rng), rng.choice(functions), rng.choice(make)
    dims: Any = rng.choice([None, random_dim(rng, len(shape)), random_dims(rng, len(shape))])
    keep = rng.random() < 0.5
    label = f"{getattr(function, '__name__', '')} dim={dims} keepdim={keep}"
    return Sample(lambda x: function(x, dims, keep), (shape,), {0: how} if how else {}, label)


def _with_dtype(op: Any, dtypes: Sequence[torch.dtype | None], x: Tensor, dim: Any, keep: bool) -> Tensor:
    """``op`` over all dims or some, in a dtype that the extent of the tensor decides on."""
    dtype = dtypes[x.numel() % len(dtypes)]
    if dim is None and not keep:
        return op(x, dtype=dtype)  # type: ignore[no-any-return]
    return op(x, dim=dim, keepdim=keep, dtype=dtype)  # type: ignore[no-any-return]


def _count(x: Tensor, dim: Any, keep: bool) -> Tensor:
    return torch.count_nonzero(x) if dim is None else torch.count_nonzero(x, dim)


def _truth(op: Any, x: Tensor, dim: Any, keep: bool) -> Tensor:
    return op(x) if dim is None else op(x, dim=dim, keepdim=keep)  # type: ignore[no-any-return]


def _product(x: Tensor, dim: Any, keep: bool) -> Tensor:
    return torch.prod(x) if not isinstance(dim, int) else torch.prod(x, dim, keep)


# rules


@rule(
    aten.sum.default, aten.sum.dim_IntList,
    samples=partial(_samples, (partial(_with_dtype, torch.sum, (None, torch.float64)),), (None, integers(-3, 4), booleans)),
)  # fmt: skip
def sum_(call: Call) -> Spec:
    """y[k] = sum over d of x[k, d]"""
    return summed(call)


@rule(
    aten.nansum.default,
    samples=partial(_samples, (partial(_with_dtype, torch.nansum, (None,)),), (None, tied_with_nan)),
)
def nansum(call: Call) -> Spec:
    """y[k] = sum over d of x[k, d] where it is a number"""
    return summed(call, saves=("self",))


@rule(
    aten.mean.default, aten.mean.dim,
    samples=partial(_samples, (partial(_with_dtype, torch.mean, (None, torch.float64)),), (None,)),
)  # fmt: skip
def mean(call: Call) -> Spec:
    """y[k] = 1/D sum over d < D of x[k, d]"""
    return summed(call, local=_share_of_mean)


def _share_of_mean(local: Local) -> Call:
    """The sum of this rank's part over the global number."""
    call = local.call
    dims = dims_of(call.args.get("dim"), call["self"].ndim)
    return call.with_(
        target=share_of_mean, self=call["self"], dims=dims, keepdim=bool(call.args.get("keepdim", False)),
        count=number_reduced(call), dtype=call.outs[0].dtype,
    )  # fmt: skip


def share_of_mean(self: Tensor, dims: tuple[int, ...], keepdim: bool, count: int, dtype: torch.dtype) -> Tensor:
    """This part's addend of the mean of ``count`` numbers."""
    total = self.sum(dims, keepdim, dtype=wide_dtype(dtype)) if dims else self.to(wide_dtype(dtype))
    return (total / count).to(dtype)


@rule(
    aten.nanmean.default,
    samples=partial(_samples, (partial(_with_dtype, torch.nanmean, (None,)),), (None, tied_with_nan)),
)
def nanmean(call: Call) -> Spec:
    """y[k] = mean over the d for which x[k, d] is a number"""
    x = call["self"]
    dims = dims_of(call["dim"], x.ndim)
    out = kept(x.ndim, dims, call["keepdim"])
    return Spec({"self": pattern(x.ndim, dims)}, [out], decompose=_nanmean, flops=2 * x.numel, saves=("self",))


def _nanmean(call: Call, emit: Emit) -> Operand:
    x, dim, keepdim = call["self"], call["dim"], call["keepdim"]
    total = emit(aten.nansum.default, x, dim, keepdim, dtype=call["dtype"])
    valid = emit(aten.logical_not.default, emit(aten.isnan.default, x))
    return emit(aten.div.Tensor, total, emit(aten.sum.dim_IntList, valid, dim, keepdim))  # type: ignore[no-any-return]


@rule(
    aten.count_nonzero.default, aten.count_nonzero.dim_IntList,
    samples=partial(_samples, (_count,), (integers(-1, 2), booleans)),
)  # fmt: skip
def count_nonzero(call: Call) -> Spec:
    """y[k] = number of d with x[k, d] != 0"""
    return summed(call)


@rule(
    aten.any.default, aten.any.dim, aten.any.dims,
    samples=partial(_samples, (partial(_truth, torch.any),), (booleans, integers(0, 2, torch.uint8), integers(0, 2))),
)  # fmt: skip
def any_(call: Call) -> Spec:
    """y[k] = whether some x[k, d] is true: the maximum"""
    return _any_or_all(call, "max")


@rule(
    aten.all.default, aten.all.dim, aten.all.dims,
    samples=partial(_samples, (partial(_truth, torch.all),), (booleans, integers(0, 2, torch.uint8), integers(0, 2))),
)  # fmt: skip
def all_(call: Call) -> Spec:
    """y[k] = whether every x[k, d] is true: the minimum"""
    return _any_or_all(call, "min")


def _any_or_all(call: Call, reduce: str) -> Spec:
    if isinstance(call.args.get("dim"), (list, tuple)) and not call["dim"]:  # no dims at all, not all dims
        same = " ".join(names(call["self"].ndim))
        return Spec({"self": same}, [same], flops=call["self"].numel)
    return summed(call, reduce=reduce)


@rule(aten.prod.default, aten.prod.dim_int, samples=partial(_samples, (_product,), (None, integers(-2, 3))))
def prod(call: Call) -> Spec:
    """y[k] = product over d of x[k, d]; d whole"""
    x = call["self"]
    dims = dims_of(call.args.get("dim"), x.ndim)
    out = kept(x.ndim, dims, bool(call.args.get("keepdim", False)))
    return Spec({"self": pattern(x.ndim, dims)}, [out], flops=x.numel, saves=("self", "output"))
