"""Pools: what stays split, ties, infinities and NaN at seams, indices, divisors, and CONFORMANCE G9, G10, N7."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halofx
from halofx.compiler.rules import Sample
from halofx.runtime import shards
from tests.laws import Case, Op, check, close
from tests.models import same_as_one_device

DEPTH = (None, None, "depth", None, None)
SPACE = (None, None, "depth", "height", "width")


def compiled(function: Callable[..., Any], *shapes: Any, axes: Any = DEPTH, **mesh: int) -> halofx.Net:
    layouts = {f"args.{i}": axes for i in range(len(shapes))}
    return halofx.compile(Op(function), halofx.Mesh(**(mesh or {"depth": 2})), inputs=list(shapes), layouts=layouts)


def outputs(net: halofx.Net, *xs: Tensor) -> list[Any]:
    """What every rank has after gathering."""

    def run(rank: int) -> Any:
        y = net(*(net._cut(x, f"args.{i}") for i, x in enumerate(xs)))
        return tuple(net.gather(v) for v in y) if isinstance(y, tuple) else net.gather(y)

    return halofx.launch(run, net.mesh, timeout=30)


def law(function: Callable[..., Any], shape: tuple[int, ...], *, make: Any = None, thin: str = "split") -> None:
    """The law for one function on meshes of one and two split dims."""
    for mesh in ({"depth": 2}, {"depth": 3, "height": 2}):
        axes = tuple(a if a in mesh else None for a in SPACE)
        check(Case(Sample(function, (shape,), {0: make} if make else {}), halofx.Mesh(**mesh), {"args.0": axes}, thin))


# -- what stays split

STAYS: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "max": (lambda x: F.max_pool3d(x, 3, 2, 1), 0),
    "max, overlapping, dilated": (lambda x: F.max_pool3d(x, 3, 1, 1, 2), 0),
    "max with indices": (lambda x: F.max_pool3d(x, 2, return_indices=True), 0),
    "max, ceil_mode": (lambda x: F.max_pool3d(x, 3, 2, 0, ceil_mode=True), 0),
    "average": (lambda x: F.avg_pool3d(x, 3, 1, 1), 0),
    "average without padding": (lambda x: F.avg_pool3d(x, 3, 2, 1, count_include_pad=False), 0),
    "power average": (lambda x: F.lp_pool3d(x, 2.0, 2), 0),
    "adaptive average": (lambda x: F.adaptive_avg_pool3d(x, (5, 3, 3)), 0),
    "adaptive max": (lambda x: F.adaptive_max_pool3d(x, (5, 3, 3), return_indices=True), 0),
    "global average": (lambda x: F.adaptive_avg_pool3d(x, 1), 1),
    "average of depth": (lambda x: F.adaptive_avg_pool3d(x, (1, 3, 8)), 1),
    "global max": (lambda x: F.adaptive_max_pool3d(x, 1, return_indices=True), 3),
    "max of depth": (lambda x: F.adaptive_max_pool3d(x, (1, 3, 2)), 3),
}


@pytest.mark.parametrize("name", STAYS)
def test_a_split_dim_stays_split(name: str) -> None:
    function, reductions = STAYS[name]
    net = compiled(function, (1, 2, 12, 8, 8))
    listing = net.listing()
    assert not any(word in listing for word in ("all_gather", "all_to_all", "no rule")), listing
    assert listing.count("all_reduce(") == reductions, listing


def test_a_pool_that_tiles_the_shards_sends_nothing() -> None:
    for function in (lambda x: F.max_pool3d(x, 2), lambda x: F.avg_pool3d(x, 2), lambda x: F.adaptive_avg_pool3d(x, 6)):
        net = compiled(function, (1, 2, 12, 12, 12), axes=SPACE, depth=2, height=2, width=2)
        assert not net.summary().forward, net.listing()


def test_unpooling_gathers_the_small_tensor_and_keeps_the_large_one_split() -> None:
    net = compiled(lambda x: F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2), (1, 2, 8, 4, 4))
    assert "f32[1, 2, 8@depth, 4, 4]" in net.listing().splitlines()[-2], net.listing()


def test_random_windows_keep_batch_and_channels_split() -> None:
    r = torch.rand(2, 4, 3)
    axes = ("data", "channel", None, None, None)
    net = compiled(
        lambda x: F.fractional_max_pool3d(x, 2, 3, _random_samples=r), (2, 4, 8, 8, 8), axes=axes, data=2, channel=2
    )
    assert "gather" not in net.listing(), net.listing()


# -- CONFORMANCE G9, and more of its kind


@pytest.mark.parametrize("k, s, p, d, ceil", [
    (3, 2, 1, 1, False), (3, 3, 1, 1, False), (2, 2, 0, 1, True), (3, 2, 1, 1, True), (4, 2, 2, 1, False), (5, 1, 2, 1, False),
    (3, 1, 1, 2, False), (2, 3, 1, 3, True), (2, 4, 1, 1, False),
])  # fmt: skip
@pytest.mark.parametrize("depth", [12, 7])
def test_padded_max_pool(k: int, s: int, p: int, d: int, ceil: bool, depth: int) -> None:
    law(lambda x: F.max_pool3d(x, k, s, p, d, ceil, return_indices=True), (1, 1, depth, 5, 5))


def _low(shape: torch.Size) -> Tensor:
    """Zeros and -inf: whole windows of -inf, and ties everywhere."""
    return torch.where(torch.rand(shape) < 0.8, -torch.inf, 0.0).double()


def _nans(shape: torch.Size) -> Tensor:
    return torch.where(torch.rand(shape) < 0.1, torch.nan, torch.randint(0, 3, shape)).double()


@pytest.mark.parametrize("make", [_low, _nans, lambda shape: -torch.ones(shape).double()], ids=["-inf", "nan", "ties"])
def test_max_pool_of_equal_numbers(make: Any) -> None:
    """The gradient goes to the first element of a window that has the maximum, also where padding lies before it."""
    law(lambda x: F.max_pool3d(x, 3, 2, 1, return_indices=True), (1, 1, 9, 5, 4), make=make)
    law(lambda x: F.max_pool3d(x, 3, 1, 1, 2), (1, 1, 6, 5, 5), make=make)


def test_max_pool_of_integers() -> None:
    make = lambda shape: torch.randint(-(2**40), -(2**39), shape)  # noqa: E731
    law(lambda x: F.max_pool3d(x, 3, 2, 1), (1, 1, 7, 5, 4), make=make)


def test_unpooling_returns_to_where_the_maxima_were() -> None:
    law(lambda x: F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2), (1, 2, 8, 6, 4))
    law(lambda x: F.max_unpool3d(*F.max_pool3d(x, 3, 2, 1, return_indices=True), 3, 2, 1), (1, 1, 7, 7, 5))


def test_one_and_two_dims() -> None:
    for function, shape, axes in (
        (lambda x: F.max_pool1d(x, 3, 2, 1, return_indices=True), (2, 3, 11), (None, None, "width")),
        (lambda x: F.avg_pool1d(x, 3, 2, 1, True, False), (2, 3, 10), (None, None, "width")),
        (lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), (2, 3, 5, 11), (None, None, None, "width")),
        (lambda x: F.adaptive_max_pool2d(x, (1, 3), True), (2, 5, 11), (None, None, "width")),
        (lambda x: F.max_unpool1d(*F.max_pool1d(x, 2, return_indices=True), 2), (2, 3, 10), (None, None, "width")),
    ):
        check(Case(Sample(function, (shape,)), halofx.Mesh(width=3), {"args.0": axes}, "split"))


# -- CONFORMANCE G10, and more of its kind


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("divisor", [None, 5])
@pytest.mark.parametrize(
    "k, s, p, ceil", [(3, 1, 1, False), (2, 2, 1, False), (3, 2, 1, True), (4, 3, 2, True), (2, 3, 0, True)]
)
def test_average_pool(k: int, s: int, p: int, ceil: bool, divisor: int | None, include: bool) -> None:
    law(lambda x: F.avg_pool3d(x, k, s, p, ceil, include, divisor), (1, 1, 6, 4, 4))
    law(lambda x: F.avg_pool3d(x, k, s, p, ceil, include, divisor), (1, 1, 7, 5, 4))


@pytest.mark.parametrize("include", [True, False])
def test_the_order_of_the_sum_is_that_of_one_device(include: bool) -> None:
    """The same elements in the same order, divided once: no more rounding than on one device."""
    x = torch.randn(2, 13, 6, 6, generator=torch.Generator().manual_seed(0))
    axes = (None, "depth", None, None)
    for function in (
        lambda x: F.avg_pool3d(x.movedim(1, 2)[:1], 3, 2, 1, True, include),
        lambda x: F.max_pool3d(x.movedim(1, 2)[:1], 3, 2, 1),
        lambda x: F.adaptive_avg_pool3d(x, (5, 4, 3)),
    ):
        for y in outputs(compiled(function, x, axes=axes, depth=3), x):
            assert torch.equal(y, function(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves(dtype: torch.dtype) -> None:
    """Rounded once; and a sum beyond the largest number does not overflow."""
    axes = (None, None, "depth", None)
    pool = lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)  # noqa: E731
    large, x = torch.full((1, 1, 6, 4), 3e4).to(dtype), torch.randn(1, 1, 9, 8).to(dtype)
    for y in outputs(compiled(pool, large, axes=axes), large):
        assert torch.equal(y, large)
    for y in outputs(compiled(pool, x, axes=axes), x):
        assert torch.equal(y, pool(x))


AUTOCAST: dict[str, Callable[[Tensor], Any]] = {
    "average": lambda x: F.avg_pool3d(x, 3, 1, 1, count_include_pad=False),
    "max": lambda x: F.max_pool3d(x, 3, 2, 1),
    "global average": lambda x: F.adaptive_avg_pool3d(x, 1),
    "global max": lambda x: F.adaptive_max_pool3d(x, 1),
}


@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast(name: str) -> None:
    """Some pools turn halves into float32 under autocast: all ranks do, also those that run another form of the op."""
    function = lambda x: AUTOCAST[name](x.bfloat16())  # noqa: E731
    x = torch.randn(1, 2, 9, 4, 4, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        net, expected = compiled(function, x, depth=3), function(x)

    def run(rank: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return net.gather(net(net._cut(x, "args.0")))

    for y in halofx.launch(run, net.mesh, timeout=30):
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)


# -- adaptive pools, CONFORMANCE N7


@pytest.mark.parametrize("out", [1, 2, 3, (1, 2, 3), (4, 1, 1), (7, 1, 4), (5, 4, 4), (8, 5, 1)], ids=str)
def test_adaptive_pools(out: Any) -> None:
    for thin in ("whole", "split"):
        law(lambda x: F.adaptive_avg_pool3d(x, out), (1, 2, 7, 4, 4), thin=thin)
        law(lambda x: F.adaptive_max_pool3d(x, out, True), (1, 2, 7, 4, 4), thin=thin)


def test_the_first_of_equal_maxima_is_chosen() -> None:
    ties = lambda shape: torch.randint(0, 2, shape).double()  # noqa: E731
    for out in (1, (1, 2, 2), (2, 1, 2), (2, 2, 1), (7, 1, 1)):
        law(lambda x, out=out: F.adaptive_max_pool3d(x, out, True), (1, 2, 7, 4, 4), make=ties)


class BothPools(nn.Module):
    """Channel attention by average and maximum, as CBAM has it."""

    def __init__(self) -> None:
        super().__init__()
        self.average, self.maximum = nn.AdaptiveAvgPool3d(1), nn.AdaptiveMaxPool3d(1)
        self.down, self.up = nn.Conv3d(4, 2, 1), nn.Conv3d(2, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        gates = [self.up(F.relu(self.down(pool(x)))) for pool in (self.average, self.maximum)]
        y: Tensor = x * torch.sigmoid(gates[0] + gates[1])
        return y


@pytest.mark.parametrize(
    "mesh", [{"depth": 2}, {"depth": 4}, {"data": 2, "depth": 2}, {"depth": 2, "height": 2, "width": 2}]
)
def test_channel_attention(mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 7, 4, 4, dtype=torch.float64)
    nets = same_as_one_device(BothPools().double(), (x,), halofx.Mesh(**mesh))
    assert "gather" not in nets[0].listing(), nets[0].listing()


# -- derivatives

TWICE: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: F.max_pool3d(x * x, 3, 2, 1) ** 2,
    "average": lambda x: F.avg_pool3d(x, 3, 2, 1, True, False) ** 2,
    "adaptive": lambda x: F.adaptive_avg_pool3d(x, (4, 2, 2)) ** 2,
    "global max": lambda x: F.adaptive_max_pool3d(x * x, 1) ** 2,
    "unpool": lambda x: F.max_unpool3d(*F.max_pool3d(x * x, 2, return_indices=True), 2) ** 2,
}


@pytest.mark.parametrize("name", TWICE)
def test_second_derivatives(name: str) -> None:
    function = TWICE[name]
    x = torch.randn(1, 2, 9, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    net = compiled(function, x)
    layout = net.instances.input_layout("args.0", x.shape)
    weights = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)

    def second(function: Any, gather: Any, part: Callable[[Tensor], Tensor]) -> Tensor:
        leaf = part(x).clone().requires_grad_()
        y = gather(function(leaf))
        first = torch.autograd.grad((y * torch.linspace(1, 2, y.numel()).view(y.shape)).sum(), leaf, create_graph=True)[
            0
        ]
        return torch.autograd.grad((first * part(weights)).sum(), leaf)[0]

    expected = second(function, lambda y: y, lambda v: v)
    cut = lambda v, rank: shards.take(v, layout, net.mesh, rank)  # noqa: E731
    for rank, found in enumerate(
        halofx.launch(lambda rank: second(net, net.gather, lambda v: cut(v, rank)), net.mesh, timeout=30)
    ):
        close(found, cut(expected, rank), f"rank {rank}")
