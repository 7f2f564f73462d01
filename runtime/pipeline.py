"""Running the stages of one rank: every action of the schedule on its micro-batch.

    order of pipe 0 (1f1b)     0F0  0F1  0B0  0F2  0B1  0B2          F: run the stage's graph, send what others use
    order of pipe 1                 1F0  1B0  1F1  1B1 ...           B: take the cotangents of what was sent, return others

The schedules are torch.distributed.pipelining's. Its runtime sends to the next stage only, so that it refuses the skips of a
U-Net under all schedules but two; here a stage's graph says what it takes and gives (`transfer`), and `Post` brings it there.

The whole step is one function to autograd: ``loss = net(x, y); loss.backward()`` stays as it is. Under GPipe its backward runs
the backward actions; under the others all actions run in the forward, and backward hands out the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from halofx.compiler.facts import layout_of, shape_of, val
from halofx.compiler.interval import blocks
from halofx.compiler.program import Program
from halofx.compiler.stages import Action, Stages
from halofx.runtime.after import After, is_addend
from halofx.runtime.comm import Comm
from halofx.runtime.comm.base import Pending
from halofx.runtime.executor import Binder
from halofx.runtime.gradients import SyncSwitch
from halofx.runtime.parts import Parts, parts_of
from halofx.runtime.post import Post
from halofx.runtime.recall import recalling
from halofx.runtime.sums import Sums
from halofx.runtime.two_phase import Later, first_phase


class Holds(Protocol):
    """What gives a program its parameters and buffers, and takes the new values of buffers."""

    @property
    def settled(self) -> bool: ...
    def of(self, program: Program) -> list[Tensor]: ...
    def write(self, updates: Sequence[tuple[str, Tensor]]) -> None: ...


class Pipeline:
    """The stages of one rank, bound for every micro-batch."""

    def __init__(self, program: Program, comm: Comm, device: torch.device, sync: SyncSwitch, state: Holds) -> None:
        assert program.stages is not None
        self.program, self.comm, self.device, self.sync, self.state = program, comm, device, sync, state
        self.stages: Stages = program.stages
        self.me = self.stages.mesh.coordinate(comm.rank, "pipe")
        self.cut = not state.settled
        self.parts: Parts = parts_of(program, self.stages, self.me)
        self.order = self.stages.orders()[self.me]
        self.sums = Sums(comm, self.stages)
        self.modules = {
            (stage, micro): self._binder(micro).bind(part)
            for stage, part in self.parts.stages.items()
            for micro in range(self.stages.micro)
        }
        after, known = self.parts.after, self.parts.known
        self.after = After(after, self._binder(0).bind(after), self.parts.sources) if after is not None else None
        self.known = [self._binder(i).bind(known) for i in range(self.stages.micro)] if known is not None else []

    def _binder(self, micro: int) -> Binder:
        return Binder(self.program, self.comm, self.device, self.sync, self.cut, micro)

    def run(self, inputs: Sequence[Tensor], rng: Sequence[Tensor]) -> list[Tensor]:
        """The outputs, from this rank's shards of the inputs."""
        placeholders = self.program.placeholders("state")
        state = dict(zip(placeholders, self.state.of(self.program), strict=True))
        trained = [n for n in placeholders if state[n].requires_grad]
        given = [*(state[n] for n in trained), *inputs]
        step = Step(self, state, dict(zip(self.program.placeholders("input"), inputs, strict=True)), list(rng))
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in given):
            step.forward_only()
            return step.outputs()
        outs: Any = _Run.apply(step, trained, *given)  # type: ignore[no-untyped-call]
        return list(outs)

    @property
    def early(self) -> bool:
        """Whether backward actions run before all forward ones have."""
        return self.stages.schedule != "gpipe" and self.stages.micro > 1


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: Step, trained: list[fx.Node], *given: Tensor) -> tuple[Tensor, ...]:
        ctx.step = step
        ctx.set_materialize_grads(False)
        step.start(trained, {n: t.requires_grad for n, t in zip(step.inputs, given[len(trained) :], strict=True)})
        outs = tuple(step.outputs())
        ctx.mark_non_differentiable(*(o for o in outs if not (o.is_floating_point() or o.is_complex())))
        return outs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        step: Step | None = ctx.step
        if step is None:
            raise RuntimeError("a pipelined step can be differentiated once; call the net again")
        ctx.step = None
        if not step.pipeline.early:
            step.finish(grads)
            return (None, None, *step.gradients())
        scale = grads[0]
        return (None, None, *(g if g is None or scale is None else g * scale.to(g.dtype) for g in step.gradients()))


@dataclass
class _Ran:
    """What a forward action leaves for the backward one."""

    outs: dict[fx.Node, Tensor]
    came: dict[fx.Node, Tensor]  # by transfer
    taken: dict[fx.Node, Tensor]  # of the inputs
    sends: list[Pending]


@dataclass
class Step:
    """One run of a pipeline."""

    pipeline: Pipeline
    state: dict[fx.Node, Tensor]
    inputs: dict[fx.Node, Tensor]
    rng: list[Tensor]
    needs: dict[fx.Node, bool] = field(default_factory=dict)  # which inputs take a gradient
    leaves: dict[fx.Node, Tensor] = field(default_factory=dict)
    trained: list[fx.Node] = field(default_factory=list)
    ran: dict[tuple[int, int], _Ran] = field(default_factory=dict)
    later: dict[tuple[int, int], tuple[list[fx.Node], Later]] = field(default_factory=dict)
    values: dict[tuple[fx.Node, int], Tensor] = field(default_factory=dict)  # outputs, and what the part after takes
    cotangents: dict[tuple[fx.Node, int], Tensor] = field(default_factory=dict)
    grads: dict[fx.Node, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        p = self.pipeline
        self.program, self.stages, self.comm, self.parts, self.after = p.program, p.stages, p.comm, p.parts, p.after
        self.micro, self.sums = self.stages.micro, p.sums
        self.post = Post(p.program, p.stages, p.comm, p.device, p.parts.tags)

    # the whole step

    def forward_only(self) -> None:
        """Run the forward actions without a graph."""
        with torch.no_grad():
            for action in self.pipeline.order:
                if action.kind == "F":
                    self._forward(action)
            self._run_after()
        self.post.wait()

    def start(self, trained: list[fx.Node], needs: dict[fx.Node, bool]) -> None:
        """Run the forward actions, or all of them where the schedule mixes them."""
        self.trained, self.needs = trained, needs
        with torch.enable_grad():
            own = set(trained)
            self.leaves = {n: t.detach().requires_grad_(n in own) for n, t in self.state.items()}
            if self.pipeline.early:
                self._predict()
            for action in self.pipeline.order:
                if action.kind == "F":
                    self._forward(action)
                elif self.pipeline.early:
                    self._backward(action)
            with torch.set_grad_enabled(not self.pipeline.early):
                self._run_after()
        if self.pipeline.early:
            self._end()

    def finish(self, grads: Sequence[Tensor | None]) -> None:
        """Run the backward actions from the cotangents of the outputs."""
        for node, grad in zip(self.program.outputs(), grads, strict=True):
            if grad is not None:
                self._seed(node, grad)
        self._after_backward()
        for action in self.pipeline.order:
            if action.kind != "F":
                self._backward(action)
        self._end()

    def _end(self) -> None:
        self.post.wait()
        self.sums.wait(self.grads)
        if not self.pipeline.sync.on:
            self.sums.keep_back([b for own in self.parts.buckets.values() for b in own], self.grads)

    # forward

    def _forward(self, action: Action) -> None:
        stage, micro = action.stage, action.micro
        part, grad = self.parts.stages[stage], torch.is_grad_enabled()
        came = {
            t: self.post.receive(t, micro).requires_grad_(grad and self._flows(t)) for t in self.parts.incoming[stage]
        }
        taken = {n: self._slice(n, micro) for n in part.inputs if "input" in n.meta}
        with recalling():
            made = self.pipeline.modules[stage, micro](*self._arguments(part.inputs, came | taken))
        outs = dict(zip(part.outputs, made, strict=True))
        self.pipeline.state.write([(name, outs[n].detach()) for name, n in self.parts.updates[stage]])
        sends = self.post.send(self.parts.outgoing[stage], micro, outs)
        self.values.update({(n, micro): outs[n] for n in self.parts.wanted[stage]})
        if grad:
            self.ran[stage, micro] = _Ran({n: t for n, t in outs.items() if t.requires_grad}, came, taken, sends)
        else:
            self.post.under_way += sends

    def _arguments(self, nodes: Sequence[fx.Node], given: Mapping[fx.Node, Tensor]) -> Iterator[Tensor]:
        for node in nodes:
            if node in given:
                yield given[node]
            else:
                yield self.rng[0] if "rng" in node.meta else self._own(node)

    def _own(self, node: fx.Node) -> Tensor:
        """A parameter or buffer; a copy where this program will write to it before the backward pass reads it."""
        value = self.leaves.get(node, self.state[node])
        return value.clone() if node.meta["state"] in self.parts.written and not value.requires_grad else value

    def _slice(self, node: fx.Node, micro: int) -> Tensor:
        """A micro-batch of an input's shard."""
        x = self._part(node, self.inputs[node].detach(), micro)
        return x.requires_grad_() if torch.is_grad_enabled() and self.needs.get(node) else x

    def _part(self, node: fx.Node, x: Tensor, micro: int) -> Tensor:
        """A micro-batch of this rank's shard of an input or output: a view."""
        dim = layout_of(node).dim("data")
        if dim is None or self.micro == 1:
            return x.view_as(x)
        held = blocks(shape_of(node)[dim], self.stages.inner["data"])
        first = self.stages.mesh.coordinate(self.comm.rank, "data") * self.micro
        return x.narrow(dim, held[first + micro].start - held[first].start, len(held[first + micro]))

    def _flows(self, node: fx.Node) -> bool:
        """Whether a cotangent comes back for a value that was sent: the same answer on both ends."""
        if not (val(node).is_floating_point() or val(node).is_complex()):
            return False
        return bool(node.meta.get("needs_grad")) or (bool(node.meta.get("grad")) and any(self.needs.values()))

    # what runs after

    def _run_after(self) -> None:
        if self.after is not None:
            sums = self.after.sums(self.values, self.micro, lambda n: self.post.empty(n, 0))
            self.values.update({(n, 0): t for n, t in self.after.run(sums, self._own).items()})

    def _predict(self) -> None:
        """The cotangents of the sums, before any of those that the model computes is known."""
        if self.after is None:
            return
        for micro, module in enumerate(self.pipeline.known):
            assert self.parts.known is not None
            taken = {n: self._slice(n, micro) for n in self.parts.known.inputs if "input" in n.meta}
            with torch.no_grad():
                made = module(*self._arguments(self.parts.known.inputs, taken))
            self.values.update({(n, micro): v for n, v in zip(self.parts.known.outputs, made, strict=True)})
        self._run_after()
        for node in self.program.outputs():
            self.cotangents[node, 0] = torch.ones_like(self.values[node, 0])
        self._after_backward()
        self.values.clear()

    def _after_backward(self) -> None:
        if self.after is None:
            return
        given = {n: c for (n, _), c in self.cotangents.items()}
        for node, grad in self.after.backward(given, self.leaves).items():
            if "state" in node.meta:
                self._add(node, grad)
            else:
                for micro in range(self.micro) if is_addend(node) else (self.micro - 1,):
                    self.cotangents[node, micro] = grad

    # backward

    def _seed(self, node: fx.Node, grad: Tensor) -> None:
        """The cotangent of an output, by micro-batch; only the stage that made it has a use for it."""
        if node in self.inputs:
            self._add(node, grad)
        elif node.meta.get("after"):
            self.cotangents[node, 0] = grad
        else:
            self.cotangents.update({(node, i): self._part(node, grad, i) for i in range(self.micro)})

    def _backward(self, action: Action) -> None:
        """One backward action: of everything (B), of what came in (I), or of the weights that I left (W)."""
        stage, micro = action.stage, action.micro
        if action.kind == "W":
            nodes, later = self.later.pop((stage, micro))
            self._add_all(nodes, later.run())
        else:
            ran = self.ran.pop((stage, micro))
            for pending in ran.sends:
                pending.wait()
            came = {n: t for n, t in (ran.came | ran.taken).items() if t.requires_grad}
            found = self._differentiate(action, list(self._pulls(stage, micro, ran)), list(came.values()))
            for (node, leaf), grad in zip(came.items(), found, strict=True):
                if node in ran.came:
                    self.post.send_back(node, micro, torch.zeros_like(leaf) if grad is None else grad)
                elif grad is not None:
                    whole = self.grads.setdefault(node, torch.zeros_like(self.inputs[node]))
                    self._part(node, whole, micro).add_(grad)
        if self.pipeline.sync.on and action == self.parts.last_backward(self.pipeline.order, stage):
            self.sums.start(self.parts.buckets[stage], self.grads)

    def _pulls(self, stage: int, micro: int, ran: _Ran) -> Iterator[tuple[Tensor, Tensor]]:
        """The outputs of a stage with their cotangents."""
        total: dict[fx.Node, Tensor] = {}
        for t in self.parts.outgoing[stage]:
            if self._flows(t):
                source, grad = t.all_input_nodes[0], self.post.receive_back(t, micro)
                total[source] = total[source] + grad if source in total else grad
        for node in self.parts.wanted[stage]:
            seed = self.cotangents.pop((node, micro), None)
            if seed is not None:
                total[node] = total[node] + seed if node in total else seed
        yield from ((ran.outs[node], grad) for node, grad in total.items() if node in ran.outs)

    def _differentiate(
        self, action: Action, pulls: Sequence[tuple[Tensor, Tensor]], came: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """The gradients of what came in; those of the weights are added up, now or in a later action."""
        trained = [
            n for n in self.parts.stages[action.stage].inputs if n in self.leaves and self.leaves[n].requires_grad
        ]
        weights = [self.leaves[n] for n in trained]
        ys, cs = [y for y, _ in pulls], [c for _, c in pulls]
        if action.kind == "I":
            found, later = first_phase(ys, cs, came, weights) if pulls else ([None] * len(came), Later(weights=weights))
            self.later[action.stage, action.micro] = trained, later
            return found
        leaves = [*came, *weights]
        grads = torch.autograd.grad(ys, leaves, cs, allow_unused=True) if pulls and leaves else [None] * len(leaves)
        self._add_all(trained, grads[len(came) :])
        return grads[: len(came)]

    # gradients

    def _add(self, node: fx.Node, grad: Tensor) -> None:
        self.grads[node] = self.grads[node] + grad if node in self.grads else grad

    def _add_all(self, nodes: Sequence[fx.Node], grads: Sequence[Tensor | None]) -> None:
        for node, grad in zip(nodes, grads, strict=True):
            if grad is not None:
                self._add(node, grad)

    # results

    def outputs(self) -> list[Tensor]:
        """The outputs of all micro-batches together, on every rank of the pipeline."""
        return [
            self.inputs[n].view_as(self.inputs[n]) if n in self.inputs else self._output(n)
            for n in self.program.outputs()
        ]

    def _output(self, node: fx.Node) -> Tensor:
        mine = self.stages.coordinate(int(node.meta.get("stage", 0))) == self.pipeline.me
        value = self._whole(node) if mine else None
        if value is None or self.stages.pipe > 1:
            return self.post.share(node, value, self.parts.output_tag)
        return value

    def _whole(self, node: fx.Node) -> Tensor:
        dim = layout_of(node).dim("data")
        if node.meta.get("after") or self.micro == 1 or dim is None:
            return self.values[node, 0].detach()
        return torch.cat([self.values[node, i].detach() for i in range(self.micro)], dim)

    def gradients(self) -> list[Tensor | None]:
        """Of the trained state, then of the inputs."""
        found = [
            self._gradient(n, self.state[n], self.pipeline.cut) for n in self.trained
        ]  # a whole state is everybody's
        return found + [self._gradient(n, x, True) if self.needs[n] else None for n, x in self.inputs.items()]

    def _gradient(self, node: fx.Node, like: Tensor, shared: bool) -> Tensor | None:
        grad = self.grads.get(node)
        if not shared or self.stages.pipe == 1:
            return grad
        return self.post.sum_over_stages(torch.zeros_like(like) if grad is None else grad)
