"""Modules marked as one op: whole, over the batch, pointwise."""

from __future__ import annotations

import numpy as np
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


class Branch(nn.Module):
    """Python reads a value of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) if x.mean() > -10 else -x


class Numpy(nn.Module):
    """Leaves torch."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(np.flip(x.detach().numpy(), 2).copy())


@pytest.mark.parametrize("inner", [Branch, Numpy])
@pytest.mark.parametrize("sizes", [{"depth": 2}, {"data": 2, "depth": 3}], ids=str)
def test_what_cannot_be_captured_runs_whole(inner: type[nn.Module], sizes: dict[str, int]) -> None:
    """And the error says so."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), inner(), nn.Conv3d(2, 1, 3, padding=1)).double()
    x = torch.randn(2, 1, 6, 5, 4, dtype=torch.float64)
    with pytest.raises(halofx.CompileError, match=r"halofx.opaque\(model\[1\]\)"):
        halofx.compile(model, halofx.Mesh(**sizes), inputs=[x.shape])
    halofx.opaque(model[1])
    same_as_one_device(model, (x,), halofx.Mesh(**sizes), steps=2)
    assert halofx.check(model, [x], halofx.Mesh(**sizes)).exact
    with torch.device("meta"):
        on_meta = nn.Sequential(nn.Conv3d(1, 2, 3), halofx.opaque(inner()))
    assert "opaque" in halofx.compile(on_meta, halofx.Mesh(**sizes), inputs=[(2, 1, 8, 8, 8)]).listing()
