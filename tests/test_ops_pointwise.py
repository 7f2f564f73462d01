"""Every elementwise function obeys the law, and keeps its split; Fourier transforms and matrices keep their batch split."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halofx
from halofx.compiler.ops.pointwise_samples import ELEMENTWISE, elementwise_sample
from halofx.compiler.rules import RULES, Sample, find_rule
from tests.laws import Case, Op, check, draw
from tests.models import same_as_one_device

pytestmark = pytest.mark.filterwarnings("ignore:halofx")
NAMES = [f"{e.name}-{i}" for i, e in enumerate(ELEMENTWISE)]


@pytest.mark.parametrize("part", range(8))
def test_every_elementwise_function(part: int) -> None:
    for name, chosen in list(zip(NAMES, ELEMENTWISE, strict=True))[part::8]:
        rng = Random(name)
        check(draw(elementwise_sample(rng, chosen), rng))


def listing(function: Any, *shapes: tuple[int, ...], **mesh: int) -> str:
    return halofx.compile(Op(function), halofx.Mesh(**mesh), inputs=list(shapes)).listing()


VOLUME = (2, 4, 8, 6, 5)
ACTIVATIONS = """
    relu relu6 elu selu celu gelu silu mish hardswish hardsigmoid hardtanh softplus softsign tanhshrink logsigmoid softshrink
    hardshrink leaky_relu rrelu sigmoid tanh
"""


@pytest.mark.parametrize("name", ACTIVATIONS.split())
def test_activations_move_nothing(name: str) -> None:
    text = listing(lambda x: getattr(F, name)(x), VOLUME, data=2, depth=2, height=3)
    assert text.splitlines()[-2].count("[2@data, 4, 8@depth, 6@height, 5]") == 1
    assert not any(word in text for word in ("all_", "exchange", "slice"))


def test_prelu_and_glu_stay_split() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(2, 4, 1), nn.PReLU(4), nn.GLU(1), nn.PReLU())
    text = halofx.compile(model, halofx.Mesh(depth=2), inputs=[(1, 2, 8, 4, 4)]).listing()
    assert "f32[1, 2, 8@depth, 4, 4]" in text.splitlines()[-2] and "all_gather" not in text
    text = listing(lambda x: F.glu(x, 2), (1, 2, 8, 4, 4), depth=2)
    assert "f32[1, 2, 4@depth, 4, 4]" in text and "all_gather" not in text


def test_every_op_that_torch_tags_as_pointwise_has_the_rule() -> None:
    aten = torch.ops.aten
    ops = (
        aten.hardswish.default,
        aten.lerp.Tensor,
        aten.log_sigmoid.default,
        aten.where.self,
        aten.masked_fill.Scalar,
        aten.pow.Scalar,
    )
    assert all(find_rule(op) is not None for op in ops)
    assert find_rule(aten.sort.default) is None or aten.sort.default in RULES


@pytest.mark.parametrize(
    "function, shape, out",
    [
        (lambda x: torch.fft.rfft(x, dim=-1).abs(), (4, 8, 6), "[4, 8@depth, 4]"),
        (lambda x: torch.fft.fft2(x, dim=(0, 2)).real, (4, 8, 6), "[4, 8@depth, 6]"),
        (lambda x: torch.fft.fftshift(x), (4, 8, 6), "[4, 8@depth, 6]"),
        (lambda x: torch.linalg.det(x), (2, 8, 3, 3), "[2, 8@depth]"),
        (lambda x: torch.linalg.inv(x), (2, 8, 3, 3), "[2, 8@depth, 3, 3]"),
        (lambda x: torch.linalg.svd(x)[0], (2, 8, 3, 3), "[2, 8@depth, 3, 3]"),
        (lambda x: torch.linalg.solve(x, x[..., 0]), (2, 8, 3, 3), "[2, 8@depth, 3]"),
        (lambda x: x.triu(1), (4, 8, 6), "[4, 8@depth, 6]"),
    ],
)
def test_batches_of_transforms_and_matrices_stay_split(function: Any, shape: tuple[int, ...], out: str) -> None:
    layouts = {"args.0": (None, "depth", *(None,) * (len(shape) - 2))}
    text = halofx.compile(Op(function), halofx.Mesh(depth=2), inputs=[shape], layouts=layouts).listing()
    assert out in text.splitlines()[-2] and "all_gather" not in text


def test_a_transform_of_a_split_dim_is_whole_and_what_follows_is_split_again() -> None:
    function = lambda x: torch.fft.irfftn(torch.fft.rfftn(x, dim=(2, 3, 4)), s=x.shape[2:], dim=(2, 3, 4)).relu()  # noqa: E731
    text = listing(function, VOLUME, depth=2)
    assert text.count("all_gather") == 1 and "f32[2, 4, 8@depth, 6, 5]" in text.splitlines()[-2]
    layouts = {"args.0": (None, None, "depth", None, None)}
    check(Case(Sample(function, (VOLUME,)), halofx.Mesh(depth=2), layouts, "whole"))


def test_embedding_splits_the_indices() -> None:
    function = lambda i, w: F.embedding(i, w)  # noqa: E731
    layouts = {"args.0": ("data", "depth"), "args.1": (None, None)}
    i = torch.zeros(2, 8, dtype=torch.int64)
    net = halofx.compile(Op(function), halofx.Mesh(data=2, depth=2), inputs=[i, (5, 3)], layouts=layouts)
    assert "[2@data, 8@depth, 3]" in net.listing() and "all_" not in net.listing()


class Spectral(nn.Module):
    """A Fourier layer (Li et al., 2021): products of the lowest modes with a complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3, 2, 2, 2, dtype=torch.complex128))
        self.skip = nn.Conv3d(2, 3, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        modes = torch.fft.rfftn(x, dim=(2, 3, 4))
        low = torch.einsum("bixyz,ioxyz->boxyz", modes[:, :, :2, :2, :2], self.weight)
        d, h, w = modes.shape[2:]
        full = F.pad(low, (0, w - 2, 0, h - 2, 0, d - 2))
        return F.gelu(torch.fft.irfftn(full, s=x.shape[2:], dim=(2, 3, 4)) + self.skip(x))


@pytest.mark.parametrize("sizes", [{"depth": 2}, {"data": 2, "height": 2}], ids=str)
def test_a_fourier_layer_with_complex_weights(sizes: dict[str, int]) -> None:
    torch.manual_seed(0)
    same_as_one_device(Spectral(), (torch.randn(2, 2, 6, 5, 4, dtype=torch.float64),), halofx.Mesh(**sizes))
