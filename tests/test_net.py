"""The compiled net as a user meets it: shards in and out, gradients, training, listing, counters."""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halofx
from halofx.runtime.comm import current
from halofx.runtime.recall import Recall
from tests.models import Convs, TinyUNet, relative, same_as_one_device

MESHES = [
    {"depth": 2}, {"depth": 3}, {"depth": 4}, {"height": 2, "width": 2}, {"data": 2, "depth": 2},
    {"depth": 2, "height": 2, "width": 2},
]  # fmt: skip


def volume(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return TinyUNet().double()


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_equals_one_device(model: nn.Module, sizes: dict[str, int]) -> None:
    same_as_one_device(model, (volume(2, 1, 9, 8, 7),), halofx.Mesh(**sizes), steps=3)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_loss_inside_equals_one_device(model: nn.Module, sizes: dict[str, int]) -> None:
    target = torch.randint(0, 3, (2, 9, 8, 7), generator=torch.Generator().manual_seed(1))
    same_as_one_device(
        model, (volume(2, 1, 9, 8, 7),), halofx.Mesh(**sizes), loss=F.cross_entropy, targets=(target,), steps=3
    )


def test_eval_mode_and_cached_programs(model: nn.Module) -> None:
    x = volume(2, 1, 8, 8, 8)
    expected = copy.deepcopy(model).eval()(x)

    def run(rank: int) -> tuple[Tensor, int]:
        net = halofx.compile(copy.deepcopy(model), halofx.Mesh(depth=2))
        net.train()
        assert net.training and net.model.training
        net.eval()
        for _ in range(2):
            y = net.gather(net(net.shard(x)))
        net(net.shard(x[:, :, :7]))
        return y, len(net.instances.cache)

    for y, programs in halofx.launch(run, 2):
        assert relative(y, expected) < 1e-12 and programs == 2


def test_messages_are_those_of_the_summary() -> None:
    """CONFORMANCE C3: no message in a forward pass but those the listing shows, and the bytes are the faces."""
    model, x, mesh = Convs().double(), volume(2, 1, 8, 9, 6), halofx.Mesh(data=2, depth=2, height=3)

    def run(rank: int) -> tuple[Any, ...]:
        net = halofx.compile(copy.deepcopy(model), mesh, inputs=[x.shape])
        shard = net.shard(x)
        net(shard)  # the first call compares digests
        comm = current()
        comm.counters.reset()
        y = net(shard)
        forward = dict(comm.counters)
        comm.counters.reset()
        y.sum().backward()
        return forward, dict(comm.counters), net

    results = halofx.launch(run, mesh)
    summary = results[0][2].summary()
    for i, traffic in enumerate((summary.forward, summary.backward)):
        counted = [t for result in results for t in result[i].values()]
        assert sum(t.messages for t in counted) == sum(t.messages for t in traffic)
        assert sum(t.bytes for t in counted) == sum(t.bytes for t in traffic)
    labels = {what for result in results for (_, what) in result[0]}
    assert labels == {f"layers.{i}.h{j}" for i in range(4) for j in range(2)}


def test_an_axis_of_size_one_moves_nothing() -> None:
    """CONFORMANCE C7."""
    model, x = Convs(2).double(), volume(1, 1, 6, 6, 6)
    net = halofx.compile(model, halofx.Mesh(depth=1), inputs=[x.shape])
    assert net.summary().forward == [] and "halo" not in net.listing()
    assert torch.equal(net(x), model(x)) and net.gather(net(x)).shape == (1, 3, 6, 6, 6)
    assert net.shard(x) is x


def test_gather_on_one_rank_and_slices() -> None:
    x, model = volume(1, 1, 7, 6, 5), Convs(1).double()

    def run(rank: int) -> tuple[Any, ...]:
        net = halofx.compile(copy.deepcopy(model), halofx.Mesh(depth=2, width=2), inputs=[x.shape])
        assert torch.equal(x[net.input_slices()], net.shard(x))
        y = net(net.shard(x))
        labels = y.argmax(1)
        return net.gather(y, dst=2), net.gather(labels).shape

    results = halofx.launch(run, 4)
    assert [r[0] is None for r in results] == [True, True, False, True]
    assert results[2][0].shape == (1, 3, 7, 6, 5) and results[0][1] == (1, 7, 6, 5)


def test_state_dict_is_the_models(model: nn.Module) -> None:
    net = halofx.compile(model, halofx.Mesh(depth=2), inputs=[(1, 1, 8, 8, 8)])
    assert list(net.state_dict()) == list(model.state_dict())
    assert [id(p) for p in net.parameters()] == [id(p) for p in model.parameters()]
    state = {k: torch.zeros_like(v) for k, v in model.state_dict().items()}
    net.load_state_dict(state)
    assert not model.head.weight.abs().max()
    net.to(torch.float32)
    assert model.head.weight.dtype == torch.float32 and not net.instances.any()


class Shared(nn.Module):
    """A layer used twice, a frozen one, one used on shards and on a whole value."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(2, 2, 3, padding=1)
        self.frozen = nn.Conv3d(2, 2, 1).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(self.frozen(self.conv(x)))
        return y * self.scale.view(2, 1, 1, 1) + (self.scale**2).sum()


@pytest.mark.parametrize("sizes", MESHES[:5], ids=str)
def test_shared_and_frozen_parameters(sizes: dict[str, int]) -> None:
    """CONFORMANCE A5."""
    torch.manual_seed(1)
    same_as_one_device(Shared().double(), (volume(2, 2, 5, 6, 4),), halofx.Mesh(**sizes), steps=2)


def test_accumulation_and_no_sync() -> None:
    torch.manual_seed(2)
    model = Convs(2).double()
    xs = [volume(1, 1, 6, 5, 4, seed=i) for i in range(3)]
    one = copy.deepcopy(model)
    for x in xs:
        one(x).square().sum().backward()

    def run(rank: int) -> tuple[list[Tensor], list[Tensor], int]:
        plain, late = copy.deepcopy(model), copy.deepcopy(model)
        net = halofx.compile(plain, halofx.Mesh(depth=3), inputs=[xs[0].shape])
        for x in xs:
            net(net.shard(x)).square().sum().backward()
        held = halofx.compile(late, halofx.Mesh(depth=3), inputs=[xs[0].shape])
        held(held.shard(xs[0]))
        current().counters.reset()
        with held.no_sync():
            for x in xs[:2]:
                held(held.shard(x)).square().sum().backward()
        sums = current().counters.total("all_reduce").messages
        held(held.shard(xs[2])).square().sum().backward()
        return [p.grad for p in plain.parameters()], [p.grad for p in late.parameters()], sums  # type: ignore[misc]

    for plain, late, sums in halofx.launch(run, 3):
        assert sums == 0
        for p, a, b in zip(one.parameters(), plain, late, strict=True):
            assert relative(a, p.grad) < 1e-11 and relative(b, p.grad) < 1e-11


def test_double_backward() -> None:
    torch.manual_seed(3)
    model, x = TinyUNet(nn.Identity).double(), volume(1, 1, 6, 6, 6)

    def penalty(output: Tensor, shard: Tensor) -> Tensor:
        (g,) = torch.autograd.grad(output.square().sum(), shard, create_graph=True)
        return g

    one, leaf = copy.deepcopy(model), x.clone().requires_grad_()
    penalty(torch.tanh(one(leaf)), leaf).square().sum().backward()

    def run(rank: int) -> list[Tensor]:
        own = copy.deepcopy(model)
        net = halofx.compile(own, halofx.Mesh(depth=2), inputs=[x.shape])
        shard = net.shard(x).requires_grad_()
        penalty(torch.tanh(net(shard)), shard).square().sum().backward()
        return [p.grad for p in own.parameters()]  # type: ignore[misc]

    for grads in halofx.launch(run, 2):
        for p, g in zip(one.parameters(), grads, strict=True):
            assert relative(g, p.grad) < 1e-10  # type: ignore[arg-type]


def test_clip_by_global_norm_and_autograd_grad(model: nn.Module) -> None:
    x = volume(1, 1, 8, 8, 8)
    one = copy.deepcopy(model)
    one(x).square().sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0)

    def run(rank: int) -> tuple[Tensor, Tensor]:
        own = copy.deepcopy(model)
        net = halofx.compile(own, halofx.Mesh(depth=2, width=2), inputs=[x.shape])
        (g,) = torch.autograd.grad(net(net.shard(x)).square().sum(), [own.head.weight])
        assert own.head.weight.grad is None
        net(net.shard(x)).square().sum().backward()
        return torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0), g

    for norm, g in halofx.launch(run, 4):
        assert relative(norm, expected) < 1e-11
        assert relative(g / expected, one.head.weight.grad) < 1e-6  # the clip divides by norm + 1e-6


def test_buckets_follow_the_backward_pass() -> None:
    """Several buckets, each summed once; their all-reduces start in the order in which gradients become ready."""
    model, x = Convs(4).double(), volume(1, 1, 8, 6, 6)

    def run(rank: int) -> list[str]:
        net = halofx.compile(copy.deepcopy(model), halofx.Mesh(depth=2), inputs=[x.shape], bucket=700)
        current().counters.reset()
        net(net.shard(x)).sum().backward()
        return [what for kind, what in current().counters if kind == "all_reduce"]

    for order in halofx.launch(run, 2):
        assert order == [f"gradients{i} (backward)" for i in reversed(range(len(order)))] and len(order) > 3


class Nested(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor], options: dict[str, Any], scale: float = 2.0) -> dict[str, Any]:
        a, b = pair
        return {"sum": a + b, "list": [options["mask"] * a * scale, None], "name": "x"}


def test_nested_inputs_and_outputs() -> None:
    a, b, mask = volume(2, 1, 5, 4, 4), volume(2, 1, 5, 4, 4, seed=1), volume(2, 1, 5, 4, 4, seed=2)

    def run(rank: int) -> Any:
        net = halofx.compile(Nested(), halofx.Mesh(depth=2), inputs=[(a, b), {"mask": mask}])
        out = net(net._cut((a, b), "pair"), net._cut({"mask": mask}, "options"))
        return net.gather(out["sum"]), net.gather(out["list"][0]), out["list"][1], out["name"]

    for total, scaled, nothing, name in halofx.launch(run, 2):
        assert torch.equal(total, a + b) and torch.equal(scaled, mask * a * 2) and nothing is None and name == "x"


def test_explain_and_listing() -> None:
    net = halofx.compile(Convs(1).double(), halofx.Mesh(depth=2, height=2), inputs=[(1, 1, 6, 6, 6)])
    text = net.listing()
    assert "layers.0.h0:" in text and "halo_exchange(x, dim=2, axis=depth, lo=1, hi=1, fill=0)" in text
    assert "padding=(0, 0, 1)" in text and "f64[1, 3, 6@depth, 6@height, 6]" in text
    told = net.explain("layers.0.h0")
    assert "0->1[2:3] 1->0[3:4]" in told and "depth 0   reads dim 2 at fill x 1 [0:4]" in told
    with pytest.raises(halofx.HalofxError, match=r"did you mean layers\.0"):
        net.explain("layers.9.h0")
    with pytest.raises(ValueError, match="the passes are"):
        net.listing(after="nothing")
    assert "conv3d(x, " in net.listing(after="plan_splits")


def test_device_mesh_like() -> None:
    class Like:
        mesh_dim_names = ("data", "depth")
        mesh = torch.arange(4).view(2, 2)

    assert halofx.Mesh.of(Like()) == halofx.Mesh(data=2, depth=2)
    assert halofx.Mesh.of({"depth": 3}) == halofx.Mesh(depth=3)


def kept_bytes(kept: list[Any]) -> int:
    """The bytes of the distinct storages behind what autograd keeps."""
    storages: dict[int, int] = {}
    for item in kept:
        while hasattr(item, "assemble"):
            arrived = item.assemble.args[2]
            storages.update({flat.data_ptr(): flat.nbytes for flat, _ in arrived.values()})
            item = item.source
        storage = getattr(item, "tensor", item).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def test_halos_are_kept_as_faces(monkeypatch: pytest.MonkeyPatch) -> None:
    """CONFORMANCE M2: what autograd keeps on one of 4 ranks is a quarter of one device's, plus faces; no second copies."""
    torch.manual_seed(0)
    model, x = Convs(4, width=4).double(), volume(1, 1, 16, 16, 12)
    one, found = copy.deepcopy(model), list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        y = one(x)
    y.square().sum().backward()
    weights = sum(p.nbytes for p in model.parameters())
    alone = kept_bytes(found) - weights

    kept: dict[int, list[Any]] = defaultdict(list)  # by thread
    pack = Recall.pack

    def spy(recall: Recall, tensor: Tensor) -> Any:
        item = pack(recall, tensor)
        kept[threading.get_ident()].append(item)
        return item

    def run(rank: int) -> tuple[int, list[Tensor]]:
        own = copy.deepcopy(model)
        net = halofx.compile(own, halofx.Mesh(depth=2, height=2), inputs=[x.shape])
        y = net(net.shard(x))
        y.square().sum().backward()
        size = kept_bytes(kept.pop(threading.get_ident())) - weights
        return size, [p.grad for p in own.parameters()]  # type: ignore[misc]

    monkeypatch.setattr(Recall, "pack", spy)
    face = (8 + 10) * 12 * 8  # one plane along depth, one along height with its corners
    faces = face * (1 + 3 * 4)
    for size, grads in halofx.launch(run, 4):
        assert size <= alone / 4 + faces, f"{size} bytes kept, a quarter is {alone / 4}, the faces {faces}"
        for p, g in zip(one.parameters(), grads, strict=True):
            assert relative(g, p.grad) < 1e-11  # type: ignore[arg-type]


def test_a_parameter_written_between_forward_and_backward_is_found() -> None:
    def run(rank: int) -> None:
        torch.manual_seed(0)
        net = halofx.compile(copy.deepcopy(model), halofx.Mesh(depth=2), inputs=[(1, 1, 8, 6, 6)])
        y = net(net.shard(volume(1, 1, 8, 6, 6)))
        with torch.no_grad():
            next(p for p in net.parameters() if p.dim() == 5).mul_(2)
        y.sum().backward()

    model = Convs(2).double()
    with pytest.raises(halofx.HalofxError, match=r"modified in place after the forward pass"):
        halofx.launch(run, 2)


def test_shapes_and_loss_from_the_first_call() -> None:
    """Nothing declared: shapes, of targets too, come from the shards of each call."""
    torch.manual_seed(0)
    model = Convs(2).double()
    cases = [(volume(2, 1, d, 6, 5), torch.randint(0, 3, (2, d, 6, 5))) for d in (9, 10, 9)]

    def run(rank: int) -> list[tuple[Tensor, Tensor]]:
        own = copy.deepcopy(model)
        net = halofx.compile(own, halofx.Mesh(data=2, depth=2), loss=F.cross_entropy)
        found = []
        for x, y in cases:
            net.zero_grad()
            loss = net(net.shard(x), net.shard_target(y))
            loss.backward()
            found.append((loss.detach(), own.layers[0].weight.grad.clone()))  # type: ignore[union-attr,operator]
        assert len(net.instances.cache) == 2
        return found

    results = halofx.launch(run, 4)
    for i, (x, y) in enumerate(cases):
        model.zero_grad()
        expected = F.cross_entropy(model(x), y)
        expected.backward()
        for found in results:
            assert relative(found[i][0], expected) < 1e-12
            assert relative(found[i][1], model.layers[0].weight.grad) < 1e-10  # type: ignore[union-attr,arg-type]


class Masked(nn.Module):
    """A volume by keyword, and an EMA of it in a frozen parameter (as VQ codebooks are kept)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(1, 2, 3, padding=1)
        self.book = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: Tensor, *, mask: Tensor, gain: float = 1.0) -> Tensor:
        y = self.conv(x) * mask * gain
        if self.training:
            self.book.data.copy_(0.9 * self.book + 0.1 * y.detach().mean((0, 2, 3, 4)))
        return y * self.book.view(1, 2, 1, 1, 1)


@pytest.mark.parametrize("declared", [True, False])
def test_keyword_volumes_and_frozen_parameters_that_the_forward_writes(declared: bool) -> None:
    torch.manual_seed(0)
    model, x, mask = Masked().double(), volume(1, 1, 8, 6, 6), volume(1, 1, 8, 6, 6)
    one = copy.deepcopy(model)
    expected = one(x, mask=mask, gain=2.0)

    def run(rank: int) -> tuple[Tensor, Tensor]:
        own = copy.deepcopy(model)
        net = halofx.compile(own, halofx.Mesh(depth=2, height=2), inputs=[x.shape] if declared else None)
        y = net(net.shard(x), mask=net._cut(mask, "mask"), gain=2.0)
        return net.gather(y), own.book

    for y, book in halofx.launch(run, 4):
        assert relative(y, expected) < 1e-12 and relative(book, one.book) < 1e-12
