r"""What one dim of one op reads: output interval -> input indices.

    conv k3 s2 p1        output        0     1     2     3
                                      /|\   /|\   /|\   /|\
                         input  fill 0 1 2 3 4 5 6 7  ...          o reads 2o-1 .. 2o+1

Indices are a tuple of runs (start, count, step), so that a halo, a crop, a flip, a roll, a stride and a replicated
border are one thing. Nothing outside the op rules knows what a stride is.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

from halofx.compiler.interval import Interval, Parts, blocks

Edge = Literal["fill", "clip", "replicate", "reflect", "circular"]


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` indices ``start, start + step, ...``; ``start=None`` is fill: indices outside the tensor."""

    start: int | None
    count: int
    step: int = 1

    def within(self, held: Interval) -> tuple[int, Run] | None:
        """The part of this run that lies in ``held``: its offset in the run, and the run in coordinates of ``held``.

        >>> Run(3, 4, 2).within(Interval(4, 8))
        (1, Run(start=1, count=2, step=2))
        """
        if self.start is None or self.count == 0:
            return None
        if self.step == 0:
            return (0, Run(self.start - held.start, self.count, 0)) if held.start <= self.start < held.stop else None
        near, far = (held.start, held.stop - 1) if self.step > 0 else (held.stop - 1, held.start)
        first = max(0, -((self.start - near) // self.step))
        last = min(self.count - 1, (far - self.start) // self.step)
        if last < first:
            return None
        return first, Run(self.start + first * self.step - held.start, last - first + 1, self.step)


Indices = tuple[Run, ...]


def length(indices: Indices) -> int:
    """How many indices the runs have together."""
    return sum(run.count for run in indices)


def span(interval: Interval) -> Indices:
    """The indices of an interval that lies inside the tensor."""
    return (Run(interval.start, len(interval)),) if interval else ()


def expand(indices: Indices) -> Iterator[int | None]:
    """The indices one by one, None for fill."""
    for run in indices:
        for i in range(run.count):
            yield None if run.start is None else run.start + i * run.step


def runs(indices: Iterable[int]) -> Indices:
    """The shortest left-to-right runs of a list of indices.

    >>> runs([4, 5, 6, 3, 1, 1])
    (Run(start=4, count=3, step=1), Run(start=3, count=1, step=1), Run(start=1, count=2, step=0))
    """
    found: list[Run] = []
    for index in indices:
        last = found[-1] if found else None
        if last is None or last.start is None:
            found.append(Run(index, 1))
        elif last.count == 1 and abs(index - last.start) <= 1:
            found[-1] = Run(last.start, 2, index - last.start)
        elif last.count > 1 and index == last.start + last.count * last.step:
            found[-1] = Run(last.start, last.count + 1, last.step)
        else:
            found.append(Run(index, 1))
    return tuple(found)


class DimMap(Protocol):
    """Any object that says which input indices an output interval reads, in a dim of ``extent`` indices."""

    def read(self, out: Interval, extent: int) -> Indices: ...


@dataclass(frozen=True, slots=True)
class IndexMap:
    """Output index *o* reads inputs ``floor((mul*o+lo)/div) .. floor((mul*o+hi)/div)``.

    ``edge`` says what stands outside the tensor: ``fill`` (the op's neutral value), ``clip`` (nothing: the op's local
    form minds the border itself), or indices inside it (``replicate``, ``reflect``, ``circular``).

    >>> conv = IndexMap(2, 1, -1, 1)                            # k3 s2 p1
    >>> conv.need(Interval(0, 4))
    Interval(start=-1, stop=8)
    >>> conv.read(Interval(0, 4), 16)
    (Run(start=None, count=1, step=1), Run(start=0, count=8, step=1))
    >>> IndexMap(1, 1, -1, 1, "circular").read(Interval(0, 2), 4)
    (Run(start=3, count=1, step=1), Run(start=0, count=3, step=1))
    """

    mul: int = 1
    div: int = 1
    lo: int = 0
    hi: int = 0
    edge: Edge = "fill"

    def need(self, out: Interval) -> Interval:
        """The input interval that ``out`` reads; it may reach outside the tensor."""
        if not out:
            return Interval(0, 0)
        return Interval(
            (self.mul * out.start + self.lo) // self.div, (self.mul * (out.stop - 1) + self.hi) // self.div + 1
        )

    def read(self, out: Interval, extent: int) -> Indices:
        """The indices that ``out`` reads, the outside of the tensor resolved by ``edge``."""
        return resolve(self.need(out), extent, self.edge)


IDENTITY = IndexMap()


@dataclass(frozen=True, slots=True)
class Strided:
    """One input index an output: *o* reads ``start + step * o``. Slices, flips, crops.

    >>> Strided(7, -1).read(Interval(0, 3), 8)
    (Run(start=7, count=3, step=-1),)
    """

    start: int
    step: int

    def read(self, out: Interval, extent: int) -> Indices:
        return (Run(self.start + self.step * out.start, len(out), self.step),) if out else ()


@dataclass(frozen=True, slots=True)
class Table:
    """One input index an output, from a list: *o* reads ``indices[o]``. Index selection, nearest resizing."""

    indices: tuple[int, ...]

    def read(self, out: Interval, extent: int) -> Indices:
        return runs(self.indices[out.start : out.stop])


@dataclass(frozen=True, slots=True)
class Spans:
    """Output *o* reads ``first[o] .. last[o]``, both not decreasing. Adaptive pools, resizes of any scale."""

    first: tuple[int, ...]
    last: tuple[int, ...]

    @staticmethod
    def of(pairs: Sequence[tuple[int, int]]) -> Spans:
        return Spans(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))

    def read(self, out: Interval, extent: int) -> Indices:
        return resolve(Interval(self.first[out.start], self.last[out.stop - 1] + 1), extent, "clip") if out else ()


@dataclass(frozen=True, slots=True)
class Everything:
    """Every output reads the whole dim: the source of a gather, of which only the output is split.

    >>> Everything().read(Interval(3, 5), 8)
    (Run(start=0, count=8, step=1),)
    """

    def read(self, out: Interval, extent: int) -> Indices:
        return span(Interval(0, extent)) if out else ()


def block_reads(index_map: DimMap, outs: int, extent: int, parts: int) -> tuple[Indices, ...]:
    """What the canonical blocks of ``outs`` indices read of a dim of ``extent`` indices. Layers repeat: remembered."""
    inner = parts.inner if isinstance(parts, Parts) else 1
    if isinstance(index_map, Hashable):
        return _block_reads(index_map, outs, extent, int(parts), inner)
    return tuple(index_map.read(block, extent) for block in blocks(outs, parts))  # a rule may have a map of its own


@lru_cache(maxsize=1024)
def _block_reads(index_map: Any, outs: int, extent: int, count: int, inner: int) -> tuple[Indices, ...]:
    parts = Parts(count // inner, inner) if inner > 1 else count
    return tuple(index_map.read(block, extent) for block in blocks(outs, parts))


def resolve(need: Interval, extent: int, edge: Edge) -> Indices:
    """The runs of an interval that may reach outside ``0:extent``.

    >>> resolve(Interval(-2, 3), 4, "reflect")
    (Run(start=2, count=2, step=-1), Run(start=0, count=3, step=1))
    >>> resolve(Interval(2, 6), 4, "replicate")
    (Run(start=2, count=2, step=1), Run(start=3, count=2, step=0))
    """
    if not need:
        return ()
    core = need & Interval(0, extent)
    before, after = Interval(need.start, min(need.stop, 0)), Interval(max(need.start, extent), need.stop)
    if edge == "circular":
        return _wrapped(need, extent)
    if edge == "clip":
        return span(core)
    pieces: list[Run] = []
    if before:
        start = {"fill": None, "replicate": 0, "reflect": -before.start}[edge]
        pieces.append(Run(start, len(before), _STEP[edge]))
    pieces += span(core)
    if after:
        start = {"fill": None, "replicate": extent - 1, "reflect": 2 * (extent - 1) - after.start}[edge]
        pieces.append(Run(start, len(after), _STEP[edge]))
    return tuple(pieces)


_STEP = {"fill": 1, "replicate": 0, "reflect": -1}


def _wrapped(need: Interval, extent: int) -> Indices:
    pieces, at = [], need.start
    while at < need.stop:
        start = at % extent
        count = min(extent - start, need.stop - at)
        pieces.append(Run(start, count))
        at += count
    return tuple(pieces)
