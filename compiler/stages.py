"""Pipeline stages: which rank runs which part of the graph, for which micro-batch, in which order.

    mesh pipe=2 data=2 depth=2, 4 micro-batches           the mesh of a stage: data=2x4 depth=2

    world rank 5 = pipe 1, data 0, depth 1                runs stage 1 of micro-batches 0 .. 3 of its samples:
                                                          coordinates data 0 .. 3, depth 1 of the stage's mesh

A micro-batch is a coordinate of axis ``data`` that one rank plays after another in time, so that layouts, local forms and
random numbers of a micro-batch are those of a rank that has only these samples. Passes see the mesh of a stage alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Literal

from torch import nn

from halofx.compiler.errors import MeshError
from halofx.compiler.mesh import Mesh

Kind = Literal["F", "B", "I", "W"]
"""Forward, backward; or backward in two: of what came in (I), and of the weights (W)."""

SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
}
"""The schedules of torch.distributed.pipelining by our names."""

LOOPED = {"interleaved": 2, "zero-bubble": 2, "zbv": 2}
"""Stages that a rank has under a schedule, where it has more than one."""


@dataclass(frozen=True)
class Action:
    """One step of one rank of the pipeline."""

    kind: Kind
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}"


@dataclass(frozen=True)
class Stages:
    """How a program is spread over axis ``pipe`` and over time; ``mesh`` is that of the world."""

    mesh: Mesh
    micro: int = 1
    schedule: str = "gpipe"

    @property
    def pipe(self) -> int:
        """The ranks of the pipeline."""
        return self.mesh["pipe"]

    @property
    def count(self) -> int:
        """The stages."""
        return self.pipe * LOOPED.get(self.schedule, 1)

    @property
    def inner(self) -> Mesh:
        """The mesh of one stage, on which micro-batches are coordinates of ``data``."""
        return self.mesh.within(self.micro)

    def coordinate(self, stage: int) -> int:
        """The coordinate on axis ``pipe`` that runs a stage."""
        turn, place = divmod(stage, self.pipe)
        return self.pipe - 1 - place if self.schedule == "zbv" and turn % 2 else place

    def own(self, coordinate: int) -> tuple[int, ...]:
        """The stages of a coordinate on axis ``pipe``."""
        return tuple(s for s in range(self.count) if self.coordinate(s) == coordinate)

    def virtual(self, rank: int, micro: int) -> int:
        """The rank of the stage's mesh that a world rank plays for a micro-batch."""
        coordinates = self.mesh.coordinates(rank)
        return self.inner.rank({**coordinates, "data": coordinates.get("data", 0) * self.micro + micro})

    def world(self, virtual: int, coordinate: int) -> int:
        """The world rank that plays a rank of the stage's mesh at a coordinate on axis ``pipe``."""
        coordinates = self.inner.coordinates(virtual)
        coordinates["data"] = coordinates.get("data", 0) // self.micro
        return self.mesh.rank({**coordinates, "pipe": coordinate})

    def orders(self) -> tuple[tuple[Action, ...], ...]:
        """The actions of every coordinate on axis ``pipe``, in order."""
        return orders(self.schedule, self.pipe, self.count, self.micro)

    def grid(self) -> str:
        """The schedule as a picture: one line a coordinate, one column a step."""
        return grid(self.orders())


@lru_cache(maxsize=256)
def orders(schedule: str, pipe: int, stages: int, micro: int) -> tuple[tuple[Action, ...], ...]:
    """The order of actions by torch.distributed.pipelining.

    Where that asks for more micro-batches than there are (1F1B wants one a stage), it is the order for as many as it wants,
    with those left out that do not exist.

    >>> print(grid(orders("1f1b", 2, 2, 3)))
    0F0 0F1  .  0B0 0F2 0B1  .  0B2
     .  1F0 1B0 1F1 1B1 1F2 1B2  .
    """
    asked = max(micro, pipe)
    while True:
        try:
            table = _torch_orders(schedule, pipe, stages, asked)
            break
        except ValueError:
            asked += 1
            if asked > micro + 4 * pipe * pipe:
                raise
    return tuple(tuple(a for a in row if a.micro < micro) for row in table)


def _torch_orders(schedule: str, pipe: int, stages: int, micro: int) -> list[list[Action]]:
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

    kind = get_schedule_class(SCHEDULES[schedule])
    stand_in = [_stand_in(i, pipe, stages) for i in range(stages // pipe)]
    given: Any = stand_in if issubclass(kind, PipelineScheduleMulti) else stand_in[0]
    made: Any = kind(given, micro, loss_fn=lambda *_: None)
    rows = ([_action(a) for a in made.pipeline_order[rank] if a is not None and _computes(a)] for rank in range(pipe))
    return [_from_zero(row) for row in rows]


def _from_zero(row: list[Action]) -> list[Action]:
    """Forward steps counted from 0: the table of Schedule1F1B (torch 2.13) counts those of the last rank from 1."""
    first = min(a.micro for a in row if a.kind == "F")
    return [Action(a.kind, a.stage, a.micro - first) if a.kind == "F" else a for a in row]


def _stand_in(index: int, pipe: int, stages: int) -> Any:
    """What a schedule wants to know of a stage before it runs."""
    return SimpleNamespace(
        stage_index=index * pipe, num_stages=stages, group_size=pipe, group_rank=0, group=None, has_backward=True,
        is_first=index == 0, is_last=False, submod=nn.Identity(), stage_index_to_group_rank={},
    )  # fmt: skip


_KINDS: Mapping[str, Kind] = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def _computes(action: Any) -> bool:
    return action.computation_type.name in _KINDS


def _action(action: Any) -> Action:
    return Action(_KINDS[action.computation_type.name], action.stage_index, action.microbatch_index)


def grid(table: Sequence[Sequence[Action]]) -> str:
    """When every action can run, if each takes one step and messages none."""
    done: dict[tuple[Kind, int, int], int] = {}
    last = max((a.stage for row in table for a in row), default=0)
    lines: list[list[str]] = [[] for _ in table]
    left = [list(row) for row in table]
    step = 0
    while any(left):
        ready = [row[0] if row and _ready(row[0], done, last, step) else None for row in left]
        if not any(ready):
            raise MeshError(f"the schedule waits for itself after step {step}: {[str(r[0]) for r in left if r]}")
        for line, row, action in zip(lines, left, ready, strict=True):
            line.append(str(action) if action else ".")
            if action:
                row.pop(0)
                done[action.kind, action.stage, action.micro] = step
        step += 1
    width = max(len(cell) for line in lines for cell in line)
    return "\n".join(" ".join(f"{cell:^{width}}" for cell in line).rstrip() for line in lines)


def _ready(action: Action, done: Mapping[tuple[Kind, int, int], int], last: int, step: int) -> bool:
    """Whether what an action waits for was done in an earlier step."""
    s, m = action.stage, action.micro
    if action.kind == "F":
        return s == 0 or done.get(("F", s - 1, m), step) < step
    if action.kind == "W":
        return done.get(("I", s, m), step) < step
    before = [done.get((kind, s + 1, m), step) for kind in ("B", "I")] if s < last else [done.get(("F", s, m), step)]
    return min(before) < step and done.get(("F", s, m), step) < step


def of(mesh: Mesh, micro: int, schedule: str) -> Stages:
    """The stages of a mesh; raises `MeshError` for a schedule that does not exist and `ValueError` for ``micro`` below 1."""
    if schedule not in SCHEDULES:
        raise MeshError(f"schedule={schedule!r} is none of {', '.join(SCHEDULES)}")
    if micro < 1:
        raise MeshError(f"microbatches={micro} must be at least 1")
    return Stages(mesh, micro, schedule)
