"""Named axes over ranks: rank <-> coordinates, and the groups of ranks along axes.

Mesh(data=2, depth=3)          rank = row-major index of the coordinates, last axis fastest

            depth 0   1   2
    data 0     [  0   1   2 ]   <- the group of axis depth that rank 1 is in
    data 1     [  3   4   5 ]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from halofx.compiler.errors import MeshError
from halofx.compiler.interval import Parts

AXES = ("pipe", "data", "channel", "depth", "height", "width")
"""Every axis name, in the order in which ranks are laid out (the last one varies fastest)."""


class Mesh:
    """An immutable grid of ranks with named axes.

    >>> mesh = Mesh(data=2, depth=3)
    >>> mesh.size, mesh.axes
    (6, ('data', 'depth'))
    >>> mesh.coordinates(4)
    {'data': 1, 'depth': 1}
    >>> mesh.group(4, ("depth",))
    (3, 4, 5)

    Raises `MeshError` for an unknown axis name or a size below 1.
    """

    __slots__ = ("_sizes", "_strides", "size")

    def __init__(self, **sizes: int) -> None:
        for name, size in sizes.items():
            if name not in AXES:
                raise MeshError(f"unknown mesh axis {name!r}; the axes are {', '.join(AXES)}")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise MeshError(f"mesh axis {name}={size!r} must be an integer of at least 1")
        self._sizes: dict[str, int] = {name: sizes[name] for name in AXES if name in sizes}
        self.size: int = math.prod(self._sizes.values())
        stride, self._strides = self.size, {}
        for name, size in self._sizes.items():
            stride //= size
            self._strides[name] = stride

    @staticmethod
    def of(value: Any) -> Mesh:
        """A mesh from a `Mesh`, a mapping ``{"depth": 2}`` or a torch `DeviceMesh` whose dim names are our axes.

        Raises `MeshError` when it is none of these, or when the ranks of a DeviceMesh are not 0, 1, 2, ... row-major.
        """
        if isinstance(value, Mesh):
            return value
        if isinstance(value, Mapping):
            return Mesh(**value)
        names, ranks = getattr(value, "mesh_dim_names", None), getattr(value, "mesh", None)
        if not names or ranks is None:
            raise MeshError(
                f"expected a halofx.Mesh, a mapping of axis sizes or a DeviceMesh with mesh_dim_names, got {value!r}"
            )
        mesh = Mesh(**dict(zip(names, ranks.shape, strict=True)))
        order = [names.index(axis) for axis in mesh.axes]
        if ranks.permute(order).flatten().tolist() != list(range(mesh.size)):
            raise MeshError(
                f"the ranks of the DeviceMesh {names} are not 0 to {mesh.size - 1} in the axis order {mesh.axes}; "
                f"build it with init_device_mesh(..., mesh_dim_names={mesh.axes})"
            )
        return mesh

    def within(self, micro: int) -> Mesh:
        """The mesh of one pipeline stage, where ``micro`` micro-batches are so many more coordinates of axis ``data``.

        >>> print(Mesh(pipe=2, data=2, depth=2).within(4), Mesh(pipe=2, depth=3).within(1))
        data=2x4 depth=2 depth=3
        """
        sizes: dict[str, int] = {axis: size for axis, size in self._sizes.items() if axis != "pipe"}
        if micro > 1:
            sizes["data"] = Parts(self["data"], micro)
        return Mesh(**sizes)

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes, outermost first."""
        return tuple(self._sizes)

    def __getitem__(self, axis: str) -> int:
        """The size of an axis; 1 for an axis that this mesh does not have."""
        return self._sizes.get(axis, 1)

    def coordinate(self, rank: int, axis: str) -> int:
        """Where a rank stands on one axis."""
        return rank // self._strides[axis] % self._sizes[axis] if axis in self._sizes else 0

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands on every axis."""
        return {axis: self.coordinate(rank, axis) for axis in self._sizes}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at the given coordinates; a missing axis counts as 0."""
        return sum(coordinates.get(axis, 0) * stride for axis, stride in self._strides.items())

    def peer(self, rank: int, axis: str, coordinate: int) -> int:
        """The rank that differs from ``rank`` only in its coordinate on ``axis``."""
        return rank + (coordinate - self.coordinate(rank, axis)) * self._strides[axis]

    def group(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """The ranks reached from ``rank`` along ``axes``, row-major in the order of the mesh."""
        along = [axis for axis in self._sizes if axis in set(axes)]
        base = rank - sum(self.coordinate(rank, axis) * self._strides[axis] for axis in along)
        steps = [range(0, self._sizes[axis] * self._strides[axis], self._strides[axis]) for axis in along]
        return tuple(base + sum(step) for step in itertools.product(*steps))

    def groups(self, axes: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """The partition of all ranks into groups along ``axes``."""
        return tuple(dict.fromkeys(self.group(rank, axes) for rank in range(self.size)))

    def count(self, axes: Iterable[str]) -> int:
        """The number of ranks in one group along ``axes``."""
        return math.prod(self[axis] for axis in axes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and self._sizes == other._sizes

    def __hash__(self) -> int:
        return hash(tuple(self._sizes.items()))

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{a}={s}' for a, s in self._sizes.items())})"

    def __str__(self) -> str:
        inner = {a: s.inner for a, s in self._sizes.items() if isinstance(s, Parts)}
        shown = {a: f"{s // inner[a]}x{inner[a]}" if a in inner else str(s) for a, s in self._sizes.items()}
        return " ".join(f"{a}={s}" for a, s in shown.items()) or "one rank"
