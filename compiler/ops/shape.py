"""Reshapes: which dims go on as they are, which merge, which fall apart.

    (a, b, c) -> (abc)          4 x 6 over 2 ranks -> 24            (abc) -> (a, b, c)          24 -> 4 x 6

    a    0       1     |   2       3                                 0 .. 11   |  12 .. 23
         0..5   6..11  |  12..17  18..23                             0       1   |   2       3
    o reads row floor(o / bc)                                        o reads bc*o .. bc*o + bc-1

Dims are grouped into the shortest blocks with equal products, [n, 6, 4] -> [n, 3, 8] is n -> n, (6, 4) -> (3, 8). In a block
that has R numbers for each index of its first dim before, and S after, output *o* reads the rows floor(S o / R) to
floor((S o + S-1) / R); a rank cuts what is its own out of the rows. The other dims of a block are needed whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halofx.compiler.index_map import IDENTITY, DimMap, IndexMap, length
from halofx.compiler.ops.dims import pattern
from halofx.compiler.rules import Call, Local, Operand, Sample, Spec, rule

if TYPE_CHECKING:
    from halofx.compiler.emit import Emit

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Block:
    """Dims of the input and dims of the output that hold the same numbers; the first of each may be split."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    rest_before: int  # numbers for each index of the first dim
    rest_after: int

    @property
    def map(self) -> DimMap:
        """The rows of the first input dim that an index of the first output dim reads."""
        if self.rest_before == self.rest_after:
            return IDENTITY
        return IndexMap(self.rest_after, self.rest_before, 0, self.rest_after - 1)


def match(before: Sequence[int], after: Sequence[int]) -> list[Block]:
    """The shortest blocks of dims with equal products; dims of extent 1 between blocks go with each other.

    >>> [(b.before, b.after) for b in match([2, 6, 4, 1, 5], [2, 3, 8, 1, 5])]
    [((0,), (0,)), ((1, 2), (1, 2)), ((3,), (3,)), ((4,), (4,))]
    >>> [(b.before, b.after, b.map) for b in match([4, 6], [24])]
    [((0, 1), (0,), IndexMap(mul=1, div=6, lo=0, hi=0, edge='fill'))]
    """
    left, right = ([d for d, n in enumerate(shape) if n != 1] for shape in (before, after))
    found: list[Block] = []
    gaps: list[tuple[tuple[int, int], tuple[int, int]]] = []  # between blocks: from the one before to the one after
    end = (-1, -1)
    while left:
        a, b = [left.pop(0)], [right.pop(0)]
        gaps.append(((end[0] + 1, a[0]), (end[1] + 1, b[0])))
        while (m := math.prod(before[d] for d in a)) != (n := math.prod(after[d] for d in b)):
            if m < n:
                a.append(left.pop(0))
            else:
                b.append(right.pop(0))
        rest_a, rest_b = math.prod(before[d] for d in a[1:]), math.prod(after[d] for d in b[1:])
        found.append(Block(tuple(a), tuple(b), rest_a, rest_b))
        end = (a[-1], b[-1])
    gaps.append(((end[0] + 1, len(before)), (end[1] + 1, len(after))))
    ones = [pair for x, y in gaps for pair in zip(range(*x), range(*y), strict=False)]
    return sorted(found + [Block((a,), (b,), 1, 1) for a, b in ones], key=lambda block: block.before)


def reshape_spec(call: Call) -> Spec | None:
    """The spec of any op that keeps the order of the numbers."""
    x, out = call["self"], call.outs[0]
    if x.numel == 0:
        return None
    before, after, maps = ["."] * x.ndim, ["."] * out.ndim, dict[str, DimMap]()
    for i, block in enumerate(match(x.shape, out.shape)):
        before[block.before[0]] = after[block.after[0]] = f"g{i}"
        maps[f"g{i}"] = block.map
    others = {k: _elsewhere(k, o) for k, o in call.tensors.items() if k != "self"}
    return Spec(
        ins={"self": " ".join(before), **others},
        outs=[" ".join(after)],
        maps=maps,
        local=_reshaped,
        decompose=_without_other if others else None,
        flops=0,
        detached=("other",),
    )


def _elsewhere(key: str, operand: Operand) -> str:
    """A tensor that gives only its shape or dtype: no dim of it runs with anything."""
    return " ".join(f"[{key}{i}]" for i in range(operand.ndim))


def _without_other(call: Call, emit: Emit) -> Any:
    return emit(aten.reshape.default, call["self"], list(call.outs[0].shape))


def _reshaped(local: Local) -> Call:
    """Reshape to this rank's shape, after cutting its own numbers out of the rows it was given."""
    call = local.call
    x, out = call["self"], call.outs[0]
    merged: list[int] = []
    windows: list[tuple[int, int]] = []
    for i, block in enumerate(match(x.shape, out.shape)):
        own, rows = local.out(f"g{i}"), local.reads("self", f"g{i}")
        first = rows[0].start or 0 if rows else 0
        merged.append(length(rows) * block.rest_before)
        windows.append((own.start * block.rest_after - first * block.rest_before, len(own) * block.rest_after))
    shape = list(local.shape())
    if all(window == (0, n) for window, n in zip(windows, merged, strict=True)):
        return call.with_(aten.reshape.default, self=x, shape=shape)
    return call.with_(windowed_reshape, input=x, merged=merged, windows=windows, shape=shape)


def windowed_reshape(
    input: Tensor, merged: Sequence[int], windows: Sequence[tuple[int, int]], shape: Sequence[int]
) -> Tensor:
    """``input`` seen with the dims ``merged``, each cut to ``(start, length)``, then in ``shape``."""
    x = input.reshape(merged)
    for dim, (start, count) in enumerate(windows):
        x = x.narrow(dim, start, count)
    return x.reshape(shape)


# samples


def factors_of(rng: Random, n: int, parts: int) -> list[int]:
    """``parts`` numbers whose product is ``n``.

    >>> math.prod(factors_of(Random(0), 12, 3))
    12
    """
    found = [1] * parts
    for p in (2, 3, 5, 7, 11):
        while n % p == 0:
            found[rng.randrange(parts)] *= p
            n //= p
    return found


def _target_shape(rng: Random, shape: Sequence[int]) -> list[int]:
    """A random shape with as many elements: dims merged, split, both, with ones between."""
    out: list[int] = []
    i = 0
    while i < len(shape):
        many = rng.randint(1, min(3, len(shape) - i))
        out += factors_of(rng, math.prod(shape[i : i + many]), rng.choice([1, 1, 1, 2, 3]))
        i += many
        if rng.random() < 0.15:
            out.append(1)
    return out


def _reshape_samples(rng: Random) -> Sample:
    shape = tuple(rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 9, 10]) for _ in range(rng.randint(1, 5)))
    while math.prod(shape) > 3000:
        shape = shape[1:]
    to = _target_shape(rng, shape)
    how = rng.choice(["reshape", "view", "flatten", "unflatten", "view_as", "ravel"])
    if how == "flatten":
        a = rng.randrange(len(shape))
        b = rng.randrange(a, len(shape))
        return Sample(lambda x: x.flatten(a, b - len(shape)), (shape,), label=f"flatten {a} {b}")
    if how == "unflatten":
        d = rng.randrange(len(shape))
        sizes = factors_of(rng, shape[d], rng.randint(1, 3))
        return Sample(lambda x: x.unflatten(d, sizes), (shape,), label=f"unflatten {d} {sizes}")
    if how == "view_as":
        return Sample(lambda x, y: x.view_as(y) * 2, (shape, tuple(to)), label="view_as")
    if how == "ravel":
        return Sample(torch.ravel, (shape,), label="ravel")
    if how == "reshape" and rng.random() < 0.5 and len(shape) > 1:
        order = rng.sample(range(len(shape)), len(shape))
        to = _target_shape(rng, [shape[d] for d in order])
        return Sample(lambda x: x.permute(order).reshape(to), (shape,), label=f"permute {order} reshape {to}")
    if rng.random() < 0.2:
        to[rng.randrange(len(to))] = -1
    return Sample(lambda x: getattr(x, how)(to), (shape,), label=f"{how} {to}")


@rule(
    aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.flatten.using_ints, aten.unflatten.int,
    aten.view_as.default, aten.reshape_as.default, aten.ravel.default,
    aten.atleast_1d.default, aten.atleast_2d.default, aten.atleast_3d.default,
    samples=_reshape_samples,
)  # fmt: skip
def reshape(call: Call) -> Spec | None:
    """y.flatten() = x.flatten()"""
    return reshape_spec(call)


# shuffles: a reshape, a permutation and a reshape in one


def _shuffle_samples(kinds: Sequence[str], rng: Random) -> Sample:
    r, kind = rng.randint(1, 3), rng.choice(kinds)
    lead = tuple(rng.randint(1, 2) for _ in range(rng.choice([0, 1, 1, 1, 2])))
    c, h, w = rng.randint(1, 4), rng.randint(1, 6), rng.randint(1, 6)
    if kind == "shuffle":
        return Sample(lambda x: torch.pixel_shuffle(x, r), ((*lead, c * r * r, h, w),), label=f"pixel_shuffle {r}")
    if kind == "unshuffle":
        return Sample(lambda x: torch.pixel_unshuffle(x, r), ((*lead, c, h * r, w * r),), label=f"pixel_unshuffle {r}")
    return Sample(lambda x: torch.channel_shuffle(x, r), ((2, c * r, h, w),), label=f"channel_shuffle {r}")


@rule(
    aten.pixel_shuffle.default,
    aten.pixel_unshuffle.default,
    samples=partial(_shuffle_samples, ("shuffle", "unshuffle")),
)
def pixel_shuffle(call: Call) -> Spec:
    """y[c, r h + i, r w + j] = x[r^2 c + r i + j, h, w]; unshuffling is the inverse"""
    x, down = call["self"], "downscale_factor" in call.args
    r = call["downscale_factor" if down else "upscale_factor"]
    area = r * r
    c = IndexMap(1, area) if down else IndexMap(area, 1, 0, area - 1)
    hw = IndexMap(r, 1, 0, r - 1) if down else IndexMap(1, r)
    dims = " ".join([*(f"d{i}" for i in range(x.ndim - 3)), "c h w"])
    return Spec(ins={"self": dims}, outs=[dims], maps={"c": c, "h": hw, "w": hw}, local=_shuffled, flops=0)


def _shuffled(local: Local) -> Call:
    """Shuffle the rows read, then cut this rank's own: whole rows are read, of which it may own a part."""
    x, out = local.call["self"], local.call.outs[0]
    windows: list[tuple[int, int]] = []
    for dim, name in zip((-3, -2, -1), "chw", strict=True):
        own, rows = local.out(name), local.reads("self", name)
        first = rows[0].start or 0 if rows else 0
        windows.append((own.start - first * (out.shape[dim] // x.shape[dim]) if len(own) else 0, len(own)))
    down = "downscale_factor" in local.call.args
    factor = local.call["downscale_factor" if down else "upscale_factor"]
    return local.call.with_(windowed_shuffle, input=x, factor=factor, down=down, windows=windows)


def windowed_shuffle(input: Tensor, factor: int, down: bool, windows: Sequence[tuple[int, int]]) -> Tensor:
    """A pixel shuffle (``down``: unshuffle) whose last three dims are each cut to ``(start, length)``."""
    y = (torch.pixel_unshuffle if down else torch.pixel_shuffle)(input, factor)
    for dim, (start, count) in zip((-3, -2, -1), windows, strict=True):
        y = y if count == y.shape[dim] else y.narrow(dim, start, count)
    return y


@rule(aten.channel_shuffle.default, samples=partial(_shuffle_samples, ("channel",)))
def channel_shuffle(call: Call) -> Spec:
    """y[n, k g + i] = x[n, i c/g + k]"""
    dims = pattern(call["self"].ndim, [1])
    return Spec(ins={"self": dims}, outs=[dims], flops=0)
