"""Axis ``pipe``: stages, schedules and micro-batches, equal to one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halofx
from halofx.compiler.stages import LOOPED, SCHEDULES, grid, orders
from tests.models import TinyUNet, relative, same_as_one_device
from tests.test_zoo_exact import CASES, model_of

UNET = partial(TinyUNet, lambda c: nn.GroupNorm(2, c))


def image(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def classes(*shape: int) -> Tensor:
    return torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(3))


def unet() -> nn.Module:
    torch.manual_seed(0)
    return UNET().double()


# schedules


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pipe", [1, 2, 3, 4, 48])
def test_schedules_do_everything_once_and_never_wait_for_themselves(schedule: str, pipe: int) -> None:
    stages = pipe * LOOPED.get(schedule, 1)
    for micro in range(1, 9):
        rows = orders(schedule, pipe, stages, micro)
        assert len(grid(rows).splitlines()) == pipe
        done = sorted((a.stage, a.micro, a.kind) for row in rows for a in row)
        forward = [(s, m) for s, m, kind in done if kind == "F"]
        whole = [(s, m) for s, m, kind in done if kind in "BW"]
        assert forward == whole == [(s, m) for s in range(stages) for m in range(micro)]


def test_1f1b_keeps_fewer_micro_batches_than_gpipe() -> None:
    def most(schedule: str) -> int:
        alive, peak = 0, 0
        for action in orders(schedule, 3, 3, 8)[0]:
            alive += 1 if action.kind == "F" else -1
            peak = max(peak, alive)
        return peak

    assert (most("gpipe"), most("1f1b")) == (8, 3)


# exactness

MESHES = [
    {"pipe": 2}, {"pipe": 3}, {"pipe": 4}, {"pipe": 2, "depth": 2}, {"pipe": 2, "data": 2}, {"pipe": 2, "channel": 2},
    {"pipe": 2, "data": 2, "depth": 2}, {"pipe": 3, "height": 2},
]  # fmt: skip


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_unet_under_every_schedule(schedule: str, sizes: dict[str, int]) -> None:
    """Skips over several stages, uneven micro-batches."""
    if sizes["pipe"] * LOOPED.get(schedule, 1) > 9:
        sizes = {**sizes, "pipe": 2}
    for micro in (2, 3):
        same_as_one_device(
            unet(), (image(8, 1, 6, 5, 4),), halofx.Mesh(**sizes), loss=F.cross_entropy, targets=(classes(8, 6, 5, 4),),
            microbatches=micro, schedule=schedule,
        )  # fmt: skip


@pytest.mark.parametrize("micro", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_any_number_of_micro_batches(schedule: str, micro: int) -> None:
    same_as_one_device(
        unet(), (image(8, 1, 6, 5, 4),), halofx.Mesh(pipe=2), loss=F.cross_entropy, targets=(classes(8, 6, 5, 4),),
        microbatches=micro, schedule=schedule, steps=2,
    )  # fmt: skip


@pytest.mark.parametrize("sizes", [{"pipe": 2}, {"pipe": 3, "depth": 2}, {"pipe": 2, "channel": 2}], ids=str)
@pytest.mark.parametrize("micro", [1, 2])
def test_without_a_loss(micro: int, sizes: dict[str, int]) -> None:
    """The output is on every rank, and a loss of the user's goes back through all stages."""
    same_as_one_device(unet(), (image(3, 1, 6, 5, 4),), halofx.Mesh(**sizes), microbatches=micro, steps=2)


@pytest.mark.parametrize("name", CASES)
def test_zoo(name: str) -> None:
    model, x = model_of(name)
    same_as_one_device(model, (x,), halofx.Mesh(pipe=3, depth=2), steps=1)
    same_as_one_device(model, (x,), halofx.Mesh(pipe=2, data=2), steps=1)


@pytest.mark.parametrize("sizes", [
    {"pipe": 2, "data": 2, "channel": 2, "depth": 2}, {"pipe": 2, "data": 2, "channel": 2, "depth": 2, "height": 2},
], ids=str)  # fmt: skip
def test_all_axes_at_once(sizes: dict[str, int]) -> None:
    same_as_one_device(
        unet(),
        (image(4, 1, 6, 5, 4),),
        halofx.Mesh(**sizes),
        loss=F.cross_entropy,
        targets=(classes(4, 6, 5, 4),),
        microbatches=2,
    )


def test_micro_batches_without_a_pipeline() -> None:
    """Gradient accumulation inside one call."""
    for sizes in ({"depth": 2}, {"data": 2}, {}):
        same_as_one_device(
            unet(),
            (image(6, 1, 6, 5, 4),),
            halofx.Mesh(**sizes),
            loss=F.cross_entropy,
            targets=(classes(6, 6, 5, 4),),
            microbatches=3,
        )


class Tied(nn.Module):
    """One convolution used in every stage, a parameter of the model itself, several inputs and outputs, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv3d(1, 3, 1)
        self.shared = nn.Conv3d(3, 3, 3, padding=1)
        self.scale = nn.Parameter(torch.rand(3, 1, 1, 1))
        self.drop = nn.Dropout(0.4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        a = F.relu(self.shared(self.enter(x)))
        b = self.drop(F.relu(self.shared(a))) * self.scale
        c = F.relu(self.shared(b + a)) + self.enter(y)
        return {"first": a, "rest": (c, self.shared(c).mean((2, 3, 4)))}


@pytest.mark.parametrize("sizes", [{"pipe": 2}, {"pipe": 4}, {"pipe": 3, "width": 2}], ids=str)
def test_tied_parameters_and_several_outputs(sizes: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = Tied().double().eval()
    same_as_one_device(
        model, (image(4, 1, 4, 4, 4), image(4, 1, 4, 4, 4)), halofx.Mesh(**sizes), microbatches=2, steps=2
    )


def test_dropout_draws_the_same_numbers_whatever_the_stages_and_micro_batches() -> None:
    torch.manual_seed(0)
    model, inputs = Tied().double(), (image(4, 1, 4, 4, 4), image(4, 1, 4, 4, 4))

    def run(sizes: dict[str, int], micro: int) -> Tensor:
        def one(rank: int) -> Tensor:
            net = halofx.compile(copy.deepcopy(model), halofx.Mesh(**sizes), inputs=inputs, microbatches=micro, seed=7)
            return net.gather(net(*net.shard(*inputs))["rest"][0])

        return halofx.launch(one, halofx.Mesh(**sizes))[0]

    expected = run({"depth": 2}, 1)
    for sizes, micro in (({"pipe": 2}, 1), ({"pipe": 3}, 4), ({"pipe": 2, "data": 2}, 2)):
        assert relative(run(sizes, micro), expected) < 1e-12


def test_batch_norm_has_the_statistics_of_each_micro_batch() -> None:
    """As on one device that takes the same micro-batches one after another."""
    torch.manual_seed(0)
    model, x, y = TinyUNet().double(), image(5, 1, 6, 5, 4), classes(5, 6, 5, 4)
    one = copy.deepcopy(model)
    for part, target in ((slice(0, 3), y[:3]), (slice(3, 5), y[3:])):
        (F.cross_entropy(one(x[part]), target, reduction="sum") / y.numel()).backward()

    for sizes in ({"pipe": 2}, {"pipe": 2, "depth": 2}, {"pipe": 3}, {"channel": 2}):
        mesh = halofx.Mesh(**sizes)

        def run(rank: int, mesh: halofx.Mesh = mesh) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
            own = copy.deepcopy(model)
            net = halofx.compile(own, mesh, inputs=[x.shape], loss=F.cross_entropy, targets=[y], microbatches=2)
            net(net.shard(x), net.shard_target(y)).backward()
            grads = {n: p.grad for n, p in net.named_parameters()}
            return grads, net.full_state_dict(), net.instances.state.layouts

        for rank, (grads, state, layouts) in enumerate(halofx.launch(run, mesh)):
            for name, buffer in one.named_buffers():
                assert relative(state[name].double(), buffer.double()) < 1e-12, name
            for name, grad in grads.items():
                expected = dict(one.named_parameters())[name].grad
                if name in layouts:
                    expected = halofx.runtime.shards.take(expected, layouts[name], mesh, rank)
                assert relative(grad, expected, floor=1e-6) < 1e-9, name


# losses

SUMS: dict[str, Callable[..., Tensor]] = {
    "cross entropy": F.cross_entropy,
    "weighted": lambda x, t: F.cross_entropy(x, t, torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64), ignore_index=1),
    "sum": lambda x, t: F.cross_entropy(x, t, reduction="sum"),
    "square": lambda x, t: 2 * ((x - t[:, None]) ** 2).mean() + 0.1 * x.abs().mean(),
    "per sample": lambda x, t: F.cross_entropy(x, t, reduction="none").mean((1, 2, 3)).sum() / 7,
}


def dice(x: Tensor, t: Tensor) -> Tensor:
    p, y = x.softmax(1), F.one_hot(t, 3).movedim(-1, 1)
    return 1 - (2 * (p * y).sum((0, 2, 3, 4)) / (p + y).sum((0, 2, 3, 4))).mean()


@pytest.mark.parametrize("loss", SUMS)
def test_losses_that_are_sums_over_samples(loss: str) -> None:
    nets = same_as_one_device(
        unet(),
        (image(5, 1, 6, 5, 4),),
        halofx.Mesh(pipe=2, depth=2),
        loss=SUMS[loss],
        targets=(classes(5, 6, 5, 4),),
        microbatches=3,
    )
    assert "3 micro-batches (1f1b)" in nets[0].listing()


def test_a_loss_that_needs_the_whole_batch() -> None:
    """Works under GPipe, which is taken; a schedule that cannot is refused by name."""
    arguments: Any = {"loss": dice, "targets": (classes(5, 6, 5, 4),), "microbatches": 2}
    with pytest.warns(UserWarning, match=r"schedule gpipe, not 1f1b: the loss is not a sum over samples \(loss"):
        same_as_one_device(unet(), (image(5, 1, 6, 5, 4),), halofx.Mesh(pipe=2), **arguments)
    with pytest.raises(halofx.CompileError, match=r"schedule='1f1b' begins the backward pass .* use schedule='gpipe'"):
        halofx.compile(unet(), halofx.Mesh(pipe=2), inputs=[(5, 1, 6, 5, 4)], schedule="1f1b", **arguments)


# cuts


def stages_of(net: halofx.Net) -> dict[str, int]:
    return {
        n.meta["label"]: n.meta["stage"]
        for n in net.program.graph.nodes
        if n.op == "call_function" and "stage" in n.meta
    }


def test_cut_by_names_counts_and_cost() -> None:
    x, mesh = [(2, 1, 8, 8, 8)], halofx.Mesh(pipe=2)
    named = stages_of(halofx.compile(unet(), mesh, inputs=x, stages=["up"]))
    assert named["down"] == 0 and named["up"] == named["head"] == 1
    counted = stages_of(halofx.compile(unet(), mesh, inputs=x, stages=[2, 3]))
    assert counted["norm"] == 0 and counted["down"] == 1
    automatic = stages_of(halofx.compile(unet(), mesh, inputs=x))
    assert automatic["enc"] == 0 and automatic["head"] == 1


@pytest.mark.parametrize(("arguments", "message"), [
    ({"stages": [1, 2]}, r"stages=\[1, 2\] must be 2 numbers of layers of at least 1 with the sum 5"),
    ({"stages": ["upp"]}, "no module 'upp' runs in this model; did you mean up"),
    ({"stages": ["down", "up"]}, "must name the first module of every stage but the first: 1 of them"),
    ({"stages": ["enc"]}, "enc runs before the module named before it"),
    ({"microbatches": 3}, r"microbatches=3 is more than the samples of input x \[2, 1, 8, 8, 8\] on a rank"),
    ({"microbatches": 0}, "microbatches=0 must be at least 1"),
    ({"schedule": "2f2b"}, "schedule='2f2b' is none of gpipe, 1f1b"),
])  # fmt: skip
def test_bad_cuts(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(halofx.MeshError, match=message):
        halofx.compile(unet(), halofx.Mesh(pipe=2), inputs=[(2, 1, 8, 8, 8)], **arguments)


def test_more_stages_than_ops() -> None:
    with pytest.raises(halofx.MeshError, match="4 stages for 2 ops; make the axis pipe smaller"):
        halofx.compile(nn.Sequential(nn.Conv3d(1, 1, 1), nn.ReLU()), halofx.Mesh(pipe=4), inputs=[(2, 1, 8, 8, 8)])


class Mixes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


def test_samples_that_mix() -> None:
    with pytest.raises(halofx.CompileError, match=r"needs both the sum over the batch and .* use microbatches=1"):
        halofx.compile(
            nn.Sequential(nn.Conv3d(1, 2, 1), Mixes()), halofx.Mesh(pipe=2), inputs=[(4, 1, 8, 8, 8)], microbatches=2
        )


# state


def test_parameters_exist_on_their_stage_only_and_go_from_mesh_to_mesh() -> None:
    model, x = unet(), image(2, 1, 8, 8, 8)

    def save(rank: int) -> tuple[set[str], dict[str, Tensor], set[str]]:
        net = halofx.compile(copy.deepcopy(model), halofx.Mesh(pipe=2, channel=2), inputs=[x.shape])
        return set(net.state_dict()), net.full_state_dict(), {n for n, _ in net.named_parameters()}

    found = halofx.launch(save, 4)
    assert found[0][0] | found[2][0] == set(model.state_dict()) and not found[0][0] & found[2][0]
    assert found[0][2] == found[0][0]
    for _, state, _ in found:
        assert all(torch.equal(state[n], v) for n, v in model.state_dict().items())

    def load(rank: int) -> Tensor:
        own = UNET().double()  # every rank its own random weights
        net = halofx.compile(own, halofx.Mesh(pipe=3), inputs=[x.shape])
        net.load_state_dict(found[0][1])
        net.eval()
        return net.gather(net(net.shard(x)))

    expected = model.eval()(x)
    assert all(relative(y, expected) < 1e-12 for y in halofx.launch(load, 3))


def test_clipping_over_all_stages() -> None:
    model, x = unet(), image(2, 1, 8, 8, 8)
    one = copy.deepcopy(model)
    one(x).square().sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5)

    def run(rank: int) -> Tensor:
        net = halofx.compile(copy.deepcopy(model), halofx.Mesh(pipe=2, channel=2), inputs=[x.shape])
        net.gather(net(net.shard(x))).square().sum().backward()
        return net.clip_grad_norm_(0.5)

    assert all(relative(norm.reshape(()), expected) < 1e-12 for norm in halofx.launch(run, 4))


def test_gradients_kept_back() -> None:
    """no_sync: two calls whose gradients are summed over ranks once."""
    model, x, y = unet(), image(4, 1, 6, 5, 4), classes(4, 6, 5, 4)
    one = copy.deepcopy(model)
    (2 * F.cross_entropy(one(x), y)).backward()

    def run(rank: int) -> dict[str, Tensor]:
        net = halofx.compile(
            copy.deepcopy(model),
            halofx.Mesh(pipe=2, depth=2),
            inputs=[x.shape],
            loss=F.cross_entropy,
            targets=[y],
            microbatches=2,
        )
        with net.no_sync():
            net(net.shard(x), net.shard_target(y)).backward()
        net(net.shard(x), net.shard_target(y)).backward()
        return {n: p.grad for n, p in net.named_parameters()}

    for grads in halofx.launch(run, 4):
        assert all(relative(g, dict(one.named_parameters())[n].grad) < 1e-10 for n, g in grads.items())


def test_a_shared_model_stays_whole() -> None:
    """Compiled outside of the ranks, every rank gets the whole gradient of every stage."""
    model, x = unet(), image(2, 1, 8, 8, 8)
    net = halofx.compile(model, halofx.Mesh(pipe=2, channel=2), inputs=[x.shape])
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))

    def run(rank: int) -> list[Tensor]:
        return list(torch.autograd.grad(net.gather(net(net.shard(x))).square().sum(), list(model.parameters())))

    for grads in halofx.launch(run, 4):
        assert all(relative(g, e) < 1e-10 for g, e in zip(grads, expected, strict=True))
