"""What autograd keeps on each rank beside one device, measured in real runs on threads."""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

import halofx
from benchmarks.one_rank import kept
from halofx import zoo
from halofx.compiler.cost import human
from halofx.runtime.recall import Recall


def bytes_of(items: list[Any]) -> int:
    """The distinct storages behind kept tensors and recipes."""
    found: dict[int, int] = {}
    for item in items:
        while hasattr(item, "assemble"):
            found.update({flat.data_ptr(): flat.nbytes for flat, _ in item.assemble.args[2].values()})
            item = item.source
        found[item.tensor.untyped_storage().data_ptr()] = item.tensor.untyped_storage().nbytes()
    return sum(found.values())


def main(size: int = 64) -> None:
    """Print the ratio for several meshes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = zoo.build("unet3d", width=8)
    x = torch.randn(1, 1, size, size, size)
    weights = sum(p.nbytes for p in model.parameters())
    alone = kept(model, x) - weights
    print(f"U-Net width 8 at {size}^3, one device keeps {human(alone)} of activations")
    for sizes in ({"depth": 2}, {"depth": 4}, {"depth": 2, "height": 2}, {"depth": 2, "height": 2, "width": 2}):
        mesh = halofx.Mesh(**sizes)
        worst = max(run(model, x, mesh)) - weights
        print(
            f"{mesh}: {human(worst)} on the fullest rank, {worst / alone:.3f} of one device (1/{mesh.size} = {1 / mesh.size:.3f})"
        )


def run(model: torch.nn.Module, x: Tensor, mesh: halofx.Mesh) -> list[int]:
    """Bytes kept on every rank."""
    items: dict[int, list[Any]] = defaultdict(list)
    pack = Recall.pack

    def spy(recall: Recall, tensor: Tensor) -> Any:
        item = pack(recall, tensor)
        items[threading.get_ident()].append(item)
        return item

    def work(rank: int) -> int:
        net = halofx.compile(copy.deepcopy(model), mesh, inputs=[x.shape])
        y = net(net.shard(x))
        size = bytes_of(items.pop(threading.get_ident()))
        del y
        return size

    Recall.pack = spy  # type: ignore[method-assign]
    try:
        return halofx.launch(work, mesh)
    finally:
        Recall.pack = pack  # type: ignore[method-assign]
