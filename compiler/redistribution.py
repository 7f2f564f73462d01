"""The one movement: have-intervals -> need-indices along one axis of the mesh.

    have   |--- 0 ---|--- 1 ---|--- 2 ---|          blocks(n, 3), one a coordinate
    need   |--- 0 -----|                            what coordinate 0 reads
                 |----- 1 -------|                  what coordinate 1 reads
                           |--- 2 ---|

A piece is ``have[src] & need[dst]``. Whether the movement is a local slice, a halo exchange, an all-gather or an
all-to-all is read off the pieces, never decided. The adjoint is the same table with its ends swapped, adding; a side on
which all ranks hold the same copy (whole) has the same cotangent on all ranks, which decides who sends back to whom:

    have       need       forward                    adjoint
    split      split      exchange                   exchange back, adding
    split      whole      all-gather                 every rank keeps its own block (no message)
    whole      split      local slice                all-gather, adding
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from halofx.compiler.index_map import Indices, Run, length, span
from halofx.compiler.interval import Interval, blocks

Box = tuple[tuple[int, Run], ...]
"""Where a piece lies in a shard: a run of indices for each of some dims; the other dims are taken whole."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One piece of one message: ``take`` it from the sender's tensor, ``put`` it into the receiver's."""

    peer: int
    take: Box
    put: Box


@dataclass(frozen=True)
class Table:
    """All that one coordinate does in one direction of a movement. Peers are coordinates on the axis."""

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    local: tuple[Transfer, ...]
    sizes: tuple[tuple[int, int], ...]  # (dim, extent) of the result where it differs from the input
    add: bool  # pieces may overlap: add them up instead of writing them
    fill: float


def spread(axis: str, parts: int, dim: int, extent: int) -> Redistribution:
    """The movement of a split dim to all ranks, where each will use it differently; its adjoint is a reduce-scatter."""
    return Redistribution(axis, parts, dim, dim, extent, extent, (span(Interval(0, extent)),) * parts)


@dataclass(frozen=True)
class Redistribution:
    """A movement along ``axis``, over which ``parts`` ranks lie.

    ``have`` is the dim held in blocks before (None: whole on every rank), ``need`` the dim that differs between ranks
    afterwards (None: every rank gets the same). ``reads[c]`` are the indices that coordinate ``c`` wants of that dim
    (of ``have`` when ``need`` is None). The extents are global; the one of an absent dim is 0.
    """

    axis: str
    parts: int
    have: int | None
    need: int | None
    have_extent: int
    need_extent: int
    reads: tuple[Indices, ...]
    fill: float = 0.0

    @property
    def dim(self) -> int:
        """The dim that ``reads`` are about."""
        dim = self.need if self.need is not None else self.have
        assert dim is not None
        return dim

    @property
    def extent(self) -> int:
        """The global extent of the dim that ``reads`` are about."""
        return self.need_extent if self.need is not None else self.have_extent

    @cached_property
    def canonical(self) -> bool:
        """Whether every rank gets its canonical block of ``need`` (or all of ``have``) and nothing else."""
        if self.need is None:
            return self.reads[0] == span(Interval(0, self.extent))
        return all(r == span(b) for r, b in zip(self.reads, blocks(self.extent, self.parts), strict=True))

    def pieces(self, src: int, dst: int) -> Iterator[tuple[Box, Box]]:
        """(where in the shard of ``src``, where in the result of ``dst``) for every piece between two coordinates."""
        if self.have is None and src != dst:
            return
        held = None if self.have is None else blocks(self.have_extent, self.parts)[src]
        same = self.have is None or self.have == self.dim
        position = 0
        for run in self.reads[dst]:
            inside = run.within(held) if held is not None and same else (0, run)
            if inside is not None and inside[1].start is not None and inside[1].count:
                offset, local = inside
                put: Box = ((self.dim, Run(position + offset, local.count)),)
                if not same and held is not None and self.have is not None:
                    if not held:
                        return
                    put += ((self.have, Run(held.start, len(held))),)
                yield ((self.dim, local),), put
            position += run.count

    def forward(self, me: int) -> Table:
        """What coordinate ``me`` does when the movement runs."""
        local = tuple(Transfer(me, take, put) for take, put in self.pieces(me, me))
        others = [c for c in range(self.parts) if c != me] if self.have is not None else []
        sends = tuple(Transfer(c, take, put) for c in others for take, put in self.pieces(me, c))
        receives = tuple(Transfer(c, take, put) for c in others for take, put in self.pieces(c, me))
        sizes = {self.dim: length(self.reads[me])}
        if self.have is not None and self.have != self.dim:
            sizes[self.have] = self.have_extent
        return Table(sends, receives, local, tuple(sizes.items()), False, self.fill)

    def backward(self, me: int) -> Table:
        """What coordinate ``me`` does when cotangents flow back: the ends swapped, adding."""
        local = tuple(Transfer(me, put, take) for take, put in self.pieces(me, me))
        others = [c for c in range(self.parts) if c != me] if self.need is not None else []
        if self.have is None:  # every rank held a copy: all of them get all cotangents
            sends = tuple(Transfer(c, put, take) for c in others for take, put in self.pieces(me, me))
            receives = tuple(Transfer(c, put, take) for c in others for take, put in self.pieces(c, c))
        else:
            sends = tuple(Transfer(c, put, take) for c in others for take, put in self.pieces(c, me))
            receives = tuple(Transfer(c, put, take) for c in others for take, put in self.pieces(me, c))
        return Table(sends, receives, local, self._sizes_before(me), True, 0.0)

    def _sizes_before(self, me: int) -> tuple[tuple[int, int], ...]:
        if self.have is None:
            return ((self.dim, self.need_extent),)
        held = (self.have, len(blocks(self.have_extent, self.parts)[me]))
        return (held,) if self.have == self.dim else (held, (self.dim, self.need_extent))

    @cached_property
    def traffic(self) -> tuple[int, int, int, int]:
        """(messages, elements) of the forward pass and of the backward pass, over all coordinates; elements count the
        moved dims only. Grouped by equal reads, so that an all-gather over many ranks is counted once."""
        groups: dict[Indices, list[int]] = {}
        for c, read in enumerate(self.reads):
            groups.setdefault(read, []).append(c)
        if self.have is None:
            kept = [(len(cs), sum(r.count for r in read if r.start is not None)) for read, cs in groups.items()]
            others = self.parts - 1
            return 0, 0, sum(n for n, size in kept if size) * others, sum(n * size for n, size in kept) * others
        pairs = elements = 0
        for read, readers in groups.items():
            for src, size in self._sources(read).items():
                receivers = len(readers) - (src in readers)
                pairs, elements = pairs + receivers, elements + receivers * size
        return (pairs, elements, 0, 0) if self.need is None else (pairs, elements, pairs, elements)

    def _sources(self, read: Indices) -> dict[int, int]:
        """Which coordinates hold what ``read`` asks for, and how many elements of the moved dims each gives."""
        held = blocks(self.have_extent, self.parts)
        if self.have != self.dim:
            size = sum(run.count for run in read if run.start is not None)
            return {c: len(b) * size for c, b in enumerate(held) if len(b) * size}
        starts, found = [b.start for b in held if b], dict[int, int]()
        for run in read:
            if run.start is None:
                continue
            ends = sorted((run.start, run.start + (run.count - 1) * run.step))
            for c in range(bisect_right(starts, ends[0]) - 1, bisect_right(starts, ends[1])):
                inside = run.within(held[c])
                if inside is not None:
                    found[c] = found.get(c, 0) + inside[1].count
        return found

    @cached_property
    def spreads(self) -> bool:
        """Whether every rank gets all of a split dim, each a copy of its own: cotangents of it are added up in blocks."""
        everything = span(Interval(0, self.need_extent))
        return self.have is not None and self.have == self.need and all(read == everything for read in self.reads)

    @cached_property
    def kind(self) -> str:
        """What the movement amounts to, read off its pieces."""
        if self.have is None:
            return "local_slice"
        if self.need is None:
            return "all_gather" if self.canonical else "broadcast_slice"
        if self.spreads:
            return "all_gather"
        if self.have != self.need:
            return "all_to_all"
        if not self.traffic[0]:
            return "local_slice"
        return "halo_exchange" if self._keeps_core() else "exchange"

    def _keeps_core(self) -> bool:
        """Whether every rank reads all of its own block, once and in order: what comes from elsewhere is a halo."""
        return all(
            any(run.step == 1 and run.within(b) == (max(0, b.start - (run.start or 0)), Run(0, len(b))) for run in read)
            for read, b in zip(self.reads, blocks(self.extent, self.parts), strict=True)
            if b
        )

    def halo(self) -> tuple[int, int]:
        """The widest lower and upper margin that a rank gets around its own block, fill counted."""
        lo = hi = 0
        for read, b in zip(self.reads, blocks(self.extent, self.parts), strict=True):
            position = 0
            for run in read:
                inside = run.within(b)
                if b and inside is not None and inside[1] == Run(0, len(b)):
                    start = position + inside[0]
                    lo, hi = max(lo, start), max(hi, length(read) - start - len(b))
                    break
                position += run.count
        return lo, hi
