"""Reshapes, permutations and repetitions: which dims stay split, and exactness where a split dim merges (CONFORMANCE G16, S6)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halofx
from halofx.compiler.index_map import length
from halofx.compiler.interval import blocks
from halofx.compiler.ops.shape import _target_shape, match
from halofx.compiler.rules import Sample
from tests.laws import Case, Op, check
from tests.models import relative, same_as_one_device

pytestmark = pytest.mark.filterwarnings("ignore:halofx. input:UserWarning")


def compiled(function: Callable[..., Any], shape: tuple[int, ...], layout: str, **axes: int) -> halofx.Net:
    """A function of a tensor split as ``layout`` says: "n . depth"."""
    split = tuple(a if a in axes else None for a in layout.split())
    return halofx.compile(Op(function), halofx.Mesh(**axes), inputs=[shape], layouts={"args.0": split})


def moves(net: halofx.Net) -> bool:
    return any(word in net.listing() for word in ("gather", "all_to_all", "exchange", "_slice(", "no rule"))


def test_blocks_have_equal_products_and_their_maps_cover_what_is_made() -> None:
    for seed in range(300):
        rng = Random(seed)
        before = [rng.choice([1, 2, 3, 4, 6]) for _ in range(rng.randint(1, 5))]
        after = _target_shape(rng, before)
        for block in match(before, after):
            n, m = (math.prod(s[d] for d in dims) for s, dims in ((before, block.before), (after, block.after)))
            assert n == m
            extent = before[block.before[0]]
            for own in blocks(after[block.after[0]], 3):
                rows = block.map.read(own, extent)
                first = rows[0].start or 0 if rows else 0
                start, stop = own.start * block.rest_after, own.stop * block.rest_after
                if own:
                    assert first * block.rest_before <= start
                    assert stop <= (first + length(rows)) * block.rest_before


@pytest.mark.parametrize(("function", "layout", "made"), [
    (lambda x: x.flatten(2), ". . depth . .", "2, 4, 128@depth"),
    (lambda x: x.flatten(2).transpose(1, 2), ". . depth . .", "2, 128@depth, 4"),
    (lambda x: x.flatten(2).unflatten(2, (8, 4, 4)), ". . depth . .", "2, 4, 8@depth, 4, 4"),
    (lambda x: x.flatten(0, 1), "depth . . . .", "8@depth, 8, 4, 4"),
    (lambda x: x.permute(0, 2, 3, 4, 1), ". . depth . .", "2, 8@depth, 4, 4, 4"),
    (lambda x: x.movedim(1, -1).reshape(2, -1, 4), ". . depth . .", "2, 128@depth, 4"),
    (lambda x: x.view(2, 2, 2, 8, 4, 4).transpose(1, 2).reshape(2, 4, 8, 4, 4), ". . depth . .", "2, 4, 8@depth, 4, 4"),
    (lambda x: x.view(2, 4, 4, 2, 4, 4), ". . depth . .", "2, 4, 4@depth, 2, 4, 4"),
    (lambda x: x[:, :1].squeeze(1) * 1, ". . depth . .", "2, 8@depth, 4, 4"),
    (lambda x: x.unsqueeze(2), ". . depth . .", "2, 4, 1, 8@depth, 4, 4"),
    (lambda x: x[:, :1].expand(-1, 3, -1, -1, -1), ". . depth . .", "2, 3, 8@depth, 4, 4"),
    (lambda x: x.tile(1, 2, 1, 1, 1), ". . depth . .", "2, 8, 8@depth, 4, 4"),
    (lambda x: x.flatten(1, 2), ". depth . . .", "2, 32@depth, 4, 4"),
    (lambda x: x.double().contiguous().clone(), ". . depth . .", "2, 4, 8@depth, 4, 4"),
])  # fmt: skip
def test_what_moves_nothing(function: Callable[[Tensor], Tensor], layout: str, made: str) -> None:
    net = compiled(function, (2, 4, 8, 4, 4), layout, depth=2)
    assert made in net.listing().splitlines()[-2] and not moves(net), net.listing()


def test_pixel_shuffles_move_nothing_on_a_canonical_split() -> None:
    for function in (lambda x: F.pixel_shuffle(x, 2), lambda x: F.pixel_unshuffle(x, 2)):
        net = compiled(function, (1, 4, 8, 8), ". . height width", height=2, width=2)
        assert "@height" in net.listing().splitlines()[-2] and not moves(net), net.listing()


def windows(x: Tensor, size: int = 4) -> Tensor:
    """Windows of [n, d, h, w, c] as a batch, as shifted-window attention makes them, and back."""
    n, d, h, w, c = x.shape
    cut = x.view(n, d // size, size, h // size, size, w // size, size, c).permute(0, 1, 3, 5, 2, 4, 6, 7)
    y = torch.tanh(cut.contiguous().view(-1, size**3, c))
    return (
        y.view(n, d // size, h // size, w // size, size, size, size, c).permute(0, 1, 4, 2, 5, 3, 6, 7).reshape(x.shape)
    )


def test_windows_of_one_volume_stay_split() -> None:
    net = compiled(windows, (1, 8, 8, 8, 2), ". depth . . .", depth=2)
    assert "8@depth, 64, 2" in net.listing() and not moves(net), net.listing()


def test_a_dim_that_merges_behind_another_is_gathered_and_the_leading_one_stays_split() -> None:
    net = compiled(lambda x: x.flatten(0, 1), (4, 6, 5), "data depth .", data=2, depth=2)
    assert "24@data, 5" in net.listing().splitlines()[-2] and "all_gather(args.0, dim=1, axis=depth)" in net.listing()


@pytest.mark.parametrize(("shape", "to", "parts"), [
    ((4, 6), (24,), 3), ((5, 6), (30,), 4), ((3, 4), (12,), 5), ((30,), (5, 6), 4), ((10,), (2, 5), 3), ((6, 4), (3, 8), 4),
    ((6, 4), (8, 3), 4), ((4, 9), (6, 6), 3), ((1, 7, 2), (14, 1), 3), ((2, 3, 2), (3, 4), 2), ((7, 1, 3), (1, 21), 4),
])  # fmt: skip
def test_merged_and_split_dims_with_uneven_blocks(shape: tuple[int, ...], to: tuple[int, ...], parts: int) -> None:
    dim = next(d for d, n in enumerate(shape) if n > 1)
    layout = tuple("depth" if d == dim else None for d in range(len(shape)))
    for thin in ("whole", "split"):
        case = Case(Sample(lambda x: x.reshape(to), (shape,)), halofx.Mesh(depth=parts), {"args.0": layout}, thin)
        check(case, 1)


def test_shards_of_one_plane_are_not_squeezed() -> None:
    sample = Sample(lambda x: (x * 2).squeeze(), ((1, 1, 3, 4, 4),))
    check(Case(sample, halofx.Mesh(depth=3), {"args.0": (None, None, "depth", None, None)}, "whole"))


class Tokens(nn.Module):
    """A convolution, attention-like mixing of tokens, and a head: the volume becomes tokens and a volume again."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix, self.head = nn.Conv3d(1, 4, 2, stride=2), nn.Linear(4, 4), nn.Conv3d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        tokens = self.mix(y.flatten(2).transpose(1, 2))
        return self.head(tokens.transpose(1, 2).reshape(y.shape) + y)


@pytest.mark.parametrize("depth", [8, 10, 12])
def test_tokens_of_a_volume_and_back(depth: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 1, depth, 4, 4, dtype=torch.float64)
    nets = same_as_one_device(Tokens().double(), (x,), halofx.Mesh(data=2, depth=2))
    assert "all_gather" not in nets[0].listing()
    same_as_one_device(Tokens().double(), (x,), halofx.Mesh(depth=3, height=2))


def test_g16_nets_of_1d_and_2d_with_reshapes() -> None:
    torch.manual_seed(0)
    shuffled = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(1, 2, 3, padding=1), nn.PixelUnshuffle(2),
        nn.ChannelShuffle(2), nn.Flatten(2), nn.Conv1d(8, 1, 1),
    ).double()  # fmt: skip
    for n in (8, 7):
        for axes in ({"height": 2}, {"height": 2, "width": 2}, {"height": 3}):
            same_as_one_device(shuffled, (torch.randn(1, 1, n, 6, dtype=torch.float64),), halofx.Mesh(**axes))


@pytest.mark.parametrize(("function", "extents"), [
    (lambda x: x[:, :, 1:-1] * 1, [3, 3, 2, 2]), (lambda x: F.interpolate(x, size=(10, 4, 4)), [3, 3, 2, 2]),
    (lambda x: torch.cat([x, x[:, :, :2]], 2), [4, 4, 3, 3]), (lambda x: x[:, :, ::5] * 1, [1, 1, 1, 0]),
])  # fmt: skip
def test_s6_uneven_outputs_are_canonical_blocks(function: Callable[[Tensor], Tensor], extents: list[int]) -> None:
    x = torch.randn(1, 1, 12, 4, 4, dtype=torch.float64)

    def run(rank: int) -> tuple[int, Tensor]:
        net = halofx.compile(copy.deepcopy(Op(function)), halofx.Mesh(depth=4), inputs=[x], thin="split")
        y = net(net.shard(x))
        return y.shape[2], net.gather(y)

    results = halofx.launch(run, 4)
    assert [planes for planes, _ in results] == extents
    assert all(relative(y, function(x)) < 1e-12 for _, y in results)


@pytest.mark.parametrize("function", [
    lambda x: F.interpolate(x, scale_factor=1.5, mode="trilinear").sin(), lambda x: F.interpolate(x, scale_factor=2).sin(),
    lambda x: F.pad(x, (1, 1, 1, 1, 2, 1), mode="reflect").sin(), lambda x: torch.cat([x, x[:, :, 1:3] ** 2], 2).sin(),
    lambda x: torch.slice_scatter(x, x[:, :, :2] ** 2, 2, 3, 5).flatten(2).sin(), lambda x: x.roll(2, 2) * x.flip(2),
    lambda x: x[:, :, [4, 0, 0]] ** 3,
])  # fmt: skip
def test_second_derivatives(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(1, 1, 5, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def penalty(y: Tensor, of: Tensor, whole: Callable[[Tensor], Tensor]) -> Tensor:
        weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
        (slope,) = torch.autograd.grad((y * weights).sum(), of, create_graph=True)
        return (whole(slope) ** 2).sum()

    one = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(penalty(function(one), one, lambda g: g), one)
    mesh = halofx.Mesh(depth=3)

    def run(rank: int) -> Tensor:
        net = halofx.compile(Op(lambda x: (function(x), x * 1)), mesh, inputs=[x])
        shard = net.shard(x).requires_grad_()
        y, like = net(shard)
        slope = torch.autograd.grad(penalty(net.gather(y), shard, lambda g: net.gather(g, like=like)), shard)[0]
        return net.gather(slope, like=like)  # type: ignore[no-any-return]

    for found in halofx.launch(run, mesh):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
