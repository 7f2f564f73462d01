"""What runs once, after all micro-batches: from the sums of their addends to the loss, and the cotangents of the addends.

Where the schedule begins backward before all of forward is done, the cotangents are needed before the sums: what runs after is
linear in the sums that the model makes (`halofx.passes.split_micro`), so any value will do for them; what depends on the inputs
alone (how many voxels count) is computed before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from halofx.compiler.facts import calls
from halofx.compiler.primitives import all_reduce
from halofx.runtime.executor import Part
from halofx.runtime.movement import merge_moments


@dataclass
class After:
    """The part after of one step: its graph, what goes in, and what came out."""

    part: Part
    module: fx.GraphModule
    sources: tuple[fx.Node, ...]  # what the stages make, of its inputs
    leaves: list[Tensor] = field(default_factory=list)
    made: list[Tensor] = field(default_factory=list)

    def sums(
        self, values: Mapping[tuple[fx.Node, int], Tensor], micro: int, empty: Callable[[fx.Node], Tensor]
    ) -> list[Tensor]:
        """Of each source the sum over the micro-batches; zeros where nothing is known."""
        found = []
        for node in self.sources:
            own = [values[node, i].detach() for i in range(micro) if (node, i) in values]
            kind = _kind(node)
            if not own:
                found.append(torch.zeros_like(empty(node)))
            else:
                found.append(own[-1] if kind is None else _combined(own, kind))
        return found

    def run(self, sums: Sequence[Tensor], state: Callable[[fx.Node], Tensor]) -> dict[fx.Node, Tensor]:
        """Run it; the results by node."""
        grad = torch.is_grad_enabled()
        self.leaves = [t.requires_grad_(grad and (t.is_floating_point() or t.is_complex())) for t in sums]
        at = dict(zip(self.sources, self.leaves, strict=True))
        self.made = list(self.module(*(at[n] if n in at else state(n) for n in self.part.inputs)))
        return dict(zip(self.part.outputs, self.made, strict=True))

    def backward(self, cotangents: Mapping[fx.Node, Tensor], state: Mapping[fx.Node, Tensor]) -> dict[fx.Node, Tensor]:
        """The cotangents of the sources, and of the state used here, from those of the results."""
        pairs = zip(self.part.outputs, self.made, strict=True)
        pulls = [(y, cotangents[n]) for n, y in pairs if n in cotangents and y.requires_grad]
        wanted = [(n, t) for n, t in zip(self.sources, self.leaves, strict=True) if t.requires_grad]
        wanted += [(n, state[n]) for n in self.part.inputs if n in state and state[n].requires_grad]
        if not pulls or not wanted:
            return {}
        ys, cs = zip(*pulls, strict=True)
        found = torch.autograd.grad(ys, [t for _, t in wanted], cs, allow_unused=True)
        return {n: g for (n, _), g in zip(wanted, found, strict=True) if g is not None}


def is_addend(node: fx.Node) -> bool:
    """Whether a source is summed over the micro-batches, rather than the same for all of them."""
    return _kind(node) is not None


def _kind(node: fx.Node) -> str | None:
    kinds = [str(user.args[2]) for user in node.users if calls(user, all_reduce) and user.meta.get("after")]
    return kinds[0] if kinds else None


def _combined(values: Sequence[Tensor], kind: str) -> Tensor:
    """The addends of all micro-batches as one."""
    stacked = torch.stack(list(values))
    if kind == "moments":
        return merge_moments(stacked)
    if kind == "sum":
        return stacked.sum(0)
    return stacked.amax(0) if kind == "max" else stacked.amin(0)
