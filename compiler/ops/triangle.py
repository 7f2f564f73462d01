r"""The triangles of a matrix: what is kept depends on the global row and column.

tril of 4 x 4, rows over 2 ranks          rank 1 holds rows 2, 3: the diagonal lies 2 further to the right

rank 0   x . . .                          x x x .
         x x . .                          x x x x
"""

from __future__ import annotations

from random import Random

import torch

from halofx.compiler.ops.dims import pattern
from halofx.compiler.ops.samples import random_shape
from halofx.compiler.rules import Call, Local, Sample, Spec, rule

aten = torch.ops.aten


def _samples(rng: Random) -> Sample:
    op, diagonal = rng.choice([torch.tril, torch.triu]), rng.randint(-4, 4)
    return Sample(lambda x: op(x, diagonal), (random_shape(rng, 2, 4),), label=f"{op.__name__} {diagonal}")


@rule(aten.tril.default, aten.triu.default, samples=_samples)
def triangle(call: Call) -> Spec:
    """y[r, c] = x[r, c] where c - r <= k (tril) or >= k (triu), else 0"""
    dims = pattern(call["self"].ndim)
    return Spec(ins={"self": dims}, outs=[dims], local=_moved, flops=0)


def _moved(local: Local) -> Call:
    """The same triangle in this rank's rows and columns."""
    ndim = local.call["self"].ndim
    row, column = (local.out(f"d{ndim - i}").start for i in (2, 1))
    return local.call.with_(diagonal=local.call["diagonal"] + row - column)
