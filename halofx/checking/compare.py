"""Comparing what ranks have with what one device has, value by value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halofx.compiler.facts import is_tensor, layout_of
from halofx.compiler.layout import Layout
from halofx.compiler.program import Program
from halofx.runtime.observe import Seen
from halofx.runtime.shards import slices, take

TOLERANCE = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 2e-4, torch.complex64: 2e-4}
"""Relative errors that are rounding; lower precisions have 3e-2."""

NOISE = 1e-3
"""Gradients and buffers are compared with this share of the largest one at least: some are zero but for rounding (a bias
before a norm, the running mean of what a norm has centered)."""


@dataclass(frozen=True)
class Difference:
    """How far a rank's tensor is from one device's: relative to the largest value; ``index`` is global."""

    name: str
    rank: int
    error: float
    index: tuple[int, ...] = ()
    layout: Layout | None = None
    shape: tuple[int, ...] = ()


def tolerance_of(program: Program) -> float:
    """The tolerance of the lowest precision in which a program computes."""
    return max(TOLERANCE.get(dtype, 3e-2) for dtype in _dtypes(program))


def eps_of(program: Program) -> float:
    """The unit in the last place of the lowest precision in which a program computes."""
    return max(torch.finfo(dtype).eps for dtype in _dtypes(program))


def _dtypes(program: Program) -> list[torch.dtype]:
    found = {n.meta["val"].dtype for n in program.graph.nodes if is_tensor(n) and n.meta.get("grad", True)}
    return [d for d in found if d.is_floating_point or d.is_complex] or [torch.float64]


def error_of(actual: Tensor, expected: Tensor, floor: float = 0.0) -> tuple[float, int]:
    """The largest relative error and where it is; infinite for another shape, and for NaN where one device has a number."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf"), 0
    if expected.numel() == 0:
        return 0.0, 0
    if not (expected.is_floating_point() or expected.is_complex()):
        wrong = (actual != expected).flatten()
        return float(wrong.any()), int(wrong.to(torch.int8).argmax())
    off = (actual - expected).abs()
    off = torch.where(actual == expected, torch.zeros_like(off), off)  # infinities
    off = torch.where(actual.isnan() & expected.isnan(), torch.zeros_like(off), off).nan_to_num(nan=float("inf"))
    scale = max(1e-30, floor, float(expected.abs().nan_to_num(0, 0, 0).max()))
    position = int(off.argmax())
    return float(off.flatten()[position]) / scale, position


def compare(program: Program, expected: Seen, ranks: Sequence[Seen], whole: bool = False) -> Iterator[Difference]:
    """Every tensor of every rank against its part of one device's, or against all of it where it is ``whole``."""
    inputs = {f"gradient of input {n.meta['input']}": n for n in program.placeholders("input")}
    outputs = {f"output {i}": n for i, n in enumerate(program.outputs())}
    floors = {kind: NOISE * _largest(expected, kind) for kind in ("gradient", "buffer")}
    updated = {f"buffer {name}" for name in program.updates}
    for rank, seen in enumerate(ranks):
        for name, value in expected.tensors.items():
            if name.startswith("buffer") and name not in updated:
                continue
            node = inputs.get(name) or outputs.get(name)
            layout = layout_of(node) if node is not None and not whole else Layout.whole(value.dim())
            mine = seen.tensors.get(name)
            part = take(value, layout, program.world, rank) if layout.axes else value
            if mine is None and name.startswith("buffer") and any(name in other.tensors for other in ranks):
                continue  # of another stage
            mine = torch.zeros_like(part) if mine is None and name.startswith("gradient") else mine
            error, at = (
                error_of(mine, part, floors.get(name.partition(" ")[0], 0.0)) if mine is not None else (float("inf"), 0)
            )
            yield Difference(
                name, rank, error, global_index(at, value.shape, layout, program, rank), layout, tuple(value.shape)
            )


def _largest(expected: Seen, kind: str) -> float:
    """The largest floating value of a kind."""
    chosen = [t for n, t in expected.tensors.items() if n.startswith(kind) and t.numel()]
    return max((float(t.abs().nan_to_num(0, 0, 0).max()) for t in chosen if t.is_floating_point()), default=0.0)


def global_index(position: int, shape: Sequence[int], layout: Layout, program: Program, rank: int) -> tuple[int, ...]:
    """The global index of a flat position in a rank's shard."""
    where, found = slices(shape, layout, program.world, rank), []
    for part in reversed(where):
        extent = max(1, part.stop - part.start)
        found.append(part.start + position % extent)
        position //= extent
    return tuple(reversed(found))


def where(program: Program, difference: Difference) -> str:
    """``[0, 1, 8, 3], 0 from the border of two ranks in dim 2 (depth)``."""
    text = f"index {list(difference.index)} of {list(difference.shape)}"
    if difference.layout is None:
        return text
    near = []
    for dim, axis in enumerate(difference.layout.split):
        if axis is None:
            continue
        mine = slices(difference.shape, difference.layout, program.world, difference.rank)[dim]
        inner = [b for b in (mine.start, mine.stop) if 0 < b < difference.shape[dim]]
        position = difference.index[dim]
        far = [min(abs(position - b), abs(position + 1 - b)) for b in inner]
        if far:
            near.append(f"{min(far)} from the border of two ranks in dim {dim} ({axis})")
    return ", ".join([text, *near])
