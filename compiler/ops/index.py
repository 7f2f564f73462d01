"""Gathers and scatters by tensors of indices.

    gather(x, dim, i)       y[a, o, b] = x[a, i[a, o, b], b]

The dim that is indexed may be read anywhere, so every rank gets all of it; the output stays split like the indices. A
scatter writes anywhere along its dim: that dim is whole in input and output. All other dims stay split.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any

import torch

from halofx.compiler.index_map import DimMap, Everything
from halofx.compiler.ops.dims import names, pattern, wrap
from halofx.compiler.ops.samples import integers, random_dim, random_shape
from halofx.compiler.rules import Call, Operand, Sample, Spec, rule

if TYPE_CHECKING:
    from halofx.compiler.emit import Emit

aten = torch.ops.aten


# gathers


def _index_select_samples(rng: Random) -> Sample:
    shape = random_shape(rng)
    dim, count = random_dim(rng, len(shape)), rng.randint(1, 8)
    return Sample(
        lambda x, i: x.index_select(dim, i), (shape, (count,)), {1: integers(0, shape[dim])}, f"index_select {dim}"
    )


@rule(aten.index_select.default, samples=_index_select_samples)
def index_select(call: Call) -> Spec | None:
    """y[o] = x[i[o]]"""
    x, index = call["self"], call["index"]
    if not x.ndim or not index.ndim:
        return None
    dims, at = pattern(x.ndim), f"d{wrap(call['dim'], x.ndim)}"
    return Spec({"self": dims, "index": at}, [dims], maps={f"self.{at}": Everything()}, flops=0, saves=("index",))


def _index_samples(rng: Random) -> Sample:
    shape = random_shape(rng, most=6)
    n = len(shape)
    where = sorted(rng.sample(range(n), rng.randint(1, min(2, n))))
    to = random_shape(rng, 1, 2, 5)
    sizes = [tuple(1 if rng.random() < 0.2 else v for v in to) for _ in where]
    sizes[0] = to
    make = {1 + k: integers(-shape[d], shape[d]) for k, d in enumerate(where)}

    def index(x: Any, *given: Any) -> Any:
        at = [slice(None)] * (where[-1] + 1)
        for d, i in zip(where, given, strict=True):
            at[d] = i
        return x[tuple(at)]

    return Sample(index, (shape, *sizes), make, f"index dims {where} by {sizes}")


@rule(aten.index.Tensor, samples=_index_samples)
def index(call: Call) -> Spec | None:
    """y[a, o, b] = x[a, i[o], j[o], b]"""
    x = call["self"]
    given = {d: i for d, i in enumerate(call["indices"]) if i is not None}
    if not given or any(i.dtype in (torch.bool, torch.uint8) for i in given.values()):
        return None
    ndim = max(i.ndim for i in given.values())
    chosen, dims = [f"i{k}" for k in range(ndim)], names(x.ndim)
    after = indexed(call["indices"], dims, chosen)
    sizes = dict(zip(after, call.outs[0].shape, strict=True))
    before, maps = [f"[{n}]" if d in given else n for d, n in enumerate(dims)], dict[str, DimMap]()
    if chosen:  # where the first indexed dim is split, the first index dim is split instead
        before[min(given)] = chosen[0]
        maps[f"self.{chosen[0]}"] = Everything()
    return Spec(
        {"self": " ".join(before), "indices": _broadcast(call["indices"], chosen, sizes)},
        [" ".join(after)],
        maps=maps,
        flops=0,
        saves=("indices",),
    )


def indexed(indices: Sequence[Operand | None], dims: Sequence[str], chosen: Sequence[str]) -> list[str]:
    """The dims of ``x[indices]``: the chosen ones stand where neighbors were indexed, else in front.

    >>> i = Operand((5,), torch.int64)
    >>> indexed([None, i, i], ["a", "b", "c", "d"], ["i"]), indexed([i, None, i], ["a", "b", "c"], ["i"])
    (['a', 'i', 'd'], ['i', 'b'])
    """
    given = [d for d, i in enumerate(indices) if i is not None]
    rest = [n for d, n in enumerate(dims) if d not in given]
    at = given[0] if given == list(range(given[0], given[-1] + 1)) else 0
    return [*rest[:at], *chosen, *rest[at:]]


def _broadcast(indices: Sequence[Operand | None], chosen: Sequence[str], sizes: dict[str, int]) -> list[str]:
    """Patterns of index tensors that are broadcast with each other from the right."""
    found = []
    for i in indices:
        aligned = chosen[len(chosen) - i.ndim :] if i is not None else ()
        found.append(
            " ".join(n if i and sizes[n] == m else "." for n, m in zip(aligned, i.shape if i else (), strict=True))
        )
    return found


def _gather_samples(rng: Random) -> Sample:
    shape = random_shape(rng, high=4, most=6)
    dim = random_dim(rng, len(shape))
    at = dim % len(shape)
    size = tuple(rng.randint(1, 8) if d == at else rng.choice([n, n, rng.randint(1, n)]) for d, n in enumerate(shape))
    make = {1: integers(0, shape[at])}
    if rng.random() < 0.4:
        if rng.random() < 0.2:
            make = {1: integers(0, torch.Size(shape).numel())}
            return Sample(lambda x, i: torch.take_along_dim(x, i), (shape, size), make, "take_along_dim flat")
        size = tuple(v if d == at else rng.choice([n, n, 1]) for d, (n, v) in enumerate(zip(shape, size, strict=True)))
        return Sample(lambda x, i: torch.take_along_dim(x, i, dim), (shape, size), make, f"take_along_dim {dim}")
    return Sample(lambda x, i: x.gather(dim, i), (shape, size), make, f"gather {dim}")


@rule(aten.gather.default, samples=_gather_samples)
def gather(call: Call) -> Spec | None:
    """y[a, o, b] = x[a, i[a, o, b], b]"""
    x, index = call["self"], call["index"]
    if not x.ndim or not index.ndim:
        return None
    dims, at = pattern(x.ndim), f"d{wrap(call['dim'], x.ndim)}"
    return Spec({"self": dims, "index": dims}, [dims], maps={f"self.{at}": Everything()}, flops=0, saves=("index",))


@rule(aten.take_along_dim.default, samples=_gather_samples)
def take_along_dim(call: Call) -> Spec | None:
    """y[a, o, b] = x[a, i[a, o, b], b], broadcasting a and b"""
    x, index = call["self"], call["indices"]
    if call["dim"] is None:
        closed = pattern(x.ndim, range(x.ndim)), " ".join(f"[i{d}]" for d in range(index.ndim))
        return Spec({"self": closed[0], "indices": closed[1]}, ["."], decompose=_take_flat, flops=0, saves=("indices",))
    if not x.ndim:
        return None
    dims, out, at = names(x.ndim), call.outs[0].shape, wrap(call["dim"], x.ndim)
    before = [n if x.shape[d] == out[d] or d == at else "." for d, n in enumerate(dims)]
    picks = [n if index.shape[d] == out[d] else "." for d, n in enumerate(dims)]
    return Spec(
        {"self": " ".join(before), "indices": " ".join(picks)},
        [" ".join(dims)],
        maps={f"self.d{at}": Everything()},
        flops=0,
        saves=("indices",),
    )


def _take_flat(call: Call, emit: Emit) -> Operand:
    flat = (emit(aten.reshape.default, call[a], [-1]) for a in ("self", "indices"))
    made: Operand = emit(aten.gather.default, next(flat), 0, next(flat))
    return made


def _embedding_samples(rng: Random) -> Sample:
    rows, width = rng.randint(1, 6), rng.randint(1, 4)
    make = {0: integers(0, rows)}
    if rng.random() < 0.5:
        classes = rng.randint(6, 8)
        one_hot = lambda i: torch.nn.functional.one_hot(i, classes)  # noqa: E731
        return Sample(one_hot, (random_shape(rng, high=3),), make, f"one_hot {classes}")
    return Sample(lambda i, w: torch.nn.functional.embedding(i, w), (random_shape(rng, high=3), (rows, width)), make)


@rule(aten.one_hot.default, samples=_embedding_samples)
def one_hot(call: Call) -> Spec | None:
    """y[d, k] = 1 where x[d] = k"""
    if call["num_classes"] < 0:
        return None
    dims = pattern(call["self"].ndim)
    return Spec({"self": dims}, [f"{dims} ."], flops=0)


# scatters


def _scatter_samples(rng: Random) -> Sample:
    shape = random_shape(rng, high=4, most=6)
    dim = random_dim(rng, len(shape))
    at = dim % len(shape)
    size = tuple(n if d == at else rng.choice([n, n, rng.randint(1, n)]) for d, n in enumerate(shape))
    # each place is written once: torch leaves open who comes last
    make = {1: lambda s: torch.argsort(torch.rand(s), at) if s[at] else torch.zeros(s, dtype=torch.int64)}
    often = {1: integers(0, shape[at])}
    reduce = rng.choice(["sum", "mean", "amax", "prod"])
    calls: list[tuple[Any, Any, str]] = [
        (lambda x, i, y: x.scatter(dim, i, y), make, "scatter"),
        (lambda x, i, y: x.scatter(dim, i, 2.0) * 1.0 + 0 * y.sum(), often, "scatter value"),
        (lambda x, i, y: x.scatter_add(dim, i, y), often, "scatter_add"),
        (
            lambda x, i, y: x.scatter_reduce(dim, i, y, reduce, include_self=at % 2 == 0),
            often,
            f"scatter_reduce {reduce}",
        ),
    ]
    function, how, label = rng.choice(calls)
    return Sample(function, (shape, size, size), how, f"{label} {dim}")


@rule(aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.scatter_reduce.two, samples=_scatter_samples)
def scatter(call: Call) -> Spec | None:
    """y[a, i[a, o, b], b] = s[a, o, b]"""
    x, index = call["self"], call["index"]
    if not x.ndim or not index.ndim:
        return None
    dims, at = names(x.ndim), wrap(call["dim"], x.ndim)
    open_ = [d != at and index.shape[d] == n for d, n in enumerate(x.shape)]
    whole = pattern(x.ndim, [d for d, o in enumerate(open_) if not o])
    rest = " ".join(n if o else "." for n, o in zip(dims, open_, strict=True))
    return Spec({"self": whole, "index": rest, "src": rest}, [whole], flops=0, saves=("index",))


def _index_write_samples(rng: Random) -> Sample:
    shape = random_shape(rng, high=4, most=6)
    dim = random_dim(rng, len(shape))
    at = dim % len(shape)
    count = rng.randint(1, shape[at])
    source = tuple(count if d == at else n for d, n in enumerate(shape))
    once = {1: lambda s: torch.randperm(shape[at])[: s[0]]}
    often = {1: integers(0, shape[at])}
    calls: list[tuple[Any, Any, str]] = [
        (lambda x, i, y: x.index_add(dim, i, y, alpha=2), often, "index_add"),
        (lambda x, i, y: x.index_copy(dim, i, y), once, "index_copy"),
        (lambda x, i, y: x.index_fill(dim, i, 3.0) + 0 * y.sum(), often, "index_fill"),
        (lambda x, i, y: x.index_fill(dim, i, y.sum()), often, "index_fill tensor"),
    ]
    function, how, label = rng.choice(calls)
    return Sample(function, (shape, (count,), source), how, f"{label} {dim}")


@rule(
    aten.index_add.default, aten.index_copy.default, aten.index_fill.int_Scalar, aten.index_fill.int_Tensor,
    samples=_index_write_samples,
)  # fmt: skip
def index_write(call: Call) -> Spec | None:
    """y[a, i[o], b] = s[a, o, b]"""
    x, at = call["self"], wrap(call["dim"], call["self"].ndim)
    if not x.ndim or not call["index"].ndim:
        return None
    source = " ".join("." if d == at else n for d, n in enumerate(names(x.ndim)))
    return Spec(
        {"self": pattern(x.ndim, [at]), "index": ".", "source": source, "value": ""}, [pattern(x.ndim, [at])], flops=0,
        saves=("index",),
    )  # fmt: skip


def _index_put_samples(rng: Random) -> Sample:
    shape = random_shape(rng, most=6)
    n = len(shape)
    where = sorted(rng.sample(range(n), rng.randint(1, min(2, n))))
    count, accumulate = rng.randint(1, min(shape[d] for d in where)), rng.random() < 0.5
    make = {1 + k: (lambda s, d=d: torch.randperm(shape[d])[: s[0]]) for k, d in enumerate(where)}
    dims = indexed(
        [Operand((count,), torch.int64) if d in where else None for d in range(where[-1] + 1)], names(n), ["i"]
    )
    full = [count if name == "i" else shape[int(name[1:])] for name in dims]
    value = [1 if rng.random() < 0.3 else v for v in full][rng.randrange(len(full)) :]

    def put(x: Any, *rest: Any) -> Any:
        indices: list[Any] = [None] * (where[-1] + 1)
        for d, i in zip(where, rest, strict=False):
            indices[d] = i
        return torch.ops.aten.index_put(x, indices, rest[-1], accumulate)

    return Sample(put, (shape, *((count,) for _ in where), tuple(value)), make, f"index_put {where}")


@rule(aten.index_put.default, samples=_index_put_samples)
def index_put(call: Call) -> Spec | None:
    """y[a, i[o], j[o], b] = s[a, o, b]"""
    x, values = call["self"], call["values"]
    given = {d: i for d, i in enumerate(call["indices"]) if i is not None}
    if not given or any(i.dtype in (torch.bool, torch.uint8) for i in given.values()):
        return None
    dims = names(x.ndim)
    full = indexed(call["indices"], dims, ["."] * max(i.ndim for i in given.values()))
    sizes = dict(zip(dims, x.shape, strict=True))
    aligned = zip(full[len(full) - values.ndim :], values.shape, strict=True)
    source = " ".join(n if n != "." and sizes[n] == m else "." for n, m in aligned)
    picks = [" ".join("." * i.ndim) if i is not None else "" for i in call["indices"]]
    whole = pattern(x.ndim, given)
    return Spec({"self": whole, "indices": picks, "values": source}, [whole], flops=0, saves=("indices",))
