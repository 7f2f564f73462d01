"""Copies, conversions, and tensors made from nothing: values or memory change, places do not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import torch

from halofx.compiler.ops.dims import names
from halofx.compiler.ops.pointwise import broadcast
from halofx.compiler.ops.samples import random_shape
from halofx.compiler.rules import Call, Operand, Sample, Spec, rule

if TYPE_CHECKING:
    from halofx.compiler.emit import Emit

aten = torch.ops.aten


def _samples(functions: Sequence[Any], rng: Random) -> Sample:
    shape, i = random_shape(rng, high=6), rng.randrange(len(functions))
    return Sample(functions[i], (shape,), label=f"function {i}")


_COPIES = (
    lambda x: x.clone(), lambda x: (x * 2).contiguous(), lambda x: x.float().double(), lambda x: x.to(torch.float32),
    lambda x: x.to("cpu", torch.float32), lambda x: x.detach() + x, lambda x: x.bfloat16(), lambda x: x.long(),
    lambda x: x.to(torch.float32, copy=True), lambda x: x.permute(*reversed(range(x.dim()))).contiguous(),
    lambda x: torch.ops.aten.alias(x) * 2, lambda x: x > 0, lambda x: x.bool(),
    lambda x: torch.ops.aten.lift_fresh_copy(x) * x, lambda x: torch.ops.aten._to_copy(x, dtype=torch.float32),
)  # fmt: skip


@rule(
    aten.contiguous.default, aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default,
    aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.clone.default, aten.detach_copy.default,
    aten.alias_copy.default,
    samples=partial(_samples, _COPIES),
)  # fmt: skip
def copy(call: Call) -> Spec:
    """y[d] = x[d]"""
    x, detaches = call["self"], call.target in (aten.detach.default, aten.detach_copy.default)
    dims = " ".join(names(x.ndim))
    flops = 0 if x.dtype == call.outs[0].dtype else x.numel
    return Spec(ins={"self": dims}, outs=[dims], flops=flops, detached=("self",) if detaches else ())


def _alike_samples(rng: Random) -> Sample:
    shape = random_shape(rng, high=6)
    other = random_shape(rng, high=6)
    return Sample(rng.choice([lambda x, y: x.type_as(y.float()), lambda x, y: x.to(y.float())]), (shape, other))


@rule(aten.type_as.default, aten.to.other, samples=_alike_samples)
def convert_like(call: Call) -> Spec:
    """y[d] = x[d] in the dtype of another tensor"""
    x, other = call["self"], call["other"]
    dims = " ".join(names(x.ndim))
    closed = " ".join(f"[o{i}]" for i in range(other.ndim))
    ins = {"self": dims, "other": closed}
    return Spec(ins, [dims], decompose=_convert_alone, flops=x.numel, detached=("other",))


def _convert_alone(call: Call, emit: Emit) -> Operand:
    made: Operand = emit(aten.to.dtype, call["self"], call["other"].dtype)
    return made


# complex numbers


_COMPLEX = (
    lambda x: torch.view_as_real(torch.complex(x, 2 * x)), lambda x: torch.complex(x, x * x).conj().imag,
    lambda x: torch.complex(x, x * x).real, lambda x: torch.view_as_real(torch.complex(x, x * x).conj().resolve_conj()),
    lambda x: torch.view_as_real(torch.view_as_complex(torch.stack([x, x * x], -1))), lambda x: x.real,
    lambda x: x.view(torch.int64),
)  # fmt: skip


@rule(
    aten.view_as_real.default, aten.view_as_complex.default, aten.real.default, aten.imag.default, aten._conj.default,
    aten.conj.default, aten.resolve_conj.default, aten.resolve_neg.default, aten.view.dtype,
    samples=partial(_samples, _COMPLEX),
)  # fmt: skip
def complex_view(call: Call) -> Spec:
    """y[d, 0] = Re x[d], y[d, 1] = Im x[d], and the like"""
    x, out = call["self"], call.outs[0]
    n = min(x.ndim, out.ndim)
    if x.shape[:n] != out.shape[:n]:  # a dtype of another size: the last dim holds more or fewer numbers
        n -= 1
    dims = names(n)
    return Spec(
        ins={"self": " ".join([*dims, *"." * (x.ndim - n)])}, outs=[" ".join([*dims, *"." * (out.ndim - n)])], flops=0
    )


# from nothing


_LIKE = (
    lambda x: torch.zeros_like(x) + x, lambda x: torch.ones_like(x, dtype=torch.int32), lambda x: torch.full_like(x, 3) * x,
    lambda x: torch.zeros_like(x, memory_format=torch.contiguous_format),
)  # fmt: skip


@rule(
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default,
    samples=partial(_samples, _LIKE),
)  # fmt: skip
def made_like(call: Call) -> Spec:
    """y[d] = a constant"""
    dims = " ".join(names(call["self"].ndim))
    return Spec(ins={"self": dims}, outs=[dims], flops=0, detached=("self",))


def _new_samples(rng: Random) -> Sample:
    shape = random_shape(rng, high=5)
    size = [n if rng.random() < 0.7 else rng.randint(1, 4) for n in shape[: rng.randint(1, len(shape))]]
    functions = [
        lambda x: x.new_zeros(size), lambda x: x.new_ones(size, dtype=torch.int64), lambda x: x.new_full(size, 2.0),
        lambda x: x.new_zeros(x.shape) + x,
    ]  # fmt: skip
    i = rng.randrange(len(functions))
    return Sample(functions[i], (shape,), label=f"new {i} {size}")


@rule(
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default, samples=_new_samples
)
def new(call: Call) -> Spec:
    """y[o] = a constant; dims as long as those of x at the same place are split like them"""
    x, size = call["self"], call.outs[0].shape
    twins = [i < len(size) and size[i] == n for i, n in enumerate(x.shape)]
    before = [f"d{i}" if twin else f"[d{i}]" for i, twin in enumerate(twins)]
    after = [f"d{i}" if i < x.ndim and twins[i] else f"e{i}" for i in range(len(size))]
    return Spec(
        ins={"self": " ".join(before)},
        outs=[" ".join(after)],
        local=lambda local: local.call.with_(size=list(local.shape())),
        decompose=_of_a_corner,
        flops=0,
        detached=("self",),
    )


def _of_a_corner(call: Call, emit: Emit) -> Operand | None:
    """Only the dtype of x matters: its first element will do."""
    x = call["self"]
    if x.numel <= 1:
        return None
    for dim, n in enumerate(x.shape):
        x = emit(aten.slice.Tensor, x, dim, 0, 1) if n > 1 else x
    made: Operand = emit(call.target, **{**call.args, "self": x})
    return made


_FACTORIES = (
    lambda x: x + torch.zeros(x.shape[-1], dtype=x.dtype), lambda x: x * torch.ones(x.shape, dtype=x.dtype),
    lambda x: x * torch.full((1,), 2.0, dtype=x.dtype), lambda x: x * torch.arange(x.shape[-1]),
    lambda x: x * torch.arange(1, x.shape[0] + 1).view(-1, *[1] * (x.dim() - 1)),
    lambda x: x * torch.arange(0, 2 * x.shape[-1], 2), lambda x: x * torch.linspace(0, 1, x.shape[-1], dtype=x.dtype),
    lambda x: x @ torch.eye(x.shape[-1], dtype=x.dtype), lambda x: x * torch.logspace(0, 1, x.shape[-1], dtype=x.dtype),
    lambda x: x * torch.scalar_tensor(2.0, dtype=x.dtype),
    lambda x: (x, *torch.meshgrid(torch.arange(3), torch.arange(2), indexing="xy")),
)  # fmt: skip


@rule(
    aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format, aten.arange.default,
    aten.arange.start, aten.arange.start_step, aten.linspace.default, aten.logspace.default, aten.eye.default, aten.eye.m,
    aten.scalar_tensor.default, aten.tril_indices.default, aten.triu_indices.default, aten.hann_window.default,
    samples=partial(_samples, _FACTORIES),
)  # fmt: skip
def factory(call: Call) -> Spec:
    """y = constants, made on every rank"""
    return Spec(ins={}, outs=[" ".join("." * call.outs[0].ndim)], flops=0)


def _meshgrid_samples(rng: Random) -> Sample:
    n, indexing = rng.randint(1, 3), rng.choice(["ij", "xy"])
    shapes = tuple((rng.randint(1, 6),) for _ in range(n))
    return Sample(lambda *xs: torch.meshgrid(*xs, indexing=indexing), shapes, label=f"meshgrid {indexing}")


@rule(aten.meshgrid.default, aten.meshgrid.indexing, samples=_meshgrid_samples)
def meshgrid(call: Call) -> Spec:
    """y_0[a, b] = x_0[a], y_1[a, b] = x_1[b]"""
    dims = names(len(call["tensors"]))
    after = dims if call.args.get("indexing") != "xy" or len(dims) < 2 else [dims[1], dims[0], *dims[2:]]
    before = [d if t.ndim else "" for d, t in zip(dims, call["tensors"], strict=True)]
    return Spec(ins={"tensors": before}, outs=[" ".join(after)] * len(dims), flops=0)


# elementwise, but not marked so by torch


_CHOICES = (
    lambda x: torch.where(x > 0, x, 1.0), lambda x: torch.where(x > 0, 2.0, x), lambda x: torch.where(x > 0, 1, 0),
    lambda x: torch.where(x > 0, x, x[..., :1]), lambda x: x.masked_fill(x > 0, x.sum()),
    lambda x: torch.complex(x, x[..., :1]).abs(), lambda x: torch.polar(x.abs(), x).real,
    lambda x: torch.ops.aten.fill(x, 2.0) + x,
)  # fmt: skip


@rule(
    aten.where.Scalar, aten.where.ScalarOther, aten.where.ScalarSelf, aten.masked_fill.Tensor, aten.complex.default,
    aten.polar.default, aten.fill.Scalar, aten.fill.Tensor,
    samples=partial(_samples, _CHOICES),
)  # fmt: skip
def choice(call: Call) -> Spec:
    """y[d] = a[d] if c[d] else b[d], and the like"""
    return broadcast(call)
