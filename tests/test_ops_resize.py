"""Resizing and sampling: torch's formulas, what is exchanged, what stays split (CONFORMANCE G12)."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import halofx
from halofx.compiler.interval import Interval, blocks
from halofx.compiler.ops.resize import OPS, Resize, fused, nearest, reads, taps
from halofx.compiler.rules import Sample
from tests.laws import Case, Op, check

pytestmark = pytest.mark.filterwarnings("ignore:halofx. input:UserWarning")

GATHERS = ("all_gather", "all_to_all", "no rule")


def compiled(function: Callable[..., Any], *shapes: tuple[int, ...], **axes: int) -> halofx.Net:
    """A function of tensors on a mesh, its spatial dims split as those of a model's inputs are."""
    return halofx.compile(Op(function), halofx.Mesh(**axes), inputs=list(shapes))


def random_resize(rng: Random, modes: tuple[str, ...]) -> Resize:
    before, scale = rng.randint(1, 30), rng.choice([None, 2.0, 3.0, 0.5, 1 / 3, 1.3, rng.uniform(0.2, 4)])
    after = max(1, int(before * scale)) if scale else rng.randint(1, 60)
    mode = rng.choice(modes)
    aligned = rng.random() < 0.5 and not mode.startswith("nearest")
    return Resize(mode, before, after, scale, aligned, rng.random() < 0.5)


@pytest.mark.parametrize("mode", ["linear", "cubic", "linear-aa", "cubic-aa"])
def test_taps_are_torchs(mode: str) -> None:
    for seed in range(80):
        dim = random_resize(Random(seed), (mode,))
        if dim.odd or dim.unchanged:
            continue
        index, weight = taps(dim, 0, dim.after, torch.device("cpu"))
        mine = torch.zeros(dim.after, dim.before, dtype=dim.dtype).scatter_add_(1, index, weight)
        unit = torch.eye(dim.before, dtype=dim.dtype)[None, :, :, None].repeat(1, 1, 1, 3)
        if mode == "linear":
            theirs = OPS[mode, 1].default(unit[..., 0], [dim.after], dim.aligned, dim.scale)[0]
        else:
            theirs = OPS[mode, 2].default(unit, [dim.after, 3], dim.aligned, dim.scale, None)[0, ..., 0]
        torch.testing.assert_close(mine.T, theirs, rtol=0, atol=1e-12 if dim.double else 2e-6, msg=str(dim))


def test_nearest_reads_nothing_twice_and_nothing_outside() -> None:
    for seed in range(200):
        dim = random_resize(Random(seed), ("nearest", "nearest-exact"))
        if dim.odd:
            continue
        for own in blocks(dim.after, 3):
            used = set(nearest(dim)[own.start : own.stop])
            read = [(r.start or 0) + i * r.step for r in reads(dim).read(own, dim.before) for i in range(r.count)]
            assert used <= set(read) and len(read) == len(set(read)), dim
            if used:
                assert min(read) == min(used) and max(read) == max(used), dim


def test_which_dims_the_op_itself_resizes() -> None:
    def on_rank(mode: str, before: int, after: int, scale: float | None, aligned: bool = False) -> Any:
        dim = Resize(mode, before, after, scale, aligned)
        own = blocks(after, 2)[1]
        runs = reads(dim).read(own, before)
        return fused(dim, own, [(r.start or 0) + i * r.step for r in runs for i in range(r.count)])

    assert on_rank("nearest", 8, 16, 2.0) == (8, 2.0, 0)
    assert on_rank("nearest", 6, 18, 3.0) == (9, 3.0, 0)
    assert on_rank("linear", 8, 16, 2.0) == (10, 2.0, 2)
    assert on_rank("linear", 8, 16, None) == (10, 2.0, 2)  # by size
    assert on_rank("linear", 8, 4, 0.5) == (2, 0.5, 0)
    assert on_rank("cubic", 8, 16, 2.0) == (12, 2.0, 4)
    assert on_rank("linear", 8, 24, 3.0) is None  # 1/3 is not exact
    assert on_rank("linear", 8, 16, 2.0, aligned=True) is None
    assert on_rank("nearest", 12, 6, 0.5) == (3, None, 0)  # every second index is delivered
    assert fused(Resize("linear", 8, 8, None, False), Interval(4, 8), [4, 5, 6, 7]) == (4, None, 0)


def test_nearest_on_a_canonical_split_moves_nothing() -> None:
    for mode in ("nearest", "nearest-exact"):
        net = compiled(lambda x, m=mode: F.interpolate(x, scale_factor=2, mode=m), (1, 2, 8, 8, 8), depth=2, height=2)
        assert "16@depth, 16@height" in net.listing()
        assert not any(word in net.listing() for word in ("halo", "slice", *GATHERS))


@pytest.mark.parametrize("options", [
    {"scale_factor": 2}, {"scale_factor": 2, "align_corners": True}, {"size": (13, 11, 9)}, {"scale_factor": 1.7},
    {"scale_factor": 0.5},
])  # fmt: skip
def test_linear_exchanges_at_most_one_plane_a_side(options: dict[str, Any]) -> None:
    net = compiled(lambda x: F.interpolate(x, mode="trilinear", **options), (1, 2, 8, 8, 8), depth=2, height=2)
    assert "@depth" in net.listing().splitlines()[-2] and "@height" in net.listing().splitlines()[-2]
    assert not any(word in net.listing() for word in GATHERS)
    planes = sum(t.bytes for t in net.summary().forward)
    assert planes <= 2 * 4 * (2 * 4 * 8 + 2 * 5 * 8) * 4  # two axes, four ranks, a face and a face with its edge


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("antialias", [False, True])
def test_images_stay_split(mode: str, antialias: bool) -> None:
    net = compiled(
        lambda x: F.interpolate(x, size=(11, 14), mode=mode, antialias=antialias), (1, 2, 16, 16), height=2, width=2
    )
    assert "11@height, 14@width" in net.listing() and not any(word in net.listing() for word in GATHERS)


def test_scales_of_which_torch_makes_copies_run_whole() -> None:
    # 5 * 1.1 makes 5 again: torch copies forward or backward, by number of dims; whatever it does is done
    for mode in ("nearest", "trilinear", "nearest-exact"):
        sample = Sample(lambda x, m=mode: F.interpolate(x, scale_factor=(1.1, 2, 2), mode=m), ((1, 1, 5, 4, 4),))
        check(Case(sample, halofx.Mesh(depth=2), {"args.0": (None, None, "depth", None, None)}, "whole"))


def test_float32_is_as_near_as_rounding_allows() -> None:
    x = torch.randn(1, 2, 200, 5, 4, generator=torch.Generator().manual_seed(0))
    mesh = halofx.Mesh(depth=3, height=2)
    for options in ({"scale_factor": 3}, {"scale_factor": 1.7}, {"size": (333, 7, 5)}, {"scale_factor": 2}):
        function: Callable[[Tensor], Tensor] = lambda x, o=options: F.interpolate(x, mode="trilinear", **o)  # noqa: E731
        net = halofx.compile(Op(function), mesh, inputs=[x])
        for y in halofx.launch(lambda rank, net=net: net.gather(net(net.shard(x))), mesh):
            torch.testing.assert_close(y, function(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["trilinear", "nearest", "nearest-exact", "bicubic", "bilinear aa"])
def test_g12_kinds(kind: str) -> None:
    two = kind in ("bicubic", "bilinear aa")
    for depth in (3, 4):
        for options in ({"scale_factor": 2}, {"size": (5, 4) if two else (5, 4, 9)}):
            for align in (True, False) if not kind.startswith("nearest") else (None,):
                extra = {"mode": kind.split()[0], "align_corners": align, "antialias": kind.endswith("aa")}
                sample = Sample(
                    lambda x, o=options | extra: F.interpolate(x, **o), ((1, 1, depth, *(4, 5)[: 1 + (not two)]),)
                )
                for axes, split in (
                    ({"depth": 4}, ("depth", None, None)),
                    ({"depth": 2, "width": 2}, ("depth", "width", None)),
                ):
                    layout = (None, None, *split[: 2 if two else 3])
                    check(Case(sample, halofx.Mesh(**axes), {"args.0": layout}, "split"), depth)


def test_what_a_grid_samples_stays_split() -> None:
    def warp(x: Tensor, grid: Tensor) -> Tensor:
        return F.grid_sample(x, grid, align_corners=True)

    net = halofx.compile(
        Op(warp), halofx.Mesh(data=2, depth=2), inputs=[(2, 1, 8, 4, 4), (2, 8, 4, 4, 3)],
        layouts={"args.0": ("data", None, "depth", None, None), "args.1": ("data", "depth", None, None, None)},
    )  # fmt: skip
    assert "f32[2@data, 1, 8@depth, 4, 4]" in net.listing().splitlines()[-2]
