r"""The two halves of every norm: statistics (a reduction that can be split) and normalization (pointwise).

    x [n, c, d, h, w]      rank 0 | rank 1               rank 0: 3 planes | rank 1: 2 planes
    statistics             (count, mean, M2)             (3 h w, m0, q0)  | (2 h w, m1, q1)          M2 = sum (x - mean)^2
    all_reduce moments     [3, .., 1, ..]                (5 h w, m, q) on both: one message a layer
    normalize              (x - mean) / sqrt(M2 / count + eps) * weight + bias

One pair serves batch norm (over n, d, h, w), instance norm (d, h, w), group norm (d, h, w, then the channels of a group) and
layer norm (the last dims). Statistics are float64 and means are subtracted before anything is scaled, in two parts, so that
no digit is lost where the mean is large. Autograd keeps x, once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halofx.compiler.ops.dims import names
from halofx.compiler.ops.reduce import HALVES, kept, wide_dtype
from halofx.compiler.rules import Call, Spec, rule

Moments = Tensor
"""[3, .., 1, ..] float64: (count, mean, sum of squares around the mean), extent 1 in the dims that were reduced."""


def shifted(x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """``(x - mean) * scale + shift`` in the precision of x, at least float32; the others are float64 and smaller than x."""
    dtype = wide_dtype(x.dtype)
    high = mean.to(dtype)
    shift = (shift - (mean - high) * scale).to(dtype)  # what `high` rounded away
    if torch.is_grad_enabled():  # inside a second derivative
        return (x - high) * scale.to(dtype) + shift
    return _apart(x, high).mul_(scale.to(dtype)).add_(shift)


def _apart(x: Tensor, high: Tensor) -> Tensor:
    """``x - high`` in new memory."""
    wide = x.to(high.dtype)
    return x - high if wide is x or torch.is_grad_enabled() else wide.sub_(high)


def _times(fresh: Tensor, other: Tensor) -> Tensor:
    """The product, in the memory of the first: new memory costs more than the product."""
    return fresh * other if torch.is_grad_enabled() else fresh.mul_(other)


def _sum(x: Tensor, dims: Sequence[int]) -> Tensor:
    """The sum over ``dims`` [.., 1, ..] in float64, also over none."""
    return (x.sum(list(dims), True) if dims else x).double()


def statistics(input: Tensor, dims: Sequence[int]) -> Moments:
    """(count, mean, M2) of a part over ``dims``; of an empty part (0, 0, 0)."""
    return _Statistics.apply(input, list(dims))  # type: ignore[no-any-return,no-untyped-call]


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: list[int]) -> Moments:
        shape = [1 if i in dims else n for i, n in enumerate(x.shape)]
        out = torch.zeros(3, *shape, dtype=torch.float64, device=x.device)
        if x.numel():
            count = math.prod(x.shape[d] for d in dims)
            near = (x.mean(dims, True) if dims else x).to(wide_dtype(x.dtype))
            rest = _apart(x, near)
            off = _sum(rest, dims) / count  # the digits of the mean that its dtype could not hold
            squares = _sum(rest.square_(), dims) - count * off**2
            out[0], out[1], out[2] = count, near + off, squares.clamp(min=0)
        ctx.save_for_backward(x, out)
        ctx.dims = dims
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        x, (count, mean, _) = ctx.saved_tensors
        _, mean_grad, squares_grad = grads[0]
        dx = shifted(x, mean, 2 * squares_grad, mean_grad / count.clamp(min=1))
        return dx.to(x.dtype), None


@rule(statistics)
def _statistics(call: Call) -> Spec:
    x = call["input"]
    out = f". {kept(x.ndim, call['dims'], True)}"
    return Spec({"input": " ".join(names(x.ndim))}, [out], reduce="moments", flops=4 * x.numel, saves=("input",))


def grouped(moments: Moments, groups: int) -> Moments:
    """The statistics of every channel's group from those of the channels: [3, n, c, 1, ..], merged over c within a group."""
    count, mean, squares = moments.unflatten(2, (groups, -1))
    total = count.sum(2, True)
    center = (count * mean).sum(2, True) / total
    squares = (squares + count * (mean - center) ** 2).sum(2, True)
    return torch.stack([total, center, squares]).expand_as(moments.unflatten(2, (groups, -1))).flatten(2, 3)


def around_zero(moments: Moments) -> Moments:
    """(count, 0, sum of squares) from (count, mean, sum of squares around the mean)."""
    count, mean, squares = moments
    return torch.stack([count, torch.zeros_like(mean), squares + count * mean**2])


def running(moments: Moments, mean: Tensor, var: Tensor, momentum: float | Tensor) -> tuple[Tensor, Tensor]:
    """The running mean and variance [c] after a batch with these statistics [3, n, c, 1, ..]; variance over count - 1."""
    count, new_mean, squares = moments.flatten(2).unbind(0)
    share = 1.0 / momentum.double() if isinstance(momentum, Tensor) else momentum
    new_var = (squares / (count - 1)).mean(0)
    return tuple((old + share * (new - old)).to(old.dtype) for old, new in ((mean, new_mean.mean(0)), (var, new_var)))  # type: ignore[return-value]


@rule(grouped, around_zero)
def _merged(call: Call) -> Spec:
    x = call["moments"]
    tokens = [n if i == 1 or (call.target is around_zero and i) else "." for i, n in enumerate(names(x.ndim))]
    return Spec({"moments": " ".join(tokens)}, [" ".join(tokens)], flops=9 * x.numel)


@rule(running)
def _running(call: Call) -> Spec:
    ins = {"moments": " ".join([". . c", *["."] * (call["moments"].ndim - 3)]), "mean": "c", "var": "c", "momentum": ""}
    return Spec(ins, ["c", "c"], flops=9 * call["mean"].numel)


def normalize(
    input: Tensor, moments: Moments, weight: Tensor | None, bias: Tensor | None, eps: float, dims: Sequence[int], first: int,
    like: str = "",
) -> Tensor:  # fmt: skip
    """``(x - mean) / sqrt(var + eps) * weight + bias``, var = M2 / count over ``dims``.

    The dims of ``weight`` and ``bias`` are those of the input from ``first`` on. ``like`` names the op whose dtype the result
    has under autocast; without it that of the input.
    """
    count, mean, squares = moments
    scale = (squares / count + eps).rsqrt()
    weight, bias = (_beside(p, input.dim(), first) for p in (weight, bias))
    dtype = _dtype_like(like, input)
    return _Normalize.apply(input, mean, scale, weight, bias, list(dims), dtype)  # type: ignore[no-any-return,no-untyped-call]


def _dtype_like(op: str, x: Tensor) -> torch.dtype:
    """The dtype that an op gives to its result: under autocast some cast halves to float32, and who asks finds out."""
    if x.dtype not in HALVES or not op or not torch.is_autocast_enabled(x.device.type):
        return x.dtype
    tiny, ops = x.detach().new_zeros(1, 2, 2), torch.nn.functional
    asked = {"group_norm": (1,), "layer_norm": ((2,),), "rms_norm": ((2,),)}[op]
    dtype: torch.dtype = getattr(ops, op)(tiny, *asked).dtype
    return dtype


def _beside(parameter: Tensor | None, ndim: int, first: int) -> Tensor | None:
    """A parameter with dims of extent 1 put around it."""
    if parameter is None:
        return None
    return parameter.reshape(*[1] * first, *parameter.shape, *[1] * (ndim - first - parameter.dim()))


class _Normalize(torch.autograd.Function):
    """``(x - mean) * scale * weight + bias``; everything but x is small, unless the weight varies over the reduced dims."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor | None, bias: Tensor | None, dims: list[int],
        dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, mean, scale, weight)
        ctx.dims, ctx.bias = dims, None if bias is None else (bias.shape, bias.dtype)
        ctx.inner = all(p is None or _constant(p, dims) for p in (weight, bias))
        none = scale.new_zeros(())
        if ctx.inner:
            full = scale if weight is None else scale * weight
            return shifted(x, mean, full, none if bias is None else bias.double()).to(dtype)
        y = shifted(x, mean, scale, none)
        y = y if weight is None else y.mul_(weight)
        return (y if bias is None else y.add_(bias)).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, mean, scale, weight = ctx.saved_tensors
        dims, high, grad = ctx.dims, mean.to(wide_dtype(x.dtype)), grads[0].to(wide_dtype(x.dtype))
        need_x, need_mean, need_scale, need_weight, need_bias, *_ = ctx.needs_input_grad
        inner = ctx.inner  # the weight comes after the sums over the reduced dims
        through = grad if inner or weight is None else grad * weight
        product = _times(_apart(x, high), through)
        after = 1.0 if weight is None or not inner else weight.double()
        total = _sum(through, dims)
        along = _sum(product, dims) - (mean - high) * total
        dmean = -(total * scale * after) if need_mean else None
        dscale = along * after if need_scale else None
        dx = dweight = dbias = None
        if need_x:
            factor, memory = (scale * after).to(through.dtype), None if torch.is_grad_enabled() else product
            dx = torch.mul(through, factor, out=memory).to(x.dtype)
        if need_weight:
            spread = along * scale if inner else _times(shifted(x, mean, scale, torch.zeros_like(mean)), grad)
            dweight = spread.sum_to_size(weight.shape).to(weight.dtype)
        if need_bias:
            shape, dtype = ctx.bias
            dbias = (total if inner else grad).sum_to_size(shape).to(dtype)
        return dx, dmean, dscale, dweight, dbias, None, None


def _constant(parameter: Tensor, dims: Sequence[int]) -> bool:
    """Whether a parameter does not vary over the reduced dims."""
    return all(parameter.shape[d] == 1 for d in dims)


@rule(normalize)
def _normalize(call: Call) -> Spec:
    x, first = call["input"], call["first"]
    every = names(x.ndim)
    small = f". {' '.join('.' if i in call['dims'] else n for i, n in enumerate(every))}"
    ins = {"input": " ".join(every), "moments": small}
    for key in ("weight", "bias"):
        if call[key] is not None:
            ins[key] = " ".join(every[first : first + call[key].ndim])
    return Spec(ins, [ins["input"]], flops=4 * x.numel, saves=("input",))
