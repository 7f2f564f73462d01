"""Padding and cropping in every mode.

    pad 2 below, reflect, 6 planes over 2 ranks         o reads o - 2, and what lies outside is resolved by the mode

    input         0 1 2 | 3 4 5
    output    2 1 0 1   | 2 3 4 5

A split dim is padded by the movement; the local op pads the others. The blocks of the output are canonical blocks of the
padded extent, so a rank may get planes of its neighbor.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any

import torch
import torch.nn.functional as F

from halofx.compiler.index_map import DimMap, Edge, IndexMap, Table
from halofx.compiler.ops.dims import as_it_is, pattern
from halofx.compiler.rules import Call, Local, Sample, Spec, rule

aten = torch.ops.aten

EDGES: dict[str, Edge] = {"constant": "fill", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


def per_side(flat: Sequence[int], ndim: int) -> list[tuple[int, int]]:
    """(lower, upper) of every dim from a list as `torch.nn.functional.pad` takes it: last dim first.

    >>> per_side([1, 2, 0, 3], 3)
    [(0, 0), (0, 3), (1, 2)]
    """
    pairs = [(flat[i], flat[i + 1]) for i in range(0, len(flat), 2)]
    return [(0, 0)] * (ndim - len(pairs)) + pairs[::-1]


def pad_map(extent: int, lower: int, upper: int, mode: str) -> DimMap:
    """What output *o* reads. A circular padding on one side of a crop on the other repeats what is left after the crop.

    >>> pad_map(4, -1, 2, "circular")
    Table(indices=(1, 2, 3, 1, 2))
    """
    if mode == "circular" and min(lower, upper) < 0 < max(lower, upper):
        first, kept = max(0, -lower), extent + min(lower, 0) + min(upper, 0)
        return Table(tuple(first + (o - max(0, lower)) % kept for o in range(extent + lower + upper)))
    return IndexMap(1, 1, -lower, -lower, EDGES[mode])


def _pad_samples(rng: Random) -> Sample:
    mode = rng.choice(["constant", "constant", "reflect", "replicate", "circular"])
    padded = rng.randint(1, 3)
    ndim = padded + (rng.randint(0, 2) if mode == "constant" else rng.randint(1, 2))
    shape = [rng.randint(1, 8 if d >= ndim - padded else 3) for d in range(ndim)]
    flat: list[int] = []
    for n in shape[::-1][:padded]:
        most = {"constant": 4, "replicate": 4, "reflect": n - 1, "circular": n}[mode]
        pair = [rng.choice([0, rng.randint(0, most), rng.randint(0, most), rng.randint(-n, most)]) for _ in range(2)]
        while n + sum(min(0, v) for v in pair) < 1 or (mode == "circular" and _too_wide(n, pair)):
            pair = [max(0, v) if rng.random() < 0.5 else 0 for v in pair]
        flat += pair
    value = rng.choice([None, 0.0, 1.5, float("-inf")]) if mode == "constant" else None
    op = partial(F.pad, pad=flat, mode=mode, value=value)
    if rng.random() < 0.3:  # as ATen code calls it
        if mode == "constant":
            op = partial(aten.constant_pad_nd.default, pad=flat, value=value or 0)
        elif mode in ("reflect", "replicate"):
            kind = {"reflect": "reflection", "replicate": "replication"}[mode]
            op = partial(getattr(aten, f"{kind}_pad{padded}d").default, padding=flat)
    return Sample(lambda x: op(x), (tuple(shape),), label=f"pad {flat} {mode} {value}")


def _too_wide(extent: int, pair: Sequence[int]) -> bool:
    """Whether a padding repeats more than a crop on the other side leaves: torch reads what is not there."""
    return min(pair) < 0 < max(pair) and max(pair) >= extent + min(pair)


@rule(
    aten.pad.default, aten.constant_pad_nd.default, aten.reflection_pad1d.default, aten.reflection_pad2d.default,
    aten.reflection_pad3d.default, aten.replication_pad1d.default, aten.replication_pad2d.default,
    aten.replication_pad3d.default,
    samples=_pad_samples,
)  # fmt: skip
def pad(call: Call) -> Spec | None:
    """y[o] = x[o - lower], outside of x by the mode"""
    x, (flat, mode, value) = call["self"], _arguments(call)
    if isinstance(value, complex) or float(value) != value:
        return None  # the movement fills with a float
    dims = pattern(x.ndim)
    maps = {
        f"d{d}": pad_map(x.shape[d], *pair, mode) for d, pair in enumerate(per_side(flat, x.ndim)) if pair != (0, 0)
    }
    return Spec({"self": dims}, [dims], maps=maps, fill=float(value), local=_pad_rest, flops=0)


def _arguments(call: Call) -> tuple[Sequence[int], str, Any]:
    """The flat padding, mode and value of any of the ops."""
    if call.target is aten.pad.default:
        return call["pad"], call["mode"], call["value"] or 0.0
    if call.target is aten.constant_pad_nd.default:
        return call["pad"], "constant", call["value"]
    return call["padding"], "reflect" if "reflection" in str(call.target) else "replicate", 0.0


def _pad_rest(local: Local) -> Call:
    """Pad the dims that the movement has not padded."""
    x, (flat, mode, value) = local.call["self"], _arguments(local.call)
    rest = [
        v for d in reversed(range(x.ndim)) for v in ((0, 0) if local.is_split(f"d{d}") else per_side(flat, x.ndim)[d])
    ]
    rest = rest[: len(flat)]
    if not any(rest):
        return local.call.with_(as_it_is, input=x)
    return local.call.with_(aten.pad.default, self=x, pad=rest, mode=mode, value=value if mode == "constant" else None)
