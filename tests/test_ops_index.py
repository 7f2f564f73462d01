"""Slices, pads, joins, gathers and scatters: what moves, what stays split (CONFORMANCE G13 to G15)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halofx
from halofx.compiler.rules import Sample
from tests.laws import Case, Op, check
from tests.models import same_as_one_device

pytestmark = pytest.mark.filterwarnings("ignore:halofx. input:UserWarning")

X = (1, 2, 8, 4, 4)


def listing(function: Callable[..., Any], *shapes: tuple[int, ...], **axes: int) -> str:
    """The listing of a function of volumes on a mesh."""
    return halofx.compile(Op(function), halofx.Mesh(**(axes or {"depth": 2})), inputs=list(shapes or (X,))).listing()


def right(function: Callable[..., Any], *shapes: tuple[int, ...]) -> None:
    """The law for a function of volumes split over depth, and over depth and width, down to empty shards."""
    for axes in ({"depth": 2}, {"depth": 3, "width": 2}, {"depth": 5}):
        layout = tuple(a if a in axes else None for a in (None, None, "depth", "height", "width"))
        layouts = {f"args.{i}": layout if len(s) == 5 else (None,) * len(s) for i, s in enumerate(shapes)}
        check(Case(Sample(function, shapes), halofx.Mesh(**axes), layouts, "split"), 3)


@pytest.mark.parametrize(("function", "made"), [
    (lambda x: x.flip(2), "8@depth"), (lambda x: torch.rot90(x, 1, (2, 3)), "4, 8@depth"),
    (lambda x: x[:, :, 1:-1] * 1, "6@depth"), (lambda x: x[:, :, ::2] * 1, "4@depth"), (lambda x: x.roll(3, 2), "8@depth"),
    (lambda x: x.narrow(2, 1, 5) * 1, "5@depth"), (lambda x: torch.diff(x, dim=2), "7@depth"),
    (lambda x: x.unfold(2, 3, 2), "3@depth, 4, 4, 3"), (lambda x: F.pad(x, (0, 0, 0, 0, 2, 1)), "11@depth"),
    (lambda x: F.pad(x, (1, 1, 0, 0, -1, 2), mode="replicate"), "9@depth"), (lambda x: torch.cat([x, x[:, :, :3]], 2), "11@depth"),
    (lambda x: torch.stack([x, x], 2), "2, 8@depth"), (lambda x: x.repeat_interleave(2, 2), "16@depth"),
    (lambda x: x.repeat(1, 1, 2, 1, 1), "16@depth"), (lambda x: x.index_select(2, torch.tensor([5, 1, 1, 0])), "4@depth"),
    (lambda x: x[:, :, [5, 1, 1, 0]], "4@depth"), (lambda x: x.gather(2, x.long().clamp(0, 7)), "8@depth"),
    (lambda x: torch.slice_scatter(x, x[:, :, :3], 2, 2, 5), "8@depth"), (lambda x: torch.select_scatter(x, x[:, :, 0], 2, 4), "8@depth"),
    (lambda x: torch.rot90(x, 3, (3, 4)), "8@depth"), (lambda x: x.tril(), "8@depth"),
])  # fmt: skip
def test_a_split_dim_stays_split(function: Callable[[Tensor], Tensor], made: str) -> None:
    text = listing(function)
    assert made in text.splitlines()[-2], text
    assert not any(word in text for word in ("all_to_all", "no rule")), text


def test_other_dims_move_nothing() -> None:
    for function in (
        lambda x: x.flip(3), lambda x: torch.cat([x, x], 1), lambda x: x[:, 1], lambda x: x.roll(1, 4),
        lambda x: F.pad(x, (1, 1, 1, 1, 0, 0), mode="circular"), lambda x: x.chunk(2, 1)[1] * 1, lambda x: x[..., [1, 0]],
        lambda x: x.scatter_add(1, torch.zeros(x.shape, dtype=torch.int64), x),
    ):  # fmt: skip
        text = listing(function)
        assert not any(word in text for word in ("gather(args", "exchange", "all_gather", "no rule")), text
        assert "8@depth" in text.splitlines()[-2], text


def test_a_selected_plane_is_all_that_is_sent() -> None:
    net = halofx.compile(Op(lambda x: x[:, :, 3] * 1), halofx.Mesh(depth=4), inputs=[X])
    (sent,) = net.summary().forward
    assert (sent.messages, sent.bytes) == (3, 3 * 2 * 4 * 4 * 4)


def test_a_crop_sends_only_what_changes_owner() -> None:
    net = halofx.compile(Op(lambda x: x[:, :, 2:] * 1), halofx.Mesh(depth=2), inputs=[X])
    (sent,) = net.summary().forward
    assert (sent.messages, sent.bytes) == (1, 2 * 4 * 4 * 4)  # plane 4: 0 .. 3 | 4 .. 7 becomes 2 3 4 | 5 6 7


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate", "zeros"])
def test_g13_padding_of_each_side_by_each_mode(mode: str) -> None:
    torch.manual_seed(0)
    for depth, kernel in ((6, 3), (5, (5, 1, 3))):
        sizes = (kernel,) * 3 if isinstance(kernel, int) else kernel
        model = nn.Conv3d(1, 2, sizes, padding=tuple(k // 2 for k in sizes), padding_mode=mode).double()
        for axes in ({"depth": 3}, {"depth": 2, "height": 2}):
            same_as_one_device(model, (torch.randn(1, 1, depth, 4, 4, dtype=torch.float64),), halofx.Mesh(**axes))


@pytest.mark.parametrize("mode", ["constant", "circular", "reflect", "replicate"])
@pytest.mark.parametrize("pad", [(2, 0), (0, 3), (4, 4), (-1, 2), (3, -2), (-2, -1)])
def test_g14_pads_and_crops(mode: str, pad: tuple[int, int]) -> None:
    for depth in (5, 8):
        right(lambda x: F.pad(x, (1, 0, 0, 2, *pad), mode=mode), (1, 1, depth, 3, 4))
    right(lambda x, w: F.conv3d(F.pad(x, (1, 1, 1, 1, *pad), mode=mode), w), (1, 1, 7, 4, 4), (1, 1, 3, 3, 3))


def test_a_constant_fills_whole_shards() -> None:
    for value in (0.5, float("-inf")):
        right(lambda x, v=value: F.pad(x, (0, 0, 0, 0, 9, 7), value=v), (1, 1, 2, 2, 2))


def shifted_skip(x: Tensor) -> Tensor:
    """Windows shifted by half, as shifted-window attention rolls them."""
    return torch.roll(torch.roll(x, (-2, -1), (2, 4)) * 2, (2, 1), (2, 4)) + x


@pytest.mark.parametrize("function", [
    shifted_skip, lambda x: torch.cat([x[:, :, :1], x, x[:, :, -1:]], 2), lambda x: x.flip(2)[:, :, 1:] - x[:, :, :-1],
    lambda x: torch.cat([x[:, :, i::2] for i in (0, 1)], 1) if x.shape[2] % 2 == 0 else x[:, :, 1::2],
    lambda x: x[:, :, -2] + x[:, :, 1], lambda x: torch.stack([p * i for i, p in enumerate(x.unbind(2))], 2),
    lambda x: sum(x.tensor_split(3, 2)[i].sum(2) for i in range(3)), lambda x: torch.rot90(x, 2, (2, 4)),
    lambda x: x[:, :, [0, -1, 2]] * x[:, :, :1], lambda x: x[:, [0, 0], [2, 1]],
])  # fmt: skip
def test_g15_kinds(function: Callable[[Tensor], Tensor]) -> None:
    for depth in (8, 7):
        right(function, (1, 2, depth, 3, 4))


def written(x: Tensor) -> Tensor:
    y = x * 1
    y[:, :, 1:6:2] = 0.0
    y[:, :, 3] += 2 * x[:, :, 0]
    y[:, 0, 2:4] = x[:, 1, 4:6]
    return y


def test_writing_to_parts_of_a_split_dim() -> None:
    right(written, (1, 2, 8, 3, 4))
    assert not any(word in listing(written) for word in ("all_gather", "no rule")), listing(written)


@pytest.mark.parametrize("thin", ["whole", "split"])
def test_what_is_detached_stops_cotangents_on_every_rank_alike(thin: str) -> None:
    # a rank that holds nothing of a value must not send cotangents where the others do not
    class Stopped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv3d(1, 1, 3, padding=1), nn.Conv3d(1, 1, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            h = F.max_pool3d(self.a(x), 3)
            return self.b(h.detach()) + torch.zeros_like(self.a(h)) + h.new_ones(h.shape) + x.mean().type_as(h)

    torch.manual_seed(0)
    x = torch.randn(1, 1, 9, 6, 6, dtype=torch.float64)
    same_as_one_device(Stopped().double(), (x,), halofx.Mesh(depth=4), thin=thin)


def test_two_split_dims_indexed_by_split_indices() -> None:
    # the volume is gathered over one axis, read whole over the other, and met by indices split over both
    def picked(x: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return x[i, j]

    rows, columns = (lambda s, n=n: torch.randint(0, n, s) for n in (4, 6))
    sample = Sample(picked, ((4, 6), (4, 2), (4, 2)), {1: rows, 2: columns})
    layouts = {"args.0": ("height", "width"), "args.1": (None, "width"), "args.2": (None, None)}
    check(Case(sample, halofx.Mesh(height=2, width=2), layouts, "split"))
