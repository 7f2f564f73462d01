"""Comparing what ranks have with what one device has, value by value, and finding the first that differs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from halofx.compiler.emit import is_getitem, label_of
from halofx.compiler.facts import calls, is_op, is_tensor, layout_of, shape_of, source_of
from halofx.compiler.layout import Layout
from halofx.compiler.primitives import COLLECTIVES, all_reduce
from halofx.compiler.program import Program
from halofx.runtime.comm import current
from halofx.runtime.launch import launch
from halofx.runtime.observe import Seen, run_rank
from halofx.runtime.shards import slices, take

TOLERANCE = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 2e-4, torch.complex64: 2e-4}
"""Relative errors that are rounding; lower precisions have 3e-2."""

NOISE = 1e-3
"""Gradients are compared with this share of the largest one at least: some are zero but for rounding (a bias before a norm)."""


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
    grads = [t for n, t in expected.tensors.items() if n.startswith("gradient") and t.numel()]
    floor = NOISE * max((float(t.abs().max()) for t in grads), default=0.0)
    updated = {f"buffer {name}" for name in program.updates}
    for rank, seen in enumerate(ranks):
        for name, value in expected.tensors.items():
            if name.startswith("buffer") and name not in updated:
                continue
            node = inputs.get(name) or outputs.get(name)
            layout = layout_of(node) if node is not None and not whole else Layout.whole(value.dim())
            mine = seen.tensors.get(name)
            part = take(value, layout, program.mesh, rank) if layout.axes else value
            mine = torch.zeros_like(part) if mine is None and name.startswith("gradient") else mine
            error, at = (
                error_of(mine, part, floor * name.startswith("gradient")) if mine is not None else (float("inf"), 0)
            )
            yield Difference(
                name, rank, error, _global(at, value.shape, layout, program, rank), layout, tuple(value.shape)
            )


def _global(position: int, shape: Sequence[int], layout: Layout, program: Program, rank: int) -> tuple[int, ...]:
    """The global index of a flat position in a rank's shard."""
    where, found = slices(shape, layout, program.mesh, rank), []
    for part in reversed(where):
        extent = max(1, part.stop - part.start)
        found.append(part.start + position % extent)
        position //= extent
    return tuple(reversed(found))


# -- the first node


Found = tuple[fx.Node, Difference]


def first_value(
    program: Program, reference: Mapping[str, Tensor], state: Mapping[str, Tensor], inputs: Sequence[Tensor],
    cotangents: Sequence[Tensor | None], limit: float, timeout: float,
) -> Found | None:  # fmt: skip
    """The first node, in the order of the program, whose value differs on a rank. ``reference``: one device's, by label."""
    watch = _Watch(program, reference, limit, lambda layout: not layout.partial)
    launch(lambda _: run_rank(program, state, inputs, cotangents, value=watch.see), program.mesh, timeout=timeout)
    wrong = [node for node in program.graph.nodes if node in watch.wrong]
    return (wrong[0], watch.wrong[wrong[0]]) if wrong else None


def first_gradient(
    program: Program, reference: Mapping[str, Tensor], state: Mapping[str, Tensor], inputs: Sequence[Tensor],
    cotangents: Sequence[Tensor | None], limit: float, timeout: float,
) -> Found | None:  # fmt: skip
    """The op whose backward makes the first wrong gradient, in the order of the backward pass."""
    largest = max((float(t.abs().max()) for t in reference.values() if t.numel()), default=0.0)
    watch = _Watch(program, reference, limit, lambda layout: True, NOISE * largest)
    launch(lambda _: run_rank(program, state, inputs, cotangents, gradient=watch.see), program.mesh, timeout=timeout)
    wrong = [node for node in reversed(program.graph.nodes) if node in watch.wrong]
    if not wrong:
        return None
    users = _users(wrong[0])
    return (users[0] if users else wrong[0]), watch.wrong[wrong[0]]


def op_of(node: fx.Node) -> fx.Node:
    """The op that made a value: that whose sum an all-reduce completes, or one of whose outputs is read."""
    while calls(node, all_reduce) or is_getitem(node):
        node = source_of(node)
    return node


def _users(node: fx.Node) -> list[fx.Node]:
    """The ops that read a value, past what lowering put between."""
    found: list[fx.Node] = []
    for user in node.users:
        found += [user] if is_op(user) else _users(user) if user.op == "call_function" else []
    return found


class _Watch:
    """Compares what ranks have of each node, as they have it, with one device."""

    def __init__(
        self,
        program: Program,
        reference: Mapping[str, Tensor],
        limit: float,
        fits: Callable[[Layout], bool],
        floor: float = 0.0,
    ) -> None:
        self.program, self.reference, self.limit, self.fits, self.floor = program, reference, limit, fits, floor
        self.seen: set[fx.Node] = set()  # compared
        self.wrong: dict[fx.Node, Difference] = {}
        self.lock = threading.Lock()

    def see(self, node: fx.Node, mine: Tensor) -> None:
        """Compare one value of this rank; nodes that lowering made have no counterpart."""
        whole, source = self.reference.get(label_of(node)), source_of(node) if is_getitem(node) else node
        if whole is None or (calls(source, *COLLECTIVES) and not calls(source, all_reduce)):
            return
        layout, rank = layout_of(node), current().rank
        if tuple(whole.shape) != shape_of(node) or not self.fits(layout):
            return
        part = take(whole, Layout(layout.split), self.program.mesh, rank)
        error, at = error_of(mine, part, self.floor)
        self.seen.add(node)
        if not error <= self.limit:
            index = _global(at, whole.shape, layout, self.program, rank)
            with self.lock:
                self.wrong.setdefault(node, Difference(label_of(node), rank, error, index, layout, tuple(whole.shape)))


def where(program: Program, difference: Difference) -> str:
    """``[0, 1, 8, 3], 0 from the border of two ranks in dim 2 (depth)``."""
    text = f"index {list(difference.index)} of {list(difference.shape)}"
    if difference.layout is None:
        return text
    near = []
    for dim, axis in enumerate(difference.layout.split):
        if axis is None:
            continue
        mine = slices(difference.shape, difference.layout, program.mesh, difference.rank)[dim]
        inner = [b for b in (mine.start, mine.stop) if 0 < b < difference.shape[dim]]
        position = difference.index[dim]
        far = [min(abs(position - b), abs(position + 1 - b)) for b in inner]
        if far:
            near.append(f"{min(far)} from the border of two ranks in dim {dim} ({axis})")
    return ", ".join([text, *near])
