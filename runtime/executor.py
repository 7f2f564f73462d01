"""Binding a program to one rank: every node becomes what this rank does, in an ordinary ``torch.fx.GraphModule``.

    program (all ranks)                                   graph module of rank 1 of 2
    enc.conv.h0: redistribute(x, depth: ...)         ->   enc_conv_h0 = self.enc_conv_h0(x)           a `Move`
    enc.conv:    conv3d(enc.conv.h0, w, padding=1)   ->   enc_conv = conv3d(enc_conv_h0, w, padding=(0, 1, 1))

The generated code drops every value after its last use.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from halofx.compiler.emit import label_of, operand_nodes, positional
from halofx.compiler.facts import (
    attached_operands,
    axes_of,
    calls,
    is_op,
    layout_of,
    shape_of,
    source_of,
    sources_of,
)
from halofx.compiler.index_map import span
from halofx.compiler.interval import Interval, blocks
from halofx.compiler.layout import Layout
from halofx.compiler.localize import local_call, local_view
from halofx.compiler.primitives import all_reduce, redistribute, reduce_scatter, vary, vary_all
from halofx.compiler.program import Program
from halofx.compiler.redistribution import Redistribution
from halofx.compiler.regions import regions
from halofx.compiler.rules import Local, Operand
from halofx.runtime.checkpoint import fold_regions
from halofx.runtime.comm.base import Comm
from halofx.runtime.gradients import Bucket, Enter, Launch, SyncSwitch
from halofx.runtime.movement import AllReduce, Group, Move, Route, Site, Vary, routes


@dataclass(frozen=True)
class Part:
    """The nodes of one stage, what they take from elsewhere, and what others take of them, in order."""

    inputs: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


class Binder:
    """Builds the graph module of one rank. ``device`` replaces the devices that capture has baked into factories.

    With ``cut`` the state comes whole to every call, which cuts its shards out and gives new values of buffers back whole.
    ``micro`` is the micro-batch for which it is bound.
    """

    def __init__(
        self, program: Program, comm: Comm, device: torch.device, sync: SyncSwitch, cut: bool = True, micro: int = 0
    ) -> None:
        self.program, self.comm, self.device, self.sync, self.cut = program, comm, device, sync, cut
        stages = program.stages
        self.rank = comm.rank if stages is None else stages.virtual(comm.rank, micro)
        self.graph, self.env = fx.Graph(), dict[fx.Node, fx.Node]()
        self.root: dict[str, Any] = {}
        self.entered: dict[fx.Node, fx.Node] = {}
        updates = set(program.results()[1])
        moving = [n for n in program.graph.nodes if "state" in n.meta or "move" in n.meta or n in updates]
        self.tags = {node: 2 * i for i, node in enumerate(moving)}

    def bind(self, part: Part | None = None) -> fx.GraphModule:
        """The graph module: takes the state placeholders, then the inputs' shards; returns (outputs, updates).

        That of a part takes and returns what the part says, as one tuple, and leaves the gradients of parameters unsummed.
        """
        nodes = list(self.program.graph.nodes) if part is None else list(part.nodes)
        inputs = [n for n in nodes if n.op == "placeholder"] if part is None else list(part.inputs)
        for node in inputs:
            self.env[node] = self.graph.placeholder(node.name)
        for node in inputs if self.cut else ():
            if "state" in node.meta:
                self.env[node] = self._recut(node, self.env[node], layout_of(node), cut=True)
        for node in nodes:
            if calls(node, vary_all) and part is None:
                self._enter(node)
        for node in nodes:
            if node not in inputs:
                self._node(node)
        if part is not None:
            updates = set(self.program.results()[1])
            self.graph.output(tuple(self._update(n) if n in updates else self.env[n] for n in part.outputs))
        module = fx.GraphModule(_root(self.root), self.graph, class_name="Rank")
        found = {self.env[node]: number for node, number in regions(self.program).items() if node in self.env}
        fold_regions(module, found)
        return module

    def _node(self, node: fx.Node) -> None:
        if node.op == "get_attr":
            constant = self.program.constants[str(node.target)]
            self.root[node.name] = constant.to(self.device)
            self.env[node] = self.graph.get_attr(node.name)
        elif node.op == "output":
            outputs, updates = self.program.results()
            self.graph.output(
                (tuple(self.env[n] for n in outputs), tuple(self._update(n) for n in updates)),
            )
        elif node.op == "call_function":
            handler = _HANDLERS.get(node.target)
            if handler is not None:
                handler(self, node)
            elif is_op(node):
                self._op(node)
            else:
                self._keep(node)

    def _update(self, node: fx.Node) -> fx.Node:
        """The new value of a buffer, whole where the state is."""
        return self._recut(node, self.env[node], layout_of(node), cut=False) if self.cut else self.env[node]

    def _recut(self, node: fx.Node, value: fx.Node, layout: Layout, cut: bool) -> fx.Node:
        """This rank's shard of a whole value, or the whole value of shards."""
        for dim, axis in enumerate(layout.split):
            if axis is None:
                continue
            extent, parts = shape_of(node)[dim], self.program.mesh[axis]
            have, need = (None, dim) if cut else (dim, None)
            every = (span(Interval(0, extent)),) * parts
            reads = tuple(span(b) for b in blocks(extent, parts)) if cut else every
            plan = Redistribution(axis, parts, have, need, extent * (not cut), extent * cut, reads)
            suffix = f"_{'cut' if cut else 'whole'}_{axis}"
            value = self._module(
                node, Move(self._route(plan, f"{label_of(node)}{suffix}", self.tags[node])), value, suffix=suffix
            )
        return value

    def _route(self, plan: Redistribution, what: str, tag: int) -> Route:
        mesh, rank = self.program.mesh, self.rank
        peers = [self._world(mesh.peer(rank, plan.axis, c)) for c in range(plan.parts)]
        return routes(plan, mesh.coordinate(rank, plan.axis), peers, Site(self.comm, what, tag))

    def _world(self, rank: int) -> int:
        """The world rank of a rank of the program's mesh, in this rank's stage."""
        stages = self.program.stages
        return rank if stages is None else stages.world(rank, stages.mesh.coordinate(self.comm.rank, "pipe"))

    def _keep(self, node: fx.Node) -> None:
        self.env[node] = self.graph.node_copy(node, self.env.__getitem__)
        self.env[node].meta = {}

    def _op(self, node: fx.Node) -> None:
        local = local_view(self.program, node, self.rank)
        if local.bound.spec is not None and local.split and self._empty(node, local):
            return
        call = local_call(local)
        sources = operand_nodes(node)
        place = {id(operand): self.env[sources[key]] for key, operand in local.bound.call.tensors.items()}
        args, kwargs = positional(call.target, call.args)
        swap = lambda a: place[id(a)] if isinstance(a, Operand) else self._device(a)  # noqa: E731
        args, kwargs = _map(args, swap), _map(kwargs, swap)
        self.env[node] = self.graph.create_node("call_function", call.target, args, kwargs, name=node.name)

    def _device(self, value: Any) -> Any:
        return self.device if isinstance(value, torch.device) else value

    def _empty(self, node: fx.Node, local: Local) -> bool:
        """An op of which this rank computes nothing: its outputs are empty, but stay in the graph of autograd."""
        shapes = [local.shape(i) for i in range(len(local.call.outs))]
        if not all(0 in shape for shape in shapes):
            return False
        tensors = [self.env[n] for n in attached_operands(node).values()]
        dtypes = [o.dtype for o in local.call.outs]
        single = isinstance(node.meta["val"], torch.Tensor)
        args: Any = (tuple(shapes), tuple(dtypes), single, self.device, *tensors)
        self.env[node] = self.graph.create_node("call_function", empty, args, name=node.name)
        return True

    def _module(self, node: fx.Node, module: nn.Module, *args: fx.Node, suffix: str = "") -> fx.Node:
        name = node.name + suffix
        self.root[name] = module
        return self.graph.create_node("call_module", name, args, name=name)

    def _redistribute(self, node: fx.Node) -> None:
        route = self._route(node.meta["move"], label_of(node), self.tags[node])
        route = route.adjoint if calls(node, reduce_scatter) else route
        self.env[node] = self._module(node, Move(route), self.env[source_of(node)])

    def _group(self, node: fx.Node) -> Group:
        ranks = sorted({self._world(r) for r in self.program.mesh.group(self.rank, axes_of(node))})
        return Group(Site(self.comm, label_of(node)), tuple(ranks))

    def _all_reduce(self, node: fx.Node) -> None:
        group = self._group(node)
        module = AllReduce(group, str(node.args[2]), group.ranks.index(self.comm.rank))
        self.env[node] = self._module(node, module, self.env[source_of(node)])

    def _vary(self, node: fx.Node) -> None:
        self.env[node] = self._module(node, Vary(self._group(node)), self.env[source_of(node)])

    def _enter(self, node: fx.Node) -> None:
        bucket = Bucket(self._group(node), self.sync)
        sources = [self.env[source] for source in sources_of(node)]
        self.entered[node] = self._module(node, Enter(bucket), *sources, suffix="_enter")
        self.root[node.name] = Launch(bucket)

    def _vary_all(self, node: fx.Node) -> None:
        entered = self.entered.get(node)
        if entered is None:
            sources = [self.env[source] for source in sources_of(node)]
            self.env[node] = self.graph.call_function(_listed, tuple(sources))
            return
        items = [self.graph.call_function(operator.getitem, (entered, i)) for i in range(len(sources_of(node)))]
        self.env[node] = self._module(node, self.root[node.name], *items)


_HANDLERS: dict[Any, Callable[[Binder, fx.Node], None]] = {
    redistribute: Binder._redistribute,
    reduce_scatter: Binder._redistribute,
    all_reduce: Binder._all_reduce,
    vary: Binder._vary,
    vary_all: Binder._vary_all,
}


def _listed(*values: Tensor) -> list[Tensor]:
    return list(values)


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply to every leaf of nested tuples, lists and dicts."""
    if isinstance(value, (tuple, list)):
        return (
            type(value)(_map(v, function) for v in value)
            if type(value) in (tuple, list)
            else [_map(v, function) for v in value]
        )
    if isinstance(value, Mapping):
        return {k: _map(v, function) for k, v in value.items()}
    return function(value)


def _root(members: Mapping[str, Any]) -> nn.Module:
    root = nn.Module()
    for name, member in members.items():
        if isinstance(member, Tensor):
            root.register_buffer(name, member, persistent=False)
        else:
            root.add_module(name, member)
    return root


def empty(
    shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], single: bool, device: torch.device, *tensors: Tensor
) -> Any:
    """Empty outputs that autograd sees as computed from ``tensors``, so that this rank takes part in the backward pass."""
    made = _Empty.apply(shapes, dtypes, device, *tensors)  # type: ignore[no-untyped-call]
    return made[0] if single else made


class _Empty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shapes: Any, dtypes: Any, device: Any, *tensors: Tensor) -> Any:
        ctx.like = [(t.shape, t.dtype, t.device) for t in tensors]
        outs = tuple(torch.empty(s, dtype=d, device=device) for s, d in zip(shapes, dtypes, strict=True))
        ctx.mark_non_differentiable(*(o for o in outs if not (o.is_floating_point() or o.is_complex())))
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        zeros = [
            torch.zeros(shape, dtype=dtype, device=device) if needed else None
            for (shape, dtype, device), needed in zip(ctx.like, ctx.needs_input_grad[3:], strict=True)
        ]
        return (None, None, None, *zeros)


def groups_of(program: Program) -> list[tuple[tuple[int, ...], ...]]:
    """The partitions that the all-reduces of a program run over, forward and backward, in graph order."""
    axes = dict.fromkeys(axes_of(node) for node in program.graph.nodes if calls(node, all_reduce, vary, vary_all))
    mesh = program.mesh if program.stages is None else program.stages.mesh
    if program.stages is not None:
        axes[("pipe",)] = None
    return [mesh.groups(a) for a in axes]
