"""Diagonals: the two dims of the matrix are needed whole, all others stay split."""

from __future__ import annotations

from random import Random

import torch

from halofx.compiler.ops.dims import names, pattern, wrap_all
from halofx.compiler.ops.samples import random_shape
from halofx.compiler.rules import Call, Sample, Spec, rule

aten = torch.ops.aten


def _samples(rng: Random) -> Sample:
    shape = random_shape(rng, low=2)
    a, b = rng.sample(range(len(shape)), 2)
    offset = rng.randint(-shape[a] + 1, shape[b] - 1)
    if rng.random() < 0.5:
        return Sample(lambda x: x.diagonal(offset, a, b) * 1.0, (shape,), label=f"diagonal {offset} {a} {b}")
    if rng.random() < 0.5:
        shape = shape[:3]
        ends = rng.sample(range(len(shape) + 1), 2)
        return Sample(lambda x: torch.diag_embed(x, offset, *ends), (shape,), label=f"diag_embed {offset} {ends}")
    source = torch.empty(shape, device="meta").diagonal(offset, a, b).shape
    return Sample(
        lambda x, y: torch.diagonal_scatter(x, y, offset, a, b),
        (shape, tuple(source)),
        label=f"diagonal_scatter {a} {b}",
    )


@rule(aten.diagonal.default, aten.diagonal_scatter.default, samples=_samples)
def diagonal(call: Call) -> Spec:
    """y[a, i] = x[i, a, i + offset]; scattering writes there"""
    x = call["self"]
    plane = wrap_all([call["dim1"], call["dim2"]], x.ndim)
    rest = " ".join([*(n for d, n in enumerate(names(x.ndim)) if d not in plane), "."])
    whole = pattern(x.ndim, plane)
    if call.target is aten.diagonal.default:
        return Spec({"self": whole}, [rest], flops=0)
    return Spec({"self": whole, "src": rest}, [whole], flops=0)


@rule(aten.diag_embed.default, samples=_samples)
def diag_embed(call: Call) -> Spec:
    """y[i, a, i + offset] = x[a, i]"""
    x, out = call["self"], call.outs[0]
    plane = wrap_all([call["dim1"], call["dim2"]], out.ndim)
    rest = iter(names(x.ndim - 1))
    after = ["." if d in plane else next(rest) for d in range(out.ndim)]
    return Spec({"self": pattern(x.ndim, [x.ndim - 1])}, [" ".join(after)], flops=0)
