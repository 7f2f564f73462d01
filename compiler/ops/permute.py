"""Dims that change places, come, go or repeat.

permute [n, c, d, h, w] -> [n, d, h, w, c]      every dim keeps its split
repeat d by 3 over 2 ranks                      0 1 2 3 0 1 | 2 3 0 1 2 3        o reads o mod 4
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any

import torch

from halofx.compiler.index_map import IndexMap
from halofx.compiler.ops.dims import names, wrap, wrap_all
from halofx.compiler.ops.samples import random_dim, random_dims, random_shape
from halofx.compiler.rules import Call, Local, Operand, Sample, Spec, rule

if TYPE_CHECKING:
    from halofx.compiler.emit import Emit

aten = torch.ops.aten


# permutations


def _order(call: Call) -> list[int]:
    """For every output dim the input dim that it is."""
    x, op = call["self"], call.target
    dims = list(range(x.ndim))
    if op is aten.permute.default:
        return list(wrap_all(call["dims"], x.ndim))
    if op in (aten.numpy_T.default, aten.t.default):
        return dims[::-1]
    if op in (aten.mT.default, aten.adjoint.default, aten.mH.default):
        return [*dims[:-2], dims[-1], dims[-2]]
    if op in (aten.movedim.int, aten.movedim.intlist, aten.moveaxis.int, aten.moveaxis.intlist):
        source, target = (wrap_all(call[a], x.ndim) for a in ("source", "destination"))
        rest = iter(d for d in dims if d not in source)
        placed = dict(zip(target, source, strict=True))
        return [placed[d] if d in placed else next(rest) for d in dims]
    a, b = [wrap(v, x.ndim) for k, v in call.args.items() if k != "self"]  # transpose, swapaxes, swapdims
    if dims:
        dims[a], dims[b] = dims[b], dims[a]
    return dims


def _permute_samples(rng: Random) -> Sample:
    shape = random_shape(rng, high=6)
    n = len(shape)
    a, b = random_dim(rng, n), random_dim(rng, n)
    order = [d - n if rng.random() < 0.2 else d for d in rng.sample(range(n), n)]
    source = rng.sample(range(n), rng.randint(1, n))
    target = rng.sample(range(n), len(source))
    functions: list[Any] = [
        lambda x: x.permute(order), lambda x: x.transpose(a, b), lambda x: x.swapaxes(a, b), lambda x: x.swapdims(a, b),
        lambda x: x.movedim(source, target), lambda x: x.movedim(a, b), lambda x: torch.moveaxis(x, a, b),
    ]  # fmt: skip
    if n <= 2:
        functions += [lambda x: x.t(), lambda x: x.T]
    if n >= 2:
        functions += [lambda x: x.mT]
    return Sample(rng.choice(functions), (shape,), label=f"permutation {order} {a} {b} {source} {target}")


@rule(
    aten.permute.default, aten.transpose.int, aten.swapaxes.default, aten.swapdims.default, aten.movedim.int,
    aten.movedim.intlist, aten.moveaxis.int, aten.moveaxis.intlist, aten.t.default, aten.numpy_T.default, aten.mT.default,
    aten.mH.default, aten.adjoint.default,
    samples=_permute_samples,
)  # fmt: skip
def permute(call: Call) -> Spec:
    """y[d, h, c] = x[c, d, h]"""
    dims = names(call["self"].ndim)
    return Spec(ins={"self": " ".join(dims)}, outs=[" ".join(dims[d] for d in _order(call))], flops=0)


# dims of extent 1


def _squeezed(call: Call) -> list[int]:
    """The dims that a squeeze drops: those asked for whose global extent is 1."""
    x = call["self"]
    asked = wrap_all(call["dim"], x.ndim) if "dim" in call.args else range(x.ndim)
    return [d for d in asked if d < x.ndim and x.shape[d] == 1]


def _thin_shape(rng: Random) -> tuple[int, ...]:
    return tuple(1 if rng.random() < 0.4 else n for n in random_shape(rng, high=6))


def _squeeze_samples(rng: Random) -> Sample:
    shape = _thin_shape(rng)
    some, one = random_dims(rng, len(shape)), random_dim(rng, len(shape))
    functions = [lambda x: x.squeeze(), lambda x: x.squeeze(one), lambda x: x.squeeze(tuple(some))]
    i = rng.randrange(3)
    return Sample(functions[i], (shape,), label=f"squeeze {[None, one, some][i]}")


@rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, samples=_squeeze_samples)
def squeeze(call: Call) -> Spec:
    """y[c, d] = x[c, 0, d]"""
    gone = _squeezed(call)
    dims = names(call["self"].ndim)
    before = " ".join("." if d in gone else n for d, n in enumerate(dims))
    after = " ".join(n for d, n in enumerate(dims) if d not in gone)
    return Spec(ins={"self": before}, outs=[after], local=_squeeze_these, flops=0)


def _squeeze_these(local: Local) -> Call:
    """Name the dims: another one may have one index left on this rank."""
    return local.call.with_(aten.squeeze.dims, self=local.call["self"], dim=_squeezed(local.call))


def _unsqueeze_samples(rng: Random) -> Sample:
    shape = random_shape(rng)
    dim = random_dim(rng, len(shape) + 1)
    return Sample(lambda x: x.unsqueeze(dim), (shape,), label=f"unsqueeze {dim}")


@rule(aten.unsqueeze.default, samples=_unsqueeze_samples)
def unsqueeze(call: Call) -> Spec:
    """y[c, 0, d] = x[c, d]"""
    dims = names(call["self"].ndim)
    at = wrap(call["dim"], len(dims) + 1)
    return Spec(ins={"self": " ".join(dims)}, outs=[" ".join([*dims[:at], ".", *dims[at:]])], flops=0)


# repetition


def _expand_samples(rng: Random) -> Sample:
    shape = _thin_shape(rng)
    to = [*random_shape(rng, 0, 2, 3), *(rng.randint(1, 5) if n == 1 else n for n in shape)]
    asked = [-1 if i >= len(to) - len(shape) and rng.random() < 0.2 else n for i, n in enumerate(to)]
    asked = [n if n != -1 else shape[i - len(to) + len(shape)] for i, n in enumerate(asked)]
    functions = [lambda x: x.expand(asked), lambda x: torch.broadcast_to(x, asked)]
    if rng.random() < 0.3:
        return Sample(lambda x, y: x.expand_as(y) * 2, (shape, tuple(to)), label=f"expand_as {to}")
    return Sample(rng.choice(functions), (shape,), label=f"expand {asked}")


@rule(aten.expand.default, aten.broadcast_to.default, aten.expand_as.default, samples=_expand_samples)
def expand(call: Call) -> Spec:
    """y[o, d] = x[0, d]"""
    x, out = call["self"], call.outs[0]
    dims, new = names(out.ndim), out.ndim - x.ndim
    before = " ".join(n if x.shape[i] == out.shape[new + i] else "." for i, n in enumerate(dims[new:]))
    others = {k: " ".join(f"[{k}{i}]" for i in range(o.ndim)) for k, o in call.tensors.items() if k != "self"}
    return Spec(
        ins={"self": before, **others},
        outs=[" ".join(dims)],
        local=_expand_here,
        decompose=_expand_alone if others else None,
        flops=0,
        detached=("other",),
    )


def _expand_alone(call: Call, emit: Emit) -> Operand:
    made: Operand = emit(aten.expand.default, call["self"], list(call.outs[0].shape))
    return made


def _expand_here(local: Local) -> Call:
    return local.call.with_(aten.expand.default, self=local.call["self"], size=list(local.shape()))


def _repeats(call: Call) -> list[int]:
    """How often every output dim repeats."""
    given = list(call["repeats"] if "repeats" in call.args else call["dims"])
    return [1] * (call.outs[0].ndim - len(given)) + given


def _repeat_samples(rng: Random) -> Sample:
    shape = random_shape(rng, high=4, most=5)
    times = [rng.choice([1, 1, 2, 3]) for _ in range(len(shape) + rng.choice([0, 0, 1]))]
    if rng.random() < 0.5:
        times = times[rng.randrange(len(times)) :]
        return Sample(lambda x: x.tile(times), (shape,), label=f"tile {times}")
    return Sample(lambda x: x.repeat(times), (shape,), label=f"repeat {times}")


@rule(aten.repeat.default, aten.tile.default, samples=_repeat_samples)
def repeat(call: Call) -> Spec | None:
    """y[o] = x[o mod n]"""
    x, out = call["self"], call.outs[0]
    if out.numel == 0:
        return None
    dims, new, times = names(out.ndim), out.ndim - x.ndim, _repeats(call)
    single = [x.shape[i] == 1 < times[new + i] for i in range(x.ndim)]
    before = " ".join("." if one else n for one, n in zip(single, dims[new:], strict=True))
    maps = {n: IndexMap(edge="circular") for n, t in zip(dims, times, strict=True) if t > 1}
    return Spec(ins={"self": before}, outs=[" ".join(dims)], maps=maps, local=_repeat_here, flops=0)


def _repeat_here(local: Local) -> Call:
    """Split dims come repeated; a new dim or one of extent 1 repeats as often as this rank has indices."""
    x, out = local.call["self"], local.call.outs[0]
    new = out.ndim - x.ndim
    times: Sequence[int] = _repeats(local.call)
    held = [
        len(local.out(f"d{i}")) if i < new or x.shape[i - new] == 1 else (1 if local.is_split(f"d{i}") else t)
        for i, t in enumerate(times)
    ]
    return local.call.with_(aten.repeat.default, self=x, repeats=held)


def _interleave_samples(rng: Random) -> Sample:
    shape, times = random_shape(rng), rng.randint(1, 4)
    dim = rng.choice([None, random_dim(rng, len(shape)), random_dim(rng, len(shape)), random_dim(rng, len(shape))])
    return Sample(lambda x: x.repeat_interleave(times, dim), (shape,), label=f"repeat_interleave {times} {dim}")


@rule(aten.repeat_interleave.self_int, samples=_interleave_samples)
def repeat_interleave(call: Call) -> Spec | None:
    """y[o] = x[floor(o / r)]"""
    x, times = call["self"], call["repeats"]
    if call.outs[0].numel == 0:
        return None
    if call["dim"] is None:
        return Spec(ins={"self": " ".join(f"[d{i}]" for i in range(x.ndim))}, outs=["."], decompose=_flat, flops=0)
    dims, at = " ".join(names(x.ndim)), f"d{wrap(call['dim'], x.ndim)}"
    return Spec(ins={"self": dims}, outs=[dims], maps={at: IndexMap(1, times)}, local=_interleave_here, flops=0)


def _flat(call: Call, emit: Emit) -> Operand:
    flat = emit(aten.reshape.default, call["self"], [-1])
    made: Operand = emit(call.target, flat, call["repeats"], 0)
    return made


def _interleave_here(local: Local) -> Call:
    x, times = local.call["self"], local.call["repeats"]
    dim = wrap(local.call["dim"], x.ndim)
    own = local.out(f"d{dim}")
    return local.call.with_(interleave_window, input=x, times=times, dim=dim, start=own.start % times, count=len(own))


def interleave_window(input: torch.Tensor, times: int, dim: int, start: int, count: int) -> torch.Tensor:
    """``input`` with every index of ``dim`` ``times`` times, cut to ``count`` of them from ``start`` on."""
    return input.repeat_interleave(times, dim).narrow(dim, start, count)
