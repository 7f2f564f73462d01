"""Tensors end to end.

    cat of x (5) and y (4) over 2 ranks      x  0 1 2 | 3 4           y  0 1 | 2 3
                                             y  x0 x1 x2 x3 x4 | y0 y1 y2 y3

Along a split dim every input is read through a shifted window, so a rank gets the parts of its own block and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch

from halofx.compiler.index_map import DimMap, IndexMap
from halofx.compiler.ops.dims import names, pattern, wrap
from halofx.compiler.ops.samples import random_dim, random_shape
from halofx.compiler.rules import Call, Sample, Spec, rule

aten = torch.ops.aten


def cat_spec(call: Call, dim: int) -> Spec:
    """The spec of a concatenation of the list ``tensors`` along a dim."""
    ndim = call.outs[0].ndim
    dims, maps, start = pattern(ndim), dict[str, DimMap](), 0
    patterns: list[str] = []
    for i, tensor in enumerate(call["tensors"]):
        if tensor.ndim != ndim:  # an old habit of torch: an empty tensor of one dim goes with anything
            patterns.append(".")
            continue
        patterns.append(dims)
        maps[f"tensors.{i}.d{dim}"] = IndexMap(1, 1, -start, -start, "clip")
        start += tensor.shape[dim]
    return Spec({"tensors": patterns}, [dims], maps=maps, flops=0)


def _shapes(rng: Random, shape: Sequence[int], dim: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of one to three tensors that differ in one dim."""
    return tuple((*shape[:dim], rng.randint(1, 6), *shape[dim + 1 :]) for _ in range(rng.randint(1, 3)))


def _cat_samples(rng: Random) -> Sample:
    shape = random_shape(rng)
    dim, function = random_dim(rng, len(shape)), rng.choice([torch.cat, torch.cat, torch.concat, torch.concatenate])
    extra = [torch.zeros(0, dtype=torch.float64)] if rng.random() < 0.15 else []
    shapes = _shapes(rng, shape, dim % len(shape))
    return Sample(
        lambda *xs: function([*xs, *(e.clone() for e in extra)], dim), shapes, label=f"{function.__name__} {dim}"
    )


def _stacks_samples(rng: Random) -> Sample:
    shape = random_shape(rng)
    function, dim = rng.choice(
        [(torch.hstack, min(1, len(shape) - 1)), (torch.vstack, 0), (torch.dstack, 2), (torch.column_stack, 1)]
    )
    reshaped = dim >= len(shape) or (len(shape) == 1 and function is torch.vstack)
    shapes = (shape,) * 2 if reshaped else _shapes(rng, shape, dim)
    return Sample(lambda *xs: function(xs), shapes, label=function.__name__)


@rule(
    aten.cat.default, aten.concat.default, aten.concatenate.default,
    samples=_cat_samples,
)  # fmt: skip
def cat(call: Call) -> Spec:
    """y[o] = x_i[o - (extents of the x before x_i)]"""
    return cat_spec(call, wrap(call["dim"], call.outs[0].ndim))


@rule(
    aten.hstack.default, aten.vstack.default, aten.dstack.default, aten.column_stack.default,
    samples=_stacks_samples,
)  # fmt: skip
def stack_along(call: Call) -> Spec | None:
    """`cat` along a dim that the name says; None where the tensors have fewer dims and are reshaped first"""
    least = min(t.ndim for t in call["tensors"])
    if call.target is aten.hstack.default:
        return cat_spec(call, 1 if least > 1 else 0) if least else None
    dim = {aten.vstack.default: 0, aten.dstack.default: 2, aten.column_stack.default: 1}[call.target]
    return cat_spec(call, dim) if least > max(1, dim) else None


def _stack_samples(rng: Random) -> Sample:
    shape = random_shape(rng, high=4)
    dim, count = random_dim(rng, len(shape) + 1), rng.randint(1, 3)
    return Sample(lambda *xs: torch.stack(xs, dim), (shape,) * count, label=f"stack {dim}")


@rule(aten.stack.default, samples=_stack_samples)
def stack(call: Call) -> Spec:
    """y[i, o] = x_i[o]"""
    dims = names(call.outs[0].ndim - 1)
    dim = wrap(call["dim"], len(dims) + 1)
    before = " ".join(dims)
    return Spec({"tensors": [before] * len(call["tensors"])}, [" ".join([*dims[:dim], ".", *dims[dim:]])], flops=0)
