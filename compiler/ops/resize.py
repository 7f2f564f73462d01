"""Resizing in every mode: nearest, linear, cubic, antialiased; by size or by any scale; with corners aligned or not.

    nearest x2, 5 planes over 2 ranks           linear x2, half-pixel centers

    input    0   1   2  |  3   4                input      0     1     2  |  3     4
    output   0 1 2 3 4  |  5 6 7 8 9            output    0   1 2   3 4   |5   6 7   8 9
             o reads floor(o / 2)                         o reads floor((o-1)/2) .. floor((o-1)/2) + 1

What torch computes of a dim depends on its extents and scale only, so each dim is handled by itself. Which indices an output
reads is taken from torch (nearest: by resizing the numbers 0, 1, 2, ...) or from its formula in its precision, and a split
dim is resized in one of two ways:

* where the positions are exact in floating point (scale 2, 4, 8, ..., or 1/2, 1/3, ...) by the op itself on the
  indices read, from a place on where the two grids meet, cut to this rank's own;
* else by weights computed from the global index: two taps (linear), four (cubic) or more (antialiased).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from halofx.compiler.index_map import IDENTITY, DimMap, Indices, Run, Spans, expand
from halofx.compiler.interval import Interval
from halofx.compiler.rules import Call, Local, Sample, Spec, rule

aten = torch.ops.aten
SPACE = ("d", "h", "w")

OPS: dict[tuple[str, int], Any] = {
    ("nearest", 1): aten.upsample_nearest1d,
    ("nearest", 2): aten.upsample_nearest2d,
    ("nearest", 3): aten.upsample_nearest3d,
    ("nearest-exact", 1): aten._upsample_nearest_exact1d,
    ("nearest-exact", 2): aten._upsample_nearest_exact2d,
    ("nearest-exact", 3): aten._upsample_nearest_exact3d,
    ("linear", 1): aten.upsample_linear1d,
    ("linear", 2): aten.upsample_bilinear2d,
    ("linear", 3): aten.upsample_trilinear3d,
    ("cubic", 2): aten.upsample_bicubic2d,
    ("linear-aa", 2): aten._upsample_bilinear2d_aa,
    ("cubic-aa", 2): aten._upsample_bicubic2d_aa,
}
"""The op of a mode for a number of dims: ``.vec`` is what capture records, ``.default`` takes sizes and scales at once."""

MODES = {op.vec: mode for (mode, _), op in OPS.items()}


@dataclass(frozen=True, slots=True)
class Resize:
    """How one dim is resized: everything that torch's formulas depend on."""

    mode: str
    before: int
    after: int
    scale: float | None  # as the caller gave it
    aligned: bool
    double: bool = False  # positions are computed in float64

    @property
    def ratio(self) -> float:
        """Input indices per output index, as torch computes it."""
        if self.aligned:
            return (self.before - 1) / (self.after - 1) if self.after > 1 else 0.0
        return 1.0 / self.scale if self.scale else self.before / self.after

    @property
    def dtype(self) -> torch.dtype:
        """The precision of positions and weights."""
        return torch.float64 if self.double else torch.float32

    @property
    def factor(self) -> int:
        """f where the output is exactly f times as fine and its positions are exact; -f where coarser; else 0."""
        up, down = (round(v) if v and v == round(v) else 0 for v in (1 / self.ratio if self.ratio else 0, self.ratio))
        if self.aligned or "aa" in self.mode:
            return 0
        if up and self.after == up * self.before and (self.mode.startswith("nearest") or up & (up - 1) == 0):
            return up
        return -down if down > 1 and self.mode == "linear" and down * self.after <= self.before else 0

    @property
    def unchanged(self) -> bool:
        """Whether every output is the input at its index (where the resize is not `odd`)."""
        return self.before == self.after

    @property
    def odd(self) -> bool:
        """A scale beside the extents, of which torch makes a copy (or a doubling) here and something else there.

        ``scale_factor=1.1`` of 5 indices makes 5; forward and backward, and 2 and 3 dims, then differ in what they do.
        """
        if self.aligned:
            return False
        doubled = self.mode == "nearest" and self.after == 2 * self.before
        return (self.before == self.after and self.ratio != 1.0) or (doubled and self.ratio != 0.5)


# what is read


@lru_cache(maxsize=256)
def nearest(dim: Resize) -> tuple[int, ...]:
    """The index that every output of a nearest resize reads.

    >>> nearest(Resize("nearest", 5, 8, None, False))
    (0, 0, 1, 1, 2, 3, 3, 4)
    """
    with unset_fake_temporarily(), torch.no_grad():  # a second dim, which grows: torch copies where no extent changes
        positions = torch.arange(dim.before, dtype=torch.float32, device="cpu").view(1, 1, -1, 1)
        resized = OPS[dim.mode, 2].default(positions, [dim.after, 2], dim.scale, None)
    return tuple(int(v) for v in resized[0, 0, :, 0].tolist())


@dataclass(frozen=True, slots=True)
class Distinct:
    """Output *o* reads ``indices[o]``, not decreasing; every index is delivered once, however often it is read.

    >>> Distinct((0, 0, 1, 1, 2, 2)).read(Interval(1, 4), 3)
    (Run(start=0, count=2, step=1),)
    >>> Distinct((0, 2, 4, 6, 9, 11)).read(Interval(0, 6), 12)
    (Run(start=0, count=4, step=2), Run(start=9, count=2, step=2))
    """

    indices: tuple[int, ...]

    def read(self, out: Interval, extent: int) -> Indices:
        wanted = list(dict.fromkeys(self.indices[out.start : out.stop]))
        found = _strides(wanted)
        if len(found) > max(2, len(wanted) // 4):  # irregular: one run with gaps is quicker than many short ones
            return (Run(wanted[0], wanted[-1] + 1 - wanted[0]),)
        return found


def _strides(indices: Sequence[int]) -> Indices:
    """The runs of any step that a list of increasing indices falls into."""
    found: list[Run] = []
    for index in indices:
        last = found[-1] if found else None
        if last is not None and last.start is not None and last.count == 1:
            found[-1] = Run(last.start, 2, index - last.start)
        elif last is not None and last.start is not None and index == last.start + last.count * last.step:
            found[-1] = Run(last.start, last.count + 1, last.step)
        else:
            found.append(Run(index, 1))
    return tuple(found)


def taps(dim: Resize, start: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The input indices [o, k] that outputs ``start:stop`` read, and their weights [o, k], by torch's formulas."""
    o = torch.arange(start, stop, dtype=dim.dtype, device=device)
    ratio = torch.full((), dim.ratio, dtype=dim.dtype, device=device)
    if "aa" in dim.mode:
        return _wide_taps(dim, o, ratio)
    # rounded once, as the fused multiply-add of torch's kernels does
    position = ratio * o if dim.aligned else (ratio.double() * (o.double() + 0.5) - 0.5).to(dim.dtype)
    if dim.mode == "linear":
        position = position.clamp(min=0)
    first = position.floor().clamp(max=dim.before - 1)
    t = (position - first).clamp(0, 1)
    if dim.mode == "linear":
        index, weight = [first, first + 1], [1 - t, t]
    else:
        index = [first + k for k in (-1, 0, 1, 2)]
        weight = [_cubic(v, -0.75) for v in (t + 1, t, 1 - t, 2 - t)]
    return torch.stack(index, 1).long().clamp(0, dim.before - 1), torch.stack(weight, 1)


def _cubic(x: Tensor, a: float) -> Tensor:
    """Keys' convolution kernel at distance ``x`` in 0 .. 2."""
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x <= 1, near, torch.where(x < 2, far, 0.0))


def _wide_taps(dim: Resize, o: Tensor, ratio: Tensor) -> tuple[Tensor, Tensor]:
    """The antialiased taps: the kernel is as wide as an output index where the output is coarser."""
    half = 1.0 if dim.mode == "linear-aa" else 2.0
    stretch = ratio.clamp(min=1.0)
    support, center = half * stretch, ratio * (o + 0.5)
    first = (center - support + 0.5).trunc().clamp(min=0)
    last = (center + support + 0.5).trunc().clamp(max=dim.before)
    most = math.ceil(half * max(dim.ratio, 1.0)) * 2 + 1
    index = first[:, None] + torch.arange(most, dtype=o.dtype, device=o.device)
    x = ((index - center[:, None] + 0.5) / stretch).abs()
    weight = (1 - x).clamp(min=0) if dim.mode == "linear-aa" else _cubic(x, -0.5)
    weight = torch.where(index < last[:, None], weight, 0.0)
    index = torch.minimum(index, last[:, None] - 1)
    return index.long(), weight / weight.sum(1, keepdim=True)


@lru_cache(maxsize=256)
def reads(dim: Resize) -> DimMap:
    """The index map of one dim."""
    if dim.unchanged:
        return IDENTITY
    if dim.mode.startswith("nearest"):
        return Distinct(nearest(dim))
    with unset_fake_temporarily(), torch.no_grad():
        index, _ = taps(dim, 0, dim.after, torch.device("cpu"))
        first, last = index.amin(1).tolist(), index.amax(1).tolist()
    if dim.factor < 0:  # from where the grids meet
        first = [-dim.factor * o for o in range(dim.after)]
    return Spans(tuple(first), tuple(last))


# the rule


def dims_of(call: Call) -> tuple[Resize, ...]:
    """How every spatial dim is resized."""
    x, out = call["input"], call.outs[0]
    scales = call["scale_factors"] or (None,) * (x.ndim - 2)
    aligned, double = bool(call.args.get("align_corners", False)), x.dtype == torch.float64
    sizes = zip(x.shape[2:], out.shape[2:], scales, strict=True)
    return tuple(Resize(MODES[call.target], before, after, scale, aligned, double) for before, after, scale in sizes)


_FUNCTIONAL = {"linear": ("linear", "bilinear", "trilinear"), "cubic": ("", "bicubic", "")}


def _samples(rng: Random) -> Sample:
    n, kind = rng.randint(1, 3), rng.choice(["nearest", "nearest-exact", "linear", "linear", "cubic", "aa"])
    n = 2 if kind in ("cubic", "aa") else n
    options: dict[str, Any] = {"mode": kind}
    if kind == "aa":
        options = {"mode": rng.choice(["bilinear", "bicubic"]), "antialias": True}
    elif kind in _FUNCTIONAL:
        options["mode"] = _FUNCTIONAL[kind][n - 1]
    if not kind.startswith("nearest"):
        options["align_corners"] = rng.random() < 0.4
    shape = (rng.randint(1, 2), rng.randint(1, 3), *(rng.randint(1, 9) for _ in range(n)))
    if rng.random() < 0.4:
        options["size"] = [rng.choice([rng.randint(1, 14), 2 * v, v, max(1, v // 2)]) for v in shape[2:]]
    else:
        scale = [rng.choice([1, 2, 2, 2, 3, 4, 0.5, 1 / 3, 1.5, 0.7, 1.3, rng.uniform(0.3, 3)]) for _ in range(n)]
        scale = scale[:1] * n if rng.random() < 0.6 else scale
        options["scale_factor"] = [max(s, 1 / v) for s, v in zip(scale, shape[2:], strict=True)]
        options["recompute_scale_factor"] = rng.choice([None, None, True])
    return Sample(lambda x: F.interpolate(x, **options), (shape,), label=f"interpolate {options}")


@rule(*MODES, samples=_samples)
def resize(call: Call) -> Spec | None:
    """y[o] = sum over k of w[o, k] x[i(o, k)], in each dim"""
    x, mode = call["input"], MODES[call.target]
    if x.numel == 0 or not (mode.startswith("nearest") or x.dtype.is_floating_point):
        return None
    names, dims = SPACE[5 - x.ndim :], dims_of(call)
    if any(dim.odd for dim in dims) or ("aa" in mode and call.outs[0].shape[-1] == 1):
        return None  # torch 2.13 contradicts itself, and misreads rows of one number: do as it does
    pattern = f"n c {' '.join(names)}"
    width = {"nearest": 0, "linear": 2, "cubic": 4}[mode.split("-")[0]]
    flops = 2 * call.outs[0].numel * width ** len(dims) if width else 0
    maps = {name: reads(dim) for name, dim in zip(names, dims, strict=True)}
    return Spec({"input": pattern}, [pattern], maps=maps, local=_local, flops=flops)


def _local(local: Local) -> Call:
    """Decide for each split dim how it is resized here; the others are left to the op."""
    call, dims = local.call, dims_of(local.call)
    names = SPACE[3 - len(dims) :]
    by_op = not any("aa" in dim.mode and local.is_split(name) for name, dim in zip(names, dims, strict=True))
    sizes, scales, windows, alone = [], [], [], list[tuple[Any, ...]]()
    for i, (name, dim) in enumerate(zip(names, dims, strict=True)):
        own, delivered = local.out(name), [v for v in expand(local.reads("input", name)) if v is not None]
        if local.is_split(name) or not by_op:
            step = fused(dim, own, delivered)
        else:
            step = dim.after, None if dim.ratio == 1.0 else dim.scale, 0
        if step is None:
            alone.append((i + 2, *_alone(dim, own, delivered)))
            step = (len(own), None, 0)
        sizes.append(step[0])
        scales.append(step[1])
        windows.append((step[2], len(own)))
    return call.with_(
        resized, input=call["input"], mode=dims[0].mode, aligned=dims[0].aligned, sizes=sizes, scales=scales,
        windows=windows, alone=alone,
    )  # fmt: skip


def fused(dim: Resize, own: Interval, delivered: Sequence[int]) -> tuple[int, float | None, int] | None:
    """(size, scale, crop) with which the op itself makes outputs ``own`` of the indices delivered; None if it cannot.

    The op's first output is f*i where i is the first index delivered; this rank's begin ``crop`` outputs later.
    """
    if not own or dim.unchanged:
        return len(own), None, 0
    near = dim.mode.startswith("nearest")
    if near and list(delivered) == list(nearest(dim)[own.start : own.stop]):
        return len(own), None, 0
    if dim.factor == 0:
        return None
    crop = own.start - dim.factor * delivered[0] if dim.factor > 0 else 0
    size, scale = crop + len(own), float(dim.factor) if dim.factor > 0 else -1.0 / dim.factor
    size += size == len(delivered)  # of equal extents torch would make a copy
    if near:
        here = nearest(Resize(dim.mode, len(delivered), size, scale, False))[crop : crop + len(own)]
        if [delivered[i] for i in here] != list(nearest(dim)[own.start : own.stop]):
            return None
    return size, scale, crop


def _alone(dim: Resize, own: Interval, delivered: Sequence[int]) -> tuple[Any, ...]:
    """How `resized` handles a dim without the op: nearest by a list of places, the others by taps."""
    if dim.mode.startswith("nearest"):
        place = {index: at for at, index in enumerate(delivered)}
        return tuple(place[i] for i in nearest(dim)[own.start : own.stop])
    fields = (dim.mode, dim.before, dim.after, dim.scale, dim.aligned, dim.double)
    return (own.start, own.stop, delivered[0], len(delivered), *fields)


def resized(
    input: Tensor, mode: str, aligned: bool, sizes: Sequence[int], scales: Sequence[float | None],
    windows: Sequence[tuple[int, int]], alone: Sequence[Sequence[Any]],
) -> Tensor:  # fmt: skip
    """``input`` [n, c, ...]: the dims ``alone`` one by one, the others by the op to ``sizes``; of these the ``windows``."""
    near = mode.startswith("nearest")
    x = input.float() if alone and not near and input.dtype in (torch.float16, torch.bfloat16) else input
    for d, *how in alone:
        x = x.index_select(d, torch.tensor(how, device=x.device)) if near else _by_taps(x, d, *how)
    if tuple(x.shape[2:]) != tuple(sizes) or any(s is not None for s in scales):
        op = OPS[mode, len(sizes)].default
        x = op(x, sizes, *scales) if near else op(x, sizes, aligned, *scales)
    for d, (start, count) in enumerate(windows, 2):
        x = x if x.shape[d] == count else x.narrow(d, start, count)
    return x.to(input.dtype)


def _by_taps(x: Tensor, d: int, start: int, stop: int, first: int, count: int, *fields: Any) -> Tensor:
    """Outputs ``start:stop`` of dim ``d``, of which ``x`` holds ``count`` indices from ``first`` on."""
    index, weight = taps(Resize(*fields), start, stop, x.device)
    index = (index - first).clamp(0, count - 1)
    shape = [-1] + [1] * (x.dim() - d - 1)
    parts = [x.index_select(d, index[:, k]) * weight[:, k].view(shape) for k in range(index.shape[1])]
    return sum(parts[1:], parts[0])
