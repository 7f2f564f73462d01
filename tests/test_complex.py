"""Complex layers: spectral convolutions that write modes into a complex tensor (FNO), and other writes of complex views."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halofx
from tests.models import same_as_one_device


class Spectral(nn.Module):
    """A Fourier layer as it is published: low modes are multiplied and written into zeros."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        shape = (width, width, modes, modes, modes)
        self.low, self.high = (nn.Parameter(torch.randn(shape, dtype=torch.cdouble) / width**2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        f, m = torch.fft.rfftn(x, dim=(-3, -2, -1)), self.modes
        out = torch.zeros(f.shape, dtype=f.dtype, device=x.device)
        out[:, :, :m, :m, :m] = torch.einsum("bixyz,ioxyz->boxyz", f[:, :, :m, :m, :m], self.low)
        out[:, :, -m:, :m, :m] = torch.einsum("bixyz,ioxyz->boxyz", f[:, :, -m:, :m, :m], self.high)
        return torch.fft.irfftn(out, s=x.shape[-3:], dim=(-3, -2, -1))


class Fourier(nn.Module):
    """A spectral layer beside a pointwise one."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.spectral = nn.Conv3d(1, 3, 1), Spectral(3, 2)
        self.local, self.head = nn.Conv3d(3, 3, 3, padding=1), nn.Conv3d(3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lift(x)
        return self.head(F.gelu(self.spectral(y) + self.local(y)))


@pytest.mark.parametrize("sizes", [{"depth": 2}, {"data": 2, "height": 2}, {"width": 3}], ids=str)
def test_fourier_neural_operator(sizes: dict[str, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 1, 8, 6, 6, dtype=torch.float64)
    same_as_one_device(Fourier().double(), (x,), halofx.Mesh(**sizes))


class Writes(nn.Module):
    """Every kind of view of a complex tensor is written to, once with a conjugate."""

    def forward(self, x: Tensor) -> Tensor:
        z = torch.complex(x, x.roll(1, 2))
        y = z * 2
        y[:, :, 1:-1] = z[:, :, :-2].conj()
        y[..., 0] = z[..., 1]
        y.diagonal(dim1=-1, dim2=-2).mul_(z.mean(-1))
        y[:, 0].copy_(y[:, 1])
        return torch.view_as_real(y).sum(-1)


@pytest.mark.parametrize("sizes", [{"depth": 2}, {"data": 2, "height": 2}, {"width": 2}], ids=str)
def test_writes_to_complex_views(sizes: dict[str, int]) -> None:
    x = torch.randn(2, 2, 6, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    same_as_one_device(nn.Sequential(nn.Conv3d(2, 2, 1), Writes()).double(), (x,), halofx.Mesh(**sizes))
