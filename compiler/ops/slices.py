"""Parts of a dim, mirrored, turned or written: which index of the input an index of the output is.

    x[2:8]  of 8 over 2 ranks       flip                     roll by 1               slice_scatter(x, y, 2, 5)
    x   0 1 2 3 | 4 5 6 7           0 1 2 3 | 4 5 6 7        0 1 2 3 | 4 5 6 7       y      0 1 | 2
    y   2 3 4   | 5 6 7             7 6 5 4 | 3 2 1 0        7 0 1 2 | 3 4 5 6       at 0 1 2 3 | 4 5 6 7

On a split dim the movement does it all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import torch

from halofx.compiler.index_map import DimMap, IndexMap, Strided
from halofx.compiler.ops.dims import as_it_is, names, pattern, wrap, wrap_all
from halofx.compiler.ops.samples import random_dim, random_dims, random_shape
from halofx.compiler.rules import Call, Local, Operand, Sample, Spec, rule

if TYPE_CHECKING:
    from halofx.compiler.emit import Emit

aten = torch.ops.aten


# parts


def window(call: Call, extent: int) -> tuple[int, int, int]:
    """The dim, first index and step of a slice of a dim of this extent."""
    dim, start, stop = wrap(call["dim"], call["self"].ndim), call["start"], call["end"]
    first, _, step = slice(start, stop, call["step"]).indices(extent)
    return dim, first, step


def _slice_of(rng: Random, extent: int) -> Any:
    """A slice that holds something."""
    while True:
        start, stop = (rng.choice([None, rng.randint(-extent, extent)]) for _ in range(2))
        part = slice(start, stop, rng.choice([1, 1, 1, 2, 3]))
        if len(range(*part.indices(extent))):
            return part


def _slice_samples(rng: Random) -> Sample:
    shape = random_shape(rng, most=9)
    dims = rng.sample(range(len(shape)), rng.randint(1, min(2, len(shape))))
    at = tuple(_slice_of(rng, n) if d in dims else slice(None) for d, n in enumerate(shape))
    if rng.random() < 0.3:
        start = rng.randrange(shape[dims[0]])
        count = rng.randint(1, shape[dims[0]] - start)
        return Sample(lambda x: x.narrow(dims[0], start, count), (shape,), label=f"narrow {dims[0]} {start} {count}")
    return Sample(lambda x: x[at] * 1.0, (shape,), label=f"slice {at}")


@rule(aten.slice.Tensor, aten.narrow.default, samples=_slice_samples)
def slice_(call: Call) -> Spec:
    """y[o] = x[start + step o]"""
    x = call["self"]
    if call.target is aten.slice.Tensor:
        dim, first, step = window(call, x.shape[wrap(call["dim"], x.ndim)])
    else:
        dim, step = wrap(call["dim"], x.ndim), 1
        first = call["start"] + (x.shape[dim] if call["start"] < 0 else 0)
    dims = pattern(x.ndim)
    return Spec({"self": dims}, [dims], maps={f"d{dim}": Strided(first, step)}, local=partial(_moved, dim), flops=0)


def _moved(dim: int, local: Local) -> Call:
    """Nothing is left to do when the movement did it."""
    return local.call.with_(as_it_is, input=local.call["self"]) if local.is_split(f"d{dim}") else local.call


def _select_samples(rng: Random) -> Sample:
    shape = random_shape(rng, low=2)
    dim = random_dim(rng, len(shape))
    index = rng.randrange(-shape[dim], shape[dim])
    return Sample(lambda x: x.select(dim, index) * 1.0, (shape,), label=f"select {dim} {index}")


@rule(aten.select.int, samples=_select_samples)
def select(call: Call) -> Spec:
    """y = x[i]; of a split dim only that index is fetched"""
    x = call["self"]
    dim = wrap(call["dim"], x.ndim)
    dims = names(x.ndim)
    after = " ".join(n for d, n in enumerate(dims) if d != dim)
    return Spec({"self": pattern(x.ndim, [dim])}, [after], decompose=_select_slice, flops=0)


def _select_slice(call: Call, emit: Emit) -> Operand:
    x = call["self"]
    dim = wrap(call["dim"], x.ndim)
    at = call["index"] % x.shape[dim]
    made: Operand = emit(aten.squeeze.dims, emit(aten.slice.Tensor, x, dim, at, at + 1), [dim])
    return made


# a list of parts


def _split_samples(rng: Random) -> Sample:
    shape = random_shape(rng, low=1, most=9)
    dim = rng.randrange(len(shape))
    n, size = shape[dim], rng.randint(1, 4)
    sizes = [v for v in (n // 3, n - n // 3) if v]
    functions: list[Any] = [
        lambda x: x.split(size, dim), lambda x: x.split(sizes, dim), lambda x: x.chunk(size, dim),
        lambda x: x.tensor_split(size, dim)[0] if n >= size else x, lambda x: x.unbind(dim) if x.dim() > 1 else x,
    ]  # fmt: skip
    return Sample(rng.choice(functions), (shape,), label=f"parts of dim {dim}, {size}")


@rule(
    aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default, aten.chunk.default, aten.tensor_split.sections,
    aten.unbind.int,
    samples=_split_samples,
)  # fmt: skip
def split(call: Call) -> Spec:
    """y_0 = x[:a], y_1 = x[a:b], ..."""
    x = call["self"]
    dim, gone = wrap(call["dim"], x.ndim), call.target is aten.unbind.int
    kept = " ".join(n for d, n in enumerate(pattern(x.ndim, [dim]).split()) if not gone or d != dim)
    after = kept if gone else kept.replace(f"[d{dim}]", ".")
    return Spec({"self": pattern(x.ndim, [dim])}, [after] * len(call.outs), decompose=_slices, flops=0)


def _slices(call: Call, emit: Emit) -> tuple[Operand, ...]:
    x = call["self"]
    dim, start, found = wrap(call["dim"], x.ndim), 0, []
    for i, out in enumerate(call.outs):
        if call.target is aten.unbind.int:
            found.append(emit(aten.select.int, x, dim, i))
        else:
            found.append(emit(aten.slice.Tensor, x, dim, start, start + out.shape[dim]))
            start += out.shape[dim]
    return tuple(found)


# mirrored and turned


def _flip_samples(rng: Random) -> Sample:
    shape = random_shape(rng)
    dims = random_dims(rng, len(shape))
    functions: list[Any] = [lambda x: x.flip(dims), lambda x: x.flip(dims), lambda x: torch.flipud(x)]
    if len(shape) > 1:
        k, plane = rng.randint(-4, 4), rng.sample(range(len(shape)), 2)
        functions += [torch.fliplr, lambda x: torch.rot90(x, k, plane), lambda x: torch.rot90(x, k, plane)]
    return Sample(rng.choice(functions), (shape,), label=f"flip {dims}")


_FLIPPED = {aten.fliplr.default: (1,), aten.flipud.default: (0,)}


@rule(aten.flip.default, aten.fliplr.default, aten.flipud.default, samples=_flip_samples)
def flip(call: Call) -> Spec:
    """y[o] = x[n-1 - o]"""
    x = call["self"]
    flipped = _FLIPPED.get(call.target) or wrap_all(call["dims"], x.ndim)
    dims = pattern(x.ndim)
    maps = {f"d{d}": Strided(x.shape[d] - 1, -1) for d in flipped}
    return Spec({"self": dims}, [dims], maps=maps, local=partial(_flip_rest, flipped), flops=0)


def _flip_rest(flipped: Sequence[int], local: Local) -> Call:
    rest = [d for d in flipped if not local.is_split(f"d{d}")]
    if not rest:
        return local.call.with_(as_it_is, input=local.call["self"])
    return local.call.with_(aten.flip.default, self=local.call["self"], dims=rest)


@rule(aten.rot90.default, samples=_flip_samples)
def rot90(call: Call) -> Spec:
    """y = x turned by k quarters in the plane of two dims"""
    x = call["self"]
    a, b = wrap_all(call["dims"], x.ndim)
    before = pattern(x.ndim, [a, b])
    after = before.split()
    if call["k"] % 2:
        after[a], after[b] = after[b], after[a]
    return Spec({"self": before}, [" ".join(after)], decompose=_flip_and_transpose, flops=0)


def _flip_and_transpose(call: Call, emit: Emit) -> Operand:
    x, quarters = call["self"], call["k"] % 4
    a, b = wrap_all(call["dims"], x.ndim)
    if quarters:
        x = emit(aten.flip.default, x, {1: [b], 2: [a, b], 3: [a]}[quarters])
    made: Operand = emit(aten.transpose.int, x, a, b) if quarters % 2 else emit(aten.alias.default, x)
    return made


def _roll_samples(rng: Random) -> Sample:
    shape = random_shape(rng)
    if rng.random() < 0.2:
        shift = rng.randint(-10, 10)
        return Sample(lambda x: torch.roll(x, shift), (shape,), label=f"roll {shift} of all")
    dims = [random_dim(rng, len(shape)) for _ in range(rng.randint(1, 3))]
    shifts = [rng.randint(-10, 10) for _ in dims]
    return Sample(lambda x: torch.roll(x, shifts, dims), (shape,), label=f"roll {shifts} {dims}")


@rule(aten.roll.default, samples=_roll_samples)
def roll(call: Call) -> Spec:
    """y[o] = x[(o - shift) mod n]"""
    x = call["self"]
    if not call["dims"]:
        closed = pattern(x.ndim, range(x.ndim))
        return Spec({"self": closed}, [closed], decompose=_roll_flat, flops=0)
    dims = pattern(x.ndim)
    maps: dict[str, DimMap] = {f"d{d}": IndexMap(1, 1, -s, -s, "circular") for d, s in _shifts(call).items()}
    return Spec({"self": dims}, [dims], maps=maps, local=_roll_rest, flops=0)


def _shifts(call: Call) -> dict[int, int]:
    """How far every dim is rolled, in positive direction; a dim named twice is rolled twice."""
    x = call["self"]
    found: dict[int, int] = {}
    for dim, shift in zip(wrap_all(call["dims"], x.ndim), call["shifts"], strict=True):
        found[dim] = found.get(dim, 0) + shift
    return {d: s % max(1, x.shape[d]) for d, s in found.items()}


def _roll_rest(local: Local) -> Call:
    rest = {d: s for d, s in _shifts(local.call).items() if not local.is_split(f"d{d}")}
    if not rest:
        return local.call.with_(as_it_is, input=local.call["self"])
    return local.call.with_(shifts=list(rest.values()), dims=list(rest))


def _roll_flat(call: Call, emit: Emit) -> Operand:
    flat = emit(aten.reshape.default, call["self"], [-1])
    made: Operand = emit(aten.reshape.default, emit(aten.roll.default, flat, call["shifts"], [0]), call["self"].shape)
    return made


# written


def _slice_scatter_samples(rng: Random) -> Sample:
    shape = random_shape(rng, most=9)
    dim = rng.randrange(len(shape))
    part = _slice_of(rng, shape[dim])
    source = (*shape[:dim], len(range(*part.indices(shape[dim]))), *shape[dim + 1 :])
    start, stop, step = part.start, part.stop, part.step
    return Sample(
        lambda x, y: torch.slice_scatter(x, y, dim, start, stop, step),
        (shape, source),
        label=f"slice_scatter {dim} {part}",
    )


@rule(aten.slice_scatter.default, samples=_slice_scatter_samples)
def slice_scatter(call: Call) -> Spec:
    """y[start + step i] = s[i], y[o] = x[o] elsewhere"""
    x = call["self"]
    dim, first, step = window(call, x.shape[wrap(call["dim"], x.ndim)])
    dims = pattern(x.ndim)
    maps = {f"src.d{dim}": IndexMap(1, step, step - 1 - first, -first, "clip")}
    return Spec({"self": dims, "src": dims}, [dims], maps=maps, local=_scatter_window, flops=0)


def _scatter_window(local: Local) -> Call:
    """Write the indices that fall on this rank, perhaps none: an empty source stays in the graph of autograd."""
    call = local.call
    dim, first, step = window(call, call["self"].shape[wrap(call["dim"], call["self"].ndim)])
    if not local.is_split(f"d{dim}"):
        return call
    own, rows = local.out(f"d{dim}"), local.reads("src", f"d{dim}")
    count = rows[0].count if rows else 0
    start = first + step * (rows[0].start or 0) - own.start if rows else 0
    return call.with_(dim=dim, start=start, end=start + (step * (count - 1) + 1 if count else 0), step=step)


def _select_scatter_samples(rng: Random) -> Sample:
    shape = random_shape(rng)
    dim = random_dim(rng, len(shape))
    index, at = rng.randrange(-shape[dim], shape[dim]), dim % len(shape)
    source = (*shape[:at], *shape[at + 1 :])
    return Sample(
        lambda x, y: torch.select_scatter(x, y, dim, index), (shape, source), label=f"select_scatter {dim} {index}"
    )


@rule(aten.select_scatter.default, samples=_select_scatter_samples)
def select_scatter(call: Call) -> Spec:
    """y[i] = s, y[o] = x[o] elsewhere"""
    x = call["self"]
    dim = wrap(call["dim"], x.ndim)
    closed = pattern(x.ndim, [dim])
    source = " ".join(n for d, n in enumerate(names(x.ndim)) if d != dim)
    return Spec({"self": closed, "src": source}, [closed], decompose=_as_slice_scatter, flops=0)


def _as_slice_scatter(call: Call, emit: Emit) -> Operand:
    x = call["self"]
    dim = wrap(call["dim"], x.ndim)
    at = call["index"] % x.shape[dim]
    source = emit(aten.unsqueeze.default, call["src"], dim)
    made: Operand = emit(aten.slice_scatter.default, x, source, dim, at, at + 1)
    return made


# windows along one dim


def _unfold_samples(rng: Random) -> Sample:
    shape = random_shape(rng, high=4, most=9)
    dim = random_dim(rng, len(shape))
    size, step, order = rng.randint(1, shape[dim]), rng.randint(1, 4), rng.randint(1, 3)
    if rng.random() < 0.4 and shape[dim] > order:
        return Sample(lambda x: torch.diff(x, order, dim), (shape,), label=f"diff {order} {dim}")
    return Sample(lambda x: x.unfold(dim, size, step), (shape,), label=f"unfold {dim} {size} {step}")


@rule(aten.unfold.default, samples=_unfold_samples)
def unfold(call: Call) -> Spec:
    """y[o, j] = x[step o + j]"""
    x = call["self"]
    dim = wrap(call["dimension"], x.ndim)
    dims = pattern(x.ndim)
    if x.ndim == 0:
        return Spec({"self": ""}, ["."], flops=0)
    return Spec(
        {"self": dims}, [f"{dims} ."], maps={f"d{dim}": IndexMap(call["step"], 1, 0, call["size"] - 1)}, flops=0
    )


@rule(aten.diff.default, samples=_unfold_samples)
def diff(call: Call) -> Spec | None:
    """y[o] = x[o+1] - x[o], n times over"""
    x, n = call["self"], call["n"]
    if call["prepend"] is not None or call["append"] is not None:
        return None
    dims = pattern(x.ndim)
    dim = wrap(call["dim"], x.ndim)
    return Spec({"self": dims}, [dims], maps={f"d{dim}": IndexMap(1, 1, 0, n)}, flops=n * x.numel)
