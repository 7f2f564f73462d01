"""How compile time grows: with layers (linearly), with ranks (not at all). Everything from ``meta`` tensors in one process."""

from __future__ import annotations

import time
import warnings

import torch
from torch import nn

import halofx
from halofx import zoo

Shape = tuple[int, ...]


def seconds(model: nn.Module, mesh: halofx.Mesh, shape: Shape) -> float:
    """Capture and all passes."""
    start = time.perf_counter()
    halofx.compile(model, mesh, inputs=[shape])
    return time.perf_counter() - start


def unet(batch: int) -> tuple[nn.Module, Shape]:
    """The 3D U-Net of Oyama et al. at 256^3."""
    shape = (batch, 1, 256, 256, 256)
    with torch.device("meta"):
        return zoo.build("unet3d", shape), shape


def chain(layers: int) -> nn.Module:
    """conv, norm, activation, ``layers`` times."""
    with torch.device("meta"):
        parts = [(nn.Conv3d(4, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU()) for _ in range(layers)]
        return nn.Sequential(*(m for group in parts for m in group))


def main() -> None:
    """Print a line a case; the first compilation of a process pays torch's own start-up and is shown apart."""
    warnings.simplefilter("ignore")
    print(f"first compilation of the process: {seconds(chain(1), halofx.Mesh(depth=2), (1, 4, 8, 8, 8)):.2f} s")
    for sizes in (
        {"depth": 2},
        {"depth": 8, "height": 4},
        {"data": 8, "depth": 8, "height": 4},
        {"data": 64, "depth": 8, "height": 4},
    ):
        mesh = halofx.Mesh(**sizes)
        model, shape = unet(max(1, mesh["data"]))
        print(f"U-Net 256^3 on {mesh.size:>5} ranks ({mesh}): {seconds(model, mesh, shape):.2f} s")
    for layers in (10, 20, 40, 80, 160):
        took = seconds(chain(layers), halofx.Mesh(depth=4, height=4), (1, 4, 64, 64, 64))
        print(f"{layers:>4} x (conv, norm, relu): {took:.2f} s, {took / layers * 1e3:.1f} ms a layer")
