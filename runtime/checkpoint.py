"""Running a checkpointed region: its values are dropped, and made again in the backward pass without a message.

    forward     conv.halo <- faces of the neighbors (kept)    conv, norm, relu (dropped)
    backward    conv.halo <- the kept faces                   conv, norm, relu again, then their gradients

The recomputation is ``torch.utils.checkpoint``'s; ours is that it needs nobody: what arrived the first time is on a tape.
A rank may so recompute when its autograd gets there, however its neighbors fare.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")


class Tape:
    """What arrived in a region: recorded in its first run, played back in every other."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.complete = False
        self.at = 0

    def next(self, receive: Callable[[], T]) -> T:
        """What ``receive`` returned at this place of the first run."""
        if not self.complete:
            self.kept.append(receive())
            return self.kept[-1]  # type: ignore[no-any-return]
        self.at += 1
        return self.kept[self.at - 1]  # type: ignore[no-any-return]


_ACTIVE = threading.local()


def taped(receive: Callable[[], T]) -> T:
    """``receive()``, or within a region that runs again what it returned the first time."""
    tape: Tape | None = getattr(_ACTIVE, "tape", None)
    return receive() if tape is None else tape.next(receive)


@contextmanager
def _playing(tape: Tape | None) -> Iterator[None]:
    before, _ACTIVE.tape = getattr(_ACTIVE, "tape", None), tape
    try:
        yield
    finally:
        _ACTIVE.tape = before


class Region(nn.Module):
    """The part of a rank's graph that a checkpointed region is."""

    def __init__(self, body: fx.GraphModule) -> None:
        super().__init__()
        self.body = body

    def forward(self, *inputs: Any) -> Any:
        """The values that the region's nodes give to those outside of it."""
        if not torch.is_grad_enabled():
            return self.body(*inputs)
        tape = Tape()

        def run(*args: Any) -> Any:
            tape.at = 0
            with _playing(tape):
                outs = self.body(*args)
            tape.complete = True
            return outs

        return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)


def fold_regions(module: fx.GraphModule, of: Mapping[fx.Node, int]) -> None:
    """Put the nodes of every region of a rank's graph into a `Region`."""
    for number in dict.fromkeys(of.values()):
        _fold(module, number, [n for n in module.graph.nodes if of.get(n) == number and n.op.startswith("call")])
    module.graph.lint()
    module.recompile()


def _fold(module: fx.GraphModule, number: int, inner: Sequence[fx.Node]) -> None:
    inside = set(inner)
    outputs = [n for n in inner if any(user not in inside for user in n.users)]
    if not outputs:
        return
    inputs = list(dict.fromkeys(s for n in inner for s in n.all_input_nodes if s not in inside))
    body, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for i, source in enumerate(inputs):
        env[source] = body.placeholder(f"input_{i}")
    members = nn.Module()
    for n in inner:
        env[n] = body.node_copy(n, env.__getitem__)
        if n.op == "call_module":
            members.add_module(str(n.target), module.get_submodule(str(n.target)))
    body.output(tuple(env[n] for n in outputs))
    name = f"checkpoint_{number}"
    module.add_submodule(name, Region(fx.GraphModule(members, body, class_name="Region")))
    _move_late(module.graph, inside, inner)
    with module.graph.inserting_after(inner[-1]):
        call = module.graph.call_module(name, tuple(inputs))
    at = call
    for i, n in enumerate(outputs):
        with module.graph.inserting_after(at):
            at = module.graph.call_function(_item, (call, i))
        n.replace_all_uses_with(at, delete_user_cb=lambda user: user not in inside)
    for n in reversed(inner):
        module.graph.erase_node(n)
    for n in inner:
        if n.op == "call_module":
            module.delete_submodule(str(n.target))


def _item(values: Sequence[Any], index: int) -> Any:
    return values[index]


def _move_late(graph: fx.Graph, inside: set[fx.Node], inner: Sequence[fx.Node]) -> None:
    """Nodes between those of the region that use its values go behind it."""
    late: list[fx.Node] = []
    node = inner[0]
    while node is not inner[-1]:
        if node not in inside and any(source in inside or source in late for source in node.all_input_nodes):
            late.append(node)
        node = node.next
    at = inner[-1]
    for node in late:
        at.append(node)
        at = node
