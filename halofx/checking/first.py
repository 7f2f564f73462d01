"""Finding the first node that differs: every value, then every gradient, as a rank has it, against one device's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, fx

from halofx.checking.compare import NOISE, Difference, error_of, global_index
from halofx.checking.one_device import OneDevice
from halofx.compiler.emit import is_getitem, label_of
from halofx.compiler.facts import calls, is_op, layout_of, shape_of, source_of
from halofx.compiler.layout import Layout
from halofx.compiler.primitives import COLLECTIVES, all_reduce
from halofx.compiler.program import Program
from halofx.runtime.comm import current
from halofx.runtime.launch import launch
from halofx.runtime.observe import run_rank
from halofx.runtime.shards import take

UNSTABLE = 1e-5
"""Relative movement (of 2 units in the last place of the inputs) from which on a result hangs on chance, and is not compared."""


@dataclass(frozen=True)
class First:
    """The op with the first wrong value, or whose backward makes the first wrong gradient."""

    node: fx.Node
    difference: Difference
    backward: bool


def find_first(program: Program, alone: OneDevice, limit: float, backward: bool = True) -> First | None:
    """Run the mesh again with an eye on every node; None when each of them is right. Raises what a rank raises."""
    values, gradients = alone.observe(alone.job.tensors)
    moved, moved_gradients = alone.observed_movement(values, gradients)
    watch = Watch(program, values, limit, moved, lambda layout: not layout.partial)
    launch(
        lambda _: run_rank(program, *_inputs(alone, False), value=watch.see), program.mesh, timeout=alone.job.timeout
    )
    wrong = [node for node in program.graph.nodes if node in watch.wrong]
    if wrong or not backward:
        return First(wrong[0], watch.wrong[wrong[0]], False) if wrong else None
    largest = max((float(t.abs().max()) for t in gradients.values() if t.numel()), default=0.0)
    watch = Watch(program, gradients, limit, moved_gradients, lambda layout: True, NOISE * largest)
    launch(lambda _: run_rank(program, *_inputs(alone), gradient=watch.see), program.mesh, timeout=alone.job.timeout)
    wrong = [node for node in reversed(program.graph.nodes) if node in watch.wrong]
    if not wrong:
        return None
    users = _users(wrong[0])
    return First(users[0] if users else wrong[0], watch.wrong[wrong[0]], True)


def _inputs(
    alone: OneDevice, backward: bool = True
) -> tuple[Mapping[str, Tensor], Sequence[Tensor], Sequence[Tensor | None]]:
    """The arguments of `run_rank`, whose backward pass may be left out."""
    cotangents = alone.cotangents if backward else [None] * len(alone.cotangents)
    return alone.job.state, alone.job.tensors, cotangents


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


@dataclass
class Watch:
    """Compares what ranks have of each node, as they have it, with one device's by label.

    ``moved`` says how far one device's moves by itself, ``fits`` which layouts can be compared on one rank.
    """

    program: Program
    reference: Mapping[str, Tensor]
    limit: float
    moved: Mapping[str, float]
    fits: Callable[[Layout], bool]
    floor: float = 0.0
    seen: set[fx.Node] = field(default_factory=set)  # compared
    wrong: dict[fx.Node, Difference] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def see(self, node: fx.Node, mine: Tensor) -> None:
        """Compare one value of this rank; nodes that lowering made have no counterpart."""
        label, source = label_of(node), source_of(node) if is_getitem(node) else node
        whole, moved = self.reference.get(label), self.moved.get(label, 0.0)
        if whole is None or (calls(source, *COLLECTIVES) and not calls(source, all_reduce)):
            return
        layout, rank = layout_of(node), current().rank
        if tuple(whole.shape) != shape_of(node) or not self.fits(layout) or moved > UNSTABLE:
            return
        part = take(whole, Layout(layout.split), self.program.mesh, rank)
        error, at = error_of(mine, part, self.floor)
        self.seen.add(node)
        if not error <= max(self.limit, 30 * moved):
            index = global_index(at, whole.shape, layout, self.program, rank)
            with self.lock:
                self.wrong.setdefault(node, Difference(label, rank, error, index, layout, tuple(whole.shape)))
