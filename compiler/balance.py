"""What each stage of a pipeline computes and keeps: how even the cut is, and how much memory the schedule asks for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from halofx.compiler.cost import human, kept_by, seconds
from halofx.compiler.facts import bound_of, is_op, layout_of, shape_of, val
from halofx.compiler.program import Program
from halofx.compiler.stages import Action


@dataclass
class StageCost:
    """One stage: its ops, seconds [of one micro-batch, forward and backward, predicted], flops [whole batch], bytes."""

    stage: int
    ops: int = 0
    seconds: float = 0.0
    flops: int = 0
    parameters: int = 0  # on a rank
    kept: int = 0  # for backward, of one micro-batch on the fullest rank
    alive: int = 1  # the most micro-batches that are between forward and backward

    def line(self, total: float) -> str:
        """``stage 0: 34 ops, 50.3 % of the time, parameters 3.1 MiB, kept 12.0 MiB x 3 micro-batches``."""
        share = self.seconds / total if total else 0.0
        return (
            f"stage {self.stage}: {self.ops} ops, {share:.1%} of the time, parameters {human(self.parameters)}, "
            f"kept {human(self.kept)} x {self.alive} micro-batch{'es' * (self.alive > 1)}"
        )


def stage_costs(program: Program) -> list[StageCost]:
    """The stages of a program; one where it has no pipeline."""
    stages = program.stages
    found = [StageCost(s) for s in range(stages.count if stages is not None else 1)]
    for node in program.graph.nodes:
        cost = found[int(node.meta.get("stage", 0))]
        if is_op(node):
            spec = bound_of(node).spec
            cost.ops += 1
            cost.seconds += seconds(node, program.mesh)
            cost.flops += spec.flops or 0 if spec is not None else 0
        if "state" in node.meta:
            local = layout_of(node).local_shape(shape_of(node), program.mesh, 0)
            cost.parameters += math.prod(local) * val(node).element_size()
    for node, size in kept_by(program):
        found[int(node.meta.get("stage", 0))].kept += size
    if stages is not None:
        for row in stages.orders():
            for stage, alive in _alive(row):
                found[stage].alive = max(found[stage].alive, alive)
    return found


def _alive(row: tuple[Action, ...]) -> Iterator[tuple[int, int]]:
    """(stage, micro-batches that wait for their backward) after every action."""
    count: dict[int, int] = {}
    for action in row:
        if action.kind != "I":
            count[action.stage] = count.get(action.stage, 0) + (1 if action.kind == "F" else -1)
        yield action.stage, count.get(action.stage, 0)


def imbalance(costs: list[StageCost]) -> float:
    """How much longer the slowest stage takes than the mean: 0 is even."""
    mean = sum(c.seconds for c in costs) / len(costs)
    return max(c.seconds for c in costs) / mean - 1 if mean else 0.0


def fullest(program: Program) -> tuple[int, int]:
    """(bytes kept for backward, bytes of parameters) on the rank that has most of them."""
    costs, stages = stage_costs(program), program.stages
    ranks: dict[int, list[StageCost]] = {}
    for cost in costs:
        ranks.setdefault(stages.coordinate(cost.stage) if stages is not None else 0, []).append(cost)
    return (
        max(sum(c.kept * c.alive for c in own) for own in ranks.values()),
        max(sum(c.parameters for c in own) for own in ranks.values()),
    )
