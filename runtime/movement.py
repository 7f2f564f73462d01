"""The movements as autograd operators: redistribution, all-reduce, vary. Each is linear, and its adjoint is another of them,
so any order of derivative runs the same code.

Faces are packed contiguous into one flat message a peer; tensors keep their memory format.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from halofx.compiler.redistribution import Box, Redistribution, Table, Transfer
from halofx.runtime.checkpoint import taped
from halofx.runtime.comm.base import Comm
from halofx.runtime.recall import active


@dataclass(frozen=True)
class Site:
    """Where a message belongs: the transport, the node's label and a tag that is the same on all ranks."""

    comm: Comm
    what: str
    tag: int = 0


@dataclass(frozen=True)
class Route:
    """One direction of a movement on one rank: what to do (peers as ranks), and the route of its adjoint."""

    table: Table
    site: Site
    forward: bool
    links: dict[bool, Route] = field(default_factory=dict, compare=False, repr=False)

    @property
    def adjoint(self) -> Route:
        """The route that cotangents take."""
        return self.links[not self.forward]


def routes(plan: Redistribution, coordinate: int, peers: Sequence[int], site: Site) -> Route:
    """The forward route of a movement at a coordinate; ``peers[c]`` is the rank at coordinate ``c`` of the axis."""

    def ranked(table: Table) -> Table:
        sends, receives = (
            tuple(Transfer(peers[t.peer], t.take, t.put) for t in transfers)
            for transfers in (table.sends, table.receives)
        )
        return Table(sends, receives, table.local, table.sizes, table.add, table.fill)

    links: dict[bool, Route] = {}
    links[True] = Route(ranked(plan.forward(coordinate)), site, True, links)
    back = Site(site.comm, f"{site.what} (backward)", site.tag + 1)
    links[False] = Route(ranked(plan.backward(coordinate)), back, False, links)
    return links[True]


class Move(nn.Module):
    """A movement bound to one rank."""

    def __init__(self, route: Route) -> None:
        super().__init__()
        self.route = route

    def forward(self, x: Tensor) -> Tensor:
        """The shard [..] as this rank needs it."""
        arrived: Arrived = {}
        moved: Tensor = _Move.apply(x, self.route, arrived)  # type: ignore[no-untyped-call]
        recall = active()
        if recall is not None:
            recall.note(moved, x, partial(assemble, self.route.table, self.route.site.comm.rank, arrived))
        return moved

    def extra_repr(self) -> str:
        return self.route.site.what


Arrived = dict[int, tuple[Tensor, list[Transfer]]]
"""Rank -> its message, and where the pieces of it go."""


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, route: Route, arrived: Arrived) -> Tensor:
        ctx.route = route
        return run(route.table, x, route.site, arrived)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Move.apply(grads[0], ctx.route.adjoint, {}), None, None  # type: ignore[no-untyped-call]


def _exchange(table: Table, x: Tensor, site: Site) -> Arrived:
    """Send and receive the pieces of one table."""
    shape, arrived = _shape_after(table, x), Arrived()
    sends = [(p, _pack(x, [t for t in table.sends if t.peer == p])) for p in dict.fromkeys(t.peer for t in table.sends)]
    for peer in dict.fromkeys(t.peer for t in table.receives):
        transfers = [t for t in table.receives if t.peer == peer]
        arrived[peer] = x.new_empty(sum(_numel(t.put, shape) for t in transfers)), transfers
    if sends or arrived:
        buffers = [(peer, flat) for peer, (flat, _) in arrived.items()]
        site.comm.start_exchange(sends, buffers, site.tag, site.what).wait()
    return arrived


def run(table: Table, x: Tensor, site: Site, arrived: Arrived) -> Tensor:
    """Send and receive the pieces of one table, and put them together; leaves the messages in ``arrived``."""
    arrived.update(taped(lambda: _exchange(table, x, site)))
    return assemble(table, site.comm.rank, arrived, x)


def assemble(table: Table, rank: int, arrived: Arrived, x: Tensor) -> Tensor:
    """The result of a movement from this rank's shard and the messages of the others."""
    out = _result(table, x, _shape_after(table, x))
    # Addends are summed in the order of the ranks, so that copies of one value get bitwise the same cotangent.
    for peer in sorted({*arrived, rank}):
        if peer == rank:
            _copy_local(out, table, x)
        else:
            flat, transfers = arrived[peer]
            _unpack(out, flat, transfers, table.add)
    return out


def _shape_after(table: Table, x: Tensor) -> list[int]:
    shape = list(x.shape)
    for dim, extent in table.sizes:
        shape[dim] = extent
    return shape


def _copy_local(out: Tensor, table: Table, x: Tensor) -> None:
    for t in table.local:
        _write(out, t.put, _read(x, t.take), table.add)


def _result(table: Table, x: Tensor, shape: list[int]) -> Tensor:
    """The result before any piece is in it; filled only where pieces do not cover it."""
    form = _memory_format(x)
    filled = 0 if table.add else sum(_numel(t.put, shape) for t in (*table.local, *table.receives))
    if table.add or filled < math.prod(shape):
        return torch.full(shape, table.fill, dtype=x.dtype, device=x.device).contiguous(memory_format=form)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=form)


def _memory_format(x: Tensor) -> torch.memory_format:
    if x.dim() == 5 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last_3d):
        return torch.channels_last_3d
    if x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return torch.contiguous_format


def _numel(box: Box, shape: Sequence[int]) -> int:
    sizes = list(shape)
    for dim, run_ in box:
        sizes[dim] = run_.count
    return math.prod(sizes)


def _read(x: Tensor, box: Box) -> Tensor:
    """The piece of ``x`` in a box: a view where the steps are positive, a copy otherwise."""
    for dim, r in box:
        start = r.start or 0
        if r.step > 0:
            x = x.narrow(dim, start, 1 + (r.count - 1) * r.step)
            x = x[(slice(None),) * dim + (slice(None, None, r.step),)] if r.step > 1 else x
        elif r.step < 0:
            low = start + (r.count - 1) * r.step
            x = x.narrow(dim, low, start - low + 1).flip(dim)
            x = x[(slice(None),) * dim + (slice(None, None, -r.step),)] if r.step < -1 else x
        else:
            x = x.narrow(dim, start, 1).expand(*x.shape[:dim], r.count, *x.shape[dim + 1 :])
    return x


def _write(out: Tensor, box: Box, piece: Tensor, add: bool) -> None:
    """Put (or add) a piece into a box; a run of step 0 is one index: its addends are summed first."""
    for dim, r in box:
        start = r.start or 0
        if r.step == 0:
            piece, out = piece.sum(dim, keepdim=True), out.narrow(dim, start, 1)
        else:
            low = min(start, start + (r.count - 1) * r.step)
            out = out.narrow(dim, low, 1 + (r.count - 1) * abs(r.step))
            out = out[(slice(None),) * dim + (slice(None, None, abs(r.step)),)] if abs(r.step) > 1 else out
            piece = piece.flip(dim) if r.step < 0 else piece
    out.add_(piece) if add else out.copy_(piece)


def _pack(x: Tensor, transfers: Sequence[Transfer]) -> Tensor:
    pieces = [_read(x, t.take).reshape(-1) for t in transfers]
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)


def _unpack(out: Tensor, flat: Tensor, transfers: Sequence[Transfer], add: bool) -> None:
    at = 0
    for t in transfers:
        shape = list(out.shape)
        for dim, r in t.put:
            shape[dim] = r.count
        count = math.prod(shape)
        _write(out, t.put, flat[at : at + count].view(shape), add)
        at += count


@dataclass(frozen=True)
class Group:
    """The ranks that one collective runs over."""

    site: Site
    ranks: tuple[int, ...]
    back: bool = False

    @property
    def adjoint(self) -> Group:
        """The same group, labeled as the backward of its node."""
        return self if self.back else Group(Site(self.site.comm, f"{self.site.what} (backward)"), self.ranks, True)


def _reduced(x: Tensor, group: Group, op: str) -> Tensor:
    out = x.contiguous().clone()
    group.site.comm.start_all_reduce(out, group.ranks, op, group.site.what).wait()
    return out


class _AllReduce(torch.autograd.Function):
    """Addends -> whole. All ranks get the same cotangent, which is that of every addend."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, op: str) -> Tensor:
        ctx.group, ctx.op = group, op
        out = taped(lambda: _reduced(x, group, op)).detach()  # the tape holds no graph
        if op != "sum":
            ctx.mark_non_differentiable(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Vary.apply(grads[0], ctx.group), None, None  # type: ignore[no-untyped-call]


class _Vary(torch.autograd.Function):
    """A whole value that shards use. Their cotangents add up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _AllReduce.apply(grads[0], ctx.group.adjoint, "sum"), None  # type: ignore[no-untyped-call]


class AllReduce(nn.Module):
    """An all-reduce bound to one rank; see `halofx.compiler.primitives.REDUCTIONS`."""

    def __init__(self, group: Group, reduce: str, row: int) -> None:
        super().__init__()
        self.group, self.reduce, self.row = group, reduce, row

    def forward(self, x: Tensor) -> Tensor:
        """The combination of all addends [..]."""
        if self.reduce == "moments":
            return merge_moments(self._rows(x))
        if x.dtype == torch.bool:
            return (_AllReduce.apply(x.to(torch.uint8), self.group, self.reduce)).bool()  # type: ignore[no-any-return,no-untyped-call]
        return _AllReduce.apply(x, self.group, self.reduce)  # type: ignore[no-any-return,no-untyped-call]

    def _rows(self, x: Tensor) -> Tensor:
        """Everyone's addends [R, ...], gathered by summing rows that are zero elsewhere: one collective."""
        rows = len(self.group.ranks)
        placed = torch.cat([x.new_zeros(self.row, *x.shape), x[None], x.new_zeros(rows - 1 - self.row, *x.shape)])
        return _AllReduce.apply(placed, self.group, "sum")  # type: ignore[no-any-return,no-untyped-call]

    def extra_repr(self) -> str:
        return f"{self.group.site.what}, ranks={self.group.ranks}"


def merge_moments(rows: Tensor) -> Tensor:
    """(count, mean, M2) of a union from those of its parts: [R, 3, ...] -> [3, ...].

    Chan, Golub, LeVeque, "Algorithms for computing the sample variance", 1983: exact for any counts, no cancellation.
    Means are taken relative to that of the largest part, so that parts of one constant have exactly that mean, and M2 = 0.
    """
    count, mean, m2 = rows.unbind(1)
    total = count.sum(0)
    share = count / total.clamp(min=1)
    near = mean.gather(0, count.argmax(0, keepdim=True)).detach()
    merged = near[0] + (share * (mean - near)).sum(0)
    return torch.stack([total, merged, (m2 + count * (mean - merged) ** 2).sum(0)])


class Vary(nn.Module):
    """`vary` bound to one rank."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """``x``."""
        return _Vary.apply(x, self.group)  # type: ignore[no-any-return,no-untyped-call]

    def extra_repr(self) -> str:
        return self.group.site.what
