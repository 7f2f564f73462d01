"""Summing the gradients of a pipeline's stages over the ranks that share the parameters: once a step, for all micro-batches."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, fx

from halofx.compiler.emit import label_of
from halofx.compiler.facts import axes_of, sources_of
from halofx.compiler.stages import Stages
from halofx.runtime.comm import Comm
from halofx.runtime.comm.base import Pending

Grads = dict[fx.Node, Tensor]
"""The gradients of a step, by placeholder."""


class Sums:
    """The all-reduces of a rank's buckets: started when a stage's last backward action is done, awaited at the end."""

    def __init__(self, comm: Comm, stages: Stages) -> None:
        self.comm, self.mesh = comm, stages.mesh
        self.held: Grads = {}  # kept back by no_sync
        self.under_way: list[tuple[list[fx.Node], Pending, Tensor]] = []

    def start(self, buckets: Iterable[fx.Node], grads: Grads) -> None:
        """Start to sum the gradients of the parameters of some buckets (`vary_all` nodes), with those kept back."""
        for bucket in buckets:
            for node in sources_of(bucket):
                if node in self.held:
                    kept = self.held.pop(node)
                    grads[node] = grads[node] + kept if node in grads else kept
            nodes = [n for n in sources_of(bucket) if n in grads]
            flat = torch.cat([grads[n].reshape(-1) for n in nodes]) if nodes else torch.empty(0)
            group = self.mesh.group(self.comm.rank, axes_of(bucket))
            self.under_way.append((nodes, self.comm.start_all_reduce(flat, group, "sum", label_of(bucket)), flat))

    def wait(self, grads: Grads) -> None:
        """Put the sums in the places of the gradients."""
        for nodes, pending, flat in self.under_way:
            pending.wait()
            for node, part in zip(nodes, flat.split([grads[n].numel() for n in nodes]), strict=True):
                grads[node] = part.view(grads[node].shape)
        self.under_way.clear()

    def keep_back(self, buckets: Iterable[fx.Node], grads: Grads) -> None:
        """Take the gradients of the parameters of some buckets out, to be summed with those of a later step."""
        for node in (n for bucket in buckets for n in sources_of(bucket) if n in grads):
            kept, grad = self.held.get(node), grads.pop(node)
            self.held[node] = grad if kept is None else kept + grad
