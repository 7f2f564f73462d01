"""Finite differences: ``torch.gradient``.

    edge_order 1, 8 planes over 2 ranks

    input        0 1 2 3 | 4 5 6 7          o reads o-1 .. o+1 (o-2 .. o+2 for edge_order 2, of which only the ends make use)
    rank 0       0 1 2 3   4                computes 5 outputs, the last one-sided, and keeps 4
    rank 1               3   4 5 6 7        computes 5 outputs, the first one-sided, and keeps 4

What is one-sided at the seam is cut off; what is one-sided at the ends of the volume is torch's.
"""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import Tensor

from halofx.compiler.index_map import IndexMap, expand
from halofx.compiler.ops.dims import names, wrap_all
from halofx.compiler.ops.samples import random_shape
from halofx.compiler.rules import Call, Local, Sample, Spec, rule

aten = torch.ops.aten
Window = tuple[int, int, int]
"""(dim, start, length) of what a rank keeps of an output."""


def _samples(rng: Random) -> Sample:
    order = rng.choice([1, 1, 2])
    shape = tuple(n + order for n in random_shape(rng, 1, 4, 6))
    ndim = len(shape)
    dims: Any = rng.choice([None, rng.randrange(-ndim, ndim), rng.sample(range(ndim), rng.randint(1, ndim))])
    count = ndim if dims is None else 1 if isinstance(dims, int) else len(dims)
    spacing: Any = rng.choice([None, 0.5, [rng.choice([0.5, 2.0]) for _ in range(count)]])
    more = {} if dims is None else {"dim": dims}
    more |= {} if spacing is None or (isinstance(dims, int) and isinstance(spacing, list)) else {"spacing": spacing}
    return Sample(lambda x: torch.gradient(x, edge_order=order, **more), (shape,), label=f"gradient {order} {more}")


@rule(
    aten.gradient.scalarint, aten.gradient.scalararray, aten.gradient.array, aten.gradient.scalarrayint,
    aten.gradient.scalarrayarray,
    samples=_samples,
)  # fmt: skip
def gradient(call: Call) -> Spec:
    """y[o] = (x[o+1] - x[o-1]) / 2h, one-sided at the ends; one output a dim"""
    x, reach = call["self"], call["edge_order"]
    same = " ".join(names(x.ndim))
    maps = {f"d{d}": IndexMap(1, 1, -reach, reach, "clip") for d in _dims(call)}
    return Spec({"self": same}, [same] * len(call.outs), maps=maps, local=_kept, flops=3 * x.numel * len(call.outs))


def _dims(call: Call) -> tuple[int, ...]:
    x, dim = call["self"], call.args.get("dim")
    return tuple(range(x.ndim)) if dim is None else wrap_all(dim, x.ndim)


def _kept(local: Local) -> Call:
    call, dims = local.call, _dims(local.call)
    spacing = call.args.get("spacing")
    steps = tuple(spacing) if isinstance(spacing, (list, tuple)) else (1 if spacing is None else spacing,) * len(dims)
    windows: list[Window] = []
    for d in dims:
        if local.is_split(f"d{d}"):
            out, first = local.out(f"d{d}"), next(iter(expand(local.reads("self", f"d{d}"))), 0)
            windows.append((d, out.start - (first or 0), len(out)))
    return call.with_(
        target=windowed_gradient,
        self=call["self"],
        spacing=steps,
        dims=dims,
        edge_order=call["edge_order"],
        windows=windows,
    )


def windowed_gradient(
    self: Tensor, spacing: tuple[float, ...], dims: tuple[int, ...], edge_order: int, windows: list[Window]
) -> list[Tensor]:
    """``torch.gradient`` of which each window is kept."""
    found = list(torch.gradient(self, spacing=list(spacing), dim=list(dims), edge_order=edge_order))
    for d, start, length in windows:
        found = [y.narrow(d, start, length) for y in found]
    return found
