"""What stays split in reductions, that ties, infinities and second derivatives are torch's, and CONFORMANCE N7."""

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
from halofx.runtime.movement import merge_moments
from tests.laws import Case, Op, check, close
from tests.models import same_as_one_device

SHAPE = (1, 4, 7, 4, 4)
DEPTH = (None, None, "depth", None, None)


def compiled(function: Callable[..., Any], *shapes: tuple[int, ...], axes: Any = DEPTH, **mesh: int) -> halofx.Net:
    layouts = {f"args.{i}": axes[: len(s)] for i, s in enumerate(shapes)}
    return halofx.compile(Op(function), halofx.Mesh(**(mesh or {"depth": 2})), inputs=list(shapes), layouts=layouts)


def gathers(net: halofx.Net) -> bool:
    return any(word in net.listing() for word in ("all_gather", "all_to_all", "no rule"))


# -- what stays split

ALL_REDUCED: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "sum": (lambda x: x.sum((2, 3)), 1),
    "mean": (lambda x: x.mean((2, 3, 4), keepdim=True), 1),
    "mean of all": (lambda x: x.mean(), 1),
    "nansum": (lambda x: x.nansum(2), 1),
    "nanmean": (lambda x: x.nanmean(), 2),
    "any": (lambda x: (x > 0).any(), 1),
    "all": (lambda x: (x > 0).all(2), 1),
    "count_nonzero": (lambda x: torch.count_nonzero(x), 1),
    "amax": (lambda x: x.amax((2, 3, 4)), 2),
    "amin": (lambda x: x.amin(2, keepdim=True), 2),
    "aminmax": (lambda x: torch.aminmax(x), 4),
    "max": (lambda x: x.max(), 2),
    "max along": (lambda x: x.max(2), 3),
    "argmax": (lambda x: x.argmax(2), 2),
    "argmin of all": (lambda x: x.argmin(), 2),
    "var": (lambda x: x.var((0, 2, 3, 4)), 1),
    "std_mean": (lambda x: torch.std_mean(x, 2), 1),
    "softmax": (lambda x: x.softmax(2), 2),
    "log_softmax": (lambda x: F.log_softmax(x, 2), 2),
    "logsumexp": (lambda x: x.logsumexp((2, 3)), 2),
    "norm 1": (lambda x: x.norm(1), 1),
    "norm 2": (lambda x: torch.linalg.vector_norm(x, dim=(2, 3)), 1),
    "norm inf": (lambda x: x.norm(float("inf")), 2),
    "normalize": (lambda x: F.normalize(x, dim=2), 1),
    "frobenius": (lambda x: torch.linalg.matrix_norm(x, dim=(2, 3)), 1),
    "cosine_similarity": (lambda x: F.cosine_similarity(x, x + 1, dim=2), 3),
    "histc": (lambda x: torch.histc(x, 5, -1, 1), 1),
}


@pytest.mark.parametrize("name", ALL_REDUCED)
def test_a_split_dim_is_reduced_where_it_lies(name: str) -> None:
    function, count = ALL_REDUCED[name]
    net = compiled(function, SHAPE)
    assert not gathers(net), net.listing()
    assert net.listing().count("all_reduce(") == count, net.listing()


UNMOVED: dict[str, Callable[[Tensor], Any]] = {
    "softmax": lambda x: x.softmax(1),
    "amax": lambda x: x.amax(1),
    "max": lambda x: x.max(1),
    "std": lambda x: x.std((1, 3)),
    "sort": lambda x: x.sort(1),
    "topk": lambda x: x.topk(2, 1),
    "median": lambda x: x.median(1),
    "quantile": lambda x: x.quantile(0.5, 1),
    "cumsum": lambda x: x.cumsum(1),
    "prod": lambda x: x.prod(1),
    "kthvalue": lambda x: x.kthvalue(2, 1),
    "norm": lambda x: x.norm(3, dim=1),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x + 1),
    "renorm": lambda x: x.renorm(2, 2, 1.0),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
}


@pytest.mark.parametrize("name", UNMOVED)
def test_reducing_another_dim_sends_nothing(name: str) -> None:
    net = compiled(UNMOVED[name], SHAPE)
    assert not net.summary().forward, net.listing()


def test_what_needs_a_split_dim_whole_gathers_it_and_splits_again() -> None:
    net = compiled(lambda x: x.sort(2)[0] * x, SHAPE)
    assert "7@depth" in net.listing().splitlines()[-2], net.listing()
    assert net.listing().count("all_gather(") == 1, net.listing()


def test_a_reduction_keeps_the_other_splits() -> None:
    net = compiled(lambda x: x.amax(2), (2, 4, 7, 6), axes=("data", None, "depth", "height"), data=2, depth=2, height=2)
    assert not gathers(net), net.listing()
    assert "[2@data, 4, 6@height]" in net.listing().splitlines()[-2], net.listing()


def test_finite_differences_are_a_halo() -> None:
    net = compiled(lambda x: torch.gradient(x, dim=(2, 3)), SHAPE)
    kinds = {t.kind for t in net.summary().forward}
    assert kinds == {"halo_exchange"}, net.listing()


# -- CONFORMANCE N7


class SqueezeExcite(nn.Module):
    def __init__(self, pool: Callable[[Tensor], Tensor], width: int = 4) -> None:
        super().__init__()
        self.pool = pool
        self.conv = nn.Conv3d(1, width, 3, padding=1)
        self.down, self.up = nn.Conv3d(width, 2, 1), nn.Conv3d(2, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        gate: Tensor = torch.sigmoid(self.up(F.relu(self.down(self.pool(x)))))
        return x * gate


POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "adaptive average": nn.AdaptiveAvgPool3d(1),
    "adaptive max": nn.AdaptiveMaxPool3d(1),
    "mean": lambda x: x.mean((2, 3, 4), keepdim=True),
    "amax": lambda x: x.amax((2, 3, 4), keepdim=True),
    "mean + amax": lambda x: x.mean((2, 3, 4), True) + x.amax((2, 3, 4), True),
    "std": lambda x: x.std((2, 3, 4), keepdim=True),
    "norm": lambda x: x.flatten(2).norm(dim=2)[:, :, None, None, None],
}


@pytest.mark.parametrize("mesh", [{"depth": 2}, {"depth": 2, "height": 2}, {"data": 2, "depth": 3}], ids=str)
@pytest.mark.parametrize("name", POOLS)
def test_squeeze_and_excite(name: str, mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = SqueezeExcite(POOLS[name]).double()
    same_as_one_device(model, (torch.randn(2, 1, 7, 4, 5, dtype=torch.float64),), halofx.Mesh(**mesh))


N7: dict[str, Callable[[Tensor], Any]] = {
    "mean": lambda x: x.mean(2),
    "var": lambda x: x.var(2),
    "amax": lambda x: x.amax(2),
    "softmax": lambda x: x.softmax(2),
    "global softmax": lambda x: x.flatten(2).softmax(2).view_as(x),
    "global mean": lambda x: x.mean((2, 3, 4)),
    "global var": lambda x: x.var((0, 2, 3, 4), unbiased=False),
    "global max": lambda x: x.flatten(2).max(2)[0],
    "standardize": lambda x: (x - x.mean()) / x.std(),
    "min-max": lambda x: (x - x.min()) / (x.max() - x.min()),
}


@pytest.mark.parametrize("name", N7)
def test_over_a_split_dim(name: str) -> None:
    for mesh, axes in (({"depth": 2}, DEPTH), ({"depth": 3, "height": 2}, (None, None, "depth", "height", None))):
        check(Case(Sample(N7[name], (SHAPE,)), halofx.Mesh(**mesh), {"args.0": axes}, "split"))


# -- derivatives

TWICE: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(2) ** 3,
    "amax": lambda x: (x * x).amax(2) ** 2,
    "max": lambda x: (x * x).max(2)[0] ** 2,
    "max of all": lambda x: (x * x).max() ** 2,
    "std": lambda x: x.std(2),
    "var": lambda x: x.var() ** 2,
    "softmax": lambda x: x.softmax(2),
    "logsumexp": lambda x: x.logsumexp(2),
    "norm 2": lambda x: x.norm(dim=2),
    "norm 3": lambda x: x.norm(3),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x**2, dim=2),
}


@pytest.mark.parametrize("name", TWICE)
def test_second_derivatives(name: str) -> None:
    function = TWICE[name]
    x = torch.randn(2, 1, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = _second(function, lambda y: y, x)
    net = halofx.compile(Op(function), halofx.Mesh(depth=2), inputs=[x], layouts={"args.0": DEPTH[:4]})
    layout = net.instances.input_layout("args.0", x.shape)

    def run(rank: int) -> Tensor:
        return _second(net, net.gather, shards.take(x, layout, net.mesh, rank), layout, rank)

    for rank, found in enumerate(halofx.launch(run, net.mesh, timeout=30)):
        close(found, shards.take(expected, layout, net.mesh, rank), f"rank {rank}")


def _second(function: Any, gather: Any, x: Tensor, layout: Any = None, rank: int = 0) -> Tensor:
    """The derivative of sum of (dy/dx * w) for fixed weights w, which are those of the part x is."""
    x = x.clone().requires_grad_()
    y = gather(function(x))
    first = torch.autograd.grad(
        (y * torch.linspace(1, 2, y.numel(), dtype=x.dtype).view(y.shape)).sum(), x, create_graph=True
    )
    weights = torch.linspace(-1, 1, 30, dtype=x.dtype).view(2, 1, 5, 3)
    weights = weights if layout is None else shards.take(weights, layout, halofx.Mesh(depth=2), rank)
    return torch.autograd.grad((first[0] * weights).sum(), x)[0]


# -- values


def test_equal_numbers_have_no_variance() -> None:
    """Whatever the number: the gradient of a standard deviation divides by it."""
    for number in (0.1, 0.7, 1e3 / 3):
        parts = [torch.full((n,), number, dtype=torch.float64) for n in (3, 3, 2)]
        rows = torch.stack(
            [torch.stack([torch.tensor(float(len(p))).double(), p.mean() * 0 + number, p.sum() * 0]) for p in parts]
        )
        count, mean, squares = merge_moments(rows)
        assert (count, mean, squares) == (8, number, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["mean", "var", "softmax", "amax", "norm", "sum"])
def test_halves(name: str, dtype: torch.dtype) -> None:
    """As near to float32 as the half can hold, and of its dtype: sums are held in float32."""
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "mean": lambda x: x.mean((2, 3, 4)),
        "var": lambda x: x.var((2, 3, 4)),
        "softmax": lambda x: x.flatten(2).softmax(2),
        "amax": lambda x: x.amax((2, 3, 4)),
        "norm": lambda x: x.flatten(2).norm(dim=2),
        "sum": lambda x: x.sum((2, 3, 4)),
    }
    x = torch.randn(1, 2, 9, 12, 12, generator=torch.Generator().manual_seed(0)).to(dtype) + 3
    if name == "mean":
        x = x * 100  # the sum of 1296 of these is beyond float16
    net = halofx.compile(Op(functions[name]), halofx.Mesh(depth=2), inputs=[x], layouts={"args.0": DEPTH})
    exact = functions[name](x.double())
    for y in halofx.launch(lambda rank: net.gather(net(net._cut(x, "args.0"))), net.mesh, timeout=30):
        assert y.dtype == dtype
        assert (y.double() - exact).abs().max() <= 2 * torch.finfo(dtype).eps * exact.abs().max()
