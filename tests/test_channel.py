"""Axis ``channel``: filters and input channels over ranks, parameters as shards, equal to one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halofx
from halofx.runtime.comm import current
from tests import channel_worker as worker
from tests.models import TinyUNet, relative, same_as_one_device
from tests.test_zoo_exact import CASES, model_of

MESHES = [
    {"channel": 2}, {"channel": 3}, {"channel": 4}, {"channel": 2, "depth": 2}, {"data": 2, "channel": 2, "height": 2},
    {"channel": 2, "depth": 2, "width": 2},
]  # fmt: skip
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm3d,
    "group": lambda c: nn.GroupNorm(2, c),
    "instance": lambda c: nn.InstanceNorm3d(c, affine=True),
}


def image(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_unet(norm: str, sizes: dict[str, int]) -> None:
    torch.manual_seed(0)
    same_as_one_device(TinyUNet(NORMS[norm]).double(), (image(2, 1, 8, 7, 8),), halofx.Mesh(**sizes), steps=2)


@pytest.mark.parametrize("sizes", [{"channel": 2, "depth": 2}, {"channel": 4}], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_zoo(name: str, sizes: dict[str, int]) -> None:
    model, x = model_of(name)
    same_as_one_device(model, (x,), halofx.Mesh(**sizes), steps=1)


class Mixed(nn.Module):
    """Depthwise, grouped (plain and transposed), uneven, tied, normed and frozen weights; a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv3d(2, 12, 3, padding="same")
        self.depthwise = nn.Conv3d(12, 24, 3, padding=1, groups=12)
        self.grouped = nn.Conv3d(24, 10, 3, padding=1, groups=2, bias=False)
        self.up = nn.ConvTranspose3d(10, 15, 2, stride=2, groups=5)
        self.point = torch.nn.utils.parametrizations.weight_norm(nn.Conv3d(15, 9, 1))
        self.again = nn.Conv3d(9, 9, 1)
        self.again.weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1, 9, 1, 1, 1))
        self.norm = nn.LayerNorm(9)
        self.head = nn.Sequential(nn.Linear(9, 16), nn.GELU(), nn.Linear(16, 9), nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.grouped(F.silu(self.depthwise(F.relu(self.stem(x)))))
        y = self.point(self.up(y))
        y = self.again(torch.tanh(self.again(y))) * self.scale
        y = y + y.mean((2, 3, 4), keepdim=True).sigmoid()
        return self.head(self.norm(y.movedim(1, -1)))


@pytest.mark.parametrize(
    "sizes", [{"channel": 2}, {"channel": 3, "depth": 2}, {"channel": 5}, {"channel": 4, "width": 2}], ids=str
)
def test_every_kind_of_layer(sizes: dict[str, int]) -> None:
    torch.manual_seed(0)
    same_as_one_device(Mixed().double().eval(), (image(2, 2, 4, 3, 5),), halofx.Mesh(**sizes), steps=2)


def test_depthwise_needs_no_channels_of_others() -> None:
    depthwise = nn.Conv3d(4, 8, 3, padding=1, groups=4)
    model = nn.Sequential(nn.Conv3d(1, 4, 1), depthwise, nn.GroupNorm(4, 8), nn.ReLU(), nn.MaxPool3d(2))
    net = halofx.compile(model, halofx.Mesh(channel=4), inputs=[(1, 1, 8, 8, 8)])
    assert not net.summary().forward or {t.kind for t in net.summary().forward} == {
        "all_gather"
    }  # of the norm's statistics
    assert "f32[1, 8@channel, 4, 4, 4]" in net.listing()


@pytest.mark.parametrize(("inner", "kind"), [(64, "all_gather"), (2, "reduce_scatter")])
def test_moves_the_smaller_of_input_and_output(inner: int, kind: str) -> None:
    """Stationary-y gathers the input, stationary-x scatters the output."""
    model = nn.Sequential(nn.Conv3d(1, 8, 1), nn.Conv3d(8, inner, 1))
    net = halofx.compile(model, halofx.Mesh(channel=2), inputs=[(1, 1, 4, 4, 4)])
    assert {t.kind for t in net.summary().forward} == {kind}


def test_parameter_memory() -> None:
    model = halofx.zoo.build("unet3d", width=16)
    whole = sum(p.numel() for p in model.parameters())

    def run(rank: int) -> int:
        net = halofx.compile(copy.deepcopy(model), halofx.Mesh(channel=4), inputs=[(1, 1, 16, 16, 16)])
        return sum(p.numel() for p in net.parameters())

    assert max(halofx.launch(run, 4)) <= 0.3 * whole


def test_a_shared_model_stays_whole() -> None:
    """Compiled outside of the ranks, every rank gets the whole gradient."""
    model, x = TinyUNet().double(), image(2, 1, 8, 8, 8)
    net = halofx.compile(model, halofx.Mesh(channel=2, depth=2), inputs=[x.shape])
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    before = {n: b.clone() for n, b in model.named_buffers()}

    def run(rank: int) -> list[Tensor]:
        y = net.gather(net(net.shard(x)))
        return list(torch.autograd.grad(y.square().sum(), list(model.parameters())))

    for grads in halofx.launch(run, 4):
        assert all(relative(g, e) < 1e-10 for g, e in zip(grads, expected, strict=True))
    assert before.keys() == dict(model.named_buffers()).keys()


def test_state_goes_from_mesh_to_mesh() -> None:
    """A full state out of one mesh, into another, and into one device."""
    torch.manual_seed(0)
    model, x = TinyUNet().double(), image(2, 1, 8, 8, 8)
    model(x)

    def save(rank: int) -> dict[str, Tensor]:
        net = halofx.compile(copy.deepcopy(model), halofx.Mesh(channel=4), inputs=[x.shape])
        assert net.full_state_dict(dst=1).keys() == (model.state_dict().keys() if rank == 1 else {}.keys())
        return net.full_state_dict()

    states = halofx.launch(save, 4)
    for state in states:
        assert all(torch.equal(state[n], v) for n, v in model.state_dict().items())

    def load(rank: int) -> Tensor:
        own = TinyUNet().double().eval()  # every rank its own random weights
        net = halofx.compile(own, halofx.Mesh(channel=2, depth=2), inputs=[x.shape])
        assert not net.load_state_dict(states[0]).missing_keys
        shards = net.state_dict()
        net.load_state_dict(shards)
        return net.gather(net(net.shard(x)))

    expected = model.eval()(x)
    assert all(relative(y, expected) < 1e-12 for y in halofx.launch(load, 4))


def test_both_modes_and_other_shapes_use_the_same_shards() -> None:
    torch.manual_seed(0)
    model = TinyUNet().double()

    def run(rank: int) -> list[float]:
        own, one, errors = copy.deepcopy(model), copy.deepcopy(model), []
        net = halofx.compile(own, halofx.Mesh(channel=2, depth=2))
        for shape in ((2, 1, 8, 8, 8), (1, 1, 6, 4, 10)):
            for training in (True, False):
                x = image(*shape)
                net.train(training), one.train(training)
                errors.append(relative(net.gather(net(net.shard(x))), one(x)))
        assert own.enc.weight.shape[0] == 2
        return errors

    assert max(max(errors) for errors in halofx.launch(run, 4)) < 1e-10


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_by_the_norm_of_the_whole_model(norm_type: float) -> None:
    torch.manual_seed(0)
    model, x = TinyUNet().double(), image(2, 1, 8, 8, 8)
    one = copy.deepcopy(model)
    one(x).square().sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5, norm_type)

    def run(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        net = halofx.compile(copy.deepcopy(model), halofx.Mesh(channel=2), inputs=[x.shape])
        net.gather(net(net.shard(x))).square().sum().backward()
        norm = net.clip_grad_norm_(0.5, norm_type)
        return norm, net.model.enc.weight.grad, one.enc.weight.grad[current().rank * 2 :][:2]

    for norm, grad, wanted in halofx.launch(run, 2):
        assert relative(norm.reshape(()), expected) < 1e-12 and relative(grad, wanted) < 1e-10


def test_a_loss_over_split_classes() -> None:
    torch.manual_seed(0)
    target = torch.randint(0, 3, (2, 8, 8, 8), generator=torch.Generator().manual_seed(3))
    for sizes in ({"channel": 2}, {"channel": 3, "depth": 2}):
        same_as_one_device(
            TinyUNet().double(),
            (image(2, 1, 8, 8, 8),),
            halofx.Mesh(**sizes),
            loss=F.cross_entropy,
            targets=(target,),
            steps=1,
        )


def test_too_many_ranks_for_the_filters() -> None:
    with pytest.raises(halofx.MeshError, match="channel=8 splits nothing: no layer of the model has as many filters"):
        halofx.compile(nn.Conv3d(1, 4, 3), halofx.Mesh(channel=8), inputs=[(1, 1, 8, 8, 8)])


def test_check_covers_the_axis() -> None:
    found = halofx.check(TinyUNet(), [torch.randn(2, 1, 8, 8, 8)], halofx.Mesh(channel=2, height=2))
    assert found.status == "exact" and found.coverage.movements["all_gather"] >= 1


@pytest.mark.slow
def test_processes_hold_dtensors_and_resume_on_another_mesh(tmp_path: Path) -> None:
    train = partial(worker.train_and_save, str(tmp_path))
    assert max(halofx.launch(train, 4, backend="processes", timeout=60)) < 1e-10
    states = halofx.launch(partial(worker.resume, str(tmp_path)), 4, backend="processes", timeout=60)
    expected = worker.last_state(0)
    for state in states:
        assert all(relative(state[n].double(), v.double()) < 1e-9 for n, v in expected.items())


class Notes(nn.Module):
    """Writes to a buffer that it never reads."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(1, 4, 3, padding=1)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        self.seen = y.detach().mean((0, 2, 3, 4))
        return y


@pytest.mark.parametrize(
    "sizes", [{"depth": 2}, {"channel": 2}, {"pipe": 2}, {"pipe": 2, "channel": 2, "depth": 2}], ids=str
)
def test_a_buffer_that_is_only_written(sizes: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Notes(), nn.ReLU()).double(), torch.randn(2, 1, 6, 5, 4, dtype=torch.float64)
    found = halofx.check(model, [x], halofx.Mesh(**sizes))
    assert found.exact and "1 buffer" in found.verdict, found.verdict
