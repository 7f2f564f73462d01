"""Faults that users of sharded convolutions met elsewhere, each as its kind: the smallest input that shows it, and relatives.

Geometry (G) and shard sizes (S); S7 is in `tests/test_bad_input.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halofx
from halofx.compiler.inputs import default_homes
from halofx.compiler.rules import Sample
from tests.laws import Case, check
from tests.models import relative, same_as_one_device

Shape = tuple[int, ...]
DEPTHS = ({"depth": 2}, {"depth": 3}, {"depth": 4}, {"depth": 2, "height": 2}, {"depth": 2, "height": 2, "width": 2})


def cases(
    function: Callable[..., Any],
    shape: Shape,
    *others: Shape,
    meshes: Any = DEPTHS,
    thin: tuple[str, ...] = ("whole", "split"),
) -> Iterator[Case]:
    """The same call on every mesh, keeping and leaving the split of thin dims."""
    for sizes in meshes:
        mesh = halofx.Mesh(**sizes)
        homes = tuple(a if a in mesh.axes else None for a in default_homes(shape, shape))
        layouts: dict[str, tuple[str | None, ...]] = {"args.0": homes}
        layouts |= {f"args.{i}": (None,) * len(s) for i, s in enumerate(others, 1)}
        for keep in thin:
            yield Case(Sample(function, (shape, *others)), mesh, layouts, keep)


def right(function: Callable[..., Any], shape: Shape, *others: Shape, **options: Any) -> None:
    for seed, case in enumerate(cases(function, shape, *others, **options)):
        check(case, seed)


def sizes(*extents: int, channels: int = 1) -> list[Shape]:
    return [(1, channels, d, 4, 4) for d in extents]


def conv(**arguments: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, w: F.conv3d(x, w, **arguments)


@pytest.mark.parametrize("shape", sizes(8, 10, 9, 7, 5), ids=str)
@pytest.mark.parametrize("k", [3, 5, 7])
def test_g1_g7_strided_conv_with_padding_at_a_seam(shape: Shape, k: int) -> None:
    right(conv(stride=2, padding=k // 2), shape, (2, 1, k, k, k))


@pytest.mark.parametrize("shape", sizes(8, 9, 10, 11), ids=str)
@pytest.mark.parametrize(("k", "s"), [(3, 2), (2, 2), (3, 3), (2, 3), (4, 4)])
def test_g2_g3_valid_strided_conv(shape: Shape, k: int, s: int) -> None:
    right(conv(stride=s), shape, (1, 1, k, min(k, 4), min(k, 4)))


def test_g4_batch_only_split_of_a_strided_stem() -> None:
    right(
        conv(stride=2, padding=3),
        (4, 3, 16, 16, 16),
        (2, 3, 7, 7, 7),
        meshes=({"data": 2}, {"data": 4}, {"data": 3, "depth": 2}),
    )


@pytest.mark.parametrize(("d", "p", "s"), [(2, 2, 1), (3, 3, 1), (2, 2, 2), (2, 0, 1), (3, 1, 2)])
def test_g5_dilation(d: int, p: int, s: int) -> None:
    for shape in sizes(8, 11):
        right(conv(dilation=(d, 1, 1), padding=(p, 1, 1), stride=s), shape, (1, 1, 3, 3, 3))


@pytest.mark.parametrize("groups", [4, 2])
def test_g6_groups_and_depthwise(groups: int) -> None:
    for shape in sizes(8, 7, channels=4):
        right(conv(groups=groups, padding=1), shape, (4, 4 // groups, 3, 3, 3))
        right(lambda x, w: F.conv_transpose3d(x, w, stride=2, groups=groups), shape, (4, 2, 2, 2, 2))


@pytest.mark.parametrize("arguments", [
    {"stride": 2, "padding": 1}, {"padding": "same"}, {"padding": 2}, {"padding": "valid"}, {"padding": "same", "dilation": 3},
], ids=str)  # fmt: skip
def test_g8_even_kernels(arguments: dict[str, Any]) -> None:
    for shape in ((1, 1, 8, 8, 8), (1, 1, 11, 12, 9)):
        k = 4 if arguments.get("dilation", 1) == 1 else 2
        right(conv(**arguments), shape, (1, 1, k, k, k), meshes=DEPTHS[:4])


@pytest.mark.parametrize("k", [(3, 2, 1), (3, 3, 1), (2, 2, 0), (2, 1, 1), (3, 1, 1), (5, 2, 2)])
@pytest.mark.parametrize("depth", [12, 11, 7])
def test_g9_padded_pooling(k: tuple[int, int, int], depth: int) -> None:
    for ceil in (False, True):
        right(lambda x, c=ceil: F.max_pool3d(x, *k, ceil_mode=c), (1, 1, depth, 6, 6))


@pytest.mark.parametrize("arguments", [
    {"count_include_pad": True}, {"count_include_pad": False}, {"divisor_override": 5}, {"count_include_pad": False, "ceil_mode": True},
    {"count_include_pad": True, "ceil_mode": True},
], ids=str)  # fmt: skip
def test_g10_average_pool_at_seams(arguments: dict[str, Any]) -> None:
    for k, s, p in ((3, 1, 1), (3, 2, 1), (2, 2, 0), (4, 3, 2)):
        for depth in (6, 9):
            right(lambda x, a=(k, s, p): F.avg_pool3d(x, *a, **arguments), (1, 1, depth, 5, 5), meshes=DEPTHS[:4])


@pytest.mark.parametrize(
    ("k", "s", "p", "extra"),
    [(2, 2, 0, 0), (3, 1, 1, 0), (3, 2, 1, 1), (4, 2, 1, 0), (1, 3, 0, 2), (2, 3, 0, 0), (5, 2, 2, 1)],
)
def test_g11_transposed_conv(k: int, s: int, p: int, extra: int) -> None:
    for depth in (6, 5, 3):
        right(
            lambda x, w, b: F.conv_transpose3d(x, w, b, stride=s, padding=p, output_padding=extra),
            (1, 2, depth, 4, 4), (2, 2, k, k, k), (2,),
        )  # fmt: skip


@pytest.mark.parametrize("mode", ["trilinear", "nearest", "nearest-exact"])
@pytest.mark.parametrize("scale", [2, 3, 0.5, 1.7])
def test_g12_resize(mode: str, scale: float) -> None:
    for align in (True, False) if mode == "trilinear" else (None,):
        for depth in (4, 5, 9):
            right(
                lambda x, a=align: F.interpolate(x, scale_factor=scale, mode=mode, align_corners=a),
                (1, 1, depth, 4, 4),
                meshes=DEPTHS[:4],
            )


@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
@pytest.mark.parametrize("k", [3, 5])
def test_g13_padding_modes(mode: str, k: int) -> None:
    for depth in (6, 7):
        for sizes_ in ({"depth": 3}, {"depth": 2, "width": 2}):
            torch.manual_seed(0)
            model = nn.Conv3d(1, 2, k, padding=k // 2, padding_mode=mode).double()
            same_as_one_device(model, (torch.randn(1, 1, depth, 6, 6, dtype=torch.float64),), halofx.Mesh(**sizes_))


@pytest.mark.parametrize("pad", [(2, 0), (0, 2), (1, 3), (0, 0)])
def test_g14_asymmetric_and_causal_padding(pad: tuple[int, int]) -> None:
    for depth in (8, 7):
        right(lambda x, w: F.conv3d(F.pad(x, (1, 1, 1, 1, *pad)), w), (1, 1, depth, 4, 4), (1, 1, 3, 3, 3))


@pytest.mark.parametrize("function", [
    lambda x: torch.flip(x, [2]), lambda x: torch.flip(x, [2, 3, 4]), lambda x: x[:, :, 1:-1], lambda x: x[:, :, ::2],
    lambda x: x[:, :, 1::3], lambda x: torch.roll(x, 3, 2), lambda x: torch.roll(x, (-1, 2), (2, 3)), lambda x: x[:, :, 2],
    lambda x: x.narrow(2, 3, 2), lambda x: torch.cat([x, x[:, :, :3]], 2), lambda x: torch.stack(x.unbind(2), 3),
    lambda x: x.index_select(2, torch.tensor([0, 0, 5, 2])),
])  # fmt: skip
def test_g15_flips_slices_crops(function: Callable[[Tensor], Tensor]) -> None:
    for depth in (8, 7):
        right(function, (1, 1, depth, 4, 4))


def test_g16_nets_in_1d_and_2d() -> None:
    torch.manual_seed(0)
    one = nn.Sequential(
        nn.Conv1d(2, 3, 5, 2, 2), nn.BatchNorm1d(3), nn.ReLU(), nn.ConvTranspose1d(3, 2, 4, 2, 1), nn.AvgPool1d(3, 1)
    ).double()
    two = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.MaxPool2d(2),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Conv2d(4, 2, 3),
    ).double()
    for n in (16, 13):
        same_as_one_device(one, (torch.randn(2, 2, n, dtype=torch.float64),), halofx.Mesh(width=2))
        same_as_one_device(two, (torch.randn(2, 2, n, n, dtype=torch.float64),), halofx.Mesh(height=2))
        same_as_one_device(two, (torch.randn(2, 2, n, n, dtype=torch.float64),), halofx.Mesh(height=2, width=3))


@pytest.mark.parametrize(("depth", "parts", "k"), [(3, 4, 3), (3, 3, 7), (5, 4, 3), (2, 5, 5), (1, 3, 3)])
def test_s1_s2_thin_shards_and_wide_halos(depth: int, parts: int, k: int) -> None:
    right(conv(padding=k // 2), (1, 1, depth, 4, 4), (2, 1, k, 3, 3), meshes=({"depth": parts},))


def test_s3_empty_last_shard() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.Upsample(scale_factor=2)).double()
    for thin in ("whole", "split"):
        same_as_one_device(model, (torch.randn(1, 1, 5, 4, 4, dtype=torch.float64),), halofx.Mesh(depth=4), thin=thin)
        same_as_one_device(model, (torch.randn(1, 1, 3, 4, 4, dtype=torch.float64),), halofx.Mesh(depth=4), thin=thin)


def test_s4_nothing_leaks_after_a_bias() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.Conv3d(2, 1, 3, padding=1)).double()
    for depth in (9, 7, 5):
        same_as_one_device(model, (torch.randn(1, 1, depth, 4, 4, dtype=torch.float64),), halofx.Mesh(depth=2))


@pytest.mark.parametrize("thin", ["whole", "split"])
def test_s5_a_level_thinner_than_the_ranks(thin: str) -> None:
    torch.manual_seed(0)
    model = halofx.zoo.build("unet3d", width=2, levels=3).double()
    nets = same_as_one_device(
        model, (torch.randn(1, 1, 16, 16, 16, dtype=torch.float64),), halofx.Mesh(depth=8), thin=thin
    )
    assert ("all_gather" in nets[0].listing()) == (thin == "whole")


def test_s6_uneven_outputs_sharded_and_gathered() -> None:
    model, x = nn.Conv3d(1, 1, 3).double(), torch.randn(1, 1, 12, 4, 4, dtype=torch.float64)

    def run(rank: int) -> tuple[int, Tensor]:
        net = halofx.compile(copy.deepcopy(model), halofx.Mesh(depth=4), inputs=[x.shape])
        y = net(net.shard(x))
        return y.shape[2], net.gather(y)

    results = halofx.launch(run, 4)
    assert [planes for planes, _ in results] == [3, 3, 2, 2]
    assert all(relative(y, model(x)) < 1e-12 for _, y in results)
