"""Half-open intervals, and the one balanced split that every dim over every axis uses.

blocks(10, 4)      0         3         6     8    10
                   |---------|---------|-----|-----|
                      rank 0    rank 1   r2    r3
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Interval:
    """The integers ``start, ..., stop - 1``; empty when ``stop <= start``.

    >>> Interval(2, 5) & Interval(4, 9)
    Interval(start=4, stop=5)
    >>> len(Interval(2, 5)), bool(Interval(3, 3)), Interval(2, 5).shift(-2)
    (3, False, Interval(start=0, stop=3))
    """

    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)

    def __bool__(self) -> bool:
        return self.stop > self.start

    def __and__(self, other: Interval) -> Interval:
        start = max(self.start, other.start)
        return Interval(start, max(start, min(self.stop, other.stop)))

    def shift(self, by: int) -> Interval:
        """The interval moved by ``by``."""
        return Interval(self.start + by, self.stop + by)

    def __str__(self) -> str:
        return f"[{self.start}:{self.stop}]"


class Parts(int):
    """A number of parts of which ``inner`` each lie in one of fewer blocks: the micro-batches of the ranks of axis ``data``.

    >>> [len(b) for b in blocks(7, Parts(2, 2))], [len(b) for b in blocks(6, Parts(2, 2))], [len(b) for b in blocks(6, 4)]
    ([2, 2, 2, 1], [2, 1, 2, 1], [2, 2, 1, 1])
    """

    inner: int

    def __new__(cls, outer: int, inner: int) -> Parts:
        made = super().__new__(cls, outer * inner)
        made.inner = inner
        return made


def blocks(extent: int, parts: int) -> tuple[Interval, ...]:
    """The canonical split of ``extent`` indices into ``parts`` blocks; the first ones are one longer when it is uneven.

    >>> [len(b) for b in blocks(10, 4)], [len(b) for b in blocks(3, 4)]
    ([3, 3, 2, 2], [1, 1, 1, 0])
    """
    inner = parts.inner if isinstance(parts, Parts) else 1
    if inner == 1:
        return _blocks(extent, int(parts))
    return _nested(extent, int(parts) // inner, inner)


@lru_cache(maxsize=4096)
def _nested(extent: int, outer: int, inner: int) -> tuple[Interval, ...]:
    return tuple(b.shift(whole.start) for whole in _blocks(extent, outer) for b in _blocks(len(whole), inner))


@lru_cache(maxsize=4096)
def _blocks(extent: int, parts: int) -> tuple[Interval, ...]:
    size, extra = divmod(extent, parts)
    starts = [i * size + min(i, extra) for i in range(parts + 1)]
    return tuple(Interval(a, b) for a, b in itertools.pairwise(starts))
