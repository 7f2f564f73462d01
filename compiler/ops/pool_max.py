r"""Max pools, their indices, and their inverse.

    max pool k3 s2 p1, 8 planes over 2 ranks; what stands outside is filled with a plane of the same window

    output        0     1     2     3
                 /|\   /|\   /|\   /|\
    input       0 0 1 2 3 4 5 6 7              rank 0 reads 0 0 1 2 3, rank 1 reads 3 4 5 6 7
                ^ copy of plane 0

A copy of an index that the window reads anyway changes neither the maximum nor which element is the first maximum, so ties,
NaN, windows of nothing but -inf and integers come out as on one device, and the gradient of a copy goes to its original. Only
where a window has no index inside the tensor does -inf stand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halofx.compiler.index_map import Indices, Run, runs, span
from halofx.compiler.interval import Interval
from halofx.compiler.ops.conv import conv_map, per_dim, spatial
from halofx.compiler.rules import Call, Local, Operand, Sample, Spec, rule

aten = torch.ops.aten
POOLS: tuple[Any, ...] = (F.max_pool1d, F.max_pool2d, F.max_pool3d)


@dataclass(frozen=True, slots=True)
class Windows:
    """What output *o* of a max pool reads, ``s*o - p + d*j`` for ``0 <= j < k``; an index outside the tensor becomes the
    next one inside that is in the same windows.

    >>> Windows(3, 2, 1, 1).read(Interval(0, 2), 8)
    (Run(start=0, count=1, step=1), Run(start=0, count=4, step=1))
    >>> Windows(2, 1, 1, 2).read(Interval(0, 1), 1)              # the window -1, 1 has nothing inside
    (Run(start=None, count=1, step=1), Run(start=0, count=1, step=1), Run(start=None, count=1, step=1))
    """

    kernel: int
    stride: int
    padding: int
    dilation: int

    def read(self, out: Interval, extent: int) -> Indices:
        need = conv_map(self.kernel, self.stride, self.padding, self.dilation).need(out)
        below, above = range(need.start, min(need.stop, 0)), range(max(need.start, extent), need.stop)
        return (*self._inside(below, extent), *span(need & Interval(0, extent)), *self._inside(above, extent))

    def _inside(self, outside: range, extent: int) -> Indices:
        moved = [inside(i, self.dilation, extent) for i in outside]
        found: list[Run] = []
        for missing, group in groupby(moved, lambda i: i is None):
            indices = [i for i in group if i is not None]
            found += runs(indices) if not missing else ()
            found += [Run(None, moved.count(None))] if missing else []
        return tuple(found)


def inside(index: int, dilation: int, extent: int) -> int | None:
    """The nearest index of ``0:extent`` that is ``index`` modulo the dilation: a window that reads one reads the other.

    >>> inside(-1, 1, 8), inside(-1, 2, 8), inside(9, 2, 8), inside(-1, 2, 1)
    (0, 1, 7, None)
    """
    moved = index % dilation if index < 0 else index - dilation * max(0, -((extent - 1 - index) // dilation))
    return moved if 0 <= moved < extent else None


def dims_of(x: Operand, dims: int) -> str:
    """``"n c d h w"``, or without ``n`` when the tensor has no batch."""
    return " ".join(("n", "c", *spatial(dims))[-x.ndim :])


def geometry(call: Call, dims: int) -> list[Windows]:
    """The windows of a max pool call, dim by dim."""
    kernel = per_dim(call["kernel_size"], dims)
    stride = per_dim(call["stride"] or kernel, dims)
    rest = (per_dim(call[name], dims) for name in ("padding", "dilation"))
    return [Windows(*numbers) for numbers in zip(kernel, stride, *rest, strict=True)]


def lowest(dtype: torch.dtype) -> float:
    """The value that loses against all others."""
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _numbers(shape: torch.Size) -> Tensor:
    """Values with many ties, some -inf, sometimes a NaN."""
    x = torch.randint(-2, 3, shape).double()
    x = torch.where(torch.rand(shape) < 0.3, -math.inf, x)
    return torch.where(torch.rand(shape) < 0.02, math.nan, x)


def _sample(rng: Random) -> Sample:
    n = rng.choice((1, 2, 3, 3))
    k = [rng.randint(1, 4) for _ in range(n)]
    s, d = ([rng.randint(1, 3) for _ in range(n)] for _ in range(2))
    p = [rng.randint(0, v // 2) for v in k]
    size = [rng.randint(max(d[i], d[i] * (k[i] - 1) + 1 - 2 * p[i]), 10) for i in range(n)]
    ceil, indices = rng.random() < 0.4, rng.random() < 0.4
    lead = (rng.randint(1, 2), rng.randint(1, 2))[rng.choice((0, 0, 0, 1)) :]
    kinds: list[Any] = [None, _numbers, lambda shape: torch.randint(-4, 4, shape)]
    make = rng.choice(kinds[: 2 + (n > 1 and not indices)])
    label = f"max_pool{n}d k{k} s{s} p{p} d{d} ceil={ceil} indices={indices}"
    function = lambda x: POOLS[n - 1](x, k, s, p, d, ceil_mode=ceil, return_indices=indices)  # noqa: E731
    return Sample(function, ((*lead, *size),), {0: make} if make else {}, label)


@rule(
    aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default,
    aten.max_pool1d_with_indices.default, aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default,
    samples=_sample,
)  # fmt: skip
def max_pool(call: Call) -> Spec:
    """y[n, c, o] = max over j of x[n, c, s o - p + d j], and the flat spatial index of the first element that has it"""
    x = next(iter(call.tensors.values()))
    dims = _dims(call)
    names, pattern, windows = spatial(dims), dims_of(x, dims), geometry(call, dims)
    return Spec(
        ins={"self": pattern},
        outs=[pattern] * len(call.outs),
        maps=dict(zip(names, windows, strict=True)),
        fill=lowest(x.dtype),
        local=_local_max,
        flops=call.outs[0].numel * math.prod(w.kernel for w in windows),
        saves=("self",),
    )


def _dims(call: Call) -> int:
    return int(call.target._schema.name.split("pool")[1][0])


def _local_max(local: Local) -> Call:
    """Split dims come with their padding; indices become those of the global tensor."""
    call, dims = local.call, _dims(local.call)
    names, windows = spatial(dims), geometry(local.call, dims)
    padding = [0 if local.is_split(n) else w.padding for n, w in zip(names, windows, strict=True)]
    if len(call.outs) == 1 or not any(local.is_split(n) for n in names):
        return call.with_(padding=padding)
    starts = [
        w.stride * local.out(n).start - w.padding if local.is_split(n) else 0
        for n, w in zip(names, windows, strict=True)
    ]
    arguments = {name: value for name, value in call.args.items() if name != "self"}
    return call.with_(
        target=indexed_max_pool,
        **{"input": call["self"], **arguments, "padding": padding},
        starts=starts,
        extents=call["self"].shape[-dims:],
    )


def indexed_max_pool(
    input: Tensor, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool,
    starts: Sequence[int], extents: Sequence[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A max pool [.., o] of a piece that begins at ``starts`` of a tensor of spatial ``extents``, with the tensor's indices."""
    n = len(extents)
    y, index = POOLS[n - 1](input, kernel_size, stride or None, padding, dilation, ceil_mode, return_indices=True)
    flat, scale = torch.zeros_like(index), 1
    steps = per_dim(dilation, n)
    for i in reversed(range(n)):
        length = input.shape[i - n]
        at, index = index % length + starts[i], index // length
        d, last = steps[i], extents[i] - 1
        at = torch.where(at < 0, at % d, at - d * ((at - last + d - 1) // d).clamp(min=0))
        flat, scale = flat + at * scale, scale * extents[i]
    return y, flat


@dataclass(frozen=True, slots=True)
class Everything:
    """Every output reads all inputs: the output may be split although each rank needs the whole input."""

    def read(self, out: Interval, extent: int) -> Indices:
        return span(Interval(0, extent)) if out else ()


def _unpool_sample(rng: Random) -> Sample:
    n = rng.choice((1, 2, 3))
    size, k = [rng.randint(1, 5) for _ in range(n)], [rng.randint(1, 3) for _ in range(n)]
    out = [s * f + rng.randint(0, f - 1) for s, f in zip(size, k, strict=True)]
    shape = (rng.randint(1, 2), rng.randint(1, 2), *size)
    volume = math.prod(out)

    def indices(shape: torch.Size) -> Tensor:
        """Distinct places of the output for every channel."""
        places = [torch.randperm(volume)[: math.prod(shape[2:])] for _ in range(math.prod(shape[:2]))]
        return torch.stack(places).view(shape)

    op: Any = (F.max_unpool1d, F.max_unpool2d, F.max_unpool3d)[n - 1]
    function = lambda x, i: op(x, i, k, k, 0, [*shape[:2], *out])  # noqa: E731
    return Sample(function, (shape, shape), {1: indices}, f"max_unpool{n}d k{k} to {out}")


@rule(aten.max_unpool2d.default, aten.max_unpool3d.default, samples=_unpool_sample)
def max_unpool(call: Call) -> Spec:
    """y[n, c, i[n, c, d]] = x[n, c, d], zero elsewhere: any index may point anywhere, so each rank reads all of x and i"""
    x = call["self"]
    dims = 2 if call.target is aten.max_unpool2d.default else 3
    names, pattern = spatial(dims), dims_of(x, dims)
    return Spec(
        ins={"self": pattern, "indices": pattern},
        outs=[pattern],
        maps=dict.fromkeys(names, Everything()),
        local=_local_unpool,
        flops=call.outs[0].numel,
        saves=("indices",),
    )


def _local_unpool(local: Local) -> Call:
    call = local.call
    names = spatial(2 if call.target is aten.max_unpool2d.default else 3)
    if not any(local.is_split(n) for n in names):
        return call
    windows = [(local.out(n).start, local.out(n).stop) for n in names]
    return call.with_(
        target=windowed_unpool,
        input=call["self"],
        indices=call["indices"],
        extents=call.outs[0].shape[-len(names) :],
        windows=windows,
    )


def windowed_unpool(
    input: Tensor, indices: Tensor, extents: Sequence[int], windows: Sequence[tuple[int, int]]
) -> Tensor:
    """The part of an unpooled tensor of spatial ``extents`` that lies in ``windows`` (start, stop), one a dim."""
    n, rest = len(extents), indices
    flat, scale, held = torch.zeros_like(indices), 1, torch.ones_like(indices, dtype=torch.bool)
    for i in reversed(range(n)):
        at, rest = rest % extents[i], rest // extents[i]
        start, stop = windows[i]
        held = held & (start <= at) & (at < stop)
        flat, scale = flat + (at - start) * scale, scale * (stop - start)
    lead = input.shape[: input.dim() - n]
    place = torch.where(held, flat, scale).flatten(len(lead))  # one more element takes what lies outside
    made = input.new_zeros(*lead, scale + 1).scatter(-1, place, input.flatten(len(lead)))
    return made[..., :scale].reshape(*lead, *(stop - start for start, stop in windows))


def _fractional_sample(rng: Random) -> Sample:
    n = rng.choice((2, 3))
    out, k = [rng.randint(1, 3) for _ in range(n)], [rng.randint(1, 3) for _ in range(n)]
    size = [o + f + rng.randint(0, 4) for o, f in zip(out, k, strict=True)]
    lead = (rng.randint(1, 3), rng.randint(1, 4))
    op = (F.fractional_max_pool2d, F.fractional_max_pool3d)[n - 2]
    function = lambda x, r: op(x, k, out, return_indices=True, _random_samples=r.detach())  # noqa: E731
    make = {1: lambda shape: torch.rand(shape, dtype=torch.float64)}
    return Sample(function, ((*lead, *size), (*lead, n)), make, f"fractional_max_pool{n}d k{k} to {out}")


@rule(aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default, samples=_fractional_sample)
def fractional_max_pool(call: Call) -> Spec:
    """A max pool whose windows are drawn for every (n, c): the random numbers place them all, so space stays whole"""
    x = call["self"]
    dims = len(call["kernel_size"])
    space = " ".join("." * dims)
    batched = x.ndim == dims + 2
    pattern = f"n c {space}" if batched else f"c {space}"
    return Spec(
        ins={"self": pattern, "random_samples": "n c ." if batched else ". c ."},
        outs=[pattern, pattern],
        flops=call.outs[0].numel * math.prod(call["kernel_size"]),
        saves=("self",),
    )
