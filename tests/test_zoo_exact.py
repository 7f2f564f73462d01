"""Zoo x meshes: output, gradients, running statistics and parameters after 3 Adam steps equal one device in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import halofx
from halofx import zoo
from tests.models import same_as_one_device

MESHES = [
    {"depth": 2}, {"depth": 3}, {"depth": 4}, {"height": 2, "width": 2}, {"data": 2, "depth": 2},
    {"depth": 2, "height": 2, "width": 2},
]  # fmt: skip
Case = tuple[Callable[[], nn.Module], tuple[int, ...]]
CASES: dict[str, Case] = {
    "cosmoflow": (lambda: zoo.build("cosmoflow", input_width=16, channels=(2, 2, 4, 4, 4, 4, 4), hidden=(8, 6), dropout=0.0), (2, 4, 16, 16, 16)),
    "cosmoflow batchnorm": (
        lambda: zoo.build("cosmoflow", input_width=16, channels=(2, 2, 4, 4, 4, 4, 4), hidden=(8, 6), dropout=0.0, batchnorm=True),
        (2, 4, 16, 16, 16),
    ),
    "cosmoflow-mlperf": (
        lambda: zoo.build("cosmoflow-mlperf", input_width=32, channels=(2, 2, 4, 4, 4), hidden=(8, 6), dropout=0.0), (2, 4, 32, 32, 32)
    ),
    "unet3d": (lambda: zoo.build("unet3d", width=2), (2, 1, 16, 16, 16)),
    "unet3d odd": (lambda: zoo.build("unet3d", width=2, levels=2), (2, 1, 13, 11, 9)),
    "unet3d-cicek": (lambda: zoo.build("unet3d-cicek", in_channels=1, width=2, levels=1), (2, 1, 20, 18, 18)),
    "unet3d-mlperf": (lambda: zoo.build("unet3d-mlperf", width=2, levels=3), (2, 1, 16, 16, 16)),
    "vnet": (lambda: zoo.build("vnet", width=2, levels=2), (2, 1, 12, 12, 8)),
    "vnet batchnorm": (lambda: zoo.build("vnet", width=2, levels=2, batchnorm=True), (2, 1, 12, 8, 8)),
    "resnet3d-18": (lambda: zoo.build("resnet3d-18", width=2, classes=3, stem="7x7x7"), (4, 1, 16, 16, 8)),
    "resnet3d-50": (lambda: zoo.build("resnet3d-50", width=2, classes=3), (4, 1, 16, 16, 16)),
}  # fmt: skip


def model_of(name: str) -> tuple[nn.Module, Tensor]:
    build, shape = CASES[name]
    torch.manual_seed(0)
    x = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return build().double(), x


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_zoo(name: str, sizes: dict[str, int]) -> None:
    model, x = model_of(name)
    nets = same_as_one_device(model, (x,), halofx.Mesh(**sizes), steps=3)
    assert "note: no rule" not in nets[0].listing()


@pytest.mark.parametrize("name", CASES)
def test_zoo_in_eval_mode(name: str) -> None:
    model, x = model_of(name)
    model(x)
    same_as_one_device(model.eval(), (x,), halofx.Mesh(depth=2, width=2))
