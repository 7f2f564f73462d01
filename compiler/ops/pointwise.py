"""Elementwise ops: every dim of the output runs together with the same dim of each input, broadcasting from the right.

Ops that torch tags as pointwise have the rule by their tag; those named here are elementwise without the tag.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

import torch
import torch.nn.functional as F

from halofx.compiler import functional
from halofx.compiler.index_map import Indices, Run
from halofx.compiler.interval import Interval
from halofx.compiler.ops.dims import names, pattern, wrap
from halofx.compiler.ops.pointwise_samples import pointwise_sample, replaced_sample
from halofx.compiler.ops.samples import integers, positive, random_dim, random_shape
from halofx.compiler.rules import Call, Operand, Sample, Spec, fallback_rule, rule

aten = torch.ops.aten


def broadcast(call: Call) -> Spec:
    """The spec of an elementwise call: output dims ``d0 d1 ...``; an input dim of extent 1 that is broadcast stays whole.

    [2, 8, 16, 16], [8, 1, 1]  ->  "d0 d1 d2 d3", "d1 . ."  ->  "d0 d1 d2 d3"
    """
    out = max(call.outs, key=lambda o: o.ndim)
    dims = names(out.ndim)

    def of(operand: Operand) -> str:
        aligned = dims[out.ndim - operand.ndim :]
        sizes = out.shape[out.ndim - operand.ndim :]
        return " ".join(d if n == m else "." for d, n, m in zip(aligned, operand.shape, sizes, strict=True))

    return Spec(
        ins={key: of(operand) for key, operand in call.tensors.items()},
        outs=[of(o) for o in call.outs],
        flops=out.numel,
    )


def pointwise_tagged(target: object) -> bool:
    """Whether torch itself tags an overload as elementwise."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


fallback_rule(pointwise_tagged, broadcast)

_NAMES = """
    absolute arccos arccosh arcsin arcsinh arctan arctan2 arctanh fix hardswish isclose isreal log_sigmoid negative floor_divide
    special_digamma special_erf special_erfc special_exp2 special_expit special_expm1 special_gammainc special_gammaincc
    special_gammaln special_i0 special_log1p special_logit special_multigammaln special_ndtr special_polygamma special_psi
    special_round special_sinc special_xlogy
"""
_PAIRS = "divide greater greater_equal less less_equal multiply not_equal subtract __and__ __or__"

UNTAGGED = (
    *(getattr(aten, name).default for name in _NAMES.split()),
    *(getattr(getattr(aten, name), overload) for name in _PAIRS.split() for overload in ("Tensor", "Scalar")),
    aten.divide.Tensor_mode, aten.divide.Scalar_mode, aten.rsub.Tensor, aten.true_divide.Scalar, aten.floor_divide.Scalar,
    aten.special_xlogy.other_scalar, aten.special_xlogy.self_scalar, aten.fake_quantize_per_tensor_affine.default,
    aten.fake_quantize_per_tensor_affine.tensor_qparams, aten.ldexp.Tensor, aten.frexp.Tensor, aten._prelu_kernel.default,
)  # fmt: skip
"""Elementwise ops without the tag."""
rule(*UNTAGGED, samples=pointwise_sample)(broadcast)


@rule(functional.replace_value, functional.no_gradient, samples=replaced_sample)
def replaced(call: Call) -> Spec:
    """The numbers of one operand, the gradient of another"""
    return replace(broadcast(call), flops=0)


# -- activations with something more


def _prelu_samples(rng: Random) -> Sample:
    shape = random_shape(rng)
    weight = shape[1] if len(shape) > 1 and rng.random() < 0.6 else 1
    return Sample(F.prelu, (shape, (weight,)), label="prelu")


@rule(aten.prelu.default, samples=_prelu_samples)
def prelu(call: Call) -> Spec:
    """y[n, c, d] = x where x > 0, else w[c] x"""
    x, w = call["self"], call["weight"]
    dims = pattern(x.ndim)
    weight = "d1" if w.ndim and x.ndim > 1 and w.shape[0] == x.shape[1] else " ".join("." * w.ndim)
    return Spec(ins={"self": dims, "weight": weight}, outs=[dims], flops=x.numel, saves=("self", "weight"))


@dataclass(frozen=True, slots=True)
class Halves:
    """Output *o* reads ``o`` and ``half + o``.

    >>> Halves(4).read(Interval(1, 3), 8)
    (Run(start=1, count=2, step=1), Run(start=5, count=2, step=1))
    """

    half: int

    def read(self, out: Interval, extent: int) -> Indices:
        return (Run(out.start, len(out)), Run(self.half + out.start, len(out))) if out else ()


def _glu_samples(rng: Random) -> Sample:
    shape = random_shape(rng)
    dim = random_dim(rng, len(shape))
    doubled = list(shape)
    doubled[dim] *= 2
    return Sample(lambda x: F.glu(x, dim), (tuple(doubled),), label=f"glu {dim}")


@rule(aten.glu.default, samples=_glu_samples)
def glu(call: Call) -> Spec:
    """y[c] = x[c] sigmoid(x[half + c]): a rank reads both halves of its part, one after the other"""
    x = call["self"]
    dim, dims = wrap(call["dim"], x.ndim), pattern(x.ndim)
    return Spec(
        ins={"self": dims},
        outs=[dims],
        maps={f"d{dim}": Halves(x.shape[dim] // 2)},
        flops=3 * call.outs[0].numel,
        saves=("self",),
    )


def _per_channel_samples(rng: Random) -> Sample:
    shape = random_shape(rng)
    axis = rng.randrange(len(shape))
    zeros = torch.zeros(shape[axis], dtype=torch.int32)
    function = lambda x, s: torch.fake_quantize_per_channel_affine(x, s.detach().float(), zeros, axis, -8, 7)  # noqa: E731
    return Sample(function, (shape, (shape[axis],)), {1: positive}, "fake quantize per channel")


@rule(aten.fake_quantize_per_channel_affine.default, samples=_per_channel_samples)
def fake_quantize_per_channel(call: Call) -> Spec:
    """y[c] = (clamp(round(x[c] / s[c] + z[c])) - z[c]) s[c]"""
    x = call["self"]
    dims, channel = pattern(x.ndim), f"d{wrap(call['axis'], x.ndim)}"
    ins = {"self": dims, "scale": channel, "zero_point": channel}
    return Spec(ins=ins, outs=[dims], flops=4 * x.numel, saves=("output",))


# -- looking numbers up: the table is whole


def _lookup_samples(kind: str, rng: Random) -> Sample:
    shape, n = random_shape(rng, 1, 4), rng.randint(1, 6)
    right = rng.random() < 0.5
    if kind == "isin":
        return Sample(torch.isin, (shape, (n,)), {0: integers(0, 9), 1: integers(0, 9)}, kind)
    return Sample(lambda x, b: torch.bucketize(x, b.sort()[0], right=right), (shape, (n,)), label=kind)


@rule(aten.bucketize.Tensor, samples=partial(_lookup_samples, "bucketize"))
def bucketize(call: Call) -> Spec:
    """y = the number of boundaries below x"""
    return _looked_up(call, "self", "boundaries")


@rule(aten.isin.Tensor_Tensor, aten.isin.Tensor_Scalar, samples=partial(_lookup_samples, "isin"))
def isin(call: Call) -> Spec:
    """y = whether x is among the test elements"""
    return _looked_up(call, "elements", "test_elements")


def _looked_up(call: Call, key: str, table: str) -> Spec:
    dims = pattern(call[key].ndim)
    ins: dict[str, Any] = {key: dims}
    if table in call.tensors:
        ins[table] = " ".join("." * call[table].ndim)
    return Spec(ins=ins, outs=[dims], flops=call[key].numel)


def _searchsorted_samples(rng: Random) -> Sample:
    n, shape = rng.randint(1, 6), random_shape(rng, 1, 4)
    table = (n,) if rng.random() < 0.5 else (*shape[:-1], n)
    right = rng.random() < 0.5
    return Sample(lambda t, x: torch.searchsorted(t.sort()[0], x, right=right), (table, shape), label="searchsorted")


@rule(aten.searchsorted.Tensor, samples=_searchsorted_samples)
def searchsorted(call: Call) -> Spec:
    """y[b, i] = the number of t[b] below x[b, i]; one row t for all when it has one dim"""
    table, x = call["sorted_sequence"], call["self"]
    dims = names(x.ndim)
    rows = " ".join([*dims[: table.ndim - 1], "."])
    return Spec(
        ins={"sorted_sequence": rows, "self": " ".join(dims), "sorter": rows}, outs=[" ".join(dims)], flops=x.numel
    )


def _embedding_samples(rng: Random) -> Sample:
    shape, n, width = random_shape(rng, 1, 4), rng.randint(1, 6), rng.randint(1, 4)
    padding = rng.choice([None, 0])
    count = rng.random() < 0.2
    function = lambda i, w: F.embedding(i, w, padding, scale_grad_by_freq=count)  # noqa: E731
    return Sample(function, (shape, (n, width)), {0: integers(0, n)}, f"embedding padding={padding} count={count}")


@rule(aten.embedding.default, samples=_embedding_samples)
def embedding(call: Call) -> Spec | None:
    """y[..., c] = w[i[...], c]"""
    if call["sparse"]:
        return None
    dims = names(call["indices"].ndim)
    if call["scale_grad_by_freq"]:  # the gradient counts how often each row is looked up
        dims = [f"[{d}]" for d in dims]
    return Spec(
        ins={"indices": " ".join(dims), "weight": ". ."}, outs=[" ".join([*dims, "."])], flops=0, saves=("indices",)
    )
