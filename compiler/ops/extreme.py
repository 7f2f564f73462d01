"""Maxima and minima: over split dims the extreme is all-reduced, and its gradient goes where torch sends it.

    x over d       rank 0: 3 5 5 | rank 1: 1 5             amax, max over all: even shares among ties of the global tensor
    peak           5             | 5          -> 5         (all-reduced maximum of detached values: no gradient)
    tied           2 equal it    | 1          -> 3         gradient of every one that equals it: g / 3
    place          1             | 4          -> 1         max over a dim, argmax: the first index that has it
    pick           x[1]          | 0          -> x[1]      gradient of that one: g

Comparing, sending and counting need no gradient, so infinities and NaN go as they go on one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halofx.compiler.functional import replace_value
from halofx.compiler.ops.dims import names, pattern
from halofx.compiler.ops.reduce import dims_of, kept, wide_dtype
from halofx.compiler.ops.samples import (
    Make,
    booleans,
    integers,
    random_dim,
    random_dims,
    random_shape,
    tied_with_infinities,
    tied_with_nan,
    ties,
)
from halofx.compiler.rules import Call, Local, Operand, Sample, Spec, rule

if TYPE_CHECKING:
    from halofx.compiler.emit import Emit

aten = torch.ops.aten
NOWHERE = 2**62
"""The index that stands for "not in this part"; larger than any."""


# samples


def _samples(functions: Sequence[Any], several: bool, rng: Random) -> Sample:
    """A call of one of ``f(x, dim, keepdim)``; dim None, one, or several where the op takes them."""
    shape, function = random_shape(rng), rng.choice(functions)
    how: Make | None = rng.choice([None, ties, tied_with_infinities, tied_with_nan, integers(-2, 3), booleans])
    if how is booleans and "arg" in str(function):
        how = integers(0, 3, torch.uint8)
    dims: Any = rng.choice([None, random_dim(rng, len(shape))])
    dims = random_dims(rng, len(shape)) if several and rng.random() < 0.6 else dims
    keep = rng.random() < 0.5
    return Sample(lambda x: function(x, dims, keep), (shape,), {0: how} if how else {}, f"{function} {dims} {keep}")


def _over(op: Any, x: Tensor, dim: Any, keep: bool) -> Any:
    return op(x, dim=() if dim is None else dim, keepdim=keep)


def _over_or_all(op: Any, x: Tensor, dim: Any, keep: bool) -> Any:
    """The two kinds of ``torch.max``: of everything, or along a dim with indices."""
    return op(x) if dim is None else op(x, dim=dim, keepdim=keep)


def _optional(op: Any, x: Tensor, dim: Any, keep: bool) -> Any:
    return op(x, dim=dim, keepdim=keep)


# rules


def _extreme_spec(call: Call, largest: bool, nan: str) -> Spec:
    x = call["self"]
    dims = dims_of(call.args.get("dim"), x.ndim)
    out = kept(x.ndim, dims, bool(call.args.get("keepdim", False)))
    rewrite = partial(_extreme, largest=largest, nan=nan)
    return Spec({"self": pattern(x.ndim, dims)}, [out], decompose=rewrite, flops=x.numel, saves=("self", "output"))


@rule(aten.amax.default, samples=partial(_samples, (partial(_over, torch.amax),), True))
def amax(call: Call) -> Spec:
    """y[k] = max over d of x[k, d]; the gradient in even shares among ties"""
    return _extreme_spec(call, True, "spread")


@rule(aten.amin.default, samples=partial(_samples, (partial(_over, torch.amin),), True))
def amin(call: Call) -> Spec:
    """y[k] = min over d of x[k, d]; the gradient in even shares among ties"""
    return _extreme_spec(call, False, "spread")


@rule(aten.aminmax.default, samples=partial(_samples, (partial(_optional, torch.aminmax),), False))
def aminmax(call: Call) -> Spec:
    """(amin, amax) of x over d"""
    x = call["self"]
    dims = dims_of(call["dim"], x.ndim)
    out = kept(x.ndim, dims, call["keepdim"])
    return Spec(
        {"self": pattern(x.ndim, dims)}, [out, out], decompose=_aminmax, flops=2 * x.numel, saves=("self", "output")
    )


def _aminmax(call: Call, emit: Emit) -> tuple[Operand, Operand]:
    return _extreme(call, emit, False, "spread"), _extreme(call, emit, True, "spread")


@rule(aten.max.default, aten.max.dim, samples=partial(_samples, (partial(_over_or_all, torch.max),), False))
def max_(call: Call) -> Spec:
    """y[k] = max over d of x[k, d], with the first d that has it; of all x without a dim, in even shares among ties"""
    return _max_or_min(call, True)


@rule(aten.min.default, aten.min.dim, samples=partial(_samples, (partial(_over_or_all, torch.min),), False))
def min_(call: Call) -> Spec:
    """y[k] = min over d of x[k, d], with the first d that has it; of all x without a dim, in even shares among ties"""
    return _max_or_min(call, False)


def _max_or_min(call: Call, largest: bool) -> Spec:
    if "dim" not in call.args:
        return _extreme_spec(call, largest, "tie")
    x = call["self"]
    dims = dims_of(call["dim"], x.ndim)
    out = kept(x.ndim, dims, call["keepdim"])
    rewrite = partial(_value_and_index, largest=largest)
    return Spec({"self": pattern(x.ndim, dims)}, [out, out], decompose=rewrite, flops=x.numel, saves=("output",))


@rule(
    aten.argmax.default, aten.argmin.default,
    samples=partial(_samples, (partial(_optional, torch.argmax), partial(_optional, torch.argmin)), False),
)  # fmt: skip
def argmax(call: Call) -> Spec:
    """y[k] = the first d with the largest (smallest) x[k, d]; counted over all dims without a dim"""
    x = call["self"]
    dims = dims_of(call["dim"], x.ndim)
    rewrite = partial(_first_index, largest=call.target is aten.argmax.default)
    return Spec(
        {"self": pattern(x.ndim, dims)}, [kept(x.ndim, dims, call["keepdim"])], decompose=rewrite, flops=x.numel
    )


# what they become over split dims


def global_peak(x: Operand, dims: tuple[int, ...], emit: Emit, largest: bool = True) -> Operand:
    """The extreme of ``x`` over ``dims`` (kept with extent 1), without a gradient."""
    return emit(peak, emit(aten.detach.default, x), dims, largest)  # type: ignore[no-any-return]


def _extreme(call: Call, emit: Emit, largest: bool, nan: str) -> Operand:
    dims = dims_of(call.args.get("dim"), call["self"].ndim)
    return extreme(call["self"], dims, bool(call.args.get("keepdim", False)), emit, largest, nan)


def extreme(x: Operand, dims: tuple[int, ...], keepdim: bool, emit: Emit, largest: bool, nan: str) -> Operand:
    """The extreme of ``x`` over ``dims`` with its gradient; ``nan`` says who gets it when the extreme is NaN.

    ``"spread"``: all of them NaN; ``"tie"``: NaN counts as equal to NaN; ``"drop"``: nobody, zeros.
    """
    m = global_peak(x, dims, emit, largest)
    shares = emit(tied, x, m, dims, nan == "tie") if x.dtype.is_floating_point else None
    return emit(settle, m, shares, dims, keepdim, nan == "drop")  # type: ignore[no-any-return]


def _value_and_index(call: Call, emit: Emit, largest: bool) -> tuple[Operand, Operand]:
    x, dims, keepdim = call["self"], dims_of(call["dim"], call["self"].ndim), call["keepdim"]
    m = global_peak(x, dims, emit, largest)
    index = emit(place, x, m, dims)
    value = emit(pick, x, index, dims[0]) if x.dtype.is_floating_point else m
    return emit(settle, value, None, dims, keepdim), emit(settle, index, None, dims, keepdim)


def _first_index(call: Call, emit: Emit, largest: bool) -> Operand:
    x, dims = call["self"], dims_of(call["dim"], call["self"].ndim)
    m = global_peak(x, dims, emit, largest)
    return emit(settle, emit(place, x, m, dims), None, dims, call["keepdim"])  # type: ignore[no-any-return]


def peak(self: Tensor, dims: tuple[int, ...], largest: bool) -> Tensor:
    """The extreme of a part [.., d, ..] -> [.., 1, ..]; of an empty part what is beyond every number."""
    if self.numel():
        return self.amax(dims, True) if largest else self.amin(dims, True)
    shape = [1 if i in dims else n for i, n in enumerate(self.shape)]
    if self.dtype == torch.bool:
        return self.new_full(shape, not largest)
    if self.dtype.is_floating_point:
        return self.new_full(shape, float("-inf" if largest else "inf"))
    bounds = torch.iinfo(self.dtype)
    return self.new_full(shape, bounds.min if largest else bounds.max)


@rule(peak)
def _peak(call: Call) -> Spec:
    x = call["self"]
    reduce = "max" if call["largest"] else "min"
    return Spec({"self": " ".join(names(x.ndim))}, [kept(x.ndim, call["dims"], True)], reduce=reduce, flops=x.numel)


def _equal(x: Tensor, peak: Tensor, nan: bool) -> Tensor:
    return (x == peak) | (x.isnan() & peak.isnan()) if nan else x == peak


def tied(self: Tensor, peak: Tensor, dims: tuple[int, ...], nan: bool) -> Tensor:
    """(sum, number) of those in this part that equal the extreme: [2, .., 1, ..]."""
    mask = _equal(self, peak, nan)
    dtype = wide_dtype(self.dtype)
    return torch.stack([(self * mask).sum(dims, True, dtype=dtype), mask.sum(dims, True).to(dtype)])


def _beside(call: Call, key: str, out: str, **more: Any) -> Spec:
    """A function of ``self`` and of a tensor that has extent 1 in ``dims``."""
    x, other = call["self"], kept(call["self"].ndim, call["dims"], True)
    return Spec({"self": " ".join(names(x.ndim)), key: other}, [out], flops=x.numel, **more)


@rule(tied)
def _tied(call: Call) -> Spec:
    x, dims = call["self"], call["dims"]
    return _beside(call, "peak", f". {kept(x.ndim, dims, True)}", reduce="sum", saves=("self",))


def settle(
    value: Tensor, shares: Tensor | None, dims: tuple[int, ...], keepdim: bool, drop_nan: bool = False
) -> Tensor:
    """``value`` with the gradient of sum / number of those that equal it, dims of extent 1 dropped unless kept."""
    if shares is not None:
        number = shares[1].detach()
        number = number.clamp(min=1) if drop_nan else number  # none equals NaN: g / 0 * 0 makes their gradients NaN
        value = replace_value((shares[0] / number).to(value.dtype), value)
    return value if keepdim else value.squeeze(dims)


@rule(settle)
def _settle(call: Call) -> Spec:
    x = call["value"]
    ones = kept(x.ndim, call["dims"], True)
    out = kept(x.ndim, call["dims"], call["keepdim"])
    return Spec({"value": ones, "shares": f". {ones}"}, [out], flops=x.numel)


def place(
    self: Tensor, peak: Tensor, dims: tuple[int, ...], starts: Sequence[int] = (), extents: Sequence[int] = ()
) -> Tensor:
    """The first index (over ``dims`` in row-major order) at which this part equals the extreme: [.., 1, ..]."""
    shape = [1 if i in dims else n for i, n in enumerate(self.shape)]
    if not self.numel():
        return torch.full(shape, NOWHERE, device=self.device)
    index = torch.zeros((), dtype=torch.int64, device=self.device)
    for i, d in enumerate(dims):
        start, extent = (starts[i], extents[i]) if starts else (0, self.shape[d])
        along = torch.arange(start, start + self.shape[d], device=self.device)
        index = index * extent + along.view([-1 if j == d else 1 for j in range(self.dim())])
    return torch.where(_equal(self, peak, True), index, NOWHERE).amin(dims, True)


@rule(place)
def _place(call: Call) -> Spec:
    return _beside(call, "peak", kept(call["self"].ndim, call["dims"], True), reduce="min", local=_placed)


def _placed(local: Local) -> Call:
    """Indices count from the start of this rank's part."""
    call = local.call
    starts = [local.out(f"d{d}").start for d in call["dims"]]
    return call.with_(starts=starts, extents=[call["self"].shape[d] for d in call["dims"]])


def pick(self: Tensor, index: Tensor, dim: int, start: int = 0) -> Tensor:
    """``self[.., index, ..]`` along ``dim`` where the index lies in this part, zero elsewhere: [.., 1, ..]."""
    count = self.shape[dim]
    if not count:
        return self.sum(dim, True)
    inside = (index >= start) & (index < start + count)
    return torch.where(inside, self.gather(dim, (index - start).clamp(0, count - 1)), 0)


@rule(pick)
def _pick(call: Call) -> Spec:
    x, dims = call["self"], (call["dim"],)
    other = kept(x.ndim, dims, True)
    ins = {"self": " ".join(names(x.ndim)), "index": other}
    return Spec(ins, [other], reduce="sum", local=_picked, flops=call.outs[0].numel, saves=("index",))


def _picked(local: Local) -> Call:
    return local.call.with_(start=local.out(f"d{local.call['dim']}").start)
