"""What a user gets wrong: each ends in a clear error on every rank, never in a hang."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halofx
from halofx.compiler.rules import RULES, Call, Spec
from halofx.runtime.comm import current
from tests.models import Convs, same_as_one_device


def errors_of(fn: Callable[[int], Any], size: int) -> list[BaseException | None]:
    """What ``fn`` raises on each rank when no rank's failure ends the others."""

    def run(rank: int) -> BaseException | None:
        try:
            fn(rank)
        except halofx.HalofxError as error:
            return error
        return None

    return halofx.launch(run, size, timeout=5)


def everywhere(fn: Callable[[int], Any], size: int, kind: type[BaseException], *texts: str) -> None:
    """Every rank raises an error of ours, each of which names all of ``texts``."""
    for rank, error in enumerate(errors_of(fn, size)):
        assert isinstance(error, kind), f"rank {rank}: {error!r}"
        for text in texts:
            assert text in str(error), f"rank {rank}: {error}"


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Convs(2).double()


def x_of(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def test_mesh_of_the_wrong_size(model: nn.Module) -> None:
    everywhere(
        lambda rank: halofx.compile(model, halofx.Mesh(depth=4)), 2, halofx.MeshError, "4 ranks", "the world has 2"
    )


def test_unknown_axis() -> None:
    with pytest.raises(halofx.MeshError, match="unknown mesh axis 'time'; the axes are pipe, data"):
        halofx.Mesh(time=2)
    with pytest.raises(halofx.MeshError, match="depth=0 must be an integer of at least 1"):
        halofx.Mesh(depth=0)


def test_axis_on_a_dim_that_the_input_lacks() -> None:
    with pytest.raises(
        halofx.MeshError, match=r"mesh axis depth=2 splits no dim of the inputs \(input \[2, 1, 8, 8\]\)"
    ):
        halofx.compile(nn.Conv2d(1, 1, 3), halofx.Mesh(depth=2), inputs=[(2, 1, 8, 8)])


def test_layouts_that_do_not_fit(model: nn.Module) -> None:
    mesh = halofx.Mesh(depth=2)
    with pytest.raises(halofx.MeshError, match=r"layouts names y; the tensor inputs of the model are x"):
        halofx.compile(model, mesh, inputs=[(1, 1, 8, 8, 8)], layouts={"y": (None,)})
    with pytest.raises(halofx.MeshError, match=r"layouts\['x'\] has 2 entries, the input has shape \[1, 1, 8, 8, 8\]"):
        halofx.compile(model, mesh, inputs=[(1, 1, 8, 8, 8)], layouts={"x": (None, "depth")})
    with pytest.raises(halofx.MeshError, match="names axis 'height'"):
        halofx.compile(model, mesh, inputs=[(1, 1, 8, 8, 8)], layouts={"x": (None, None, "height", None, None)})


def test_more_ranks_than_planes_works_with_a_warning(model: nn.Module) -> None:
    x = torch.randn(1, 1, 3, 5, 5, dtype=torch.float64)
    expected = model(x)

    def run(rank: int) -> Tensor:
        net = halofx.compile(copy.deepcopy(model), halofx.Mesh(depth=4), inputs=[x.shape])
        assert net.shard(x).shape[2] == (0 if rank == 3 else 1)
        return net.gather(net(net.shard(x)))

    with pytest.warns(UserWarning, match="input x has 3 indices for the 4 ranks of axis depth"):
        results = halofx.launch(run, 4)
    assert all(torch.allclose(y, expected, rtol=1e-12) for y in results)


@pytest.mark.parametrize(("wrong", "texts"), [
    (lambda x: x[:, :, :3], ("input x on rank 1 has shape [1, 1, 3, 8, 8]", "[1, 1, 8@depth, 8, 8]", "net.shard(x)")),
    (lambda x: x.float(), ("input x on rank 1 has dtype torch.float32", "compiled for torch.float64")),
    (lambda x: x.to("meta"), ("input x on rank 1 is on meta, the model on cpu",)),
])  # fmt: skip
def test_a_wrong_shard_on_one_rank(model: nn.Module, wrong: Callable[[Tensor], Tensor], texts: tuple[str, ...]) -> None:
    def run(rank: int) -> None:
        net = halofx.compile(copy.deepcopy(model), halofx.Mesh(depth=2), inputs=[(1, 1, 8, 8, 8)])
        shard = net.shard(x_of(1, 1, 8, 8, 8))
        net(wrong(shard) if rank == 1 else shard)

    everywhere(run, 2, halofx.RankError, *texts)


def test_shards_that_make_no_tensor(model: nn.Module) -> None:
    def run(rank: int) -> None:
        halofx.compile(copy.deepcopy(model), halofx.Mesh(depth=2))(x_of(1, 1, 3 + 2 * rank, 8, 8))

    everywhere(run, 2, halofx.RankError, "input x", "the shards do not make one tensor", "[1, 1, 8@depth, 8, 8]")


def test_ranks_with_other_global_shapes(model: nn.Module) -> None:
    def run(rank: int) -> None:
        net = halofx.compile(copy.deepcopy(model), halofx.Mesh(depth=2), inputs=[(1, 1, 8, 8, 8 + rank)])
        net(net.shard(x_of(1, 1, 8, 8, 8 + rank)))

    everywhere(run, 2, halofx.RankError, "disagree on the program (shapes, code, options)", "rank 0 has", "rank 1 has")


def test_ranks_with_other_parameters(model: nn.Module) -> None:
    def run(rank: int) -> None:
        own = copy.deepcopy(model)
        with torch.no_grad():
            own.layers[0].bias[0] += rank  # type: ignore[union-attr,index,operator]
        net = halofx.compile(own, halofx.Mesh(depth=2), inputs=[(1, 1, 8, 8, 8)])
        net(net.shard(x_of(1, 1, 8, 8, 8)))

    everywhere(run, 2, halofx.RankError, "disagree on the parameters", "torch.manual_seed(0)")


def test_a_loss_with_weights_that_threads_share() -> None:
    """Every rank captures and holds one of its own: none sees another's fakes or parts, ten times over."""
    model = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.Conv3d(4, 4, 1)).double()
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 0.5, 2.0, 1.0], dtype=torch.float64))
    x, y = torch.randn(2, 1, 4, 4, 4, dtype=torch.float64), torch.randint(0, 4, (2, 4, 4, 4))
    expected = loss(model(x), y)
    for sizes in ({"channel": 4}, {"pipe": 2}, {"data": 2, "channel": 2}, {"pipe": 2, "channel": 2}, {"depth": 4}) * 2:
        mesh = halofx.Mesh(**sizes)

        def run(rank: int, mesh: halofx.Mesh = mesh) -> Tensor:
            net = halofx.compile(copy.deepcopy(model), mesh, inputs=[x.shape], loss=loss, targets=[y])
            return net(net.shard(x), net.shard_target(y)).detach()

        assert all(abs(value - expected) < 1e-12 for value in halofx.launch(run, mesh))
        assert loss.weight is not None and loss.weight.shape == (4,)


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_data_dependent_control_flow() -> None:
    with pytest.raises(halofx.CompileError, match=r"test_bad_input.py:\d+: return x if x.sum\(\) > 0 else -x"):
        halofx.compile(Branches(), halofx.Mesh(depth=2), inputs=[(1, 1, 4, 4, 4)])


@torch.library.custom_op("halofx_tests::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    """An op that halofx has never heard of."""
    return x**3


@cube.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


cube.register_autograd(
    lambda ctx, grad: 3 * ctx.saved_tensors[0] ** 2 * grad,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Cubed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(1, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(cube(self.conv(x))[:, :1])


def test_op_without_a_rule() -> None:
    torch.manual_seed(0)
    model, x = Cubed().double(), torch.randn(1, 1, 6, 5, 4, dtype=torch.float64)
    with pytest.raises(
        halofx.CompileError, match=r"no rule for op halofx_tests.cube.default, used by cube \(at test_bad"
    ):
        halofx.compile(model, halofx.Mesh(depth=2), inputs=[x.shape], strict=True)
    with pytest.warns(UserWarning, match="no rule for op halofx_tests.cube.default: its inputs are gathered"):
        (net, _) = same_as_one_device(model, (x,), halofx.Mesh(depth=2))
    assert "all_gather" in net.listing() and "note: no rule for op halofx_tests.cube.default" in net.listing()


def test_a_user_adds_the_rule() -> None:
    torch.manual_seed(0)
    target = torch.ops.halofx_tests.cube.default

    @halofx.rule(target)
    def cube_rule(call: Call) -> Spec:
        """y = x^3"""
        return Spec(ins={"x": "n c d h w"}, outs=["n c d h w"], flops=2 * call.outs[0].numel, saves=("x",))

    try:
        x = torch.randn(1, 1, 6, 5, 4, dtype=torch.float64)
        nets = same_as_one_device(Cubed().double(), (x,), halofx.Mesh(depth=2, width=2), strict=True)
    finally:
        RULES.pop(target, None)
    assert "all_gather" not in nets[0].listing()


def test_a_wrapped_model(model: nn.Module) -> None:
    with pytest.raises(halofx.CompileError, match="DataParallel"):
        halofx.compile(nn.DataParallel(model), halofx.Mesh(depth=2), inputs=[(1, 1, 8, 8, 8)])


def test_calling_without_ranks(model: nn.Module) -> None:
    net = halofx.compile(model, halofx.Mesh(depth=2), inputs=[(1, 1, 8, 8, 8)])
    with pytest.raises(halofx.MeshError, match=r"torchrun --nproc-per-node 2 or mpirun -n 2"):
        net(x_of(1, 1, 4, 8, 8))


def test_asking_before_anything_is_compiled(model: nn.Module) -> None:
    net = halofx.compile(model, halofx.Mesh(depth=2))
    with pytest.raises(halofx.HalofxError, match="nothing is compiled yet: pass inputs="):
        net.listing()
    assert "nothing compiled yet" in str(net)


def test_calling_from_a_subset_of_the_ranks(model: nn.Module) -> None:
    """CONFORMANCE S7: an error, not a hang."""

    def run(rank: int) -> None:
        net = halofx.compile(copy.deepcopy(model), halofx.Mesh(height=4), inputs=[(1, 1, 4, 9, 4)])
        shard = net.shard(x_of(1, 1, 4, 9, 4))
        net(shard)
        if rank != 2:
            net(shard)

    start = time.monotonic()
    errors = errors_of(run, 4)
    assert time.monotonic() - start < 10
    assert isinstance(errors[1], halofx.RankError) and isinstance(errors[3], halofx.RankError)
    assert "rank 2" in str(errors[1]) and "layers.0.h0" in str(errors[1])


def test_a_rank_that_raises_ends_all(model: nn.Module) -> None:
    def run(rank: int) -> None:
        net = halofx.compile(copy.deepcopy(model), halofx.Mesh(depth=3), inputs=[(1, 1, 9, 4, 4)])
        shard = net.shard(x_of(1, 1, 9, 4, 4))
        net(shard)
        if rank == 1:
            raise KeyError("the user's own bug")
        net(shard)

    with pytest.raises(KeyError, match="the user's own bug"):
        halofx.launch(run, 3, timeout=20)


def test_a_late_rank_is_named(model: nn.Module) -> None:
    def run(rank: int) -> None:
        net = halofx.compile(copy.deepcopy(model), halofx.Mesh(depth=2), inputs=[(1, 1, 8, 4, 4)])
        shard = net.shard(x_of(1, 1, 8, 4, 4))
        net(shard)
        if rank == 1:
            time.sleep(2)
        net(shard)

    with pytest.raises(halofx.RankError, match=r"layers.0.h0: no message from rank 1 to rank 0 within 0.5 s"):
        halofx.launch(run, 2, timeout=0.5)


def killed(rank: int) -> str:
    """Rank 1 dies between two calls; rank 0 must hear of it. Runs in a process of its own."""
    torch.manual_seed(0)
    net = halofx.compile(Convs(2).double(), halofx.Mesh(depth=2), inputs=[(1, 1, 8, 4, 4)])
    shard = net.shard(x_of(1, 1, 8, 4, 4))
    net(shard)
    if current().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    net(shard).sum().backward()
    return "not reached"


@pytest.mark.slow
def test_a_killed_rank_ends_all() -> None:
    start = time.monotonic()
    with pytest.raises(halofx.RankError, match="rank 1"):
        halofx.launch(killed, 2, backend="processes", timeout=30)
    assert time.monotonic() - start < 60
