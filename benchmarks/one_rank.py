"""A compiled net on a mesh of one rank against the plain model: step time and peak memory, interleaved."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import halofx
from halofx import zoo


def step(forward: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> float:
    """Seconds of one forward and backward pass."""
    model.zero_grad()
    start = time.perf_counter()
    forward(x).square().mean().backward()
    return time.perf_counter() - start


def main(size: int = 48, rounds: int = 15) -> None:
    """Print the ratio of medians and of minima over interleaved rounds, and the bytes that autograd keeps."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    plain = zoo.build("unet3d", width=8)
    other = copy.deepcopy(plain)
    x = torch.randn(1, 1, size, size, size)
    net = halofx.compile(other, halofx.Mesh(depth=1), inputs=[x.shape])
    times: dict[str, list[float]] = {"plain": [], "net": []}
    for i in range(rounds + 2):
        pair = [("plain", plain, plain), ("net", net, other)]
        for name, forward, model in pair if i % 2 else reversed(pair):
            seconds = step(forward, model, x)
            if i >= 2:
                times[name].append(seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(
        f"U-Net width 8 at {size}^3, forward + backward: plain {medians['plain'] * 1e3:.1f} ms, net {medians['net'] * 1e3:.1f} ms"
    )
    print(
        f"net / plain: median {medians['net'] / medians['plain']:.4f}, minimum {min(times['net']) / min(times['plain']):.4f}"
    )
    print(f"bytes kept for backward: plain {kept(plain, x):,}, net {kept(net, x):,}")


def kept(forward: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """Bytes of the distinct storages that autograd keeps of one forward pass."""
    found: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = forward(x)
    del y
    return sum(found.values())
