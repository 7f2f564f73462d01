"""Random numbers: the same on any mesh, others at the next step and in the next layer, and good ones (CONFORMANCE N8)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halofx
from halofx.compiler import random_functions as functions
from halofx.runtime.comm import current
from halofx.runtime.shards import gather
from tests.laws import Op

MESHES = [
    {"depth": 1},
    {"depth": 2},
    {"depth": 4},
    {"data": 2},
    {"data": 2, "depth": 3},
    {"depth": 2, "height": 2, "width": 2},
]
CPU = torch.device("cpu")


def volume(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def outputs(model: nn.Module, x: Tensor, mesh: halofx.Mesh, steps: int = 2, **options: Any) -> list[Tensor]:
    """What each step returns, gathered, and the gradients of input and parameters; equal on all ranks."""

    def run(rank: int) -> list[Tensor]:
        net = halofx.compile(copy.deepcopy(model), mesh, inputs=[x.shape], **options)
        layout = net.instances.input_layout(net.names[0], x.shape)
        found = []
        for _ in range(steps):
            shard = net.shard(x).clone().requires_grad_()
            y = net.gather(net(shard))
            net.zero_grad()
            (y * y).sum().backward()
            assert shard.grad is not None
            whole = gather(shard.grad, layout, tuple(x.shape), mesh, current())
            found += [y.detach(), whole, *(p.grad for p in net.parameters() if p.grad is not None)]
        return found

    ranks = halofx.launch(run, mesh)
    for other in ranks[1:]:
        for a, b in zip(ranks[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    return ranks[0]


def masks(function: Callable[[Tensor], Any], shape: tuple[int, ...], mesh: halofx.Mesh, **options: Any) -> list[Tensor]:
    """The outputs of a random function of ones in two steps."""
    return outputs(_Scaled(function), torch.ones(shape, dtype=torch.float64), mesh, **options)[::3]


class _Scaled(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.scale)


# -- N8


class Dropped(nn.Module):
    """Convolutions with both kinds of dropout between them, and one at the head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv3d(2, 6, 3, padding=1), nn.Dropout3d(0.4), nn.ReLU(), nn.Conv3d(6, 4, 3, padding=1), nn.Dropout(0.3)
        )  # fmt: skip
        self.head = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3, 4)))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Dropped().double()


@pytest.mark.parametrize("sizes", MESHES[1:], ids=str)
def test_same_as_on_one_rank(model: nn.Module, sizes: dict[str, int]) -> None:
    x = volume(2, 2, 8, 6, 4)
    alone = outputs(model, x, halofx.Mesh(depth=1))
    for a, b in zip(outputs(model, x, halofx.Mesh(**sizes)), alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_other_masks_at_the_next_step_in_the_next_layer_and_for_another_seed(sizes: dict[str, int]) -> None:
    mesh, shape = halofx.Mesh(**sizes), (2, 2, 8, 6, 4)
    both = lambda x: torch.cat([F.dropout(x, 0.5), F.dropout(x, 0.5)], 1)  # noqa: E731
    one, two = masks(both, shape, mesh)
    (other_seed, _), (again, _) = masks(both, shape, mesh, seed=2**31 + 5), masks(both, shape, mesh, seed=0)
    assert torch.equal(one, again)
    for a, b in ((one, two), (one[:, :2], one[:, 2:]), (one, other_seed)):
        assert 0.35 < (a == b).double().mean() < 0.65
    assert set(one.unique().tolist()) == {0.0, 2.0}


def test_eval_mode_draws_nothing(model: nn.Module) -> None:
    x, mesh = volume(2, 2, 8, 6, 4), halofx.Mesh(depth=2)
    net = halofx.compile(model.eval(), mesh, inputs=[x.shape])
    assert "rng" not in net.listing() and "dropout" not in net.listing()
    for y in halofx.launch(lambda rank: net(net.shard(x)), mesh):
        torch.testing.assert_close(y, model(x))


def test_masks_stay_split_and_the_listing_shows_them(model: nn.Module) -> None:
    listing = halofx.compile(model, halofx.Mesh(depth=2), inputs=[(2, 2, 8, 6, 4)]).listing()
    assert "all_gather" not in listing
    lines = {line.split(":")[0]: line for line in listing.splitlines()}
    assert lines["rng"].split()[1:] == ["i64[]", "input"]
    assert "bool[2, 6, 1, 1, 1]" in lines["body.1.mask"] and "draw(" in lines["body.1.mask"]
    assert "bool[2, 4, 8@depth, 6, 4]" in lines["body.4.mask"] and "op=1, kind=bernoulli, a=0.7" in lines["body.4.mask"]
    assert "dropout(body.3, body.4.mask, p=0.3)" in lines["body.4"]


def test_noise_of_a_shape_is_split_as_what_it_is_added_to() -> None:
    net = halofx.compile(Op(lambda x: x * 2 + torch.randn(x.shape)), halofx.Mesh(depth=2), inputs=[(1, 1, 8, 4, 4)])
    assert "f32[1, 1, 8@depth, 4, 4] draw_like(" in net.listing() and "slice" not in net.listing()


def test_steps_go_on_from_one_launch_to_the_next() -> None:
    """Threads share the net: each counts its own calls, and a new world goes on where the last one was."""
    mesh, x = halofx.Mesh(depth=2), torch.ones(1, 1, 64, 2, 2)
    net = halofx.compile(nn.Dropout(0.5), mesh, inputs=[x.shape])
    seen = [halofx.launch(lambda rank: net.gather(net(net.shard(x))), mesh) for _ in range(3)]
    for a, b in seen:
        assert torch.equal(a, b)
    assert not torch.equal(seen[0][0], seen[1][0]) and not torch.equal(seen[1][0], seen[2][0])


def test_checkpointing_around_the_net_is_refused() -> None:
    mesh, x = halofx.Mesh(depth=2), torch.ones(1, 1, 8, 2, 2)
    net = halofx.compile(nn.Sequential(nn.Conv3d(1, 1, 1), nn.Dropout(0.5)), mesh, inputs=[x.shape])

    def run(rank: int) -> None:
        checkpoint(net, net.shard(x).requires_grad_(), use_reentrant=False).sum().backward()

    with pytest.raises(halofx.HalofxError, match="draw others than before"):
        halofx.launch(run, mesh)


# -- every kind of random op


def drop_path(x: Tensor) -> Tensor:
    """Stochastic depth, as timm and MONAI write it."""
    keep = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.5)
    return x.div(0.5) * keep


def attention(x: Tensor) -> Tensor:
    """Tokens of all positions, with groups of heads, a mask, and dropout of the weights."""
    q = x.flatten(2).unflatten(1, (4, -1)).transpose(2, 3)
    k, v = q[:, ::2], q[:, 1::2] * 2
    tokens = q.shape[2]
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril(3)
    return F.scaled_dot_product_attention(q, k, v, mask, dropout_p=0.3, enable_gqa=True)


RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout1d": lambda x: F.dropout1d(x.flatten(2)), "dropout2d": lambda x: F.dropout2d(x.flatten(3)),
    "unbatched": lambda x: F.dropout3d(x[0]), "native": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "native mask": lambda x: torch.native_dropout(x, 0.4, True)[1] * x, "p=0": lambda x: F.dropout(x, 0.0),
    "p=1": lambda x: F.dropout(x, 1.0) + x * torch.rand_like(x), "alpha": lambda x: F.alpha_dropout(x, 0.4, True),
    "feature alpha": lambda x: F.feature_alpha_dropout(x, 0.5, True), "rrelu": lambda x: F.rrelu(-x, training=True),
    "in place": lambda x: F.dropout(x * 2, inplace=True), "drop path": drop_path, "attention": attention,
    "gumbel": lambda x: F.gumbel_softmax(x, hard=True, dim=1), "noise": lambda x: x + 0.1 * torch.randn_like(x),
    "rand": lambda x: x * torch.rand(x.shape[2:]),
    "noise of a shape": lambda x: x * torch.randn(x.shape), "randint": lambda x: x * torch.randint(3, 9, (4,)),
    "randint_like": lambda x: x * torch.randint_like(x, 5), "randperm": lambda x: x * torch.randperm(x.shape[-1]),
    "normal": lambda x: x * torch.normal(x, 2.0), "normal_": lambda x: x * torch.empty_like(x).normal_(1.0, 3.0),
    "normal of sizes": lambda x: x * torch.normal(1.0, 2.0, (4,)), "bernoulli": lambda x: torch.bernoulli(x * 0.3) * x,
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(x.detach() * 0.4),
    "random_": lambda x: x * torch.empty_like(x).random_(),
    "random_ of": lambda x: x * torch.empty_like(x).random_(2, 9),
    "poisson": lambda x: x * torch.poisson(x.detach() * 3),
    "choices": lambda x: x * torch.multinomial(x[0, 0, 0].detach(), 3).sum(),
    "lstm": lambda x: _rnn(x, torch.lstm), "gru": lambda x: _rnn(x, torch.gru),
}  # fmt: skip


def _rnn(x: Tensor, op: Any) -> Tensor:
    """Two layers with dropout between them, over the last dim."""
    t, gates = x[:, :, :, :2].flatten(0, 2), 4 if op is torch.lstm else 3
    state = torch.zeros(2, t.shape[0], 3, dtype=x.dtype)
    weights = [0.3 * torch.ones(gates * 3, n, dtype=x.dtype) for n in (4, 3, 3, 3)]
    hx = (state, state) if op is torch.lstm else state
    return op(t, hx, weights, False, 2, 0.5, True, False, True)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.filterwarnings("ignore:halofx")
def test_every_random_op_is_the_same_on_any_mesh(name: str) -> None:
    alone = masks(RANDOM[name], (2, 4, 4, 6, 4), halofx.Mesh(depth=1))
    for sizes in ({"data": 2, "depth": 2}, {"height": 3}):
        for a, b in zip(masks(RANDOM[name], (2, 4, 4, 6, 4), halofx.Mesh(**sizes)), alone, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda m: f"{name} on {sizes}: {m}")  # noqa: B023
    assert name in ("p=0", "randperm", "choices") or not torch.equal(alone[0], alone[1])


def test_ops_that_draw_in_their_own_way_say_so() -> None:
    with pytest.warns(UserWarning, match="poisson draws random numbers in its own way"):
        net = halofx.compile(Op(torch.poisson), halofx.Mesh(depth=2), inputs=[(1, 1, 4, 4, 4)])
    assert "all_gather" in net.listing()


def test_a_constant_drawn_by_the_model_is_equal_on_all_ranks() -> None:
    mesh, x = halofx.Mesh(depth=2), torch.ones(1, 1, 4, 4, 4)
    net = halofx.compile(Op(lambda x: (x, torch.randn(2, 3))), mesh, inputs=[x.shape])
    (_, a), (_, b) = halofx.launch(lambda rank: net(net.shard(x)), mesh)
    assert torch.equal(a, b) and a.std() > 0.1


# -- the numbers themselves


def words(op: int = 0, step: int = 1, shape: tuple[int, ...] = (64, 64, 64)) -> Tensor:
    key = functions.key_of(torch.tensor(step), op)
    return functions.words(key, shape, [(0, n) for n in shape], CPU)


def drawn(kind: str, a: float, b: float, dtype: torch.dtype = torch.float64, n: int = 1 << 18, op: int = 0) -> Tensor:
    return functions.draw([n], torch.tensor(7), op, kind, a, b, dtype, CPU)


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


def uniform_of(z: Tensor) -> Tensor:
    return functions.uniform((z >> 11) & (2**53 - 1), 0.0, 1.0, torch.float64)


def test_every_bit_is_fair_and_independent_of_its_neighbors() -> None:
    bits = torch.stack([(words(shape=(32, 32, 32)).flatten() >> i) & 1 for i in range(64)]).double()
    n = bits.shape[1]
    assert (bits.mean(1) - 0.5).abs().max() < 4.5 * 0.5 / n**0.5
    assert (torch.corrcoef(bits) - torch.eye(64)).abs().max() < 5 / n**0.5
    assert (torch.corrcoef(torch.cat([bits[:, 1:], bits[:, :-1]])) - torch.eye(128)).abs().max() < 5 / n**0.5


def test_bytes_are_uniform() -> None:
    """Chi squared of the 256 values of each byte, 255 degrees of freedom: mean 255, deviation 22.6."""
    z = words().flatten()
    for i in range(8):
        counts = torch.bincount((z >> (8 * i)) & 255, minlength=256).double()
        expected = z.numel() / 256
        assert abs(float(((counts - expected) ** 2).sum() / expected) - 255) < 4 * 22.6


def test_no_correlation_along_axes_between_steps_ops_and_seeds() -> None:
    u = uniform_of(words())
    pairs = [
        (u[1:], u[:-1]),
        (u[:, 1:], u[:, :-1]),
        (u[:, :, 1:], u[:, :, :-1]),
        (u, u.flip(0)),
        (u, u.permute(2, 0, 1)),
    ]
    others = [words(op=1), words(op=1000), words(step=2), words(step=1 + (1 << 32)), words(step=3 + (5 << 32))]
    pairs += [(u, uniform_of(w)) for w in others]
    for a, b in pairs:
        assert abs(correlation(a, b)) < 4.5 / a.numel() ** 0.5
        halves = correlation((a < 0.5).double(), (b < 0.5).double())
        assert abs(halves) < 4.5 / a.numel() ** 0.5


def test_runs_of_a_mask_have_the_right_lengths() -> None:
    mask = drawn("bernoulli", 0.5, 0.0, torch.bool)
    changes = (mask[1:] != mask[:-1]).double()
    assert abs(changes.mean() - 0.5) < 4.5 * 0.5 / len(changes) ** 0.5
    triples = mask[:-2].long() * 4 + mask[1:-1].long() * 2 + mask[2:].long()
    assert (torch.bincount(triples) / len(triples) - 1 / 8).abs().max() < 0.004


@pytest.mark.parametrize(
    "kind, a, b, mean, variance",
    [
        ("uniform", 0.0, 1.0, 0.5, 1 / 12), ("uniform", -2.0, 4.0, 1.0, 3.0), ("normal", 0.0, 1.0, 0.0, 1.0),
        ("normal", 3.0, 2.0, 3.0, 4.0), ("exponential", 2.0, 0.0, 0.5, 0.25), ("geometric", 0.25, 0.0, 4.0, 12.0),
        ("integers", -3, 5, 0.5, 63 / 12), ("bernoulli", 0.3, 0.0, 0.3, 0.21),
        ("log_normal", 0.0, 0.5, 1.1331485, 0.3646958),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_moments(kind: str, a: float, b: float, mean: float, variance: float, dtype: torch.dtype) -> None:
    x = drawn(kind, a, b, dtype).double()
    assert abs(x.mean() - mean) < 4.5 * (variance / len(x)) ** 0.5
    assert abs(x.var() / variance - 1) < 0.03


def test_normal_numbers_have_the_normal_distribution() -> None:
    """Kolmogorov and Smirnov: the largest distance of the distribution functions is below 1.63 / sqrt(n) in 99 of 100."""
    x = drawn("normal", 0.0, 1.0).sort()[0]
    n = len(x)
    assert (torch.special.ndtr(x) - (torch.arange(n) + 0.5) / n).abs().max() < 1.63 / n**0.5
    assert abs((x**3).mean()) < 0.05 and abs((x**4).mean() - 3) < 0.1 and x.isfinite().all()


def test_cauchy_and_permutation() -> None:
    x = drawn("cauchy", 1.0, 2.0)
    assert abs(x.median() - 1) < 0.03 and abs((x.quantile(0.75) - x.quantile(0.25)) / 2 - 2) < 0.05
    order = functions.permutation(1000, torch.tensor(1), 0, torch.int64, CPU)
    assert (
        torch.equal(order.sort()[0], torch.arange(1000))
        and abs(correlation(order.double(), torch.arange(1000.0))) < 0.15
    )


def test_a_mask_does_not_depend_on_the_dtype_and_uniform_numbers_are_rounded_down() -> None:
    rng, like = torch.tensor(1), torch.empty(1000)
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    kept = [functions.draw_like(like.to(d), rng, 0, "bernoulli", 0.3, 0.0, torch.bool) for d in dtypes]
    assert all(torch.equal(kept[0], k) for k in kept)
    exact, *rounded = (functions.draw_like(like, rng, 0, "uniform", 0.0, 1.0, d).double() for d in dtypes)
    for u, digits in zip(rounded, (24, 11, 8), strict=True):
        assert torch.equal(u, (exact * 2.0**digits).floor() * 2.0**-digits) and u.max() < 1


def test_dropout_in_low_precision_drops_the_same() -> None:
    x, rng = torch.randn(64, 8), torch.tensor(5)
    for function in (functions.dropout, functions.alpha_dropout):
        wide = function(x, functions.draw_like(x, rng, 0, "bernoulli", 0.7, 0.0, torch.bool), 0.3)
        for dtype in (torch.float16, torch.bfloat16):
            low = x.to(dtype)
            made = function(low, functions.draw_like(low, rng, 0, "bernoulli", 0.7, 0.0, torch.bool), 0.3)
            assert made.dtype == dtype
            torch.testing.assert_close(made.float(), wide, rtol=0.02, atol=0.02)


def test_large_numbers_of_integers() -> None:
    x = drawn("integers", 0, 2**63 - 1, torch.int64)
    assert x.min() >= 0 and x.max() > 2**62 and abs(float(x.double().mean()) / 2**62 - 1) < 0.01


@pytest.mark.parametrize("chunk", [1, 7, 100, 1 << 20])
def test_chunks_do_not_matter(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    place = ((3, 10), (0, 6), (5, 20))
    like, rng = torch.empty(5, 6, 7), torch.tensor(9)
    whole = functions.draw_like(torch.empty(10, 6, 20), rng, 2, "normal", 0.0, 1.0)
    monkeypatch.setitem(functions.CHUNK, "cpu", chunk)
    assert torch.equal(functions.draw_like(like, rng, 2, "normal", 0.0, 1.0, place=place), whole[3:8, :, 5:12])


def test_gradient_through_dropout_twice() -> None:
    x, rng = torch.randn(5, 6, dtype=torch.float64, requires_grad=True), torch.tensor(1)
    mask = functions.draw_like(x, rng, 0, "bernoulli", 0.6, 0.0, torch.bool)
    assert torch.autograd.gradgradcheck(lambda t: functions.dropout(t, mask, 0.4) ** 2, (x,))


@pytest.mark.gpu
def test_the_same_numbers_on_a_gpu() -> None:
    rng = torch.tensor(3)
    for kind, dtype in (
        ("bernoulli", torch.bool),
        ("uniform", torch.float32),
        ("integers", torch.int64),
        ("normal", torch.float64),
    ):
        made = [
            functions.draw([1 << 16], rng, 4, kind, 0.25, 9.0, dtype, torch.device(d)).cpu() for d in ("cpu", "cuda")
        ]
        torch.testing.assert_close(*made, rtol=1e-12, atol=1e-12)
