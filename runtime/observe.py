"""Running one rank of a program by hand: with tensors of one's own for the state, and an eye on every value and gradient.

`Net` runs a program for a user; this runs it for `halofx.check`, which compares what it sees with one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from halofx.compiler.emit import label_of
from halofx.compiler.errors import HalofxError, at
from halofx.compiler.facts import layout_of
from halofx.compiler.program import Program
from halofx.runtime import shards
from halofx.runtime.comm import current
from halofx.runtime.executor import Binder, groups_of
from halofx.runtime.gradients import SyncSwitch
from halofx.runtime.pipeline import Pipeline
from halofx.runtime.recall import recalling

See = Callable[[fx.Node, Tensor], None]
"""Called with a node of the program and the value, or the gradient, that this rank has of it."""


class NodeError(HalofxError):
    """A node that fails on a rank, whose rule gave it shards that do not fit."""

    def __init__(self, node: fx.Node | None, name: str, error: Exception) -> None:
        self.node = node
        where = label_of(node) + at(node.meta.get("source")) if node is not None else name
        super().__init__(
            f"{where} fails on rank {current().rank} with {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        )


@dataclass
class Seen:
    """What one rank ended with: shards by name (``output 0``, ``gradient of enc.weight``, ``buffer bn.running_mean``)."""

    tensors: dict[str, Tensor] = field(default_factory=dict)


def run_rank(
    program: Program,
    state: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    value: See | None = None,
    gradient: See | None = None,
) -> Seen:
    """Run this rank forward and backward.

    Args:
        program: all passes run; its mesh has as many ranks as the world.
        state: parameters and buffers by key, whole; copied, so that ranks may be threads.
        inputs: the GLOBAL inputs and targets, in the order of the program; each rank cuts its shards.
        cotangents: of the outputs, global; None where an output takes no gradient.
        value, gradient: called with what this rank has of every node, the gradient when backward has reached it.
    """
    comm, mesh = current(), program.world
    device = next((t.device for t in [*inputs, *state.values()]), torch.device("cpu"))
    comm.prepare(groups_of(program))
    names = [str(n.meta["state"]) for n in program.placeholders("state")]
    own = _copies([state[name] for name in names])
    nodes = program.placeholders("input")
    cut = [leaf(shards.take(x.detach(), layout_of(n), mesh, comm.rank)) for n, x in zip(nodes, inputs, strict=True)]
    rng = [torch.tensor(1)] if program.placeholders("rng") else []
    written = dict[str, Tensor]()
    if program.stages is not None:
        copies = Copies(dict(zip(names, own, strict=True)))
        outs: Sequence[Tensor] = Pipeline(program, comm, device, SyncSwitch(), copies).run(cut, rng)
        written = copies.written
    elif value is None and gradient is None:
        module = Binder(program, comm, device, SyncSwitch()).bind()  # cuts the whole state
        with recalling():
            outs, updates = module(*own, *cut, *rng)
        written = dict(zip(program.updates, updates, strict=True))
    else:
        binder = Binder(program, comm, device, SyncSwitch())
        module = binder.bind()
        by_name = {bound.name: node for node, bound in binder.env.items()}
        outs, updates = _Watcher(module, by_name, value, gradient).run(*own, *cut, *rng)
        written = dict(zip(program.updates, updates, strict=True))
    seen = Seen({f"output {i}": y.detach() for i, y in enumerate(outs)})
    seen.tensors |= {f"buffer {name}": y.detach() for name, y in written.items()}
    layouts = [layout_of(node) for node in program.outputs()]
    pulls = [
        (y, shards.take(c, layout, mesh, comm.rank))
        for y, c, layout in zip(outs, cotangents, layouts, strict=True)
        if c is not None and y.requires_grad
    ]
    leaves = _wanted(names, own) | {f"gradient of input {n.meta['input']}": x for n, x in zip(nodes, cut, strict=True)}
    leaves = {name: t for name, t in leaves.items() if t.requires_grad}
    seen.tensors |= _gradients(leaves, pulls)
    return seen


@dataclass
class Copies:
    """The state of one rank's run: whole tensors of its own."""

    tensors: dict[str, Tensor]
    written: dict[str, Tensor] = field(default_factory=dict)
    settled: bool = False  # they are not shards

    def of(self, program: Program) -> list[Tensor]:
        """What a program's placeholders of state take."""
        return [
            self.written.get(str(n.meta["state"]), self.tensors[str(n.meta["state"])])
            for n in program.placeholders("state")
        ]

    def write(self, updates: Sequence[tuple[str, Tensor]]) -> None:
        """Note the new values of buffers."""
        self.written.update(updates)


def _gradients(leaves: Mapping[str, Tensor], pulls: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    if not leaves or not pulls:
        return {}
    outs, cotangents = zip(*pulls, strict=True)
    grads = torch.autograd.grad(outs, list(leaves.values()), cotangents, allow_unused=True)
    return {name: g for name, g in zip(leaves, grads, strict=True) if g is not None}


def _wanted(names: Sequence[str], own: Sequence[Tensor]) -> dict[str, Tensor]:
    """Parameters by the first of their names: tied ones are one tensor."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in zip(names, own, strict=True):
        found.setdefault(id(tensor), (f"gradient of {name}", tensor))
    return dict(found.values())


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Leaves with the values of tensors; the same tensor twice makes the same copy twice."""
    made: dict[int, Tensor] = {}
    for t in tensors:
        if id(t) not in made:
            made[id(t)] = t.detach().clone().requires_grad_(t.requires_grad)
    return [made[id(t)] for t in tensors]


def leaf(x: Tensor) -> Tensor:
    """A copy that takes a gradient, if a tensor of its dtype can."""
    return x.clone().requires_grad_() if x.is_floating_point() or x.is_complex() else x


class _Watcher(fx.Interpreter):
    """Runs a rank's graph module node by node and shows what each one makes."""

    def __init__(
        self, module: fx.GraphModule, nodes: Mapping[str, fx.Node], value: See | None, gradient: See | None
    ) -> None:
        super().__init__(module)
        self.nodes, self.value, self.gradient = nodes, value, gradient

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node, shown if it is one tensor of a node of the program."""
        node = self.nodes.get(n.name)
        try:
            result = super().run_node(n)
        except HalofxError:
            raise
        except Exception as error:
            raise NodeError(node, n.name, error) from error
        if node is None or n.op == "output" or not isinstance(result, Tensor):
            return result
        if self.value is not None:
            self.value(node, result.detach())
        if self.gradient is not None and result.requires_grad:
            see = self.gradient
            result.register_hook(lambda grad, node=node: see(node, grad))
        return result


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensor leaves of nested inputs or outputs, in order."""
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]
