"""Cross-entropy and negative log-likelihood: the class dim whole, batch and space split.

    logits [n, C, d, h, w], classes y [n, d, h, w], weights w [C]

    mean = sum of w[y] * loss / sum of w[y],  both over the voxels of the whole batch that are not ignored

Every rank adds up numerator and denominator of its voxels, then come their all-reduced ratio and its gradient.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halofx.compiler.ops.dims import names
from halofx.compiler.ops.loss import MEAN, REDUCTIONS, reduced
from halofx.compiler.ops.reduce import wide_dtype
from halofx.compiler.ops.samples import Make, integers, positive
from halofx.compiler.rules import Call, Operand, Sample, Spec, rule

if TYPE_CHECKING:
    from halofx.compiler.emit import Emit

aten = torch.ops.aten


# samples


def _samples(probabilities: bool, rng: Random) -> Sample:
    classes, reduction = rng.randint(2, 5), rng.choice(REDUCTIONS)
    batch, space = [rng.randint(1, 6)], [rng.randint(1, 6) for _ in range(rng.randint(0, 3))]
    if rng.random() < 0.1:
        batch = space = []
    logits, places = (*batch, classes, *space), (*batch, *space)
    weighted, smoothing = rng.random() < 0.4, rng.choice([0.0, 0.0, 0.2])
    ignore = rng.choice([-100, -1, 1, "all"])
    shapes: list[tuple[int, ...]]
    make: dict[int, Make]
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    if probabilities:
        shapes, make = [logits, logits], {1: positive}
    else:
        low = -1 if ignore == -1 else 0
        target = integers(1, 2) if ignore == "all" else integers(low, classes)
        shapes, make = [logits, places], {1: target}
        options["ignore_index"] = 1 if ignore == "all" else ignore
    if weighted:
        shapes, make = [*shapes, (classes,)], {**make, 2: positive}

    def function(x: Tensor, y: Tensor, *w: Tensor) -> Tensor:
        return F.cross_entropy(x, y, w[0].detach() if w else None, **options)

    return Sample(
        function, tuple(shapes), make, f"cross_entropy {options} probabilities={probabilities} weight={weighted}"
    )


def _any_target(rng: Random) -> Sample:
    return _samples(rng.random() < 0.35, rng)


def _nll_samples(rng: Random) -> Sample:
    sample = _samples(False, rng)
    reduction, ignore = rng.choice(REDUCTIONS), rng.choice([-100, 1])
    make = {**sample.make, 1: integers(0, sample.shapes[0][0 if len(sample.shapes[0]) == 1 else 1])}

    def function(x: Tensor, y: Tensor, *w: Tensor) -> Tensor:
        weight = w[0].detach() if w else None
        return F.nll_loss(
            F.log_softmax(x, 0 if x.dim() == 1 else 1), y, weight, ignore_index=ignore, reduction=reduction
        )

    return Sample(function, sample.shapes, make, f"nll {reduction} ignore={ignore}")


# rules


@rule(aten.cross_entropy_loss.default, samples=_any_target)
def cross_entropy(call: Call) -> Spec | None:
    """-sum over c of t[c] w[c] log_softmax(x)[c], t one-hot of the class or probabilities, smoothed towards 1/C"""
    x, target = call["self"], call["target"]
    if x.shape != target.shape:
        return _of_classes(call)
    batch, row, places = _dims(x)
    return reduced(call, {"self": row, "target": row, "weight": "."}, batch, places, ("weight",))


@rule(aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default, samples=_nll_samples)
def nll_loss(call: Call) -> Spec | None:
    """-w[y] x[y]"""
    return _of_classes(call)


def _dims(x: Operand) -> tuple[list[str], str, tuple[int, ...]]:
    """(dims of the losses, pattern of the input, shape of the losses) of logits [n, C, ...] or [C]."""
    batch = names(max(0, x.ndim - 1))
    row = " ".join(["[c]"] if x.ndim == 1 else [batch[0], "[c]", *batch[1:]])
    return batch, row, () if x.ndim == 1 else (x.shape[0], *x.shape[2:])


def _of_classes(call: Call) -> Spec | None:
    x = call["self"]
    batch, row, places = _dims(x)
    if call["target"].shape != places:
        return None
    ins = {"self": row, "target": " ".join(batch), "weight": "."}
    if call["reduction"] != MEAN:
        return reduced(call, ins, batch, places, ("weight",))
    rewrite = _mean_of_classes if batch else None
    return Spec(ins, [""], decompose=rewrite, flops=5 * x.numel, saves=("self", "target"), detached=("weight",))


def _mean_of_classes(call: Call, emit: Emit) -> Operand:
    """The ratio of two sums over all voxels; the second, of weights, is known before the logits are."""
    smoothing = call.args.get("label_smoothing")
    log = call.target is aten.cross_entropy_loss.default
    target, weight, ignored = call["target"], call["weight"], call["ignore_index"]
    dtype = wide_dtype(call["self"].dtype)
    total = emit(class_sum, call["self"], target, weight, ignored, smoothing if log else None)
    weights = emit(weight_sum, target, weight, ignored, dtype)
    return emit(ratio, total, weights, call["self"].dtype)  # type: ignore[no-any-return]


def class_sum(
    self: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, smoothing: float | None
) -> Tensor:
    """The weighted sum of the losses of a part: []; ``smoothing=None`` for log-probabilities."""
    dtype = wide_dtype(self.dtype)
    if not self.numel():
        return (self.sum() * 0).to(dtype)
    if smoothing is None:
        loss = F.nll_loss(self, target, weight, ignore_index=ignore_index, reduction="none")
    else:
        loss = F.cross_entropy(
            self, target, weight, ignore_index=ignore_index, reduction="none", label_smoothing=smoothing
        )
    return loss.sum(dtype=dtype)


@rule(class_sum)
def _class_sum(call: Call) -> Spec:
    x = call["self"]
    batch, row, _ = _dims(x)
    ins = {"self": row, "target": " ".join(batch), "weight": "."}
    return Spec(ins, [""], reduce="sum", flops=5 * x.numel, saves=("self", "target"), detached=("weight",))


def weight_sum(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """The sum of the weights of a part, or the count of the voxels that are not ignored: []."""
    counted = target != ignore_index
    if weight is None:
        return counted.sum().to(dtype)
    weights = weight.gather(0, torch.where(counted, target, 0).flatten()).view_as(target)
    return torch.where(counted, weights, 0).sum(dtype=dtype)


@rule(weight_sum)
def _weight_sum(call: Call) -> Spec:
    ins = {"target": " ".join(names(call["target"].ndim)), "weight": "."}
    return Spec(ins, [""], reduce="sum", flops=call["target"].numel, detached=("weight",))


def ratio(total: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """``total / weights``: NaN when nothing is counted."""
    return (total / weights).to(dtype)


@rule(ratio)
def _ratio(call: Call) -> Spec:
    return Spec({"total": "", "weights": ""}, [""], flops=1)
