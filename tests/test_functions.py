"""A user's autograd Function is one op: exact whole, and split where the user gives it a rule."""

from __future__ import annotations

import cProfile
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halofx
from halofx.compiler.rules import RULES, Spec
from tests.models import same_as_one_device


class Swish(torch.autograd.Function):
    """Saves its input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        s = torch.sigmoid(ctx.saved_tensors[0])
        return grad * s * (1 + ctx.saved_tensors[0] * (1 - s))


class Reverse(torch.autograd.Function):
    """A view of its input with another gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * grad, None


class Silent(torch.autograd.Function):
    """Calls no op at all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad


class Split(torch.autograd.Function):
    """Two outputs, with its context set up apart, around another Function."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return Swish.apply(x) * weight, (x > 0).long()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum((0, 2, 3, 4), keepdim=True)


FUNCTIONS = (Swish, Reverse, Silent)
bound = Swish.apply  # as models keep it


def test_under_a_profiler() -> None:
    """Which cannot be taken off and put on again: models without such Functions compile, others are refused."""
    with cProfile.Profile():
        halofx.compile(nn.Conv3d(1, 1, 3), halofx.Mesh(depth=2), inputs=[(1, 1, 6, 6, 6)])
        with pytest.raises(halofx.CompileError, match="custom autograd Function S"):
            halofx.compile(Net(), halofx.Mesh(depth=2), inputs=[(1, 1, 6, 6, 6)])


class Net(nn.Module):
    """Every Function between convolutions, and what they read used again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv3d(1, 4, 3, padding=1), nn.Conv3d(4, 2, 3, padding=1)
        self.weight = nn.Parameter(torch.rand(1, 4, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        z, positive = Split.apply(bound(y), self.weight)
        return self.b(Silent.apply(Reverse.apply(z, 0.5)) + y * positive)


@pytest.mark.parametrize("sizes", [{"depth": 2}, {"height": 2, "width": 2}, {"data": 2, "depth": 3}], ids=str)
@pytest.mark.parametrize("ruled", [False, True])
def test_same_as_one_device(sizes: dict[str, int], ruled: bool) -> None:
    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(2, 1, 6, 6, 4, dtype=torch.float64)
    if ruled:
        for function in FUNCTIONS:
            halofx.rule(function)(lambda call: Spec(ins={"x": "n c d h w"}, outs=["n c d h w"]))
    try:
        same_as_one_device(model, (x,), halofx.Mesh(**sizes), steps=2)
        found = halofx.check(model, [x], halofx.Mesh(**sizes))
        assert found.exact, str(found)
        without = {name.rpartition(".")[2] for name in found.coverage.unruled}
        assert without == ({"Split"} if ruled else {"Split", "Swish", "Reverse", "Silent"})
        assert found.coverage.share < (0.9 if ruled else 0.6)
        assert f"@halofx.rule({__name__}.Split)" in str(found) and '"weight": "n c d h w"' in str(found)
    finally:
        for function in FUNCTIONS:
            RULES.pop(function, None)
