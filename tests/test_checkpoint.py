"""``torch.utils.checkpoint`` inside a model keeps its meaning: less is kept, the result is the same, no message is sent twice."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import halofx
from halofx.runtime.comm import current
from tests.models import relative, same_as_one_device


class Block(nn.Module):
    """Two convolutions, a norm between."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.a, self.norm = nn.Conv3d(ins, outs, 3, padding=1), nn.BatchNorm3d(outs, track_running_stats=False)
        self.b = nn.Conv3d(outs, outs, 3, padding=1)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        y = F.relu(self.b(F.relu(self.norm(self.a(x)))))
        return y if skip is None else y + skip


class Blocks(nn.Module):
    """Three blocks, checkpointed or not, with a skip around the middle."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.blocks, self.way = nn.ModuleList([Block(1, 4), Block(4, 4), Block(4, 2)]), way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "sequential":
            return checkpoint_sequential(list(self.blocks), 2, x, use_reentrant=False)
        a, b, c = self.blocks
        if not self.way:
            y = a(x)
            return c(b(y, y))
        reentrant = self.way == "reentrant"
        y = checkpoint(a, x, use_reentrant=reentrant)
        z = checkpoint(b, y, y, use_reentrant=reentrant)
        return checkpoint(
            lambda v: checkpoint(c, v, use_reentrant=reentrant), z, use_reentrant=reentrant
        )  # one in another


MESHES = [{"depth": 2}, {"depth": 3}, {"height": 2, "width": 2}, {"data": 2, "depth": 2}]
WAYS = ["plain", "reentrant", "sequential"]


def volume(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_same_as_one_device(way: str, sizes: dict[str, int]) -> None:
    torch.manual_seed(0)
    steps = 0 if way == "reentrant" else 2  # which gives no gradient where its inputs take none, on one device too
    same_as_one_device(Blocks(way).double(), (volume(2, 1, 8, 8, 6),), halofx.Mesh(**sizes), steps=steps)


@pytest.mark.parametrize("way", WAYS)
def test_running_statistics_are_updated_once(way: str) -> None:
    """As without checkpoints; torch on one device updates them again when it recomputes."""
    torch.manual_seed(0)
    model, x = Blocks(way).double(), volume(2, 1, 8, 8, 6)
    for block in model.blocks:
        block.norm = nn.BatchNorm3d(block.norm.num_features).double()
    once = copy.deepcopy(model)
    once.way = ""
    once(x)

    def run(rank: int) -> dict[str, Tensor]:
        own = copy.deepcopy(model)
        net = halofx.compile(own, halofx.Mesh(depth=2), inputs=[x.shape])
        net(net.shard(x)).sum().backward()
        return dict(own.named_buffers())

    for buffers in halofx.launch(run, 2):
        if way != "sequential":  # another model: no skip
            assert all(relative(b, buffers[n]) < 1e-12 for n, b in once.named_buffers())
        assert all(int(b) == 1 for n, b in buffers.items() if n.endswith("tracked"))


def test_more_ranks_than_planes() -> None:
    """A rank with nothing to compute keeps nothing and recomputes nothing; its neighbors do not wait for it."""
    torch.manual_seed(0)
    same_as_one_device(Blocks("plain").double(), (volume(1, 1, 3, 8, 6),), halofx.Mesh(depth=4), thin="split")


def test_eval_and_no_grad() -> None:
    torch.manual_seed(0)
    model, x = Blocks("plain").double().eval(), volume(1, 1, 8, 6, 6)
    expected = model(x).detach()

    def run(rank: int) -> Tensor:
        net = halofx.compile(copy.deepcopy(model), halofx.Mesh(depth=2), inputs=[x.shape])
        with torch.no_grad():
            return net.gather(net(net.shard(x)))

    assert all(relative(y, expected) < 1e-12 for y in halofx.launch(run, 2))


class Count(TorchDispatchMode):
    """Counts convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.convolutions += func is torch.ops.aten.convolution.default
        return func(*args, **(kwargs or {}))


def _counts(model: Blocks, rank: int) -> tuple[int, int, int, int]:
    """Convolutions and messages, forward and backward."""
    x, counters = volume(1, 1, 8, 8, 6), current().counters
    net = halofx.compile(copy.deepcopy(model), halofx.Mesh(depth=2), inputs=[x.shape])
    net(net.shard(x))  # ranks compare notes
    counters.reset()
    with Count() as forward:
        y = net(net.shard(x))
    sent = counters.total().messages
    counters.reset()
    with Count() as backward:
        y.square().sum().backward()
    return forward.convolutions, backward.convolutions, sent, counters.total().messages


@pytest.mark.parametrize("way", WAYS)
def test_it_computes_twice_and_sends_once(way: str) -> None:
    for way_, again in (
        ("", 0),
        (way, 2 if way == "sequential" else 6),
    ):  # of a sequence torch leaves the last part alone
        model = Blocks(way_).double()
        for forward, backward, sent, sent_back in halofx.launch(partial(_counts, model), 2):
            assert (forward, backward) == (6, again)
            assert (sent, sent_back) == (
                (6 + 3),
                (6 + 3 + 1 - 1),
            )  # halos and statistics; backward no halo of x, but the sums


def test_the_summary_counts_what_is_kept() -> None:
    """Between regions the inputs of the blocks alone, and the faces that arrived in them."""
    nets = [halofx.compile(Blocks(way), halofx.Mesh(depth=2), inputs=[(1, 1, 8, 8, 6)]) for way in ("", "plain")]
    plain, kept = (net.summary().activations for net in nets)
    plane, shard = 8 * 6 * 4, 4 * 8 * 6 * 4
    entering = shard * (1 + 4 + 4)
    faces = plane * (1 + 4 + 4 + 4 + 4 + 2)
    assert kept == entering + faces and kept < plain / 2
    assert "checkpointed region 1 runs again" in nets[1].explain("blocks.1.a")
