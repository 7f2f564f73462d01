"""Modules marked as one op: whole, over the batch, pointwise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import halofx
from tests.models import same_as_one_device


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(2, 2, 3, padding=1)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return torch.tanh(self.conv(x)) * scale


class Tone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.gain + y, torch.sin(y)


class Outer(nn.Module):
    def __init__(self, inner: str, tone: str) -> None:
        super().__init__()
        self.first = nn.Conv3d(1, 2, 3, padding=1)
        self.inner = halofx.opaque(Inner(), split=inner)  # type: ignore[arg-type]
        self.tone = halofx.opaque(Tone(), split=tone)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        a, b = self.tone(self.inner(y, scale=2.0), y)
        return a + b


@pytest.mark.parametrize(
    ("inner", "tone"), [("whole", "whole"), ("whole", "pointwise"), ("batch", "pointwise"), ("batch", "batch")]
)
@pytest.mark.parametrize("sizes", [{"depth": 2}, {"data": 2}, {"data": 2, "depth": 3}], ids=str)
def test_opaque_modules_are_exact(inner: str, tone: str, sizes: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = Outer(inner, tone).double()
    x = torch.randn(2, 1, 6, 5, 4, dtype=torch.float64)
    net = halofx.compile(model, halofx.Mesh(**sizes), inputs=[x.shape])
    listing = net.listing()
    assert "opaque_inner(" in listing and "opaque_tone(" in listing and "tanh" not in listing
    if inner == "whole" or tone == "whole":
        assert "all_gather" in listing
    elif sizes == {"data": 2} or tone == "pointwise":
        assert ("all_gather" in listing) == ("depth" in sizes)
    same_as_one_device(model, (x,), halofx.Mesh(**sizes), steps=2)


def test_random_and_buffers_are_refused() -> None:
    model = nn.Sequential(halofx.opaque(nn.Dropout(0.5)), nn.Conv3d(1, 1, 1))
    with pytest.raises(halofx.CompileError, match="opaque module 0 draws random numbers"):
        halofx.compile(model, halofx.Mesh(depth=2), inputs=[(1, 1, 4, 4, 4)])
    model = nn.Sequential(halofx.opaque(nn.BatchNorm3d(1), split="batch"))
    with pytest.raises(halofx.CompileError, match="opaque module 0 writes to its buffers"):
        halofx.compile(model, halofx.Mesh(depth=2), inputs=[(2, 1, 4, 4, 4)])
    with pytest.raises(ValueError, match="is none of 'whole', 'batch', 'pointwise'"):
        halofx.opaque(nn.ReLU(), split="depth")  # type: ignore[arg-type]
