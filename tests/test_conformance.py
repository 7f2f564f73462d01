"""Faults that users of sharded convolutions met elsewhere, each as its kind: the smallest input that shows it, and relatives.

Norms, reductions, losses (N), communication (C), autograd and training (A), memory (M); more of C and A in `tests/test_net.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halofx
from halofx.runtime.comm import current
from tests.models import TinyUNet, relative, same_as_one_device
from tests.test_conformance_geometry import DEPTHS, right


def test_n1_batch_norm_with_different_sizes_per_rank() -> None:
    for affine in (True, False):
        for momentum in (0.1, 0.3):
            model = nn.BatchNorm3d(2, affine=affine, momentum=momentum).double()
            for shape, sizes_ in (
                ((1, 2, 5, 4, 4), {"depth": 2}),
                ((3, 2, 5, 4, 4), {"data": 2, "depth": 3}),
                ((2, 2, 3, 2, 2), {"depth": 4}),
            ):
                same_as_one_device(
                    model, (torch.randn(shape, dtype=torch.float64),), halofx.Mesh(**sizes_), thin="split"
                )


def test_n5_batch_norm_with_batch_split() -> None:
    same_as_one_device(
        nn.BatchNorm3d(4).double(), (torch.randn(2, 4, 3, 3, 3, dtype=torch.float64),), halofx.Mesh(data=2)
    )


@pytest.mark.parametrize("norm", [
    nn.GroupNorm(2, 4), nn.InstanceNorm3d(4, affine=True), nn.InstanceNorm3d(4, affine=True, track_running_stats=True), nn.LayerNorm((4, 4)),
    nn.LocalResponseNorm(3),
], ids=str)  # fmt: skip
def test_n_norms(norm: nn.Module) -> None:
    for sizes_ in DEPTHS:
        same_as_one_device(
            copy.deepcopy(norm).double(), (torch.randn(2, 4, 5, 4, 4, dtype=torch.float64) + 3,), halofx.Mesh(**sizes_)
        )


def test_n3_instance_norm_keeps_the_memory_format() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(4, 4, 3, padding=1), nn.InstanceNorm3d(4, affine=True), nn.LeakyReLU()).double()
    x = torch.randn(1, 4, 8, 8, 8, dtype=torch.float64)
    last = torch.channels_last_3d
    expected = model(x.contiguous(memory_format=last))

    def run(rank: int) -> tuple[Tensor, bool]:
        net = halofx.compile(copy.deepcopy(model), halofx.Mesh(depth=2), inputs=[x.shape])
        y = net(net.shard(x).contiguous(memory_format=last))
        return net.gather(y), y.is_contiguous(memory_format=last)

    for y, kept in halofx.launch(run, 2):
        assert relative(y, expected) < 1e-11 and kept == expected.is_contiguous(memory_format=last)


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.down, self.up = nn.Conv3d(4, 4, 3, padding=1), nn.Linear(4, 2), nn.Linear(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        gate = torch.sigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool3d(x, 1).flatten(1)))))
        return x * gate[:, :, None, None, None]


@pytest.mark.parametrize("function", [
    lambda x: F.adaptive_avg_pool3d(x, 1), lambda x: F.adaptive_max_pool3d(x, 1), lambda x: x.mean((2, 3, 4)), lambda x: x.var((2, 3, 4)),
    lambda x: x.std(2), lambda x: x.amax((2, 3, 4)), lambda x: x.softmax(2), lambda x: x.log_softmax(2), lambda x: x.flatten(2).softmax(2),
    lambda x: x.sum(), lambda x: x.mean(2, keepdim=True), lambda x: x.logsumexp((2, 3)), lambda x: x.max(2).values, lambda x: x.norm(),
], ids=range(14))  # fmt: skip
def test_n7_reductions_over_split_dims(function: Callable[[Tensor], Tensor]) -> None:
    right(function, (1, 4, 7, 4, 4))


def test_n7_squeeze_and_excite() -> None:
    torch.manual_seed(0)
    for sizes_ in ({"depth": 2}, {"data": 2, "depth": 2}, {"height": 2, "width": 2}):
        same_as_one_device(
            SqueezeExcite().double(), (torch.randn(2, 4, 7, 4, 4, dtype=torch.float64),), halofx.Mesh(**sizes_)
        )


def test_c1_halos_and_collectives_in_a_loop() -> None:
    torch.manual_seed(0)
    layers = [m for _ in range(20) for m in (nn.Conv3d(1, 1, 3, padding=1), nn.Softmax(2))]
    same_as_one_device(
        nn.Sequential(*layers).double(), (torch.randn(1, 1, 6, 4, 4, dtype=torch.float64),), halofx.Mesh(depth=2)
    )


def test_c2_a_forward_replaced_after_compile_changes_nothing() -> None:
    model, x = TinyUNet().double().eval(), torch.randn(1, 1, 8, 8, 8, dtype=torch.float64)
    expected, forward = model(x), nn.Conv3d.forward

    net = halofx.compile(model, halofx.Mesh(depth=2), inputs=[x.shape])
    nn.Conv3d.forward = lambda self, x: torch.zeros(1)  # type: ignore[assignment,method-assign]
    try:
        results = halofx.launch(lambda rank: net.gather(net(net.shard(x))), 2)
    finally:
        nn.Conv3d.forward = forward  # type: ignore[method-assign]
    assert all(relative(y, expected) < 1e-12 for y in results)


@pytest.mark.parametrize("module", [
    nn.Conv3d(1, 1, 3, padding=1), nn.Conv3d(3, 8, 4, 4), nn.Conv3d(2, 2, 3, padding=1, bias=False),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("sizes_", [{"depth": 2}, {"width": 2}, {"height": 2, "width": 2}], ids=str)
def test_a1_to_a5_gradients_at_seams(module: nn.Conv3d, sizes_: dict[str, int]) -> None:
    x = torch.randn(1, module.in_channels, 8, 8, 8, dtype=torch.float64)
    same_as_one_device(copy.deepcopy(module).double(), (x,), halofx.Mesh(**sizes_))


def soft_dice_and_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    p = logits.softmax(1)
    truth = F.one_hot(target, logits.shape[1]).movedim(-1, 1).to(p.dtype)
    dims = (0, 2, 3, 4)
    dice = (2 * (p * truth).sum(dims) + 1e-5) / (p.sum(dims) + truth.sum(dims) + 1e-5)
    return F.cross_entropy(logits, target) + 1 - dice.mean()


@pytest.mark.parametrize("loss", [
    soft_dice_and_cross_entropy, nn.CrossEntropyLoss(ignore_index=1), nn.CrossEntropyLoss(label_smoothing=0.1),
    nn.CrossEntropyLoss(weight=torch.tensor([0.2, 0.5, 2.0], dtype=torch.float64)), nn.CrossEntropyLoss(reduction="sum"),
], ids=["dice+ce", "ignore", "smooth", "weights", "sum"])  # fmt: skip
@pytest.mark.parametrize("sizes_", [{"depth": 2}, {"data": 2}, {"data": 2, "depth": 2}, {"depth": 3}], ids=str)
def test_n4_a7_losses_and_sharded_labels(loss: Any, sizes_: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, target = nn.Conv3d(1, 3, 3, padding=1).double(), torch.randint(0, 3, (2, 8, 8, 8))
    nets = same_as_one_device(
        model,
        (torch.randn(2, 1, 8, 8, 8, dtype=torch.float64),),
        halofx.Mesh(**sizes_),
        loss=loss,
        targets=(target,),
        steps=2,
    )
    assert "all_gather" not in nets[0].listing()


def test_a8_autocast_clipping_and_scaler() -> None:
    torch.manual_seed(0)
    model, x = TinyUNet(), torch.randn(1, 1, 8, 8, 8)
    one = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        expected = one(x).float().square().mean()
    expected.backward()

    def run(rank: int) -> tuple[Tensor, Tensor]:
        own = copy.deepcopy(model)
        net = halofx.compile(own, halofx.Mesh(depth=2), inputs=[x.shape])
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = net.gather(net(net.shard(x))).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1e9)
        scaler.step(optimizer)
        return loss.detach(), norm

    reference = torch.nn.utils.clip_grad_norm_(one.parameters(), 1e9)
    for loss, norm in halofx.launch(run, 2):
        assert relative(loss, expected) < 1e-2 and relative(norm, reference) < 5e-2


def test_m1_huge_shards_are_planned() -> None:
    with torch.device("meta"):
        model = nn.Conv3d(256, 8, 3, padding=1)
    net = halofx.compile(model, halofx.Mesh(height=4), inputs=[(1, 256, 5, 1090, 1922)])
    assert "f32[1, 256, 5, 1090@height, 1922]" in net.listing()


def test_m2_512_cubed_on_4_ranks_is_planned() -> None:
    with torch.device("meta"):
        model = halofx.zoo.build("unet3d", width=16)
    alone, split = (
        halofx.compile(model, halofx.Mesh(depth=n), inputs=[(1, 1, 512, 512, 512)]).summary() for n in (1, 4)
    )
    assert 0.25 <= split.activations / alone.activations < 0.27


def test_m4_attention_is_counted() -> None:
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.attend = nn.Conv3d(1, 8, 3, padding=1), nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            tokens = y.flatten(2).transpose(1, 2)
            return self.attend(tokens, tokens, tokens, need_weights=True)[0].transpose(1, 2).view_as(y)

    with torch.device("meta"):
        model = Attend()
    net = halofx.compile(model, halofx.Mesh(depth=2), inputs=[(1, 1, 16, 16, 16)])
    assert net.summary().activations > 4 * 2 * 4096 * 4096 / 2  # the weights of 2 heads, split or not


def test_m5_bfloat16_seams_are_no_worse_than_the_interior() -> None:
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 1, 3, padding=1)),
        torch.randn(1, 1, 16, 8, 8),
    )
    exact = copy.deepcopy(model).double()(x.double())
    low = model.to(torch.bfloat16)

    def run(rank: int) -> Tensor:
        net = halofx.compile(copy.deepcopy(low), halofx.Mesh(depth=4), inputs=[x.to(torch.bfloat16)])
        return net.gather(net(net.shard(x.to(torch.bfloat16))))

    error = (halofx.launch(run, 4)[0].double() - exact).abs().amax((0, 1, 3, 4))
    seams = error[[3, 4, 7, 8, 11, 12]].max()
    assert seams <= 2 * error[[1, 2, 5, 6, 9, 10, 13, 14]].max()


def test_c8_torch_compile_of_a_compiled_net() -> None:
    torch.manual_seed(0)
    model, x = TinyUNet().double(), torch.randn(1, 1, 8, 8, 8, dtype=torch.float64)
    expected = copy.deepcopy(model)(x)

    def run(rank: int) -> Tensor:
        net = halofx.compile(copy.deepcopy(model), halofx.Mesh(depth=2), inputs=[x.shape])
        compiled = torch.compile(net, backend="eager")
        shard = net.shard(x)
        y = compiled(shard)
        current()
        return net.gather(y, like=net(shard))

    assert all(relative(y, expected) < 1e-12 for y in halofx.launch(run, 2))
