"""Functions that appear as nodes of a captured graph where ATen has no functional op that is exact.

They are ordinary differentiable functions of tensors: none changes an argument in place.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def batch_norm_train(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float | Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch norm of ``x`` [n, c, ...] by its own statistics, and the running statistics [c] after it.

    ``momentum`` is a number, or the 0-d count of batches so far for the cumulative average (``momentum=None`` of the
    module, that is 1 / count). The new statistics carry no gradient.
    """
    share = 1.0 / float(momentum) if isinstance(momentum, Tensor) else momentum
    mean, var = running_mean.detach().clone(), running_var.detach().clone()
    return F.batch_norm(x, mean, var, weight, bias, True, share, eps), mean, var


def instance_norm_train(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Instance norm of ``x`` [n, c, ...] by its own statistics, and the running statistics [c] after it.

    The new statistics carry no gradient.
    """
    mean, var = running_mean.detach().clone(), running_var.detach().clone()
    return F.instance_norm(x, mean, var, weight, bias, True, momentum, eps), mean, var


def no_gradient(value: Tensor, input: Tensor) -> Tensor:
    """``value``, said to be computed from ``input`` with a gradient of zero: a random number, ``0 * input`` with NaN in it.

    ``input`` broadcasts to ``value`` and its numbers do not matter.

    >>> x = torch.tensor([float("nan")], requires_grad=True)
    >>> no_gradient(torch.tensor([3.0]), x).sum().backward()
    >>> x.grad
    tensor([0.])
    """
    never = torch.zeros((), dtype=torch.bool, device=input.device)
    return torch.where(never, input.to(value.dtype), value)


def replace_value(old: Tensor, new: Tensor) -> Tensor:
    """The values of ``new`` with the gradient of ``old``: what a write under ``torch.no_grad`` leaves behind.

    ``with torch.no_grad(): y.clamp_(0, 1)`` changes the numbers of y and not how y was computed, so the gradient
    passes to ``old`` as if nothing had happened and none goes to ``new``.

    >>> old, new = torch.tensor([3.0], requires_grad=True), torch.tensor([1.0])
    >>> y = replace_value(old, new)
    >>> (2 * y).sum().backward()
    >>> y.item(), old.grad.item()
    (1.0, 2.0)
    """
    result: Tensor = _ReplaceValue.apply(old, new)  # type: ignore[no-untyped-call]
    return result


class _ReplaceValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, old: Tensor, new: Tensor) -> Tensor:
        return new.view_as(new)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
