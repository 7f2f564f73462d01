"""Norms of vectors, and the distances and similarities made of them.

    |x|_p over d        rank 0: x0 x1          | rank 1: x2
    p = 0, 1            |x0| + |x1|            | |x2|             one all-reduced sum
    p = inf             max(|x0|, |x1|)        | |x2|             as amax: gradient in even shares among ties
    other p > 0         |x0|^p + |x1|^p        | |x2|^p           the root of the all-reduced sum

Norms of matrices other than that of all their numbers see their two dims whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halofx.compiler.functional import replace_value
from halofx.compiler.ops.dims import names, pattern
from halofx.compiler.ops.extreme import extreme
from halofx.compiler.ops.reduce import dims_of, kept, wide_dtype
from halofx.compiler.ops.samples import random_dim, random_dims, random_shape, ties
from halofx.compiler.rules import Call, Operand, Sample, Spec, rule

if TYPE_CHECKING:
    from halofx.compiler.emit import Emit

aten = torch.ops.aten
INF = float("inf")


@dataclass(frozen=True)
class Norm:
    """A norm of order ``p`` over ``dims``; p None is a norm of matrices, which needs both dims whole."""

    p: float | None
    dims: tuple[int, ...]
    keepdim: bool


def norm_of(call: Call) -> Norm:
    """What one of the many spellings of a norm asks for."""
    x, dim = call["self"], call.args.get("dim")
    keepdim = bool(call.args.get("keepdim", False))
    order = call.args.get("ord", call.args.get("p", 2))
    return Norm(_vector_order(call, order), dims_of(dim, x.ndim), keepdim)


def _vector_order(call: Call, order: Any) -> float | None:
    """The order of a vector norm, None where it is another norm of matrices than that of all their numbers."""
    if order in (None, "fro"):
        return 2.0
    if isinstance(order, str):
        return None
    name = call.target._schema.name
    dim = call.args.get("dim")
    matrix = name == "aten::linalg_matrix_norm"
    if name == "aten::linalg_norm":
        matrix = call["self"].ndim == 2 if dim is None else len(dim) == 2
    return None if matrix else float(order)


# samples


def _samples(rng: Random) -> Sample:
    shape = random_shape(rng, 2)
    p = rng.choice([0, 1, 2, 2, 2, 3, 1.5, 0.5, 4, INF, -INF, -1.5])
    dims: Any = rng.choice([None, random_dim(rng, len(shape)), random_dims(rng, len(shape))])
    keep, pair = rng.random() < 0.5, rng.sample(range(len(shape)), 2)
    q = rng.choice([2, -2, 1, INF])
    function = rng.choice(
        [
            lambda x: torch.linalg.vector_norm(x, p, dims, keep),
            lambda x: torch.linalg.vector_norm(x, p, dims, keep),
            lambda x: torch.norm(x, p, dims, keep),
            lambda x: x.norm(p),
            lambda x: torch.linalg.norm(x, dim=dims if isinstance(dims, int) else None),
            lambda x: torch.linalg.norm(x, q, dim=dims if isinstance(dims, int) else pair, keepdim=keep),
            lambda x: torch.linalg.matrix_norm(x, "fro" if q == 1 else q, dim=pair, keepdim=keep),
            lambda x: aten.norm.ScalarOpt_dim(x, p, [dims] if isinstance(dims, int) else dims or [], keep),
            lambda x: aten.frobenius_norm.dim(x, pair, keep),
            lambda x: F.normalize(x, p=abs(p) or 1, dim=pair[0]),
        ]
    )
    return Sample(function, (shape,), rng.choice([{}, {0: ties}]), f"norm {p} {q} {dims} {keep} {pair}")


def _pair_samples(rng: Random) -> Sample:
    shape = random_shape(rng)
    other = tuple(1 if rng.random() < 0.2 else n for n in shape)[rng.choice([0, 0, rng.randrange(len(shape))]) :]
    dim, p, keep = random_dim(rng, len(shape)), rng.choice([1.0, 2.0, 3.0, INF, 0.0]), rng.random() < 0.5
    functions = [
        lambda x, y: F.cosine_similarity(x, y, dim),
        lambda x, y: F.pairwise_distance(x, y, p, keepdim=keep),
        lambda x, y: torch.dist(x, y, p or 1.0),  # torch has no gradient of the one with p = 0
    ]
    which = rng.randrange(3)
    return Sample(
        functions[which], (shape, other), rng.choice([{}, {0: ties, 1: ties}]), f"pair {which} {dim} {p} {keep}"
    )


# the norms


@rule(
    aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dtype,
    aten.norm.ScalarOpt_dim_dtype, aten.frobenius_norm.dim, aten.linalg_norm.default, aten.linalg_norm.ord_str,
    aten.linalg_matrix_norm.default, aten.linalg_matrix_norm.str_ord, aten.nuclear_norm.default, aten.nuclear_norm.dim,
    samples=_samples,
)  # fmt: skip
def norm(call: Call) -> Spec:
    """y[k] = (sum over d of |x[k, d]|^p)^(1/p); p = 0 counts, p = inf is the largest, p = -inf the smallest |x|"""
    x, form = call["self"], norm_of(call)
    out, flops = [kept(x.ndim, form.dims, form.keepdim)], 2 * x.numel
    if form.p in (0.0, 1.0):
        return Spec({"self": " ".join(names(x.ndim))}, out, reduce="sum", flops=flops, saves=("self",))
    split = form.p is not None and (form.p > 0 or form.p == -INF) and x.dtype.is_floating_point
    ins = {"self": pattern(x.ndim, form.dims)}
    return Spec(ins, out, decompose=_norm if split else None, flops=flops, saves=("self", "output"))


def _norm(call: Call, emit: Emit) -> Operand:
    form, dtype = norm_of(call), call.outs[0].dtype
    assert form.p is not None
    x = call["self"] if call["self"].dtype == dtype else emit(aten.to.dtype, call["self"], dtype)
    if math.isinf(form.p):
        return extreme(emit(aten.abs.default, x), form.dims, form.keepdim, emit, form.p > 0, "drop")
    total = emit(power_sum, x, form.p, form.dims)
    return emit(root, total, form.p, form.dims, form.keepdim, dtype)  # type: ignore[no-any-return]


def power_sum(self: Tensor, p: float, dims: tuple[int, ...]) -> Tensor:
    """The sum of ``|x|^p`` over a part [.., d, ..] -> [.., 1, ..]; zeros have no gradient."""
    x = self.to(wide_dtype(self.dtype))
    if p == 2:
        return x.square().sum(dims, True)
    zero = x == 0
    return torch.where(zero, 0, torch.where(zero, 1, x).abs().pow(p)).sum(dims, True)


@rule(power_sum)
def _power_sum(call: Call) -> Spec:
    x = call["self"]
    out = kept(x.ndim, call["dims"], True)
    return Spec({"self": " ".join(names(x.ndim))}, [out], reduce="sum", flops=2 * x.numel, saves=("self",))


def root(self: Tensor, p: float, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype) -> Tensor:
    """``self ** (1 / p)`` [.., 1, ..], without the dims of extent 1 unless kept; the root of zero has the gradient 0."""
    zero = self == 0
    safe = torch.where(zero, 1, self)
    y = torch.where(zero, 0, safe.sqrt() if p == 2 else safe ** (1 / p)).to(dtype)
    return y if keepdim else y.squeeze(dims)


@rule(root)
def _root(call: Call) -> Spec:
    x, dims = call["self"], call["dims"]
    return Spec({"self": kept(x.ndim, dims, True)}, [kept(x.ndim, dims, call["keepdim"])], flops=x.numel)


@rule(aten.renorm.default, samples=lambda rng: _renorm_sample(rng))
def renorm(call: Call) -> Spec:
    """Every slice of x along ``dim`` scaled down to a norm of at most ``maxnorm``; the other dims whole."""
    x = call["self"]
    same = pattern(x.ndim, [d for d in range(x.ndim) if d != call["dim"] % x.ndim])
    return Spec({"self": same}, [same], flops=3 * x.numel, saves=("self",))


def _renorm_sample(rng: Random) -> Sample:
    shape, p = random_shape(rng, 2), rng.choice([1.0, 2.0, 3.0])
    dim, most = random_dim(rng, len(shape)), rng.choice([0.5, 2.0])
    return Sample(lambda x: torch.renorm(x, p, dim, most), (shape,), label=f"renorm {p} {dim} {most}")


# of two tensors


def _two(call: Call, first: str, second: str, dims: tuple[int, ...], keepdim: bool, **more: Any) -> Spec:
    """A reduction over ``dims`` of the broadcast shape of two tensors."""
    a, b = call[first], call[second]
    shape = torch.broadcast_shapes(a.shape, b.shape)

    def aligned(x: Operand) -> str:
        lead = len(shape) - x.ndim
        tokens = pattern(len(shape), dims).split()[lead:]
        return " ".join(t if n == m else "." for t, n, m in zip(tokens, x.shape, shape[lead:], strict=True))

    flops = 4 * math.prod(shape)
    out = kept(len(shape), dims, keepdim)
    return Spec({first: aligned(a), second: aligned(b)}, [out], flops=flops, saves=(first, second), **more)


@rule(aten.cosine_similarity.default, samples=_pair_samples)
def cosine_similarity(call: Call) -> Spec:
    """y[k] = sum over d of x1[k, d] x2[k, d] / (max(|x1[k]|, eps) max(|x2[k]|, eps))"""
    ndim = max(call["x1"].ndim, call["x2"].ndim)
    return _two(call, "x1", "x2", dims_of(call["dim"], ndim), False, decompose=_cosine)


def _cosine(call: Call, emit: Emit) -> Operand:
    a, b = call["x1"], call["x2"]
    shape = list(torch.broadcast_shapes(a.shape, b.shape))
    dim = dims_of(call["dim"], len(shape))
    units = []
    for x in (a, b):
        x = x if list(x.shape) == shape else emit(aten.expand.default, x, shape)
        x = x if x.dtype == call.outs[0].dtype else emit(aten.to.dtype, x, call.outs[0].dtype)
        length = emit(aten.linalg_vector_norm.default, x, 2, dim, True)
        # torch raises small norms to eps behind the back of autograd
        length = emit(
            replace_value, length, emit(aten.clamp_min.default, emit(aten.detach.default, length), call["eps"])
        )
        units.append(emit(aten.div.Tensor, x, length))
    return emit(aten.sum.dim_IntList, emit(aten.mul.Tensor, *units), dim)  # type: ignore[no-any-return]


@rule(aten.pairwise_distance.default, samples=_pair_samples)
def pairwise_distance(call: Call) -> Spec:
    """y[k] = |x1[k] - x2[k] + eps|_p over the last dim"""
    ndim = max(call["x1"].ndim, call["x2"].ndim)
    return _two(call, "x1", "x2", (ndim - 1,), call["keepdim"], decompose=_pairwise_distance)


def _pairwise_distance(call: Call, emit: Emit) -> Operand:
    apart = emit(aten.add.Scalar, emit(aten.sub.Tensor, call["x1"], call["x2"]), call["eps"])
    return emit(aten.linalg_vector_norm.default, apart, call["p"], [-1], call["keepdim"])  # type: ignore[no-any-return]


@rule(aten.dist.default, samples=_pair_samples)
def dist(call: Call) -> Spec:
    """y = |x - y|_p over all dims"""
    ndim = max(call["self"].ndim, call["other"].ndim)
    return _two(call, "self", "other", tuple(range(ndim)), False, decompose=_dist)


def _dist(call: Call, emit: Emit) -> Operand:
    return emit(aten.linalg_vector_norm.default, emit(aten.sub.Tensor, call["self"], call["other"]), call["p"])  # type: ignore[no-any-return]


@rule(aten.cdist.default, aten._cdist_forward.default, samples=lambda rng: _cdist_sample(rng))
def cdist(call: Call) -> Spec:
    """y[b, i, j] = |x1[b, i] - x2[b, j]|_p, the points whole"""
    a, b, out = call["x1"], call["x2"], call.outs[0]
    batch = names(out.ndim - 2)

    def lead(x: Operand) -> str:
        n = x.ndim - 2
        pairs = zip(batch[len(batch) - n :], x.shape, out.shape[len(batch) - n :], strict=False)
        return " ".join(t if n == m else "." for t, n, m in pairs)

    ins = {"x1": f"{lead(a)} i .", "x2": f"{lead(b)} j ."}
    return Spec(ins, [" ".join([*batch, "i", "j"])], flops=3 * out.numel * a.shape[-1], saves=("x1", "x2", "output"))


def _cdist_sample(rng: Random) -> Sample:
    batch, width = random_shape(rng, 0, 2, 4), rng.randint(1, 4)
    other = tuple(1 if rng.random() < 0.2 else n for n in batch)
    first, second = ((*lead, rng.randint(1, 6), width) for lead in (batch, other))
    p = rng.choice([1.0, 2.0, 3.0])
    return Sample(lambda x, y: torch.cdist(x, y, p), (first, second), label=f"cdist {p}")


@rule(aten.pdist.default, samples=lambda rng: Sample(F.pdist, ((rng.randint(2, 6), rng.randint(1, 4)),), label="pdist"))
def pdist(call: Call) -> Spec:
    """y = the distances of all pairs of rows, whole"""
    return Spec({"self": ". ."}, ["."], flops=3 * call.outs[0].numel * call["self"].shape[1], saves=("self", "output"))


# weights by direction and length


def _weight_norm_samples(rng: Random) -> Sample:
    shape = random_shape(rng, 2, 4)
    dim = rng.choice([0, len(shape) - 1])
    lengths = tuple(n if i == dim else 1 for i, n in enumerate(shape))
    return Sample(lambda v, g: torch._weight_norm(v, g, dim), (shape, lengths), label=f"weight_norm {dim}")


@rule(aten._weight_norm.default, samples=_weight_norm_samples)
def weight_norm(call: Call) -> Spec:
    """w[o, i] = g[o] v[o, i] / (norm over i of v[o, i])"""
    own = call["dim"] % call["v"].ndim
    every = pattern(call["v"].ndim, set(range(call["v"].ndim)) - {own})
    length = " ".join(n if i == own else "." for i, n in enumerate(names(call["g"].ndim)))
    return Spec({"v": every, "g": length}, [every], flops=3 * call["v"].numel, saves=("v", "g"))
