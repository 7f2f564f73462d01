"""Nested inputs and outputs: trees of tensors and other leaves, taken apart and put together again.

    {"image": x, "flags": (True, None)}    ->    spec, tensors [x], leaves (None, True, NONE)

A tensor's place in the leaves is None, and a leaf that is None is written `NONE`, so that the two differ.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from halofx.compiler.errors import CompileError


class _None(enum.Enum):
    NONE = "None"

    def __repr__(self) -> str:
        return "NONE"


NONE = _None.NONE
"""Stands for a literal None among the non-tensor leaves of inputs and outputs."""


Path = tuple[str, ...]


def flatten(tree: Any, what: str) -> tuple[pytree.TreeSpec, tuple[Any, ...], list[tuple[Path, Tensor]]]:
    """The spec of a tree, its non-tensor leaves, and its tensors with their paths (``("0", "image")``).

    ``what`` names the tree in the error. Raises `CompileError` for a leaf that hides tensors.
    """
    paths, spec = pytree.tree_flatten_with_path(tree)
    leaves: list[Any] = []
    tensors: list[tuple[Path, Tensor]] = []
    for path, leaf in paths:
        if isinstance(leaf, Tensor):
            tensors.append((tuple(_step(key) for key in path), leaf))
            leaves.append(None)
        else:
            _refuse_hidden_tensors(leaf, what)
            leaves.append(NONE if leaf is None else leaf)
    return spec, tuple(leaves), tensors


def rebuild(spec: pytree.TreeSpec, leaves: Sequence[Any], tensors: Iterable[Any]) -> Any:
    """The tree with ``tensors`` in the places of tensors; the inverse of `flatten`.

    >>> import torch
    >>> spec, leaves, tensors = flatten({"a": torch.ones(1), "b": (None, 3)}, "input")
    >>> rebuild(spec, leaves, ["t"])
    {'a': 't', 'b': (None, 3)}
    """
    rest = iter(tensors)
    full = [next(rest) if leaf is None else None if leaf is NONE else leaf for leaf in leaves]
    return pytree.tree_unflatten(full, spec)


def _step(key: Any) -> str:
    """One step of a path: an index, a key or an attribute."""
    for attribute in ("idx", "key", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _refuse_hidden_tensors(leaf: Any, what: str) -> None:
    """Tensors inside an object that pytree does not open would silently become constants of the graph."""
    kind = type(leaf).__name__
    if type(leaf).__module__ == "numpy" and hasattr(leaf, "dtype") and getattr(leaf, "ndim", 0) > 0:
        raise CompileError(f"an {what} of the model is a numpy array; pass torch.from_numpy(array) instead")
    inside = vars(leaf).values() if dataclasses.is_dataclass(leaf) or hasattr(leaf, "__dict__") else ()
    if isinstance(leaf, (set, frozenset)):
        inside = leaf
    if not isinstance(leaf, type) and any(isinstance(v, Tensor) for v in inside):
        raise CompileError(
            f"an {what} of the model is a {kind} that holds tensors and is not a registered pytree; pass a tuple, "
            f"list or dict instead, or register it with torch.utils._pytree.register_pytree_node({kind}, ...)"
        )
