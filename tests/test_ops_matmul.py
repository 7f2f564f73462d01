"""What stays split in products and in attention, and that every sum is right (CONFORMANCE M4)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halofx
from halofx.compiler.rules import Sample
from tests.laws import Case, Op, check
from tests.models import same_as_one_device

pytestmark = pytest.mark.filterwarnings("ignore:halofx")
Axes = tuple[str | None, ...]


def listing(function: Callable[..., Any], mesh: dict[str, int], *inputs: tuple[tuple[int, ...], Axes]) -> str:
    """The listing of a function of tensors, given their shapes and layouts."""
    layouts = {f"args.{i}": axes for i, (_, axes) in enumerate(inputs)}
    return halofx.compile(Op(function), halofx.Mesh(**mesh), inputs=[s for s, _ in inputs], layouts=layouts).listing()


def agree(function: Callable[..., Any], mesh: dict[str, int], *inputs: tuple[tuple[int, ...], Axes]) -> None:
    """The law, for given shapes and layouts, thin dims whole and split."""
    layouts = {f"args.{i}": axes for i, (_, axes) in enumerate(inputs)}
    for thin in ("whole", "split"):
        check(Case(Sample(function, tuple(s for s, _ in inputs)), halofx.Mesh(**mesh), layouts, thin))


TOKENS: Axes = ("data", "depth", None)
WHOLE: Axes = (None, None, None)


# -- what stays split


def test_linear_over_split_tokens_moves_nothing() -> None:
    text = listing(F.linear, {"data": 2, "depth": 2}, ((2, 8, 3), TOKENS), ((5, 3), (None, None)), ((5,), (None,)))
    assert "f32[2@data, 8@depth, 5]" in text and "all_" not in text and "exchange" not in text


def test_linear_over_split_features_adds_the_bias_once() -> None:
    inputs = ((2, 3, 8), (None, None, "width")), ((5, 8), (None, None)), ((5,), (None,))
    text = listing(F.linear, {"width": 2}, *inputs)
    assert (
        "all_reduce(linear.addend, axes=(width))" in text.replace("linear.linear", "linear")
        and "all_gather" not in text
    )
    agree(F.linear, {"width": 2}, *inputs)
    agree(F.linear, {"width": 3}, *inputs)


def test_product_over_a_split_sum_is_one_all_reduce() -> None:
    inputs = ((2, 3, 8), (None, None, "depth")), ((2, 8, 4), (None, "depth", None))
    text = listing(torch.bmm, {"depth": 4}, *inputs)
    assert text.count("all_reduce") == 1 and "all_gather" not in text and "local_slice" not in text


def test_a_whole_matrix_is_cut_where_its_rows_are_summed() -> None:
    text = listing(torch.matmul, {"depth": 4}, ((3, 8), (None, "depth")), ((8, 4), (None, None)))
    assert "local_slice" in text and text.count("all_reduce") == 1 and "all_gather" not in text


@pytest.mark.parametrize("equation", ["ncdhw,oc->nodhw", "nodhw,oc->ncdhw", "ncdhw,ncdhw->ncdhw"])
def test_einsum_keeps_the_split_of_space(equation: str) -> None:
    other = ((4, 4), (None, None)) if "oc" in equation else ((2, 4, 8, 6, 5), (None, None, "depth", "height", None))
    function = lambda x, w: torch.einsum(equation, x, w)  # noqa: E731
    inputs = ((2, 4, 8, 6, 5), (None, None, "depth", "height", None)), other
    text = listing(function, {"depth": 2, "height": 2}, *inputs)
    assert "f32[2, 4, 8@depth, 6@height, 5]" in text.splitlines()[-2]
    assert not any(word in text for word in ("all_gather", "all_reduce", "exchange", "all_to_all"))


def test_products_of_tokens_with_tokens_keep_the_rows_split() -> None:
    """q k^T and its product with v: keys and values are gathered, the scores never are."""
    function = lambda q, k, v: (q @ k.mT).softmax(-1) @ v  # noqa: E731
    for width in (2, 32):  # v smaller and larger than the scores
        inputs = [((1, 8, width), (None, "depth", None))] * 3
        text = listing(function, {"depth": 2}, *inputs)
        assert text.count("all_gather") == 2 and "all_reduce" not in text and "all_to_all" not in text
        assert f"f32[1, 8@depth, {width}]" in text.splitlines()[-2]
        agree(function, {"depth": 3}, *inputs)


def test_dims_that_wait_for_each_other() -> None:
    """x + x^T split both ways: each axis wants the dim that the other has; one is gathered first."""
    function = lambda x: x + x.T * 2  # noqa: E731
    agree(function, {"depth": 2, "height": 2}, ((5, 5), ("depth", "height")))
    agree(function, {"depth": 3, "height": 2}, ((4, 4), ("height", "depth")))


def test_every_movement_has_a_name_of_its_own() -> None:
    function = lambda x, y: torch.einsum("ab,cd->", x, y) + torch.einsum("ii,jj->", x, y)  # noqa: E731
    both: Axes = ("depth", "height")
    text = listing(function, {"depth": 2, "height": 2}, ((6, 6), both), ((6, 6), both))
    labels = [line.split(":")[0] for line in text.splitlines()]
    assert len(set(labels)) == len(labels)


# -- attention


@pytest.mark.parametrize("causal", [False, True])
def test_attention_splits_queries_heads_and_batch(causal: bool) -> None:
    function = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal)  # noqa: E731
    inputs = [((2, 4, 9, 3), ("data", "channel", "depth", None))] * 3
    text = listing(function, {"data": 2, "depth": 3, "channel": 2}, *inputs)
    assert "f32[2@data, 4@channel, 9@depth, 3]" in text.splitlines()[-2]
    assert text.count("all_gather") == 2 and "all_reduce" not in text
    agree(function, {"data": 2, "depth": 3, "channel": 2}, *inputs)
    agree(function, {"depth": 4}, *[((1, 2, 3, 3), (None, None, "depth", None))] * 3)


class Attention(nn.Module):
    """A convolution, then attention between all positions of the volume."""

    def __init__(self, fused: bool, width: int = 8) -> None:
        super().__init__()
        self.conv = nn.Conv3d(2, width, 3, padding=1)
        self.qkv, self.out, self.fused = nn.Linear(width, 3 * width), nn.Linear(width, width), fused

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        q, k, v = self.qkv(y.flatten(2).transpose(1, 2)).chunk(3, -1)
        if self.fused:
            z = F.scaled_dot_product_attention(q, k, v)
        else:
            z = (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).softmax(-1) @ v
        return y + self.out(z).transpose(1, 2).reshape(y.shape)


@pytest.mark.parametrize("fused", [False, True])
def test_attention_over_a_volume_is_split_and_counted(fused: bool) -> None:
    """CONFORMANCE M4: 4096 tokens; the scores are a quarter on each of 4 ranks, and the memory model counts them."""
    net = halofx.compile(Attention(fused), halofx.Mesh(depth=4), inputs=[(1, 2, 16, 16, 16)])
    text = net.listing()
    assert "f32[1, 4096@depth, 8]" in text and text.count("all_gather") == 2 and "all_reduce" not in text
    scores = 4 * 4096 * 4096 // 4
    if fused:
        assert net.summary().activations < scores // 4
    else:
        assert text.count("f32[1, 4096@depth, 4096]") == 3 and scores <= net.summary().activations < 1.2 * scores


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("sizes", [{"depth": 2}, {"depth": 3, "height": 2}, {"data": 2, "width": 3}], ids=str)
def test_attention_over_a_volume_equals_one_device(fused: bool, sizes: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = Attention(fused, 4).double()
    x = torch.randn(2, 2, 5, 4, 3, dtype=torch.float64)
    same_as_one_device(copy.deepcopy(model), (x,), halofx.Mesh(**sizes))


def test_multi_head_attention_equals_one_device() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            t = self.norm(x.flatten(2).transpose(1, 2))
            t = t + self.attention(t, t, t)[0] + self.attention(t, t, t, need_weights=False)[0]
            return t.transpose(1, 2).reshape(x.shape)

    torch.manual_seed(0)
    same_as_one_device(
        Tokens().double(), (torch.randn(2, 8, 4, 3, 2, dtype=torch.float64),), halofx.Mesh(data=2, depth=2)
    )


# -- more of the kind: transformers over patches, channel attention, low-rank products, Gram matrices


def patches(x: Tensor, w: Tensor) -> Tensor:
    n, c, d, h, v = x.shape
    t = x.reshape(n, c, d // 2, 2, h // 2, 2, v // 2, 2).permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4)
    return F.linear(t, w).movedim(-1, 1)


def gram(x: Tensor, w: Tensor) -> Tensor:
    f = x.flatten(2)
    return (f @ f.transpose(1, 2)) / f.shape[-1] + w.sum()


def excite(x: Tensor, w: Tensor) -> Tensor:
    s = x.mean((2, 3, 4)) @ w[: x.shape[1], : x.shape[1]]
    return x * torch.sigmoid(s)[:, :, None, None, None]


def channel_mix(x: Tensor, w: Tensor) -> Tensor:
    m = w[: x.shape[1], : x.shape[1]]
    return torch.tensordot(x, m, ([1], [0])).movedim(-1, 1) + torch.einsum("ncd...,ce->ned...", x, m)


def head(x: Tensor, w: Tensor) -> Tensor:
    ones = torch.ones(x[0].numel(), 2, dtype=x.dtype)
    return torch.addmm(w[0, :2], x.flatten(1), 0.1 * ones, beta=0.5, alpha=2.0)


@pytest.mark.parametrize("function", [patches, gram, excite, channel_mix, head])
def test_more_of_the_kind(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    rng = Random(0)
    for sizes in ({"depth": 2}, {"depth": 3, "height": 2}, {"data": 2, "width": 2}):
        d, h, w = (2 * rng.randint(1, 4) for _ in range(3))
        layout = tuple(a if a in sizes else None for a in ("data", None, "depth", "height", "width"))
        check(
            Case(
                Sample(function, ((2, 4, d, h, w), (6, 32))),
                halofx.Mesh(**sizes),
                {"args.0": layout, "args.1": (None, None)},
                "whole",
            )
        )
