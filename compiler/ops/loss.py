"""Losses of pairs of numbers: pointwise, then a sum or a mean over all of them.

    mse_loss(x, y), mean over 7        rank 0: 0 1 2 3 | rank 1: 4 5 6
    addend                             sum of 4 / 7    | sum of 3 / 7          one all-reduce of one number

``reduction="none"`` is pointwise; the classification losses of whole vectors see their class dim whole. Cross-entropy, whose
mean is weighted by the targets, is in `halofx.compiler.ops.cross_entropy`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halofx.compiler.ops.dims import names
from halofx.compiler.ops.reduce import HALVES
from halofx.compiler.ops.samples import integers, positive, random_shape, signs
from halofx.compiler.rules import Call, Local, Operand, Sample, Spec, rule

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2
REDUCTIONS = ("none", "mean", "sum")
"""By the number that ATen has for them."""


# one reduction for all


def reduced(
    call: Call, ins: Mapping[str, str], loss: Sequence[str], shape: Sequence[int], detached: Sequence[str] = ()
) -> Spec:
    """The spec of a loss with ``reduction``: per number it has the dims ``loss`` and the global ``shape``.

    ``detached`` are the arguments of which torch has no derivative.
    """
    more: Any = {"detached": tuple(detached), "saves": tuple(call.tensors)}
    more["flops"] = 5 * max(t.numel for t in call.tensors.values())
    if call["reduction"] == NONE:
        return Spec(ins, [" ".join(loss)], **more)
    count = math.prod(shape) if call["reduction"] == MEAN else 1
    return Spec(ins, [""], reduce="sum", local=partial(_addend, count=count), **more)


def _addend(local: Local, count: int) -> Call:
    """The sum over this rank's part, divided by the global number."""
    call, spec = local.call, local.bound.spec
    arguments = {**call.args, "reduction": SUM}
    attached = [key for key in call.tensors if spec is not None and key not in spec.detached]
    return call.with_(target=addend, op=call.target, arguments=arguments, attached=attached, count=count)


def addend(op: Any, arguments: Mapping[str, Any], attached: Sequence[str], count: int) -> Tensor:
    """This part's sum of losses over ``count``, 0 for an empty part; halves are summed in float32."""
    tensors: list[Tensor] = [arguments[key] for key in attached if arguments[key].is_floating_point()]
    if any(not t.numel() for t in tensors):
        return torch.stack([t.sum() * 0 for t in tensors]).sum()
    if tensors[0].dtype in HALVES:
        losses: Tensor = op(**{**arguments, "reduction": NONE})
        return (losses.sum(dtype=torch.float32) / count).to(losses.dtype)
    total: Tensor = op(**arguments)
    return total / count if count != 1 else total


def _pointwise(call: Call, *keys: str, detached: Sequence[str] = ()) -> Spec | None:
    """A loss of the numbers at one place of tensors that broadcast."""
    tensors = {key: call[key] for key in keys if isinstance(call[key], Operand)}
    shape = torch.broadcast_shapes(*(t.shape for t in tensors.values()))
    dims = names(len(shape))

    def aligned(x: Operand) -> str:
        lead = len(shape) - x.ndim
        return " ".join(d if n == m else "." for d, n, m in zip(dims[lead:], x.shape, shape[lead:], strict=True))

    return reduced(call, {k: aligned(t) for k, t in tensors.items()}, dims, shape, detached)


# samples: a loss of two tensors of one shape, or of shapes that broadcast


def _pair(functions: Mapping[str, Any], make: Mapping[int, Any], broadcast: bool, rng: Random) -> Sample:
    shape, name = random_shape(rng, 1, 4), rng.choice(list(functions))
    other = tuple(1 if broadcast and rng.random() < 0.15 else n for n in shape)
    reduction = rng.choice(REDUCTIONS)
    fixed = make.get(1) is signs  # labels, of which torch has no derivative

    def function(x: Tensor, y: Tensor) -> Any:
        return functions[name](x, y.detach() if fixed else y, reduction=reduction)

    return Sample(function, (shape, other), make, f"{name} reduction={reduction}")


def _weighted(name: str, rng: Random) -> Sample:
    """Binary cross-entropy with its weights, which may have fewer dims than the input."""
    shape, reduction = random_shape(rng, 1, 4), rng.choice(REDUCTIONS)
    lead = rng.choice([0, 0, rng.randrange(len(shape))])
    weight = tuple(1 if rng.random() < 0.2 else n for n in shape[lead:])
    how = rng.randrange(3)
    make = {0: positive, 1: positive, 2: positive}
    if name == "logits":
        make.pop(0)
        first = rng.random() < 0.5

        def function(x: Tensor, y: Tensor, *w: Tensor) -> Tensor:
            fixed = w[0].detach() if w else None
            weight, pos_weight = (fixed, None) if first else (None, fixed)
            return F.binary_cross_entropy_with_logits(x, y, weight, reduction=reduction, pos_weight=pos_weight)

    else:

        def function(x: Tensor, y: Tensor, *w: Tensor) -> Tensor:
            return F.binary_cross_entropy(x, y, w[0].detach() if w else None, reduction=reduction)

    shapes = (shape, shape) if how == 0 else (shape, shape, weight)
    return Sample(function, shapes, {i: m for i, m in make.items() if i < len(shapes)}, f"bce {name} {reduction}")


def _three(rng: Random) -> Sample:
    shape, reduction, margin = random_shape(rng, 1, 4), rng.choice(REDUCTIONS), rng.choice([0.0, 0.7])
    function = lambda a, b, y: F.margin_ranking_loss(a, b, y, margin, reduction=reduction)  # noqa: E731
    return Sample(function, (shape, shape, shape), {2: signs}, f"margin_ranking {margin} {reduction}")


# losses of two numbers


@rule(
    aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
    samples=partial(
        _pair,
        {
            "mse": F.mse_loss, "l1": F.l1_loss, "smooth_l1": partial(F.smooth_l1_loss, beta=0.6),
            "huber": partial(F.huber_loss, delta=0.7),
        },
        {}, True,
    ),
)  # fmt: skip
def distance_loss(call: Call) -> Spec | None:
    """f(x - y): the square, the absolute value, or the one near zero and the other far from it"""
    return _pointwise(call, "self", "target")


@rule(
    aten.kl_div.default,
    samples=partial(_pair, {"kl": F.kl_div, "kl_log": partial(F.kl_div, log_target=True)}, {1: positive}, False),
)
def kl_div(call: Call) -> Spec | None:
    """y (log y - x), or exp(y) (y - x) of logarithms"""
    return _pointwise(call, "self", "target")


@rule(
    aten.poisson_nll_loss.default,
    samples=partial(
        _pair,
        {
            "log": F.poisson_nll_loss, "full": partial(F.poisson_nll_loss, full=True),
            "plain": partial(F.poisson_nll_loss, log_input=False),
        },
        {0: positive, 1: positive}, False,
    ),
)  # fmt: skip
def poisson_nll_loss(call: Call) -> Spec | None:
    """exp(x) - y x, or x - y log(x + eps); with Stirling's approximation of log(y!) when full"""
    return _pointwise(call, "input", "target")


@rule(aten.hinge_embedding_loss.default, samples=partial(_pair, {"hinge": F.hinge_embedding_loss}, {1: signs}, False))
def hinge_embedding_loss(call: Call) -> Spec | None:
    """x where y = 1, max(0, margin - x) where y = -1"""
    return _pointwise(call, "self", "target", detached=("target",))


@rule(aten.soft_margin_loss.default, samples=partial(_pair, {"soft_margin": F.soft_margin_loss}, {1: signs}, False))
def soft_margin_loss(call: Call) -> Spec | None:
    """log(1 + exp(-y x))"""
    return _pointwise(call, "self", "target", detached=("target",))


@rule(aten.margin_ranking_loss.default, samples=_three)
def margin_ranking_loss(call: Call) -> Spec | None:
    """max(0, -y (x1 - x2) + margin)"""
    return _pointwise(call, "input1", "input2", "target")


@rule(aten.binary_cross_entropy.default, samples=partial(_weighted, "probabilities"))
def binary_cross_entropy(call: Call) -> Spec | None:
    """-w (y log x + (1 - y) log(1 - x))"""
    return _pointwise(call, "self", "target", "weight", detached=("weight",))


@rule(aten.binary_cross_entropy_with_logits.default, samples=partial(_weighted, "logits"))
def binary_cross_entropy_with_logits(call: Call) -> Spec | None:
    """-w (p y log s(x) + (1 - y) log(1 - s(x))), s the logistic function"""
    return _pointwise(call, "self", "target", "weight", "pos_weight", detached=("weight", "pos_weight"))


# losses of vectors: the last dim, or the class dim, whole


def _vectors(name: str, rng: Random) -> Sample:
    n, c, reduction, margin = rng.randint(1, 7), rng.randint(2, 6), rng.choice(REDUCTIONS), rng.choice([0.0, 0.4])
    lead = random_shape(rng, 0, 2, 4)
    one = rng.random() < 0.2 and reduction != "none"  # of which torch's shape inference is wrong for some
    target = integers(0, c)
    if name == "cosine":
        function: Any = lambda a, b, y: F.cosine_embedding_loss(a, b, y.detach(), margin, reduction=reduction)  # noqa: E731
        shapes: Any = ((c,), (c,), ()) if one else ((n, c), (n, c), (n,))
        make: Any = {2: signs}
    elif name == "triplet":
        swap, p = rng.random() < 0.5, rng.choice([1.0, 2.0])
        function = lambda a, b, y: F.triplet_margin_loss(a, b, y, 1.5, p, swap=swap, reduction=reduction)  # noqa: E731
        shapes, make = ((*lead, n, c),) * 3, {}
    elif name == "multi":
        p, weighted = rng.choice([1, 2]), rng.random() < 0.4
        function = lambda x, y, *w: F.multi_margin_loss(  # noqa: E731
            x, y, p, 1.1, w[0].detach() if w else None, reduction=reduction
        )
        shapes = ((c,), ()) if one else ((n, c), (n,))
        make = {1: target, 2: positive}
        shapes = (*shapes, (c,)) if weighted else shapes
    else:
        function = lambda x, y: F.multilabel_margin_loss(x, y, reduction=reduction)  # noqa: E731
        shapes, make = ((c,), (c,)) if one else ((n, c), (n, c)), {1: integers(-1, c)}
    return Sample(function, shapes, {i: m for i, m in make.items() if i < len(shapes)}, f"{name} {reduction}")


@rule(aten.cosine_embedding_loss.default, samples=partial(_vectors, "cosine"))
def cosine_embedding_loss(call: Call) -> Spec | None:
    """1 - cos(x1, x2) where y = 1, max(0, cos(x1, x2) - margin) where y = -1"""
    batch = names(call["target"].ndim)
    row = " ".join([*batch, "[c]"])
    if call["input1"].ndim != len(batch) + 1 or call["input1"].shape != call["input2"].shape:
        return None
    ins = {"input1": row, "input2": row, "target": " ".join(batch)}
    return reduced(call, ins, batch, call["target"].shape, ("target",))


@rule(aten.triplet_margin_loss.default, samples=partial(_vectors, "triplet"))
def triplet_margin_loss(call: Call) -> Spec | None:
    """max(0, |a - p| - |a - n| + margin) of the norms over the last dim"""
    a, keys = call["anchor"], ("anchor", "positive", "negative")
    if any(call[key].shape != a.shape for key in keys) or not a.ndim:
        return None
    batch = names(a.ndim - 1)
    return reduced(call, dict.fromkeys(keys, " ".join([*batch, "[c]"])), batch, a.shape[:-1])


@rule(aten.multi_margin_loss.default, samples=partial(_vectors, "multi"))
def multi_margin_loss(call: Call) -> Spec | None:
    """1/C sum over c != y of max(0, margin - x[y] + x[c])^p"""
    batch = names(call["target"].ndim)
    if not batch:
        return None
    ins = {"self": " ".join([*batch, "[c]"]), "target": " ".join(batch), "weight": "."}
    return reduced(call, ins, batch, call["target"].shape, ("weight",))


@rule(aten.multilabel_margin_loss.default, samples=partial(_vectors, "multilabel"))
def multilabel_margin_loss(call: Call) -> Spec | None:
    """1/C sum over labels y and others c of max(0, 1 - x[y] + x[c])"""
    batch = names(call["self"].ndim - 1)
    row = " ".join([*batch, "[c]"])
    return reduced(call, {"self": row, "target": row}, batch, call["self"].shape[:-1]) if batch else None
