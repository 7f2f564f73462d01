"""Sums of products written as equations.

"bid,bjd->bij"    b, i, j of the result run with the operands; d is summed: split, it takes one all-reduce
"bii->bi"         i stands twice in one operand: whole
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch

from halofx.compiler.ops.dims import names, wrap_all
from halofx.compiler.ops.matmul import product
from halofx.compiler.ops.samples import random_shape
from halofx.compiler.rules import Call, Sample, Spec, rule

aten = torch.ops.aten


def _tensordot_samples(rng: Random) -> Sample:
    a = random_shape(rng, 1, 4, 5)
    count = rng.randint(0, min(len(a), 2))
    left = rng.sample(range(len(a)), count)
    rest = [rng.randint(1, 4) for _ in range(rng.randint(0, 2))]
    places = rng.sample(range(count + len(rest)), count)
    b, spare = [0] * (count + len(rest)), iter(rest)
    for place, dim in zip(places, left, strict=True):
        b[place] = 1 if rng.random() < 0.1 else a[dim]
    b = [n or next(spare) for n in b]
    return Sample(lambda x, y: torch.tensordot(x, y, (left, places)), (a, tuple(b)), label=f"tensordot {left} {places}")


@rule(aten.tensordot.default, samples=_tensordot_samples)
def tensordot(call: Call) -> Spec:
    """z[a, b] = sum over k of x[a, k] y[b, k], k some dims of each"""
    x, y = call["self"], call["other"]
    left, right = wrap_all(call["dims_self"], x.ndim), wrap_all(call["dims_other"], y.ndim)
    a, b = names(x.ndim), names(y.ndim, x.ndim)
    for i, j in zip(left, right, strict=True):
        b[j] = a[i]
    out = [n for i, n in enumerate(a) if i not in left] + [n for j, n in enumerate(b) if j not in right]
    return product(call, {"self": a, "other": b}, out)


def parse_einsum(equation: str, ndims: Sequence[int]) -> tuple[list[list[str]], list[str]]:
    """The names of the dims of every operand and of the result; dims of an ellipsis are ``0``, ``1``, ... from the left.

    >>> parse_einsum("b...c,cd", [4, 2])
    ([['b', '0', '1', 'c'], ['c', 'd']], ['0', '1', 'b', 'd'])
    >>> parse_einsum("ij,kj->ik", [2, 2])
    ([['i', 'j'], ['k', 'j']], ['i', 'k'])
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    most = max(n - len(t.replace("...", "")) for t, n in zip(terms, ndims, strict=True))
    dots = [str(i) for i in range(most if "..." in left else 0)]

    def dims(term: str, count: int) -> list[str]:
        before, _, after = term.partition("...")
        return [*before, *(dots[len(dots) - count :] if "..." in term else ()), *after]

    ins = [dims(t, n - len(t.replace("...", ""))) for t, n in zip(terms, ndims, strict=True)]
    if arrow:
        return ins, dims(right, len(dots))
    letters = [n for term in ins for n in term if n not in dots]
    return ins, [*dots, *sorted(n for n in set(letters) if letters.count(n) == 1)]


_EQUATIONS = (
    "bid,bjd->bij", "bij,bjd->bid", "ncdhw,oc->nodhw", "bhld,bhsd->bhls", "bhls,bhsd->bhld", "ij,jk", "ij,jk,kl->il",
    "ij->ji", "ij->i", "ij", "ij->", "ii->i", "ii", "bii->bi", "bii->b", "...i,oi->...o", "...ij,...jk->...ik", "i,j->ij",
    "i,i", "ij,ij->", "b...c,cd", "bnqc,bnqkc->bnqk", "abc,abc->ac", "ij,ik,il->jkl", " i j , j k -> i k ", "iji,j->j",
)  # fmt: skip


def _einsum_samples(rng: Random) -> Sample:
    equation = rng.choice(_EQUATIONS)
    extent: dict[str, int] = {}
    dots = [rng.randint(1, 4) for _ in range(rng.randint(0, 3))]
    shapes: list[tuple[int, ...]] = []
    for term in equation.replace(" ", "").partition("->")[0].split(","):
        before, ellipsis, after = term.partition("...")
        first, last = ([extent.setdefault(n, rng.randint(1, 6)) for n in letters] for letters in (before, after))
        middle = [1 if shapes and rng.random() < 0.2 else n for n in dots] if ellipsis else []
        shapes.append((*first, *middle, *last))
    return Sample(lambda *xs: torch.einsum(equation, *xs), tuple(shapes), label=f"einsum {equation}")


@rule(aten.einsum.default, samples=_einsum_samples)
def einsum(call: Call) -> Spec:
    """What the equation says; a letter that an operand has twice is whole."""
    ins, out = parse_einsum(call["equation"], [o.ndim for o in call.tensors.values()])
    twice = {n for dims in ins for n in dims if dims.count(n) > 1}
    *ins, out = ([n if n not in twice else "." for n in dims] for dims in (*ins, out))
    return product(call, dict(zip(call.tensors, ins, strict=True)), out)
