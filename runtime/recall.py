"""Keeping faces instead of halos: what autograd saves of a moved tensor is the shard that it came from, and what arrived.

    relu   |------ x ------|         kept by relu anyway
    halo  |f|----- x ------|f|       the convolution would keep a second copy of x; it keeps the two faces and a reference

In the backward pass the tensor is put together again, without a message. So a split net keeps 1/P of the activations of one
device, plus faces.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halofx.compiler.errors import HalofxError

Assemble = Callable[[Tensor], Tensor]
"""From the shard that a movement took to its result, with the messages that arrived."""


@dataclass(frozen=True)
class _Plain:
    """A saved tensor as it is, and its version, so that a write to it before the backward pass is still found."""

    tensor: Tensor
    version: int

    def get(self) -> Tensor:
        if self.tensor._version != self.version:
            raise HalofxError(
                f"a tensor of shape {list(self.tensor.shape)} that the backward pass needs was modified in place after the "
                "forward pass; do not step the optimizer (or write to parameters) between net(...) and backward()"
            )
        return self.tensor


@dataclass(frozen=True)
class _Recipe:
    """A moved tensor: what it was moved from, and how to put it together."""

    source: _Plain | _Recipe
    assemble: Assemble

    def get(self) -> Tensor:
        return self.assemble(self.source.get())


class Recall:
    """The moved tensors of one forward pass that are still alive."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[weakref.ref[Tensor], _Recipe]] = {}

    def note(self, moved: Tensor, source: Tensor, assemble: Assemble) -> None:
        """``moved`` can be made from ``source``."""
        key = id(moved)
        alive = weakref.ref(moved, lambda _: self.known.pop(key, None))
        self.known[key] = (alive, _Recipe(self.pack(source), assemble))

    def pack(self, tensor: Tensor) -> _Plain | _Recipe:
        """What to keep of a tensor."""
        alive, recipe = self.known.get(id(tensor), (None, None))
        if alive is not None and recipe is not None and alive() is tensor:
            return recipe
        return _Plain(tensor.detach(), tensor._version)

    @staticmethod
    def unpack(kept: _Plain | _Recipe) -> Tensor:
        """The tensor again."""
        return kept.get()


_ACTIVE = threading.local()


def active() -> Recall | None:
    """The recall of the forward pass that this thread is in."""
    found: Recall | None = getattr(_ACTIVE, "recall", None)
    return found


@contextmanager
def recalling() -> Iterator[None]:
    """Save moved tensors as faces in here; nothing changes without gradients, or where the user has hooks of their own."""
    if not torch.is_grad_enabled() or _users_hooks():
        yield
        return
    recall, before = Recall(), active()
    _ACTIVE.recall = recall
    try:
        with torch.autograd.graph.saved_tensors_hooks(recall.pack, recall.unpack):
            yield
    finally:
        _ACTIVE.recall = before


def _users_hooks() -> bool:
    """Whether saved-tensor hooks are on already (checkpointing, offloading): only the innermost would be used."""
    top: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None
