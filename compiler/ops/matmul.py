"""Products: every one of them is a sum over the indices that its operands share and its result has not.

    matmul    x[b, n, k] y[b, k, m]     ->  z[b, n, m]         k split: every rank multiplies its part, one all-reduce
    linear    x[..., i]  w[o, i]  b[o]  ->  y[..., o]          i split: without the bias, which is added afterwards

All are linear in each operand, so a sum that is split is exact: each rank holds an addend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from halofx.compiler.functional import no_gradient
from halofx.compiler.ops.dims import names, wrap_all
from halofx.compiler.ops.samples import random_shape
from halofx.compiler.rules import Call, Local, Operand, Sample, Spec, rule

if TYPE_CHECKING:
    from halofx.compiler.emit import Emit

aten = torch.ops.aten


def product(call: Call, ins: Mapping[str, Sequence[str]], out: Sequence[str], **more: Any) -> Spec:
    """The spec of a product: names of the dims of its operands and of its result; those missing in the result are summed.

    A dim of extent 1 that is broadcast is whole. Names in brackets are whole too.
    """
    extents: dict[str, int] = {}
    for key, dims in ins.items():
        for name, n in zip(dims, call.tensors[key].shape, strict=True):
            extents[name] = max(extents.get(name, 1), n) if n else 0
    patterns = {
        key: " ".join(
            name if n == extents[name] else "." for name, n in zip(dims, call.tensors[key].shape, strict=True)
        )
        for key, dims in ins.items()
    }
    more.setdefault("flops", _flops(list(ins.values()), out, extents))
    more.setdefault("saves", tuple(ins))
    return Spec(ins=patterns, outs=[" ".join(out)], reduce="sum", **more)


def _flops(ins: Sequence[Sequence[str]], out: Sequence[str], extents: Mapping[str, int]) -> int:
    """Of the products from left to right, each summed as soon as what follows allows."""
    total, held = 0, set(ins[0])
    for i, dims in enumerate(ins[1:], 1):
        held |= set(dims)
        total += 2 * math.prod(extents[n] for n in held)
        held &= set(out).union(*ins[i + 1 :])
    return total or math.prod(extents.values())


def aligned(operand: Operand, out: Sequence[str]) -> list[str]:
    """The names of an operand that is broadcast to the result from the right."""
    return list(out)[len(out) - operand.ndim :]


# -- matmul and its kin


def _pair(rng: Random, kinds: Sequence[tuple[str, str]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Random shapes for operands such as ("b n k", "b k m")."""
    extent: dict[str, int] = {}
    a, b = (tuple(extent.setdefault(name, rng.randint(1, 7)) for name in term.split()) for term in rng.choice(kinds))
    return a, b


def _two(function: Callable[..., Any], kinds: Sequence[tuple[str, str]], rng: Random) -> Sample:
    return Sample(function, _pair(rng, kinds), label=getattr(function, "__name__", ""))


def _matmul_samples(rng: Random) -> Sample:
    a = [rng.randint(1, 6) for _ in range(rng.randint(1, 5))]
    k, batch = a[-1], a[:-2]
    if rng.random() < 0.25:
        b = [k]
    else:
        shared = batch[rng.randint(0, len(batch)) :] if batch else []
        shared = [1 if rng.random() < 0.2 else n for n in shared]
        b = [*shared, k, rng.randint(1, 6)]
        if not batch and rng.random() < 0.3:
            b = [rng.randint(1, 4), *b]
        a = [1 if i < len(batch) and rng.random() < 0.15 else n for i, n in enumerate(a)]
    return Sample(torch.matmul, (tuple(a), tuple(b)), label="matmul")


@rule(aten.matmul.default, aten.linalg_matmul.default, samples=_matmul_samples)
def matmul(call: Call) -> Spec:
    """z[b, n, m] = sum over k of x[b, n, k] y[b, k, m]; a vector has no n or no m"""
    x_key, y_key = list(call.tensors)
    x, y = call.tensors[x_key], call.tensors[y_key]
    rows, columns = ["n"] * (x.ndim > 1), ["m"] * (y.ndim > 1)
    batch = names(max(x.ndim, y.ndim, 2) - 2)
    ins = {
        x_key: [*batch[len(batch) - max(x.ndim - 2, 0) :], *rows, "k"],
        y_key: [*batch[len(batch) - max(y.ndim - 2, 0) :], "k", *columns],
    }
    return product(call, ins, [*batch, *rows, *columns])


_MM = [("n k", "k m")]
_BMM = [("b n k", "b k m")]


@rule(aten.mm.default, samples=partial(_two, torch.mm, _MM))
def mm(call: Call) -> Spec:
    """z[n, m] = sum over k of x[n, k] y[k, m]"""
    return product(call, {"self": ["n", "k"], "mat2": ["k", "m"]}, ["n", "m"])


@rule(aten.bmm.default, samples=partial(_two, torch.bmm, _BMM))
def bmm(call: Call) -> Spec:
    """z[b, n, m] = sum over k of x[b, n, k] y[b, k, m]"""
    return product(call, {"self": ["b", "n", "k"], "mat2": ["b", "k", "m"]}, ["b", "n", "m"])


@rule(aten.mv.default, samples=partial(_two, torch.mv, [("n k", "k")]))
def mv(call: Call) -> Spec:
    """z[n] = sum over k of x[n, k] y[k]"""
    return product(call, {"self": ["n", "k"], "vec": ["k"]}, ["n"])


def _dot_samples(rng: Random) -> Sample:
    return _two(rng.choice([torch.dot, torch.vdot]), [("k", "k")], rng)


@rule(aten.dot.default, aten.vdot.default, samples=_dot_samples)
def dot(call: Call) -> Spec:
    """z = sum over k of x[k] y[k]"""
    a, b = list(call.tensors)
    return product(call, {a: ["k"], b: ["k"]}, [])


def _outer_samples(rng: Random) -> Sample:
    return _two(rng.choice([torch.outer, torch.ger]), [("n", "m")], rng)


@rule(aten.outer.default, aten.ger.default, samples=_outer_samples)
def outer(call: Call) -> Spec:
    """z[n, m] = x[n] y[m]"""
    return product(call, {"self": ["n"], "vec2": ["m"]}, ["n", "m"])


@rule(
    aten.inner.default,
    samples=partial(_two, torch.inner, [("a b k", "c k"), ("k", "k"), ("k", "a k"), ("a k", "b c k")]),
)
def inner(call: Call) -> Spec | None:
    """z[a, b] = sum over k of x[a, k] y[b, k]"""
    x, y = call["self"], call["other"]
    if not x.ndim or not y.ndim:
        return None
    left, right = names(x.ndim - 1), names(y.ndim - 1, x.ndim)
    return product(call, {"self": [*left, "k"], "other": [*right, "k"]}, [*left, *right])


def _vecdot_samples(rng: Random) -> Sample:
    shape = random_shape(rng)
    dim = rng.randrange(len(shape)) - len(shape)
    other = tuple(1 if rng.random() < 0.2 and i != dim + len(shape) else n for i, n in enumerate(shape))
    return Sample(lambda x, y: torch.linalg.vecdot(x, y, dim=dim), (shape, other), label=f"vecdot {dim}")


@rule(aten.linalg_vecdot.default, samples=_vecdot_samples)
def vecdot(call: Call) -> Spec | None:
    """z[a] = sum over k of x[a, k] y[a, k]"""
    x, y = call["x"], call["y"]
    ndim = max(x.ndim, y.ndim)
    dims = names(ndim)
    (dim,) = wrap_all(call["dim"], ndim)
    return product(call, {"x": aligned(x, dims), "y": aligned(y, dims)}, dims[:dim] + dims[dim + 1 :])


# -- a product added to something: where its sum is split, the something is added once, afterwards


def _added(call: Call, emit: Emit, product_of: Callable[[Call, Emit], Operand], name: str) -> Any:
    """beta input + alpha (the product)."""
    total = product_of(call, emit)
    if call.args.get("alpha", 1) != 1:
        total = emit(aten.mul.Tensor, total, call["alpha"])
    input = call[name]
    if call.args.get("beta", 1) == 0:
        return emit(no_gradient, total, input)
    if call.args.get("beta", 1) != 1:
        input = emit(aten.mul.Tensor, input, call["beta"])
    return emit(aten.add.Tensor, total, input)


def _closed(call: Call, ins: Mapping[str, Sequence[str]], out: Sequence[str], added: str, product_of: Any) -> Spec:
    """A product with an addend: dims that are summed are whole here; split ones go the way of `_added`."""
    summed = {n for dims in ins.values() for n in dims} - set(out)
    wrapped = {key: [f"[{n}]" if n in summed else n for n in dims] for key, dims in ins.items()}
    saves = tuple(ins)
    if call[added] is not None:
        wrapped[added] = aligned(call[added], out)
    return product(call, wrapped, out, saves=saves, decompose=lambda c, emit: _added(c, emit, product_of, added))


def _add_samples(function: Any, operands: tuple[str, str, str], rng: Random) -> Sample:
    extent: dict[str, int] = {}
    shapes = [[extent.setdefault(n, rng.randint(1, 6)) for n in names_.split()] for names_ in operands]
    shapes[0] = [1 if rng.random() < 0.2 else n for n in shapes[0]][rng.choice([0, 0, 0, 1]) :]
    beta, alpha = rng.choice([0, 1, 0.5]), rng.choice([1, -0.5])
    plain = beta == alpha == 1
    call = function if plain else partial(function, beta=beta, alpha=alpha)
    return Sample(call, tuple(map(tuple, shapes)), label=f"{function.__name__} beta={beta} alpha={alpha}")


@rule(aten.addmm.default, samples=partial(_add_samples, torch.addmm, ("n m", "n k", "k m")))
def addmm(call: Call) -> Spec:
    """z[n, m] = beta a[n, m] + alpha sum over k of x[n, k] y[k, m]"""
    ins = {"mat1": ["n", "k"], "mat2": ["k", "m"]}
    return _closed(call, ins, ["n", "m"], "self", lambda c, emit: emit(aten.mm.default, c["mat1"], c["mat2"]))


@rule(aten.addmv.default, samples=partial(_add_samples, torch.addmv, ("n", "n k", "k")))
def addmv(call: Call) -> Spec:
    """z[n] = beta a[n] + alpha sum over k of x[n, k] y[k]"""
    ins = {"mat": ["n", "k"], "vec": ["k"]}
    return _closed(call, ins, ["n"], "self", lambda c, emit: emit(aten.mv.default, c["mat"], c["vec"]))


@rule(aten.addr.default, samples=partial(_add_samples, torch.addr, ("n m", "n", "m")))
def addr(call: Call) -> Spec:
    """z[n, m] = beta a[n, m] + alpha x[n] y[m]"""
    ins = {"vec1": ["n"], "vec2": ["m"], "self": aligned(call["self"], ["n", "m"])}
    return product(call, ins, ["n", "m"], saves=("vec1", "vec2"))


@rule(aten.baddbmm.default, samples=partial(_add_samples, torch.baddbmm, ("b n m", "b n k", "b k m")))
def baddbmm(call: Call) -> Spec:
    """z[b, n, m] = beta a[b, n, m] + alpha sum over k of x[b, n, k] y[b, k, m]"""
    ins = {"batch1": ["b", "n", "k"], "batch2": ["b", "k", "m"]}
    bmm_of = lambda c, emit: emit(aten.bmm.default, c["batch1"], c["batch2"])  # noqa: E731
    return _closed(call, ins, ["b", "n", "m"], "self", bmm_of)


@rule(aten.addbmm.default, samples=partial(_add_samples, torch.addbmm, ("n m", "b n k", "b k m")))
def addbmm(call: Call) -> Spec:
    """z[n, m] = beta a[n, m] + alpha sum over b and k of x[b, n, k] y[b, k, m]"""
    ins = {"batch1": ["b", "n", "k"], "batch2": ["b", "k", "m"]}
    summed = lambda c, emit: emit(aten.einsum.default, "bnk,bkm->nm", [c["batch1"], c["batch2"]])  # noqa: E731
    return _closed(call, ins, ["n", "m"], "self", summed)


def _linear_samples(rng: Random) -> Sample:
    i, o = rng.randint(1, 7), rng.randint(1, 5)
    lead = [rng.randint(1, 6) for _ in range(rng.randint(0, 4))]
    weight = (o, i) if rng.random() < 0.9 else (i,)
    bias = ((o,),) if len(weight) == 2 and rng.random() < 0.6 else ()
    return Sample(F.linear, ((*lead, i), weight, *bias), label="linear")


@rule(aten.linear.default, samples=_linear_samples)
def linear(call: Call) -> Spec:
    """y[..., o] = sum over i of w[o, i] x[..., i] + b[o]"""
    x, w = call["input"], call["weight"]
    lead, out = names(x.ndim - 1), ["o"] * (w.ndim - 1)
    ins = {"input": [*lead, "i"], "weight": [*out, "i"]}
    if call["bias"] is None:
        return product(call, ins, [*lead, *out])
    plain = lambda c, emit: emit(aten.linear.default, c["input"], c["weight"])  # noqa: E731
    return _closed(call, ins, [*lead, *out], "bias", plain)


def _bilinear_samples(rng: Random) -> Sample:
    lead = [rng.randint(1, 6) for _ in range(rng.randint(0, 3))]
    i, j, o = (rng.randint(1, 4) for _ in range(3))
    bias = ((o,),) if rng.random() < 0.5 else ()
    return Sample(F.bilinear, ((*lead, i), (*lead, j), (o, i, j), *bias), label="bilinear")


@rule(aten.bilinear.default, samples=_bilinear_samples)
def bilinear(call: Call) -> Spec:
    """y[..., o] = sum over i, j of w[o, i, j] x[..., i] z[..., j] + b[o]"""
    lead = names(call["input1"].ndim - 1)
    ins = {"input1": [*lead, "i"], "input2": [*lead, "j"], "weight": ["o", "i", "j"]}
    plain = lambda c, emit: emit(aten.bilinear.default, c["input1"], c["input2"], c["weight"], None)  # noqa: E731
    if call["bias"] is None:
        return product(call, ins, [*lead, "o"], local=_bilinear_part)
    return _closed(call, ins, [*lead, "o"], "bias", plain)


def _bilinear_part(local: Local) -> Call:
    """An addend, in a form that takes empty shards."""
    if not (local.is_split("i") or local.is_split("j")):
        return local.call
    tensors = [local.call[name] for name in ("input1", "input2", "weight")]
    return local.call.with_(aten.einsum.default, equation="...i,...j,oij->...o", tensors=tensors)


# -- chains


def _chain_samples(rng: Random) -> Sample:
    sizes = [rng.randint(1, 6) for _ in range(rng.randint(3, 5))]
    shapes: list[tuple[int, ...]] = list(pairwise(sizes))
    if rng.random() < 0.3:
        shapes[0] = shapes[0][1:]
    if rng.random() < 0.3:
        shapes[-1] = shapes[-1][:1]
    return Sample(lambda *xs: torch.linalg.multi_dot(xs), tuple(shapes), label="multi_dot")


@rule(aten.linalg_multi_dot.default, aten.chain_matmul.default, samples=_chain_samples)
def multi_dot(call: Call) -> Spec:
    """z[n, m] = sum over k, l, ... of a[n, k] b[k, l] c[l, ...] ..."""
    operands = list(call.tensors.values())
    ins = [[f"k{i}", f"k{i + 1}"] for i in range(len(operands))]
    ins[0], ins[-1] = ins[0][2 - operands[0].ndim :], ins[-1][: operands[-1].ndim]
    out = ins[0][:-1] + ins[-1][1:]
    return product(call, dict(zip(call.tensors, ins, strict=True)), out)


def _kron_samples(rng: Random) -> Sample:
    return Sample(torch.kron, (random_shape(rng, 1, 3, 4), random_shape(rng, 1, 2, 3)), label="kron")


@rule(aten.kron.default, samples=_kron_samples)
def kron(call: Call) -> None:
    """Whole: every index of the result is one of both operands."""
    return None
