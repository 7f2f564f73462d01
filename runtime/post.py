"""The messages between the stages of a pipeline: every value straight to the stages that use it, every cotangent straight back.

A send is started and not waited for until its buffer has to go, so that no order of actions can make two ranks wait for each
other. A stage on the same rank gets the value itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx

from halofx.compiler.emit import label_of
from halofx.compiler.facts import ends_of, layout_of, shape_of, source_of, val
from halofx.compiler.localize import shard_shape
from halofx.compiler.program import Program
from halofx.compiler.stages import Stages
from halofx.runtime.comm import Comm
from halofx.runtime.comm.base import DONE, Pending


class Post:
    """One rank's messages to and from other stages, in one step."""

    def __init__(
        self, program: Program, stages: Stages, comm: Comm, device: torch.device, tags: Mapping[fx.Node, int]
    ) -> None:
        self.program, self.stages, self.comm, self.device, self.tags = program, stages, comm, device, tags
        self.here: dict[tuple[fx.Node, int, bool], Tensor] = {}  # between stages of this rank
        self.under_way: list[Pending] = []

    def peer(self, stage: int) -> int:
        """The rank that plays this rank's part in another stage."""
        return self.stages.mesh.peer(self.comm.rank, "pipe", self.stages.coordinate(stage))

    def send(self, transfers: Sequence[fx.Node], micro: int, outs: Mapping[fx.Node, Tensor]) -> list[Pending]:
        """Give away what other stages use of a micro-batch."""
        return [self._put(t, micro, outs[source_of(t)].detach(), back=False) for t in transfers]

    def send_back(self, transfer: fx.Node, micro: int, grad: Tensor) -> None:
        """Give back the cotangent of what came in."""
        self.under_way.append(self._put(transfer, micro, grad, back=True))

    def receive(self, transfer: fx.Node, micro: int) -> Tensor:
        """What another stage has made of a micro-batch, as this rank's shard."""
        return self._get(transfer, micro, back=False)

    def receive_back(self, transfer: fx.Node, micro: int) -> Tensor:
        """The cotangent of what this stage gave away."""
        return self._get(transfer, micro, back=True)

    def _put(self, t: fx.Node, micro: int, value: Tensor, back: bool) -> Pending:
        peer = self.peer(ends_of(t)[0 if back else 1])
        if peer == self.comm.rank:
            self.here[t, micro, back] = value
            return DONE
        return self.comm.start_exchange([(peer, value.contiguous())], [], self.tags[t] + back, _what(t, back))

    def _get(self, t: fx.Node, micro: int, back: bool) -> Tensor:
        peer = self.peer(ends_of(t)[1 if back else 0])
        if peer == self.comm.rank:
            return self.here.pop((t, micro, back)).detach()
        value = self.empty(t, micro)
        self.comm.start_exchange([], [(peer, value)], self.tags[t] + back, _what(t, back)).wait()
        return value

    def empty(self, node: fx.Node, micro: int) -> Tensor:
        """A tensor like this rank's shard of a value."""
        shape = shard_shape(self.program, node, self.stages.virtual(self.comm.rank, micro))
        return torch.empty(shape, dtype=val(node).dtype, device=self.device)

    def share(self, node: fx.Node, value: Tensor | None, tag: int) -> Tensor:
        """An output, from the stage that made it, on every rank of the pipeline."""
        mesh, owner = self.stages.mesh, self.stages.coordinate(int(node.meta.get("stage", 0)))
        peers = [mesh.peer(self.comm.rank, "pipe", c) for c in range(self.stages.pipe) if c != owner]
        what = f"{label_of(node)} (to all stages)"
        if value is not None:
            value = value.contiguous()
            self.comm.start_exchange([(p, value) for p in peers], [], tag, what).wait()
            return value
        value = torch.empty(
            layout_of(node).local_shape(shape_of(node), mesh, self.comm.rank), dtype=val(node).dtype, device=self.device
        )
        self.comm.start_exchange([], [(mesh.peer(self.comm.rank, "pipe", owner), value)], tag, what).wait()
        return value

    def sum_over_stages(self, grad: Tensor) -> Tensor:
        """The sum of what all stages have."""
        grad = grad.contiguous().clone()
        group = self.stages.mesh.group(self.comm.rank, ("pipe",))
        self.comm.start_all_reduce(grad, group, "sum", "the gradients of all stages").wait()
        return grad

    def wait(self) -> None:
        """Wait for all sends."""
        for pending in self.under_way:
            pending.wait()
        self.under_way.clear()


def _what(t: fx.Node, back: bool) -> str:
    return f"{label_of(t)} (backward)" if back else label_of(t)
