"""Convolutions and transposed convolutions in 1, 2 and 3 dims.

    conv k3 s2 p1, 10 planes over 2 ranks                 transposed conv k3 s2 p1 output_padding 1, 5 planes

    input   0 1 2 3 4 | 5 6 7 8 9                         input     0   1   2 | 3   4
    output  0   1   2 | 3   4                             output   0 1 2 3 4 5|6 7 8 9
            o reads 2o-1 .. 2o+1                                  o reads floor((o-1+1)/2) .. floor((o+1)/2)

A split dim is padded by the movement (fill 0), so the local op pads only the dims that are not split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any

import torch
import torch.nn.functional as F

from halofx.compiler.index_map import IndexMap
from halofx.compiler.rules import Call, Local, Sample, Spec, rule

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
    groups = rng.choice([1, 1, 1, 2])
    cin, cout = groups * rng.randint(1, 2), groups * rng.randint(1, 2)
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
    x, w, dims = call["input"], call["weight"], call["weight"].ndim - 2
    kernel = w.shape[2:]
    stride, dilation = per_dim(call["stride"], dims), per_dim(call["dilation"], dims)
    padding = _lower_padding(call["padding"], kernel, dilation)
    names = spatial(dims)
    batch = "n " if x.ndim == dims + 2 else ""
    space, dots = " ".join(names), " ".join("." * dims)
    maps = {n: conv_map(*args) for n, *args in zip(names, kernel, stride, padding, dilation, strict=True)}
    return Spec(
        ins={"input": f"{batch}. {space}", "weight": f". . {dots}", "bias": "."},
        outs=[f"{batch}. {space}"],
        maps=maps,
        local=_unpadded,
        flops=2 * call.outs[0].numel * math.prod(w.shape[1:]),
        saves=("input", "weight"),
    )


def _lower_padding(padding: Any, kernel: Sequence[int], dilation: Sequence[int]) -> tuple[int, ...]:
    """The padding below index 0; ``"same"`` puts the odd one of an even total above."""
    if padding == "valid":
        return (0,) * len(kernel)
    if padding == "same":
        return tuple(d * (k - 1) // 2 for k, d in zip(kernel, dilation, strict=True))
    return per_dim(padding, len(kernel))


def _unpadded(local: Local) -> Call:
    """Split dims come with their padding; ``"same"`` on the others is spelled out."""
    call, dims = local.call, local.call["weight"].ndim - 2
    names = spatial(dims)
    if not any(local.is_split(n) for n in names):
        return call
    if isinstance(call["padding"], str):
        return _same_unpadded(local, names)
    padding = [0 if local.is_split(n) else p for n, p in zip(names, per_dim(call["padding"], dims), strict=True)]
    return call.with_(padding=padding)


def _same_unpadded(local: Local, names: tuple[str, ...]) -> Call:
    call = local.call
    kernel, dilation = call["weight"].shape[2:], per_dim(call["dilation"], len(names))
    pads: list[int] = []
    for name, k, d in reversed(list(zip(names, kernel, dilation, strict=True))):
        total = 0 if local.is_split(name) or call["padding"] == "valid" else d * (k - 1)
        pads += [total // 2, total - total // 2]
    return call.with_(target=padded_conv, **{**call.args, "padding": pads})


def padded_conv(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
) -> torch.Tensor:
    """A convolution after an explicit zero padding, given as `torch.nn.functional.pad` takes it."""
    op = (F.conv1d, F.conv2d, F.conv3d)[weight.dim() - 3]
    return op(F.pad(input, padding) if any(padding) else input, weight, bias, stride, 0, dilation, groups)


@rule(
    aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input,
    samples=partial(_samples, (1, 2, 3, 3), True),
)  # fmt: skip
def conv_transpose(call: Call) -> Spec:
    """y[n, o, q] = sum over i, k with q = s d - p + dil k of w[i, o, k] x[n, i, d]"""
    x, w, dims = call["input"], call["weight"], call["weight"].ndim - 2
    names = spatial(dims)
    batch = "n " if x.ndim == dims + 2 else ""
    space, dots = " ".join(names), " ".join("." * dims)
    arguments = (per_dim(call[a], dims) for a in ("stride", "padding", "dilation"))
    maps = {n: transposed_map(*args) for n, *args in zip(names, w.shape[2:], *arguments, strict=True)}
    return Spec(
        ins={"input": f"{batch}. {space}", "weight": f". . {dots}", "bias": "."},
        outs=[f"{batch}. {space}"],
        maps=maps,
        local=_cropped,
        flops=2 * x.numel * math.prod(w.shape[1:]),
        saves=("input", "weight"),
    )


def _cropped(local: Local) -> Call:
    """Split dims: run without padding on the inputs read, then keep the outputs that are this rank's.

    inputs i0 .. i1 make outputs from s*i0 - p on; this rank's start at its own first output. With k < s there are gaps,
    so a window may begin before, or reach beyond, what the inputs make: those outputs are the bias alone.
    """
    call, dims = local.call, local.call["weight"].ndim - 2
    names = spatial(dims)
    if not any(local.is_split(n) for n in names):
        return call
    stride, padding, extra = (list(per_dim(call[a], dims)) for a in ("stride", "padding", "output_padding"))
    dilation, kernel = per_dim(call["dilation"], dims), call["weight"].shape[2:]
    windows: list[tuple[int, int]] = []
    for i, name in enumerate(names):
        out, made = local.out(name), call.outs[0].shape[call.outs[0].ndim - dims + i]
        window = (0, made)
        if local.is_split(name):
            read = transposed_map(kernel[i], stride[i], padding[i], dilation[i]).need(out)
            window = (out.start + padding[i] - read.start * stride[i], len(out))
            padding[i] = extra[i] = 0
        windows.append(window)
    tail = {"stride": stride, "padding": padding, "output_padding": extra}
    return call.with_(target=windowed_conv_transpose, **{**call.args, **tail, "windows": windows})


def windowed_conv_transpose(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: Any, padding: Any, output_padding: Any,
    groups: int, dilation: Any, windows: Any,
) -> torch.Tensor:  # fmt: skip
    """A transposed convolution of which each spatial dim is cut, or extended by zeros, to ``(start, length)``."""
    op = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[weight.dim() - 3]
    dims = len(windows)
    if input.numel():
        y = op(input, weight, None, stride, padding, output_padding, groups, dilation)
        pads = [(-start, start + count - n) for (start, count), n in zip(windows, y.shape[-dims:], strict=True)]
        flat = [v for pad in reversed(pads) for v in pad]
        y = F.pad(y, flat) if any(flat) else y
    else:  # nothing read: zeros that stay in the graph of autograd
        shape = (*input.shape[: input.dim() - dims - 1], weight.shape[1] * groups, *(count for _, count in windows))
        y = input.new_zeros(shape) + input.sum() + 0 * weight.sum()
    return y if bias is None else y + bias.view(-1, *(1,) * dims)
