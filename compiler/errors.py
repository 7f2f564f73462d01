"""The errors of halofx. Each message says what, where, the values, and one remedy."""

from __future__ import annotations


class HalofxError(Exception):
    """Base of all errors that halofx raises on purpose."""


class CompileError(HalofxError):
    """The model, its inputs or an op cannot be compiled exactly; raised before anything runs."""


class MeshError(HalofxError, ValueError):
    """The mesh does not fit the world, the axis names or the tensors."""


class RankError(HalofxError, RuntimeError):
    """Ranks disagree, a rank failed or died, or a message did not arrive in time."""


def at(where: str | None) -> str:
    """``" (at model.py:12: x = self.conv(x))"`` for a source line, nothing when it is unknown."""
    return f" (at {where})" if where else ""
