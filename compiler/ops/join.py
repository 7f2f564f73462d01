"""Tensors end to end.

    cat of x (5) and y (4) over 2 ranks      x  0 1 2 | 3 4           y  0 1 | 2 3
                                             y  x0 x1 x2 x3 x4 | y0 y1 y2 y3

Along a split dim every input is read through a shifted window, so a rank gets the parts of its own block and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any

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


def _cat_samples(functions: Sequence[Any], rng: Random) -> Sample:
    shape = random_shape(rng)
    dim, function = random_dim(rng, len(shape)), rng.choice(functions)
    at = {torch.hstack: min(1, len(shape) - 1), torch.vstack: 0, torch.dstack: 2, torch.column_stack: 1}.get(
        function, dim
    )
    count = rng.randint(1, 3)
    shapes = [[rng.randint(1, 6) if d == at % len(shape) else n for d, n in enumerate(shape)] for _ in range(count)]
    if at >= len(shape):
        shapes = [list(shape)] * count
    stacks = function in (torch.hstack, torch.vstack, torch.dstack, torch.column_stack)
    if function is torch.vstack and len(shape) == 1:
        shapes = [list(shape)] * count
    extra = rng.random() < 0.15 and not stacks
    call = (
        (lambda *xs: function(xs))
        if stacks
        else lambda *xs: function([*xs, torch.zeros(0).double()][: len(xs) + extra], dim)
    )
    return Sample(call, tuple(tuple(s) for s in shapes), label=f"{function.__name__} {dim}")


@rule(
    aten.cat.default, aten.concat.default, aten.concatenate.default,
    samples=partial(_cat_samples, (torch.cat, torch.cat, torch.concat, torch.concatenate)),
)  # fmt: skip
def cat(call: Call) -> Spec:
    """y[o] = x_i[o - (extents of the x before x_i)]"""
    return cat_spec(call, wrap(call["dim"], call.outs[0].ndim))


@rule(
    aten.hstack.default, aten.vstack.default, aten.dstack.default, aten.column_stack.default,
    samples=partial(_cat_samples, (torch.hstack, torch.vstack, torch.dstack, torch.column_stack)),
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
