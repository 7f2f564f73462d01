"""Linear algebra on batches of matrices: the matrices are whole, the batch dims may be split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from halofx.compiler.ops.dims import names, wrap
from halofx.compiler.ops.pointwise import broadcast
from halofx.compiler.ops.samples import random_shape
from halofx.compiler.rules import Call, Local, Operand, Sample, Spec, rule

aten = torch.ops.aten


def regular(x: Tensor) -> Tensor:
    """A regular symmetric matrix with different eigenvalues, from any matrix."""
    n = x.shape[-1]
    return 0.1 * (x + x.mT) + torch.diag(torch.arange(1.0, n + 1, dtype=x.dtype))


_OF_MATRIX: dict[str, Any] = {
    "inv": torch.linalg.inv, "inverse": torch.inverse, "inv_ex": lambda a: torch.linalg.inv_ex(a)[0], "det": torch.linalg.det,
    "torch.det": torch.det, "slogdet": lambda a: torch.linalg.slogdet(a)[1], "logdet": lambda a: torch.logdet(a @ a.mT),
    "svdvals": torch.linalg.svdvals, "svd": lambda a: torch.linalg.svd(a)[1], "eigvalsh": torch.linalg.eigvalsh,
    "eigh": lambda a: torch.linalg.eigh(a)[0], "eigvals": lambda a: torch.linalg.eigvals(a).real,
    "qr": lambda a: torch.linalg.qr(a)[1].abs(), "cholesky": lambda a: torch.linalg.cholesky(a @ a.mT),
    "cholesky_ex": lambda a: torch.linalg.cholesky_ex(a @ a.mT)[0], "matrix_exp": lambda a: torch.linalg.matrix_exp(a / 9),
    "matrix_power": lambda a: torch.linalg.matrix_power(a, 3), "power_of": lambda a: torch.matrix_power(a, 2),
    "pinv": torch.linalg.pinv, "pinverse": torch.pinverse, "lu": lambda a: torch.linalg.lu(a)[2],
    "lu_factor": lambda a: torch.linalg.lu_factor(a)[0], "matrix_rank": lambda a: torch.linalg.matrix_rank(a.detach()),
    "cond": torch.linalg.cond, "cholesky_inverse": lambda a: torch.cholesky_inverse(torch.linalg.cholesky(a @ a.mT)),
    "torch.matrix_exp": lambda a: torch.matrix_exp(a / 9), "torch.svd": lambda a: torch.svd(a)[1],
}  # fmt: skip


def _matrix_samples(rng: Random) -> Sample:
    name, n = rng.choice(sorted(_OF_MATRIX)), rng.randint(1, 4)
    function = _OF_MATRIX[name]
    shape = (*random_shape(rng, 0, 3, 5), n, n)
    return Sample(lambda x: function(regular(x)), (shape,), label=name)


@rule(
    *(getattr(aten, f"linalg_{name}").default for name in (
        "inv", "inv_ex", "det", "slogdet", "svd", "svdvals", "eigh", "eigvalsh", "eig", "eigvals", "qr", "cholesky",
        "cholesky_ex", "matrix_exp", "matrix_power", "lu", "lu_factor", "cond", "pinv",
    )),
    *(getattr(aten, name).default for name in (
        "inverse", "det", "slogdet", "logdet", "svd", "qr", "cholesky", "cholesky_inverse", "matrix_exp", "matrix_power",
        "pinverse",
    ) if hasattr(aten, name)),  # torch 2.14 dropped some of the old names
    aten.linalg_pinv.atol_rtol_tensor, aten.linalg_pinv.atol_rtol_float,
    aten.linalg_matrix_rank.atol_rtol_tensor, aten.linalg_matrix_rank.atol_rtol_float,
    samples=_matrix_samples,
)  # fmt: skip
def of_matrix(call: Call) -> Spec | None:
    """y[b] = f(x[b]) for matrices x[b]"""
    (key, x), *others = call.tensors.items()
    if others:
        return None
    batch = names(x.ndim - 2)
    cubed = x.numel * min(x.shape[-2:])
    return Spec(
        ins={key: " ".join([*batch, ".", "."])},
        outs=[" ".join([*batch, *"." * (out.ndim - len(batch))]) for out in call.outs],
        flops=2 * cubed,
        saves=(key, "output"),
    )


def _solve_samples(rng: Random) -> Sample:
    n, columns, batch = rng.randint(1, 4), rng.randint(1, 3), random_shape(rng, 0, 3, 4)
    few = batch[rng.randint(0, len(batch)) :] if rng.random() < 0.3 else batch
    upper = rng.random() < 0.5
    kinds = {
        "solve": lambda a, b: torch.linalg.solve(regular(a), b),
        "triangular": lambda a, b: torch.linalg.solve_triangular(regular(a), b, upper=upper),
        "cholesky_solve": lambda a, b: torch.cholesky_solve(b, torch.linalg.cholesky(regular(a) @ regular(a).mT)),
    }
    name = rng.choice(sorted(kinds))
    right: tuple[int, ...] = (*few, n, columns)
    if name == "solve" and rng.random() < 0.3:
        right = (*batch, n)
    return Sample(kinds[name], ((*batch, n, n), right), label=name)


@rule(
    aten.linalg_solve.default, aten.linalg_solve_triangular.default, aten.cholesky_solve.default, samples=_solve_samples
)  # fmt: skip
def solve(call: Call) -> Spec:
    """a[b] y[b] = x[b] for matrices a[b] and matrices or vectors x[b]"""
    keys = list(call.tensors)
    if keys[0] == "self" and keys[1] != "B":  # cholesky_solve takes the right side first
        keys.reverse()
    a, x, out = call.tensors[keys[0]], call.tensors[keys[1]], call.outs[0]
    vector = x.ndim == 1 or (call.target is aten.linalg_solve.default and x.shape == a.shape[:-1])
    rest = 1 if vector else 2
    batch = names(out.ndim - rest)

    def of(operand: Operand, ndim: int) -> str:
        lead = operand.ndim - ndim
        aligned = zip(batch[len(batch) - lead :], out.shape[len(batch) - lead :], operand.shape, strict=False)
        return " ".join([*(d if n == m else "." for d, n, m in list(aligned)[:lead]), *"." * ndim])

    return Spec(
        ins={keys[0]: of(a, 2), keys[1]: of(x, rest)},
        outs=[" ".join([*batch, *"." * rest])],
        local=_matrices if call.target is aten.linalg_solve.default and not vector and x.ndim == a.ndim - 1 else None,
        flops=2 * a.numel * a.shape[-1] + 2 * out.numel * a.shape[-1],
        saves=(keys[0], "output"),
    )


def _matrices(local: Local) -> Call:
    """A right side of matrices may look like one of vectors in this rank's extents: it gets a batch dim to tell."""
    return local.call.with_(target=solve_matrices, **local.call.args)


def solve_matrices(A: Tensor, B: Tensor, left: bool = True) -> Tensor:
    """The solution for matrices ``B`` that have one dim less than ``A``."""
    solution: Tensor = torch.linalg.solve(A, B[None], left=left)
    return solution


def _cross_samples(rng: Random) -> Sample:
    shape = list(random_shape(rng, 1, 4))
    dim = rng.randrange(len(shape))
    shape[dim] = 3
    other = [1 if rng.random() < 0.2 and i != dim else n for i, n in enumerate(shape)]
    return Sample(lambda x, y: torch.linalg.cross(x, y, dim=dim), (tuple(shape), tuple(other)), label=f"cross {dim}")


@rule(aten.linalg_cross.default, aten.cross.default, samples=_cross_samples)
def cross(call: Call) -> Spec:
    """y = x1 x2 of vectors of three along one dim"""
    spec, out, dim = broadcast(call), call.outs[0], call["dim"]
    whole = f"d{out.shape.index(3) if dim is None else wrap(dim, out.ndim)}"

    def close(dims: Sequence[str]) -> str:
        return " ".join(f"[{d}]" if d == whole else d for d in dims)

    ins = {key: close(dims) for key, dims in spec.patterns.items()}
    return replace(spec, ins=ins, outs=[close(spec.outs[0].split())], flops=5 * out.numel, saves=tuple(ins))
