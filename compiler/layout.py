"""How one tensor lies over the mesh: which axis splits each dim, and over which axes a sum is pending."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from halofx.compiler.interval import blocks
from halofx.compiler.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Layout:
    """``split[d]`` is the mesh axis over which dim ``d`` is held as ``blocks(n, P)``, or None where it is whole.

    ``partial`` are the axes over which every rank holds one addend of the value. Over an axis that is neither, all
    ranks hold the same copy, and so the same cotangent (JAX calls such a value invariant over the axis).

    >>> str(Layout(("data", None, "depth"), ("height",)).show((2, 8, 33)))
    '[2@data, 8, 33@depth] +height'
    """

    split: tuple[str | None, ...]
    partial: tuple[str, ...] = ()

    @staticmethod
    def whole(dims: int) -> Layout:
        """Nothing split."""
        return Layout((None,) * dims)

    @property
    def axes(self) -> frozenset[str]:
        """The axes over which ranks hold different values: split or pending."""
        return frozenset(a for a in self.split if a is not None) | frozenset(self.partial)

    def dim(self, axis: str) -> int | None:
        """The dim that ``axis`` splits, or None."""
        return self.split.index(axis) if axis in self.split else None

    def local_shape(self, shape: Sequence[int], mesh: Mesh, rank: int) -> tuple[int, ...]:
        """The shape of one rank's shard of a tensor of global ``shape``."""
        return tuple(
            n if axis is None else len(blocks(n, mesh[axis])[mesh.coordinate(rank, axis)])
            for n, axis in zip(shape, self.split, strict=True)
        )

    def show(self, shape: Sequence[int]) -> str:
        """``[2@data, 8, 33@depth] +height``: a global shape in this layout."""
        dims = ", ".join(f"{n}@{a}" if a else str(n) for n, a in zip(shape, self.split, strict=True))
        return f"[{dims}]" + "".join(f" +{axis}" for axis in self.partial)
