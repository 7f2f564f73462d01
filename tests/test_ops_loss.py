"""Losses stay split and are exact for the global batch: those of torch, and those written by hand (CONFORMANCE N4, A7)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halofx
from tests.models import same_as_one_device

Loss = Callable[..., Tensor]
BOTH = {"data": 2, "depth": 2}


def labels(*shape: int, classes: int = 3, seed: int = 1) -> Tensor:
    return torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(seed))


def volume(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gathers(net: halofx.Net) -> bool:
    return any(word in net.listing() for word in ("all_gather", "all_to_all", "no rule"))


def head() -> nn.Module:
    torch.manual_seed(0)
    return nn.Conv3d(1, 3, 3, padding=1).double()


def exact(
    loss: Loss, *targets: Tensor, mesh: dict[str, int] | None = None, shape: tuple[int, ...] = (2, 1, 8, 8, 8)
) -> None:
    """The law for a convolution with three classes and a loss, which gathers nothing."""
    nets = same_as_one_device(head(), (volume(*shape),), halofx.Mesh(**(mesh or BOTH)), loss=loss, targets=targets)
    assert not gathers(nets[0]), nets[0].listing()


# -- losses of segmentation written in plain torch (N4)


def one_hot(target: Tensor, like: Tensor) -> Tensor:
    """[n, d, h, w] -> [n, c, d, h, w]"""
    return F.one_hot(target, like.shape[1]).movedim(-1, 1).to(like.dtype)


def dice(logits: Tensor, target: Tensor, batch: bool = False, eps: float = 1e-5) -> Tensor:
    """1 - mean over the classes (and the batch, unless its sums are joint) of 2 |p t| / (|p| + |t|)."""
    p, t = logits.softmax(1), one_hot(target, logits)
    dims = (0, 2, 3, 4) if batch else (2, 3, 4)
    score = (2 * (p * t).sum(dims) + eps) / (p.sum(dims) + t.sum(dims) + eps)
    return 1 - score.mean()


def dice_of_foreground(logits: Tensor, target: Tensor) -> Tensor:
    """Without the background, with squared denominators, classes absent from the target left out."""
    p, t = logits.softmax(1)[:, 1:], one_hot(target, logits)[:, 1:]
    inter, total = (p * t).sum((2, 3, 4)), (p * p + t * t).sum((2, 3, 4))
    present = (t.sum((2, 3, 4)) > 0).to(p.dtype)
    return ((1 - 2 * inter / total.clamp_min(1e-6)) * present).sum() / present.sum().clamp_min(1)


def generalized_dice(logits: Tensor, target: Tensor) -> Tensor:
    """Sudre et al. 2017: classes weighted by the inverse square of their volume."""
    p, t = logits.softmax(1).flatten(2), one_hot(target, logits).flatten(2)
    w = 1 / t.sum(2).pow(2).clamp_min(1)
    return 1 - (2 * (w * (p * t).sum(2)).sum(1) / (w * (p + t).sum(2)).sum(1)).mean()


def dice_and_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return dice(logits, target) + 0.5 * F.cross_entropy(logits, target)


def tversky(logits: Tensor, target: Tensor, alpha: float = 0.3, beta: float = 0.7) -> Tensor:
    """Salehi et al. 2017, and its focal form (Abraham and Khan 2018)."""
    p, t = logits.softmax(1), one_hot(target, logits)
    hit, over, under = ((a * b).sum((0, 2, 3, 4)) for a, b in ((p, t), (p, 1 - t), (1 - p, t)))
    return (1 - (hit + 1) / (hit + alpha * over + beta * under + 1)).pow(0.75).mean()


def focal(logits: Tensor, target: Tensor, gamma: float = 2.0) -> Tensor:
    """Lin et al. 2017, by picking the class of every voxel."""
    log_p = F.log_softmax(logits, 1).gather(1, target[:, None])[:, 0]
    return (-((1 - log_p.exp()) ** gamma) * log_p).mean()


def focal_of_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    ce = F.cross_entropy(logits, target, reduction="none", weight=logits.new_tensor([0.2, 0.3, 0.5]))
    return ((1 - torch.exp(-ce)) ** 2 * ce).mean()


def binary_dice_and_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    t = one_hot(target, logits)
    p = logits.sigmoid()
    score = 2 * (p * t).sum() / (p.sum() + t.sum())
    return (
        1
        - score
        + F.binary_cross_entropy_with_logits(logits, t, pos_weight=logits.new_tensor([1.0, 2.0, 3.0]).view(3, 1, 1, 1))
    )


def hardest_voxels(logits: Tensor, target: Tensor) -> Tensor:
    """nnU-Net's TopKLoss but for the sorting: voxels whose loss is above the mean."""
    ce = F.cross_entropy(logits, target, reduction="none")
    hard = (ce > ce.mean()).to(ce.dtype)
    return (ce * hard).sum() / hard.sum()


BY_HAND = [
    dice, dice_of_foreground, generalized_dice, dice_and_cross_entropy, tversky, focal, focal_of_cross_entropy,
    binary_dice_and_cross_entropy, hardest_voxels,
]  # fmt: skip


@pytest.mark.parametrize("loss", BY_HAND, ids=lambda f: f.__name__)
def test_written_by_hand(loss: Loss) -> None:
    exact(loss, labels(2, 8, 8, 8))


@pytest.mark.parametrize(
    "mesh", [{"depth": 3}, {"depth": 2, "height": 2}, {"data": 2, "depth": 2, "width": 2}], ids=str
)
def test_batch_dice_on_uneven_meshes(mesh: dict[str, int]) -> None:
    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return dice(logits, target, batch=True) + F.cross_entropy(logits, target, ignore_index=1)

    exact(loss, labels(2, 7, 5, 6), mesh=mesh, shape=(2, 1, 7, 5, 6))


# -- cross-entropy in all its forms


@pytest.mark.parametrize("weight", [None, [0.2, 1.0, 3.0]], ids=["even", "weighted"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    "options", [{}, {"ignore_index": 1}, {"label_smoothing": 0.1}, {"ignore_index": 0, "label_smoothing": 0.2}], ids=str
)
def test_cross_entropy(options: dict[str, Any], reduction: str, weight: list[float] | None) -> None:
    w = torch.tensor(weight, dtype=torch.float64) if weight else None
    exact(nn.CrossEntropyLoss(w, reduction=reduction, **options), labels(2, 8, 8, 8))


def test_cross_entropy_of_probabilities() -> None:
    exact(nn.CrossEntropyLoss(label_smoothing=0.1), volume(2, 3, 8, 8, 8, seed=3).softmax(1))


def test_labels_lie_as_the_volume_does() -> None:
    """A7: the target [1, 8, 8, 8] is split with x."""
    net = same_as_one_device(
        head(), (volume(1, 1, 8, 8, 8),), halofx.Mesh(depth=2), loss=F.cross_entropy, targets=(labels(1, 8, 8, 8),)
    )[0]
    assert "8@depth" in next(line for line in net.listing().splitlines() if line.startswith("target:"))
    assert not gathers(net), net.listing()


def test_labels_on_some_ranks_only() -> None:
    """All that counts lies on the first rank: the mean is over those voxels."""
    target = labels(1, 8, 8, 8)
    target[:, 4:] = -100
    exact(nn.CrossEntropyLoss(), target, mesh={"depth": 2}, shape=(1, 1, 8, 8, 8))


def test_nothing_to_count_is_nan_as_on_one_device() -> None:
    net = halofx.compile(
        head(),
        halofx.Mesh(depth=2),
        inputs=[volume(1, 1, 8, 8, 8)],
        loss=nn.CrossEntropyLoss(ignore_index=1),
        targets=[labels(1, 8, 8, 8)],
    )
    target = torch.ones(1, 8, 8, 8, dtype=torch.int64)
    for value in halofx.launch(lambda rank: net(net.shard(volume(1, 1, 8, 8, 8)), net.shard_target(target)), net.mesh):
        assert math.isnan(value.detach())


# -- every other loss of torch


def image(seed: int = 4) -> Tensor:
    return volume(2, 3, 8, 8, 8, seed=seed)


OF_TORCH: dict[str, tuple[Loss, Callable[[], tuple[Tensor, ...]]]] = {
    "mse": (F.mse_loss, lambda: (image(),)),
    "mse broadcast": (lambda y, t: F.mse_loss(y, t.expand_as(y)), lambda: (image()[:, :1],)),
    "l1": (F.l1_loss, lambda: (image(),)),
    "smooth_l1": (F.smooth_l1_loss, lambda: (image(),)),
    "huber": (nn.HuberLoss(delta=0.5), lambda: (image(),)),
    "weighted mse": (lambda y, t: F.mse_loss(y, t, weight=t * t), lambda: (image(),)),
    "bce": (lambda y, t: F.binary_cross_entropy(y.sigmoid(), t), lambda: (image().sigmoid(),)),
    "bce with logits": (nn.BCEWithLogitsLoss(), lambda: (image().sigmoid(),)),
    "kl": (lambda y, t: F.kl_div(y.log_softmax(1), t, reduction="batchmean"), lambda: (image().softmax(1),)),
    "poisson": (nn.PoissonNLLLoss(), lambda: (image().abs(),)),
    "gaussian": (lambda y, t: F.gaussian_nll_loss(y, t, 0.5), lambda: (image(),)),
    "nll": (lambda y, t: F.nll_loss(y.log_softmax(1), t), lambda: (labels(2, 8, 8, 8),)),
    "soft margin": (nn.SoftMarginLoss(), lambda: (image().sign(),)),
    "hinge": (nn.HingeEmbeddingLoss(), lambda: (image().sign(),)),
    "margin ranking": (lambda y, a, b: F.margin_ranking_loss(y, a, b, 0.1), lambda: (image(), image(5).sign())),
    "multilabel soft margin": (nn.MultiLabelSoftMarginLoss(), lambda: ((image() > 0).double(),)),
    "cosine": (lambda y, t: 1 - F.cosine_similarity(y, t).mean(), lambda: (image(),)),
    "correlation": (
        lambda y, t: 1 - ((y - y.mean()) * (t - t.mean())).mean() / (y.std() * t.std()), lambda: (image(),),
    ),
    "total variation": (lambda y: sum(y.sigmoid().diff(dim=d).abs().mean() for d in (2, 3, 4)), lambda: ()),
    "triplet": (
        lambda y, a, b: F.triplet_margin_loss(y.movedim(1, -1), a.movedim(1, -1), b.movedim(1, -1)),
        lambda: (image(), image(5)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_TORCH)
def test_of_torch(name: str) -> None:
    loss, targets = OF_TORCH[name]
    exact(loss, *targets())


@pytest.mark.parametrize(
    "loss", [F.mse_loss, F.cross_entropy, F.binary_cross_entropy_with_logits], ids=lambda f: f.__name__
)
def test_means_of_halves_do_not_overflow(loss: Loss) -> None:
    """8192 losses of about 100 each: their sum is beyond float16, their mean is not."""
    y = (volume(1, 2, 16, 16, 16) * 10 + 100).half()
    target = labels(1, 16, 16, 16, classes=2) if loss is F.cross_entropy else (y < 100).half()
    y[:, 0] += 100
    net = halofx.compile(nn.Identity(), halofx.Mesh(depth=2), inputs=[y], loss=loss, targets=[target])
    exactly = loss(y.double(), target if loss is F.cross_entropy else target.double())
    for value in halofx.launch(lambda rank: net(net.shard(y), net.shard_target(target)), net.mesh):
        assert value.dtype == torch.float16
        assert abs(float(value.detach()) - float(exactly)) <= 4e-3 * float(exactly)
