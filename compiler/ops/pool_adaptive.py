r"""Adaptive pools: output *o* of O pools the inputs ``floor(o N / O) .. ceil((o + 1) N / O) - 1``.

    10 planes to 4 outputs over 2 ranks           10 planes to 1 output

    input    0 1 2 3 4 5 6 7 8 9                  0 1 2 3 4 | 5 6 7 8 9
    output   |-0-|                                each rank reduces its own part, an all-reduce joins them
               |--1--|
                     |--2--|
                         |-3-|                    rank 0 reads 0..4, rank 1 reads 5..9

The cells of a piece are in general not those of an adaptive pool of the piece, so that each is pooled by itself; where N is a
multiple of O they are, and the op runs as it is. A dim that is pooled to one output is reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halofx.compiler.index_map import Spans
from halofx.compiler.ops.conv import spatial
from halofx.compiler.ops.dims import names
from halofx.compiler.ops.extreme import NOWHERE, global_peak, place
from halofx.compiler.ops.pool_max import dims_of
from halofx.compiler.ops.reduce import HALVES, kept
from halofx.compiler.rules import Call, Local, Operand, Sample, Spec, rule

if TYPE_CHECKING:
    from halofx.compiler.emit import Emit

aten = torch.ops.aten
AVERAGE: tuple[Any, ...] = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
MAXIMUM: tuple[Any, ...] = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)
Cells = Sequence[tuple[int, int]]
"""(start, stop) of the inputs of each output."""


def cells(extent: int, outputs: int) -> list[tuple[int, int]]:
    """Which inputs each output pools.

    >>> cells(10, 4)
    [(0, 3), (2, 5), (5, 8), (7, 10)]
    """
    return [(o * extent // outputs, -(-(o + 1) * extent // outputs)) for o in range(outputs)]


def _sample(ops: Sequence[Any], indices: bool, rng: Random) -> Sample:
    n = rng.choice((1, 2, 3, 3))
    size = [rng.randint(1, 9) for _ in range(n)]
    out = [rng.choice([1, rng.randint(1, 6), max(1, v // 2)]) for v in size]
    out = [1] * n if rng.random() < 0.2 else out
    lead = (rng.randint(1, 2), rng.randint(1, 3))[rng.choice((0, 0, 0, 1)) :]
    more = {"return_indices": rng.random() < 0.5} if indices else {}
    ties = {0: lambda shape: torch.randint(-2, 3, shape).double()} if rng.random() < 0.5 else {}
    function = lambda x: ops[n - 1](x, out[0] if n == 1 else out, **more)  # noqa: E731
    return Sample(function, ((*lead, *size),), ties, f"adaptive pool {n}d to {out} {more}")


def _spec(call: Call, rewrite: Callable[[Call, Emit], Any]) -> Spec:
    """Dims run together through their cells; a dim that is pooled to one output must be seen whole."""
    x, dims = call["self"], _dims(call)
    outs = call.outs[0].shape[-dims:]
    tokens, maps = {n: n for n in ("n", "c", *spatial(dims))}, dict[str, Spans]()
    for name, extent, out in zip(spatial(dims), x.shape[-dims:], outs, strict=True):
        if out != extent:
            maps[name] = Spans.of([(start, stop - 1) for start, stop in cells(extent, out)])
            tokens[name] = f"[{name}]" if out == 1 else name
    pattern = dims_of(x, dims).split()
    ins = " ".join(tokens[n] for n in pattern)
    made = " ".join("." if tokens[n] != n else n for n in pattern)
    return Spec(
        ins={"self": ins}, outs=[made] * len(call.outs), maps=maps, local=_local, decompose=rewrite,
        flops=x.numel, saves=("self",),
    )  # fmt: skip


def _dims(call: Call) -> int:
    return int(call.target._schema.name[-2])


def _local(local: Local) -> Call:
    """Split dims pool their own cells: in one call where all are alike, one by one elsewhere."""
    call, dims = local.call, _dims(local.call)
    outs = list(call.outs[0].shape[-dims:])
    ranges: list[list[tuple[int, int]] | None] = [None] * dims
    starts = [0] * dims
    for i, (name, extent) in enumerate(zip(spatial(dims), call["self"].shape[-dims:], strict=True)):
        if local.is_split(name):
            own, total = local.out(name), outs[i]
            mine = cells(extent, total)[own.start : own.stop]
            starts[i], outs[i] = mine[0][0] if mine else 0, len(own)
            if extent % total:
                ranges[i] = [(a - starts[i], b - starts[i]) for a, b in mine]
    if len(call.outs) == 1 and not any(ranges):
        return call.with_(output_size=outs)
    changes: dict[str, Any] = {"input": call["self"], "output_size": outs, "ranges": ranges}
    if len(call.outs) == 1:
        return call.with_(target=celled_average, **changes)
    extents = call["self"].shape[-dims:]
    return call.with_(target=celled_maximum, **changes, starts=starts, extents=extents)


def celled_average(input: Tensor, output_size: Sequence[int], ranges: Sequence[Cells | None]) -> Tensor:
    """The averages [.., o] of a piece; ``ranges`` are the cells of the dims that have their own."""
    n = len(ranges)
    cut = next((i for i in range(n) if ranges[i] is not None), None)
    if cut is None:
        return AVERAGE[n - 1](input, output_size if n > 1 else output_size[0])  # type: ignore[no-any-return]
    rest, size = _without(ranges, cut), _with_one(output_size, cut)
    parts = [celled_average(input.narrow(cut - n, a, b - a), size, rest) for a, b in ranges[cut] or ()]
    return torch.cat(parts, cut - n)


def celled_maximum(
    input: Tensor, output_size: Sequence[int], ranges: Sequence[Cells | None], starts: Sequence[int], extents: Sequence[int]
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The maxima [.., o] of a piece that begins at ``starts`` of a tensor of spatial ``extents``, and the tensor's indices."""
    n = len(ranges)
    cut = next((i for i in range(n) if ranges[i] is not None), None)
    if cut is None:
        y, index = MAXIMUM[n - 1](input, output_size if n > 1 else output_size[0], return_indices=True)
        return y, flat_index(index, input.shape[-n:], starts, extents)
    rest, size = _without(ranges, cut), _with_one(output_size, cut)
    parts = []
    for a, b in ranges[cut] or ():
        begin = [s + a * (i == cut) for i, s in enumerate(starts)]
        parts.append(celled_maximum(input.narrow(cut - n, a, b - a), size, rest, begin, extents))
    return torch.cat([y for y, _ in parts], cut - n), torch.cat([i for _, i in parts], cut - n)


def _without(ranges: Sequence[Cells | None], i: int) -> list[Cells | None]:
    return [None if j == i else r for j, r in enumerate(ranges)]


def _with_one(sizes: Sequence[int], i: int) -> list[int]:
    return [1 if j == i else n for j, n in enumerate(sizes)]


def flat_index(index: Tensor, shape: Sequence[int], starts: Sequence[int], extents: Sequence[int]) -> Tensor:
    """Flat indices in a piece of ``shape`` that begins at ``starts``, as flat indices in the tensor of ``extents``."""
    flat, scale = torch.zeros_like(index), 1
    for length, start, extent in reversed(list(zip(shape, starts, extents, strict=True))):
        flat, index = flat + (index % length + start) * scale, index // length
        scale *= extent
    return flat


def _average_sample(rng: Random) -> Sample:
    return _sample(AVERAGE, False, rng)


@rule(
    aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default,
    samples=_average_sample,
)  # fmt: skip
def adaptive_avg_pool(call: Call) -> Spec:
    """y[n, c, o] = mean of x[n, c, d] over floor(o N / O) <= d < ceil((o + 1) N / O)"""
    return _spec(call, _mean)


def _single(call: Call) -> tuple[int, ...]:
    """The dims of the input that are pooled to one output."""
    x, y = call["self"], call.outs[0]
    return tuple(d for d in range(x.ndim - _dims(call), x.ndim) if y.shape[d] == 1 < x.shape[d])


def _mean(call: Call, emit: Emit) -> Operand:
    """The mean over the dims pooled to one output, then the pool of the others."""
    x, single = call["self"], _single(call)
    y = emit(aten.mean.dim, x, single, True, dtype=torch.float32 if x.dtype in HALVES else None)
    if y.shape != call.outs[0].shape:
        y = emit(call.target, y, call["output_size"])
    return _cast(y, call, emit)


def _cast(y: Operand, call: Call, emit: Emit) -> Operand:
    """``y`` in the dtype that the op has, which under autocast may not be that of its input."""
    return y if y.dtype == call.outs[0].dtype else emit(aten.to.dtype, y, call.outs[0].dtype)


def _max_sample(rng: Random) -> Sample:
    return _sample(MAXIMUM, True, rng)


@rule(
    aten.adaptive_max_pool1d.default, aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default,
    samples=_max_sample,
)  # fmt: skip
def adaptive_max_pool(call: Call) -> Spec:
    """y[n, c, o] = max of x[n, c, d] over floor(o N / O) <= d < ceil((o + 1) N / O), and the first flat index that has it"""
    return _spec(call, _maximum)


def _maximum(call: Call, emit: Emit) -> tuple[Operand, Operand]:
    """The pool of the other dims, then the maximum over the dims pooled to one output; among ties the lowest index wins."""
    x, single = call["self"], _single(call)
    first = x.ndim - _dims(call)
    if all(n == 1 for n in call.outs[0].shape[first:]):
        at = emit(place, x, global_peak(x, single, emit), single)
        return _cast(emit(pick_flat, x, at, single), call, emit), at
    sizes = [x.shape[d] if d in single else call.outs[0].shape[d] for d in range(first, x.ndim)]
    y, index = emit(call.target, x, sizes)
    at = emit(lowest, y, global_peak(y, single, emit), index, single)
    return _cast(emit(held, y, index, at, single), call, emit), at


def lowest(self: Tensor, peak: Tensor, index: Tensor, dims: Sequence[int]) -> Tensor:
    """The lowest index over ``dims`` of those in this part that equal the extreme: [.., 1, ..]."""
    if not self.numel():
        return index.new_full([1 if i in dims else n for i, n in enumerate(self.shape)], NOWHERE)
    equal = (self == peak) | (self.isnan() & peak.isnan())
    return torch.where(equal, index, NOWHERE).amin(tuple(dims), True)


def held(self: Tensor, index: Tensor, at: Tensor, dims: Sequence[int]) -> Tensor:
    """The value with the index ``at`` where this part holds it, zero elsewhere: [.., 1, ..]."""
    return torch.where(index == at, self, 0).sum(tuple(dims), True, dtype=self.dtype)


@rule(lowest, held)
def _among_indices(call: Call) -> Spec:
    x = call["self"]
    every, ones = " ".join(names(x.ndim)), kept(x.ndim, call["dims"], True)
    reduce = "min" if call.target is lowest else "sum"
    ins = {"self": every, "index": every, "peak": ones, "at": ones}
    return Spec(ins, [ones], reduce=reduce, flops=2 * x.numel, saves=("index",))


def pick_flat(
    self: Tensor, index: Tensor, dims: Sequence[int], starts: Sequence[int] = (), extents: Sequence[int] = ()
) -> Tensor:
    """``self`` at the flat ``index`` [.., 1, ..] over ``dims`` (row-major) where it lies in this part, zero elsewhere."""
    ones = [1 if i in dims else n for i, n in enumerate(self.shape)]
    if not self.numel():
        return self.sum(tuple(dims), True)
    starts, extents = starts or [0] * len(dims), extents or [self.shape[d] for d in dims]
    flat, scale, inside = torch.zeros_like(index), 1, torch.ones_like(index, dtype=torch.bool)
    for d, start, extent in reversed(list(zip(dims, starts, extents, strict=True))):
        at, index, length = index % extent - start, index // extent, self.shape[d]
        inside = inside & (at >= 0) & (at < length)
        flat, scale = flat + at.clamp(0, length - 1) * scale, scale * length
    others = [i for i in range(self.dim()) if i not in dims]
    lined = self.permute(*others, *dims).reshape(*(self.shape[i] for i in others), scale)
    picked = lined.gather(-1, flat.reshape(*lined.shape[:-1], 1)).reshape(ones)
    return torch.where(inside, picked, 0)


@rule(pick_flat)
def _pick_flat(call: Call) -> Spec:
    x, ones = call["self"], kept(call["self"].ndim, call["dims"], True)
    ins = {"self": " ".join(names(x.ndim)), "index": ones}
    return Spec(ins, [ones], reduce="sum", local=_picked, flops=call.outs[0].numel, saves=("index",))


def _picked(local: Local) -> Call:
    call = local.call
    starts = [local.out(f"d{d}").start for d in call["dims"]]
    return call.with_(starts=starts, extents=[call["self"].shape[d] for d in call["dims"]])
