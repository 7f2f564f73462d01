"""What the random samples of several families of ops have in common: shapes, dims, and values with ties, NaN or labels."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor

Make = Callable[[torch.Size], Tensor]


def random_shape(rng: Random, low: int = 1, high: int = 5, most: int = 7) -> tuple[int, ...]:
    """A shape of ``low`` to ``high`` dims with extents 1 to ``most``, at most about a thousand elements."""
    shape = [rng.randint(1, most) for _ in range(rng.randint(low, high))]
    while torch.Size(shape).numel() > 1500:
        shape[rng.randrange(len(shape))] = rng.randint(1, 3)
    return tuple(shape)


def random_dims(rng: Random, ndim: int) -> list[int]:
    """One to ``ndim`` different dims, some counted from the end."""
    dims = rng.sample(range(ndim), rng.randint(1, ndim))
    return [d - ndim if rng.random() < 0.3 else d for d in dims]


def random_dim(rng: Random, ndim: int) -> int:
    """One dim, sometimes counted from the end."""
    return rng.randrange(-ndim, ndim)


def integers(low: int, high: int, dtype: torch.dtype = torch.int64) -> Make:
    """Random integers ``low <= i < high``."""
    return lambda shape: torch.randint(low, high, shape).to(dtype)


def ties(shape: torch.Size) -> Tensor:
    """Floats of which many are equal, zeros among them."""
    return torch.randint(-2, 3, shape).double()


def tied_with_infinities(shape: torch.Size) -> Tensor:
    """Floats of which many are equal, and some infinite."""
    values = torch.tensor([-float("inf"), -1.0, 0.0, 2.0, 2.0, float("inf")], dtype=torch.float64)
    return values[torch.randint(0, 6, shape)]


def tied_with_nan(shape: torch.Size) -> Tensor:
    """Floats of which many are equal, and few NaN."""
    values = ties(shape)
    return torch.where(torch.rand(shape) < 0.08, float("nan"), values)


def positive(shape: torch.Size) -> Tensor:
    """Floats between 0.05 and 0.95: probabilities, variances, scales."""
    return torch.rand(shape, dtype=torch.float64) * 0.9 + 0.05


def signs(shape: torch.Size) -> Tensor:
    """-1 or 1."""
    return torch.randint(0, 2, shape).double() * 2 - 1


def booleans(shape: torch.Size) -> Tensor:
    """True or False, rarely the one or the other throughout."""
    return torch.rand(shape) < torch.rand(()).clamp(0.02, 0.98)


def pick(rng: Random, *choices: Any) -> Any:
    """One of the arguments."""
    return rng.choice(choices)
