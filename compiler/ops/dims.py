"""Naming dims in patterns, and the op that does nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor


def names(ndim: int, first: int = 0) -> list[str]:
    """Factor names of consecutive dims.

    >>> names(3), names(2, 4)
    (['d0', 'd1', 'd2'], ['d4', 'd5'])
    """
    return [f"d{first + i}" for i in range(ndim)]


def wrap(dim: int, ndim: int) -> int:
    """A dim counted from the front; that of a scalar is 0."""
    return dim % ndim if ndim else 0


def wrap_all(dims: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    """Dims counted from the front."""
    return tuple(wrap(d, ndim) for d in ([dims] if isinstance(dims, int) else dims))


def pattern(ndim: int, whole: Collection[int] = ()) -> str:
    """Dims d0, d1, ... of which the op must see some whole.

    >>> pattern(3, [1])
    'd0 [d1] d2'
    """
    return " ".join(f"[{n}]" if i in whole else n for i, n in enumerate(names(ndim)))


def as_it_is(input: Tensor) -> Tensor:
    """``input``: the local form of an op of which the movement did everything."""
    return input
