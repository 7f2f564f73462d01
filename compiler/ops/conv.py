"""Convolutions and transposed convolutions in 1, 2 and 3 dims.

    conv k3 s2 p1, 10 planes over 2 ranks                 transposed conv k3 s2 p1 output_padding 1, 5 planes

    input   0 1 2 3 4 | 5 6 7 8 9                         input     0   1   2 | 3   4
    output  0   1   2 | 3   4                             output   0 1 2 3 4 5|6 7 8 9
            o reads 2o-1 .. 2o+1                                  o reads floor((o-1+1)/2) .. floor((o+1)/2)

A split dim is padded by the movement (fill 0), so the local op pads only the dims that are not split.

Filters are one more loop (o), input channels a sum (i): split, each rank has an addend of the result. With groups an output
channel reads the channels of its group alone, so filters of whole groups need no other rank's channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from halofx.compiler.index_map import IDENTITY, DimMap, IndexMap, Spans, length
from halofx.compiler.interval import Interval
from halofx.compiler.ops.dims import names
from halofx.compiler.rules import Call, Local, Operand, Sample, Spec, rule

if TYPE_CHECKING:
    from halofx.compiler.emit import Emit

aten = torch.ops.aten
SPACE = ("d", "h", "w")


def spatial(dims: int) -> tuple[str, ...]:
    """The factor names of the last ``dims`` spatial dims: ``("h", "w")`` for 2."""
    return SPACE[3 - dims :]


def per_dim(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """An argument such as ``stride=2``, ``[2]`` or ``[2, 1, 1]``, one entry a dim."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values


def conv_map(kernel: int, stride: int, padding: int, dilation: int) -> IndexMap:
    """What output *o* of a convolution or pool reads: ``s*o - p .. s*o - p + d(k-1)``.

    >>> conv_map(3, 2, 1, 1)
    IndexMap(mul=2, div=1, lo=-1, hi=1, edge='fill')
    """
    return IndexMap(stride, 1, -padding, dilation * (kernel - 1) - padding)


def transposed_map(kernel: int, stride: int, padding: int, dilation: int) -> IndexMap:
    """What output *o* of a transposed convolution reads: the inputs *i* with ``0 <= o + p - s*i <= d(k-1)``.

    >>> transposed_map(3, 2, 1, 1)
    IndexMap(mul=1, div=2, lo=0, hi=1, edge='fill')
    """
    return IndexMap(1, stride, padding - dilation * (kernel - 1) + stride - 1, padding)


def _samples(dims: Sequence[int], transposed: bool, rng: Random) -> Sample:
    n = rng.choice(dims)
    groups = rng.choice([1, 1, 1, 2, 3])
    cin, cout = groups * rng.randint(1, 3), groups * rng.randint(1, 3)
    k, s, d = ([rng.randint(1, hi) for _ in range(n)] for hi in (4, 3, 2))
    size = [rng.randint(max(1, d[i] * (k[i] - 1) // 2), 9) for i in range(n)]
    bias = rng.random() < 0.5
    if transposed:
        p = [rng.randint(0, min(2, d[i] * (k[i] - 1))) for i in range(n)]
        extra = [rng.randint(0, max(s[i], d[i]) - 1) for i in range(n)]
        size = [
            max(v, 1 + math.ceil(max(0, 2 * p[i] - d[i] * (k[i] - 1) - extra[i]) / s[i])) for i, v in enumerate(size)
        ]
        op = getattr(F, f"conv_transpose{n}d")
        function = lambda x, w, *b: op(x, w, *(b or (None,)), s, p, extra, groups, d)  # noqa: E731
        weight = (cin, cout // groups, *k)
    else:
        p = [rng.randint(0, 3) for _ in range(n)]
        size = [max(v, d[i] * (k[i] - 1) + 1 - 2 * p[i]) for i, v in enumerate(size)]
        pad: Any = "same" if rng.random() < 0.15 and all(v == 1 for v in s) else p
        if pad == "same":
            size = [max(v, 1) for v in size]
        op = getattr(F, f"conv{n}d")
        function = lambda x, w, *b: op(x, w, *(b or (None,)), s, pad, d, groups)  # noqa: E731
        weight = (cout, cin // groups, *k)
    label = f"{'transposed ' if transposed else ''}conv{n}d k{k} s{s} p{p} d{d} g{groups}"
    return Sample(function, ((rng.randint(1, 2), cin, *size), weight, *(((cout,),) if bias else ())), label=label)


@rule(
    aten.conv1d.default, aten.conv2d.default, aten.conv3d.default,
    aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding,
    samples=partial(_samples, (1, 2, 3, 3), False),
)  # fmt: skip
def conv(call: Call) -> Spec:
    """y[n, o, d] = sum over i, k of w[o, i, k] x[n, i, s d + dil k - p]"""
    w, dims = call["weight"], call["weight"].ndim - 2
    kernel = w.shape[2:]
    stride, dilation = per_dim(call["stride"], dims), per_dim(call["dilation"], dims)
    padding = _lower_padding(call["padding"], kernel, dilation)
    every = spatial(dims)
    maps = {n: conv_map(*args) for n, *args in zip(every, kernel, stride, padding, dilation, strict=True)}
    return _spec(call, maps, ("o", "i"), _local_conv)


def _spec(call: Call, maps: Mapping[str, DimMap], filters: tuple[str, str], local: Callable[[Local], Call]) -> Spec:
    """The spec of a convolution whose weight has the dims ``filters`` first. A bias is added once: i is whole beside it."""
    x, w, dims, groups = call["input"], call["weight"], call["weight"].ndim - 2, call["groups"]
    every, batch = spatial(dims), "n " if call["input"].ndim == dims + 2 else ""
    space, closed = " ".join(every), call["bias"] is not None
    i = "o" if groups > 1 else "[i]" if closed else "i"
    own = " ".join(i if name == "i" else name for name in filters)
    extra: dict[str, DimMap] = {}
    if groups > 1:
        channels = group_map(groups, x.shape[-dims - 1], call.outs[0].shape[-dims - 1])
        own, extra = "o .", {"input.o": channels}
        if filters[0] == "i":  # the weight has a row for each input channel
            extra["weight.o"] = channels
    return Spec(
        ins={"input": f"{batch}{i} {space}", "weight": f"{own} {' '.join('.' * dims)}", "bias": "o"},
        outs=[f"{batch}o {space}"],
        maps={**maps, **extra},
        reduce="sum",
        local=local,
        decompose=_bias_afterwards if closed else None,
        flops=2 * (x if filters[0] == "i" else call.outs[0]).numel * math.prod(w.shape[1:]),
        saves=("input", "weight"),
    )


def group_map(groups: int, inputs: int, outputs: int) -> DimMap:
    """The input channels that an output channel reads: those of its group.

    >>> group_map(2, 6, 4).read(Interval(1, 3), 6), group_map(4, 4, 4)
    ((Run(start=0, count=6, step=1),), IndexMap(mul=1, div=1, lo=0, hi=0, edge='fill'))
    """
    if groups == inputs == outputs:
        return IDENTITY
    size, each = inputs // groups, outputs // groups
    return Spans.of([(o // each * size, (o // each + 1) * size - 1) for o in range(outputs)])


def _bias_afterwards(call: Call, emit: Emit) -> Operand:
    """Where the input channels are split, the sum first."""
    plain = emit(call.target, **{**call.args, "input": call["input"], "bias": None})
    total: Operand = emit(add_bias, plain, call["bias"], plain.ndim - call["weight"].ndim + 1)
    return total


def add_bias(input: torch.Tensor, bias: torch.Tensor, dim: int) -> torch.Tensor:
    """``input`` plus ``bias`` along one dim."""
    return input + bias.reshape([-1] + [1] * (input.dim() - dim - 1))


@rule(add_bias)
def _add_bias(call: Call) -> Spec:
    every = names(call["input"].ndim)
    return Spec({"input": " ".join(every), "bias": every[call["dim"]]}, [" ".join(every)], flops=call["input"].numel)


def _lower_padding(padding: Any, kernel: Sequence[int], dilation: Sequence[int]) -> tuple[int, ...]:
    """The padding below index 0; ``"same"`` puts the odd one of an even total above."""
    if padding == "valid":
        return (0,) * len(kernel)
    if padding == "same":
        return tuple(d * (k - 1) // 2 for k, d in zip(kernel, dilation, strict=True))
    return per_dim(padding, len(kernel))


def _local_conv(local: Local) -> Call:
    """Split dims come with their padding, ``"same"`` on the others is spelled out; groups are those of this rank's filters."""
    call, dims = local.call, local.call["weight"].ndim - 2
    every, groups = spatial(dims), call["groups"]
    if not any(local.is_split(n) for n in (*every, "o", "i")):
        return call
    kernel, dilation = call["weight"].shape[2:], per_dim(call["dilation"], dims)
    padding: Any = call["padding"]
    if isinstance(padding, str):
        pads = [
            0 if local.is_split(n) or padding == "valid" else d * (k - 1)
            for n, k, d in zip(every, kernel, dilation, strict=True)
        ]
        pairs = [(total // 2, total - total // 2) for total in pads]
    else:
        pairs = [(0, 0) if local.is_split(n) else (p, p) for n, p in zip(every, per_dim(padding, dims), strict=True)]
    runs = group_runs(local.out("o"), call.outs[0].shape[-dims - 1] // groups)
    simple = len(runs) == 1 and not local.is_split("i") and all(a == b for a, b in pairs)
    if simple and not isinstance(padding, str):
        return call.with_(padding=[a for a, _ in pairs], groups=runs[0][1])
    flat = [p for pair in reversed(pairs) for p in pair]
    return call.with_(target=pieces_conv, **{**call.args, "padding": flat, "groups": runs})


def group_runs(own: Interval, each: int) -> list[tuple[int, int]]:
    """This rank's filters as runs of (filters, groups): a part of a group, whole groups, a part of another.

    >>> group_runs(Interval(3, 14), 4)
    [(1, 1), (8, 2), (2, 1)]
    """
    found: list[tuple[int, int]] = []
    at = own.start
    while at < own.stop:
        whole = (own.stop - at) // each if at % each == 0 else 0
        count = whole * each or min(own.stop, (at // each + 1) * each) - at
        found.append((count, max(whole, 1)))
        at += count
    return found


def pieces_conv(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: Any, padding: Any, dilation: Any, groups: Any,
) -> torch.Tensor:  # fmt: skip
    """Convolutions of runs of filters over their groups' channels, after a zero padding as `torch.nn.functional.pad` takes it."""
    dims = weight.dim() - 2
    op = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    input = F.pad(input, padding) if any(padding) else input
    if not input.shape[-dims - 1]:  # no channels: zeros that stay in the graph of autograd
        return _nothing(input, weight, stride, dilation)
    if len(groups) == 1:
        return op(input, weight, bias, stride, 0, dilation, groups[0][1])
    made, at, width = [], 0, weight.shape[1]
    channels = input.split([width * count for _, count in groups], -dims - 1)
    for x, (filters, count) in zip(channels, groups, strict=True):
        own = slice(at, at + filters)
        made.append(op(x, weight[own], None if bias is None else bias[own], stride, 0, dilation, count))
        at += filters
    return torch.cat(made, -dims - 1)


def _nothing(x: torch.Tensor, weight: torch.Tensor, stride: Any, dilation: Any) -> torch.Tensor:
    dims = weight.dim() - 2
    arguments = zip(x.shape[-dims:], weight.shape[2:], per_dim(stride, dims), per_dim(dilation, dims), strict=True)
    space = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in arguments]
    return x.new_zeros((*x.shape[: -dims - 1], weight.shape[0], *space)) + x.sum() + weight.sum()


@rule(
    aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input,
    samples=partial(_samples, (1, 2, 3, 3), True),
)  # fmt: skip
def conv_transpose(call: Call) -> Spec:
    """y[n, o, q] = sum over i, k with q = s d - p + dil k of w[i, o, k] x[n, i, d]"""
    w, dims = call["weight"], call["weight"].ndim - 2
    every = spatial(dims)
    arguments = (per_dim(call[a], dims) for a in ("stride", "padding", "dilation"))
    maps = {n: transposed_map(*args) for n, *args in zip(every, w.shape[2:], *arguments, strict=True)}
    return _spec(call, maps, ("i", "o"), _cropped)


def _cropped(local: Local) -> Call:
    """Split dims: run without padding on the inputs read, then keep the outputs that are this rank's.

    inputs i0 .. i1 make outputs from s*i0 - p on; this rank's start at its own first output. With k < s there are gaps,
    so a window may begin before, or reach beyond, what the inputs make: those outputs are the bias alone.
    """
    call, dims = local.call, local.call["weight"].ndim - 2
    every = spatial(dims)
    if not any(local.is_split(n) for n in (*every, "o", "i")):
        return call
    stride, padding, extra = (list(per_dim(call[a], dims)) for a in ("stride", "padding", "output_padding"))
    dilation, kernel = per_dim(call["dilation"], dims), call["weight"].shape[2:]
    groups, filters = call["groups"], call.outs[0].shape[-dims - 1]
    windows = [(0, len(local.out("o")))]
    if groups > 1 and local.is_split("o"):
        size, each = call["input"].shape[-dims - 1] // groups, filters // groups
        read, own = local.reads("input", "o"), local.out("o")
        groups = length(read) // size
        windows = [(own.start % each if own else 0, len(own))]
    for i, name in enumerate(every):
        out, made = local.out(name), call.outs[0].shape[call.outs[0].ndim - dims + i]
        window = (0, made)
        if local.is_split(name):
            need = transposed_map(kernel[i], stride[i], padding[i], dilation[i]).need(out)
            window = (out.start + padding[i] - need.start * stride[i], len(out))
            padding[i] = extra[i] = 0
        windows.append(window)
    tail = {"stride": stride, "padding": padding, "output_padding": extra, "groups": groups}
    return call.with_(target=windowed_conv_transpose, **{**call.args, **tail, "windows": windows})


def windowed_conv_transpose(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: Any, padding: Any, output_padding: Any,
    groups: int, dilation: Any, windows: Any,
) -> torch.Tensor:  # fmt: skip
    """A transposed convolution of which channels and each spatial dim are cut, or extended by zeros, to ``(start, length)``."""
    op = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[weight.dim() - 3]
    dims = weight.dim() - 2
    if input.numel():
        y = op(input, weight, None, stride, padding, output_padding, groups, dilation)
        pads = [(-start, start + count - n) for (start, count), n in zip(windows, y.shape[-dims - 1 :], strict=True)]
        flat = [v for pad in reversed(pads) for v in pad]
        y = F.pad(y, flat) if any(flat) else y
    else:  # nothing read: zeros that stay in the graph of autograd
        shape = (*input.shape[: input.dim() - dims - 1], *(count for _, count in windows))
        y = input.new_zeros(shape) + input.sum() + 0 * weight.sum()
    return y if bias is None else y + bias.view(-1, *(1,) * dims)
