"""Norms: what stays split, precision, memory, derivatives, replicas, and CONFORMANCE N1, N2, N3, N5."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halofx
from halofx.compiler.ops.norm_parts import around_zero, grouped, normalize, statistics
from halofx.runtime import shards
from halofx.runtime.comm import current
from halofx.runtime.movement import merge_moments
from tests.models import relative, same_as_one_device


def volume(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def randomized(module: nn.Module) -> nn.Module:
    """Weights that are not all one."""
    torch.manual_seed(1)
    for p in module.parameters():
        nn.init.uniform_(p, 0.5, 1.5)
    return module


def compiled(module: nn.Module, shape: tuple[int, ...], axes: Any = None, **mesh: int) -> halofx.Net:
    layouts = {"x" if isinstance(module, nn.RMSNorm) else "input": axes} if axes else None
    return halofx.compile(module, halofx.Mesh(**mesh), inputs=[shape], layouts=layouts)


# -- what stays split

NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm3d(4),
    "batch without running statistics": lambda: nn.BatchNorm3d(4, track_running_stats=False),
    "instance": lambda: nn.InstanceNorm3d(4, affine=True),
    "instance with running statistics": lambda: nn.InstanceNorm3d(4, affine=True, track_running_stats=True),
    "group": lambda: nn.GroupNorm(2, 4),
    "layer": lambda: nn.LayerNorm((7, 6, 4)),
    "layer with channels": lambda: nn.LayerNorm((4, 7, 6, 4)),
    "root mean square": lambda: nn.RMSNorm((7, 6, 4)),
}


@pytest.mark.parametrize("name", NORMS)
def test_one_message_a_layer(name: str) -> None:
    """The collective of the statistics, and nothing else, whatever the mesh."""
    for mesh in ({"depth": 2}, {"data": 2, "depth": 3, "width": 2}):
        net = compiled(NORMS[name](), (2, 4, 7, 6, 4), **mesh)
        kinds = [t.kind for t in net.summary().forward]
        gathered = (
            ["all_gather"] if "running" in name and "instance" in name and "data" in mesh else []
        )  # of statistics
        assert sorted(kinds) == sorted(["all_reduce", *gathered]), net.listing()


@pytest.mark.parametrize("name", NORMS)
def test_the_op_itself_runs_where_no_reduced_dim_is_split(name: str) -> None:
    axes = {"batch": (None, "channel"), "batch without running statistics": (None, "channel")}.get(name, ("data", None))
    net = compiled(NORMS[name](), (2, 4, 7, 6, 4), (*axes, None, None, None), **{a: 2 for a in axes if a})
    if name == "instance with running statistics":  # their mean over the batch
        assert not re.search("all_gather.*f32", net.listing()), net.listing()
        return
    assert "normalize(" not in net.listing(), net.listing()
    moved = [line for line in net.listing().splitlines() if " msg " in line]
    assert all("new_mean.whole" in line or "new_var.whole" in line for line in moved), net.listing()


@pytest.mark.parametrize("name", ["batch", "instance with running statistics"])
def test_evaluation_is_pointwise(name: str) -> None:
    net = compiled(NORMS[name]().eval(), (2, 4, 7, 6, 4), data=2, depth=2)
    assert not net.summary().forward, net.listing()


def test_layer_norm_over_the_last_dim_sends_nothing() -> None:
    net = compiled(nn.LayerNorm(4), (2, 7, 6, 4), ("data", "depth", "height", None), data=2, depth=2, height=2)
    assert not net.summary().forward, net.listing()


# -- CONFORMANCE N1, N5, and more of their kind


@pytest.mark.parametrize("mesh", [{"data": 2, "depth": 2}, {"depth": 4}, {"depth": 2, "height": 2}], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_uneven_shards(name: str, mesh: dict[str, int]) -> None:
    """Outputs, all gradients, running mean and variance (over n - 1), parameters after a step."""
    model = randomized(NORMS[name]()).double()
    same_as_one_device(model, (volume(2, 4, 7, 6, 4) * 2 + 3,), halofx.Mesh(**mesh), steps=1)


@pytest.mark.parametrize("shape, mesh", [((1, 2, 5, 4, 4), 2), ((1, 2, 3, 4, 4), 4), ((1, 1, 2, 1, 1), 2)], ids=str)
def test_batch_norm_with_different_sizes(shape: tuple[int, ...], mesh: int) -> None:
    for thin in ("whole", "split"):
        model = nn.BatchNorm3d(shape[1]).double()
        same_as_one_device(model, (volume(*shape),), halofx.Mesh(depth=mesh), steps=2, thin=thin)


def test_cumulative_running_statistics() -> None:
    model = nn.BatchNorm3d(2, momentum=None).double()
    same_as_one_device(model, (volume(2, 2, 5, 4, 4),), halofx.Mesh(depth=2), steps=3)


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm3d(4), nn.InstanceNorm3d(4, affine=True), nn.GroupNorm(2, 4), nn.GroupNorm(1, 4)], ids=str
)
def test_split_channels(norm: nn.Module) -> None:
    model, layouts = randomized(norm).double(), {"input": (None, "channel", "depth", None, None)}
    same_as_one_device(
        model, (volume(2, 4, 3, 3, 3),), halofx.Mesh(channel=2), layouts={"input": (None, "channel", None, None, None)}
    )
    same_as_one_device(model, (volume(2, 4, 3, 3, 3),), halofx.Mesh(depth=2, channel=3), layouts=layouts)


def test_one_and_two_dims() -> None:
    for model, shape, mesh in (
        (nn.BatchNorm1d(3), (4, 3, 9), {"data": 2, "width": 2}),
        (nn.BatchNorm1d(3), (5, 3), {"data": 2}),
        (nn.BatchNorm2d(3), (2, 3, 5, 6), {"height": 3}),
        (nn.InstanceNorm1d(3, affine=True), (2, 3, 9), {"width": 4}),
        (nn.GroupNorm(2, 4), (2, 4, 9), {"width": 2}),
        (nn.Sequential(nn.LocalResponseNorm(3), nn.Conv2d(5, 1, 1)), (2, 5, 6, 5), {"height": 2}),
    ):
        same_as_one_device(randomized(model).double(), (volume(*shape) + 1,), halofx.Mesh(**mesh))


# -- CONFORMANCE N3: memory format


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(4, 4, 3, padding=1, bias=False)  # a bias before a norm has no gradient
        self.norm = nn.InstanceNorm3d(4, affine=True)
        self.act = nn.LeakyReLU(0.01)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.norm(self.conv(x)))
        return y


def test_instance_norm_keeps_the_memory_format() -> None:
    x = volume(1, 4, 12, 10, 8).contiguous(memory_format=torch.channels_last_3d)
    same_as_one_device(Block().double(), (x,), halofx.Mesh(depth=2), steps=2)
    dims = (2, 3, 4)
    y = normalize(x, statistics(x, dims), None, None, 1e-5, dims, 1)
    assert y.is_contiguous(memory_format=torch.channels_last_3d)


# -- CONFORMANCE N2: large means, low precision


@pytest.mark.parametrize("mean", [0.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["batch", "instance", "group", "layer", "root mean square"])
def test_as_precise_as_one_device(name: str, dtype: torch.dtype, mean: float) -> None:
    """Errors against float64 at most twice those of torch on one device: output, gradient of the input, running statistics."""
    x, weights = (volume(1, 4, 7, 6, 4) + mean).to(dtype), volume(1, 4, 7, 6, 4, seed=1).to(dtype)
    model = randomized(NORMS[name]())
    model = model if name == "batch" else model.to(dtype)  # running statistics stay float32, as under autocast
    exact, plain = (
        _run(copy.deepcopy(model).double(), x.double(), weights.double()),
        _run(copy.deepcopy(model), x, weights),
    )
    mesh = halofx.Mesh(depth=2)

    def run(rank: int) -> list[Tensor]:
        own = copy.deepcopy(model)
        net = halofx.compile(own, mesh, inputs=[x])
        layout = net.instances.input_layout(net.names[0], x.shape)
        cut = lambda v: shards.take(v, layout, mesh, rank)  # noqa: E731
        found = _run(own, cut(x), cut(weights), net)
        return [shards.gather(v, layout, x.shape, mesh, current()) for v in found[:2]] + found[2:]

    for found in halofx.launch(run, mesh, timeout=30):
        for ours, theirs, true in zip(found, plain, exact, strict=True):
            allowed = 2 * (theirs.double() - true).abs().max() + 1e-6 * true.abs().max()
            assert (ours.double() - true).abs().max() <= allowed


def _run(model: nn.Module, x: Tensor, weights: Tensor, call: Any = None) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = (call or model)(x)
    (grad,) = torch.autograd.grad(y, x, weights)
    return [y.detach(), grad, *(b.clone() for n, b in model.named_buffers() if "running" in n)]


def test_statistics_are_more_precise_than_their_input() -> None:
    """float32 around 1e4: the mean to 1e-12, which float32 cannot even hold."""
    x = (volume(2, 3, 9, 16, 16) + 1e4).float()
    count, mean, squares = statistics(x, (0, 2, 3, 4)).flatten(1)
    true = x.double()
    assert torch.equal(count, torch.full((3,), 2.0 * 9 * 16 * 16, dtype=torch.float64))
    assert relative(mean, true.mean((0, 2, 3, 4))) < 1e-11
    assert relative(squares, true.var((0, 2, 3, 4), correction=0) * count) < 1e-6


def test_equal_numbers_are_normalized_to_zero() -> None:
    x = torch.full((1, 1, 4, 3, 3), 1e3 / 3)
    dims = (2, 3, 4)
    y = normalize(x, statistics(x, dims), None, None, 1e-5, dims, 1)
    assert y.abs().max() < 1e-6


def test_parts_merge_to_the_whole() -> None:
    x, dims = volume(2, 3, 9, 4, 4) + 100, (2, 3, 4)
    parts = [statistics(p, dims) for p in x.split([5, 0, 3, 1], 2)]
    torch.testing.assert_close(merge_moments(torch.stack(parts)), statistics(x, dims), rtol=1e-12, atol=1e-12)
    halves = statistics(x.transpose(0, 1).reshape(1, 3, -1, 4, 4), dims)
    torch.testing.assert_close(
        grouped(statistics(x, dims), 1)[:, :, :1], statistics(x, (1, *dims)), rtol=1e-12, atol=1e-12
    )
    assert halves.shape == (3, 1, 3, 1, 1, 1)


# -- memory


def test_autograd_keeps_the_input_once() -> None:
    for shape, dims, parameters in (
        ((2, 4, 8, 8, 8), (0, 2, 3, 4), (4,)), ((2, 4, 8, 8, 8), (2, 3, 4), (4,)), ((2, 4, 8, 8, 8), (2, 3, 4), (8, 8, 8)),
    ):  # fmt: skip
        for dtype in (torch.float32, torch.bfloat16):
            x = volume(*shape).to(dtype).requires_grad_()
            weight = torch.ones(parameters, requires_grad=True)
            kept: dict[int, int] = {}

            def pack(t: Tensor, kept: dict[int, int] = kept) -> Tensor:
                kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
                return t

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                normalize(
                    x, statistics(x, dims), weight, weight, 1e-5, dims, 5 - len(dims) if len(parameters) > 1 else 1
                )
            large = [size for size in kept.values() if size >= x.numel() * x.element_size()]
            assert len(large) == 1


# -- derivatives


def test_second_derivatives_of_the_parts() -> None:
    x = (volume(2, 2, 3, 1) + 2).requires_grad_()
    for dims, shape, first in (((0, 2, 3), (2,), 1), ((2, 3), (2,), 1), ((2, 3), (3, 1), 2), ((), (2,), 1)):
        w, b = (volume(*shape, seed=s).requires_grad_() for s in (1, 2))
        norm = lambda x, w, b: normalize(x, statistics(x, dims), w, b, 0.1, dims, first)  # noqa: B023, E731
        assert torch.autograd.gradcheck(norm, (x, w, b)) and torch.autograd.gradgradcheck(norm, (x, w, b))
    root = lambda x: normalize(x, around_zero(statistics(x, (2, 3))), None, None, 0.1, (2, 3), 1)  # noqa: E731
    assert torch.autograd.gradcheck(root, (x,)) and torch.autograd.gradgradcheck(root, (x,))


@pytest.mark.parametrize("name", ["batch", "instance", "group", "layer"])
def test_second_derivatives(name: str) -> None:
    model, mesh = randomized(NORMS[name]()).double(), halofx.Mesh(depth=3)
    x, weights = volume(2, 4, 7, 6, 4), volume(2, 4, 7, 6, 4, seed=1)

    def second(function: Any, part: Callable[[Tensor], Tensor]) -> Tensor:
        leaf = part(x).clone().requires_grad_()
        first = torch.autograd.grad((function(leaf) ** 3 * part(weights)).sum(), leaf, create_graph=True)[0]
        return torch.autograd.grad((first * part(weights)).sum(), leaf)[0]

    expected = second(copy.deepcopy(model), lambda v: v)

    def run(rank: int) -> None:
        net = halofx.compile(copy.deepcopy(model), mesh, inputs=[x])
        layout = net.instances.input_layout(net.names[0], x.shape)
        cut = lambda v: shards.take(v, layout, mesh, rank)  # noqa: E731
        assert relative(second(net, cut), cut(expected)) < 1e-10

    halofx.launch(run, mesh, timeout=30)


def test_frozen_parameters_and_inputs_without_gradient() -> None:
    model = randomized(
        nn.Sequential(nn.BatchNorm3d(2), nn.Conv3d(2, 2, 3, padding=1, bias=False), nn.GroupNorm(2, 2))
    ).double()
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    same_as_one_device(model, (volume(1, 2, 7, 4, 4),), halofx.Mesh(depth=2), steps=2)


# -- replicas


class TwoNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv = nn.BatchNorm3d(3), nn.Conv3d(3, 3, 1)
        self.second = nn.BatchNorm3d(3, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(F.relu(self.conv(self.first(x))))
        return y


@pytest.mark.parametrize("mesh", [{"data": 2}, {"data": 2, "depth": 2}, {"data": 3, "depth": 2}, {"depth": 2}], ids=str)
def test_statistics_of_each_replica(mesh: dict[str, int]) -> None:
    """As DistributedDataParallel: every coordinate of data normalizes its own samples, running statistics are those of 0."""
    torch.manual_seed(0)
    model, x, weights = TwoNorms().double(), volume(5, 3, 5, 4, 4), volume(5, 3, 5, 4, 4, seed=1)
    one, grid = copy.deepcopy(model), halofx.Mesh(**mesh)
    outs, running = [], []
    for part in x.tensor_split(grid["data"]):
        outs.append(one(part))
        running.append([b.clone() for b in one.buffers()])
    (torch.cat(outs) * weights).sum().backward()

    def run(rank: int) -> None:
        own = copy.deepcopy(model)
        net = halofx.compile(own, grid, inputs=[x], batchnorm="replica")
        y = net.gather(net(net.shard(x)))
        (y * weights).sum().backward()
        assert relative(y, torch.cat(outs)) < 1e-12
        for p, q in zip(own.parameters(), one.parameters(), strict=True):
            assert relative(p.grad, q.grad) < 1e-10
        for b, c in zip(own.buffers(), running[0], strict=True):
            assert relative(b, c) < 1e-12
        reduced = [t.axes for t in net.summary().forward if t.kind == "all_reduce"]
        assert all("data" not in axes for axes in reduced), net.listing()

    halofx.launch(run, grid, timeout=30)


def test_an_unknown_kind_of_batch_norm_is_refused() -> None:
    with pytest.raises(ValueError, match="batchnorm='local'"):
        halofx.compile(TwoNorms(), halofx.Mesh(data=2), inputs=[(2, 3, 4, 4, 4)], batchnorm="local")
