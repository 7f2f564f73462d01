"""Cutting global tensors into shards and gathering them again."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from halofx.compiler.errors import RankError
from halofx.compiler.index_map import Indices, span
from halofx.compiler.interval import Interval, blocks
from halofx.compiler.layout import Layout
from halofx.compiler.mesh import Mesh
from halofx.compiler.redistribution import Redistribution
from halofx.runtime.comm import Comm
from halofx.runtime.movement import Move, Site, routes

GATHER_TAG = 30000
"""Tags of gathers lie above those of a program's movements (MPI guarantees tags up to 32767)."""


def slices(shape: Sequence[int], layout: Layout, mesh: Mesh, rank: int) -> tuple[slice, ...]:
    """Where a rank's shard lies in a global tensor of ``shape``."""
    found = []
    for n, axis in zip(shape, layout.split, strict=True):
        block = blocks(n, mesh[axis])[mesh.coordinate(rank, axis)] if axis else Interval(0, n)
        found.append(slice(block.start, block.stop))
    return tuple(found)


def take(x: Tensor, layout: Layout, mesh: Mesh, rank: int) -> Tensor:
    """A rank's shard of a global tensor, a copy that does not keep the global one alive (differentiable)."""
    part = x[slices(x.shape, layout, mesh, rank)]
    return x if part.shape == x.shape else part.clone()


def global_shape(shapes: Sequence[Sequence[int]], layout: Layout, mesh: Mesh, what: str) -> tuple[int, ...]:
    """The global shape of a tensor from the shapes of all shards; raises `RankError` when they do not fit together."""
    found = []
    for dim, axis in enumerate(layout.split):
        along = mesh.group(0, (axis,)) if axis else (0,)
        found.append(sum(shapes[r][dim] for r in along))
    for rank, shape in enumerate(shapes):
        expected = layout.local_shape(found, mesh, rank)
        if tuple(shape) != expected:
            raise RankError(
                f"{what}: the shards do not make one tensor: rank {rank} has {list(shape)}, a tensor "
                f"{layout.show(found)} would give it {list(expected)}; make shards with net.shard(x) or net.input_slices()"
            )
    return tuple(found)


def gather(y: Tensor, layout: Layout, shape: Sequence[int], mesh: Mesh, comm: Comm, dst: int | None = None) -> Tensor:
    """The global tensor from the shards: on every rank (differentiable), or with ``dst`` there alone (empty elsewhere)."""
    for i, axis in enumerate(a for a in mesh.axes if a in layout.split):
        dim, parts = layout.split.index(axis), mesh[axis]
        every: Indices = span(Interval(0, shape[dim]))
        wanted = None if dst is None else mesh.coordinate(dst, axis)
        reads = tuple(every if wanted in (None, c) else () for c in range(parts))
        need = None if dst is None else dim
        plan = Redistribution(axis, parts, dim, need, shape[dim], shape[dim] if need is not None else 0, reads)
        peers = [mesh.peer(comm.rank, axis, c) for c in range(parts)]
        site = Site(comm, "gather", GATHER_TAG + 2 * i)
        y = Move(routes(plan, mesh.coordinate(comm.rank, axis), peers, site))(y)
    return y
