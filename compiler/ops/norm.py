"""Batch, instance, group, layer and root-mean-square norms.

    x [2, 8, 16@depth, 16, 16]         batch_norm over n, d, h, w: d is split, so it becomes
    moments = statistics(x, (0, 2, 3, 4))       all-reduced over depth
    y = normalize(x, moments, weight, bias)     x as it is split

Where no reduced dim is split the op itself runs. Batch norm over a split batch has the statistics of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halofx.compiler.emit import name_of
from halofx.compiler.functional import batch_norm_train, instance_norm_train
from halofx.compiler.ops.dims import pattern
from halofx.compiler.ops.norm_parts import around_zero, grouped, normalize, running, statistics
from halofx.compiler.ops.reduce import wide_dtype
from halofx.compiler.rules import Call, Operand, Sample, Spec, rule

if TYPE_CHECKING:
    from halofx.compiler.emit import Emit

aten = torch.ops.aten
Decompose = Callable[["Call", "Emit"], Any]


# samples


def _shape(rng: Random, low: int = 0) -> list[int]:
    """[n, c, ...] with ``low`` to 3 spatial dims, more than one element a channel."""
    space = [rng.randint(1, 7) for _ in range(rng.randint(low, 3))]
    shape = [rng.randint(1, 3), rng.choice([1, 2, 3, 4, 4]), *space]
    if shape[0] == 1 or low:
        shape[-1] = max(shape[-1], 2) if space else shape[-1]
    shape[0] = max(shape[0], 1 if space else 2)
    return shape


def _affine(rng: Random, n: int) -> list[tuple[int, ...]]:
    """The shapes of weight and bias, or none."""
    return [(n,), (n,)] if rng.random() < 0.7 else []


def _pair(parameters: tuple[Any, ...]) -> tuple[Any, Any]:
    return (parameters[0], parameters[1]) if parameters else (None, None)


def _moved(shape: torch.Size) -> Tensor:
    """Numbers far from zero."""
    return torch.randn(shape, dtype=torch.float64) + 3


def _positive(shape: torch.Size) -> Tensor:
    return torch.rand(shape, dtype=torch.float64) + 0.5


def _batch_sample(rng: Random) -> Sample:
    shape = _shape(rng)
    channels, affine, training = shape[1], _affine(rng, shape[1]), rng.random() < 0.6
    momentum, eps = rng.choice([0.1, 0.7]), rng.choice([1e-5, 0.1])
    if training:
        function = lambda x, *p: F.batch_norm(x, None, None, *_pair(p), True, momentum, eps)  # noqa: E731
        return Sample(function, (tuple(shape), *affine), {0: _moved}, f"batch_norm training {eps}")
    function = lambda x, m, v, *p: F.batch_norm(x, m.detach(), v.detach(), *_pair(p), False, momentum, eps)  # noqa: E731
    return Sample(function, (tuple(shape), (channels,), (channels,), *affine), {2: _positive}, f"batch_norm eval {eps}")


def _running_sample(function: Any, low: int, rng: Random) -> Sample:
    """A norm that updates running statistics; the momentum sometimes a count of batches."""
    shape = _shape(rng, low)
    channels, affine, eps = shape[1], _affine(rng, shape[1]), rng.choice([1e-5, 0.1])
    count = rng.choice([None, 3]) if function is batch_norm_train else None

    def call(x: Tensor, m: Tensor, v: Tensor, *p: Tensor) -> Any:
        return function(x, *_pair(p), m, v, 0.3 if count is None else torch.tensor(count), eps)

    shapes = (tuple(shape), (channels,), (channels,), *affine)
    return Sample(call, shapes, {0: _moved, 2: _positive}, f"{function.__name__} momentum {count}")


def _instance_sample(rng: Random) -> Sample:
    shape, eps = _shape(rng, 1), rng.choice([1e-5, 0.1])
    affine = _affine(rng, shape[1])
    if rng.random() < 0.7:
        function = lambda x, *p: F.instance_norm(x, None, None, *_pair(p), True, 0.1, eps)  # noqa: E731
        return Sample(function, (tuple(shape), *affine), {0: _moved}, f"instance_norm {eps}")
    function = lambda x, m, v, *p: F.instance_norm(  # noqa: E731
        x, m.detach(), v.detach(), *_pair(p), False, 0.1, eps
    )
    channels = ((shape[1],), (shape[1],))
    return Sample(function, (tuple(shape), *channels, *affine), {2: _positive}, f"instance_norm eval {eps}")


def _group_sample(rng: Random) -> Sample:
    shape, eps = _shape(rng), rng.choice([1e-5, 0.1])
    groups, width = rng.randint(1, 3), rng.randint(2, 3)
    shape[1] = groups * width
    function = lambda x, *p: F.group_norm(x, groups, *_pair(p), eps)  # noqa: E731
    return Sample(function, (tuple(shape), *_affine(rng, shape[1])), {0: _moved}, f"group_norm {groups} {eps}")


def _layer_sample(op: Any, rng: Random) -> Sample:
    shape, eps = [rng.randint(1, 6) for _ in range(rng.randint(1, 5))], rng.choice([1e-5, 0.1])
    last = shape[-rng.randint(1, len(shape)) :]
    parameters = 2 if op is F.layer_norm else 1
    count = rng.randint(0, parameters)
    function = lambda x, *p: op(x, last, *p, *[None] * (parameters - len(p)), eps)  # noqa: E731
    return Sample(function, (tuple(shape), *[tuple(last)] * count), {0: _moved}, f"{op.__name__} over {last} {eps}")


# rules


def _spec(
    call: Call, key: str, dims: range | tuple[int, ...], first: int, decompose: Decompose | None, **extra: str
) -> Spec:
    """A norm of ``call[key]`` over ``dims`` (seen whole unless decomposed), parameters beside its dims from ``first`` on."""
    x = call[key]
    every = pattern(x.ndim, dims)
    ins = {key: every, **extra}
    for name in ("weight", "bias"):
        if call.args.get(name) is not None:
            ins[name] = " ".join(every.split()[first : first + call[name].ndim])
    outs = [every] + ["d1"] * (len(call.outs) - 1)
    return Spec(ins, outs, decompose=decompose, flops=8 * x.numel, saves=(key,))


RUNNING = {"running_mean": "d1", "running_var": "d1"}


@rule(aten.batch_norm.default, samples=_batch_sample)
def batch_norm(call: Call) -> Spec | None:
    """y[n, c, d] = (x - mean[c]) / sqrt(var[c] + eps) weight[c] + bias[c]"""
    if not call["training"]:
        return _spec(call, "input", (), 1, None, **RUNNING)
    if call["running_mean"] is not None:  # would change its arguments: capture spells it `batch_norm_train`
        return None
    return _spec(call, "input", _batch(call["input"]), 1, _over(_batch, 1))


@rule(batch_norm_train, samples=partial(_running_sample, batch_norm_train, 0))
def batch_norm_updated(call: Call) -> Spec:
    """Batch norm by the statistics of the batch, and the running statistics after it"""
    return _spec(call, "x", _batch(call["x"]), 1, partial(_updated, dims=_batch), **RUNNING, momentum="")


@rule(aten.instance_norm.default, samples=_instance_sample)
def instance_norm(call: Call) -> Spec | None:
    """y[n, c, d] = (x - mean[n, c]) / sqrt(var[n, c] + eps) weight[c] + bias[c]"""
    if not call["use_input_stats"]:
        return _spec(call, "input", (), 1, None, **RUNNING)
    if call["running_mean"] is not None:
        return None
    return _spec(call, "input", _space(call["input"]), 1, _over(_space, 1))


@rule(instance_norm_train, samples=partial(_running_sample, instance_norm_train, 1))
def instance_norm_updated(call: Call) -> Spec:
    """Instance norm by the statistics of the instance, and the running statistics after it: their mean over n"""
    return _spec(call, "x", (0, *_space(call["x"])), 1, partial(_updated, dims=_space), **RUNNING, momentum="")


@rule(aten.group_norm.default, samples=_group_sample)
def group_norm(call: Call) -> Spec:
    """y[n, c, d] = (x - mean[n, g]) / sqrt(var[n, g] + eps) weight[c] + bias[c], g the group of c"""
    return _spec(call, "input", range(1, call["input"].ndim), 1, _by_groups)


@rule(aten.layer_norm.default, samples=partial(_layer_sample, F.layer_norm))
def layer_norm(call: Call) -> Spec:
    """y[k, d] = (x - mean[k]) / sqrt(var[k] + eps) weight[d] + bias[d]"""
    first = _first(call)
    return _spec(call, "input", range(first, call["input"].ndim), first, _by_layers)


@rule(aten.rms_norm.default, samples=partial(_layer_sample, F.rms_norm))
def rms_norm(call: Call) -> Spec:
    """y[k, d] = x / sqrt(mean over d of x^2 + eps) weight[d]"""
    first = _first(call)
    return _spec(call, "input", range(first, call["input"].ndim), first, _by_root)


def _batch(x: Operand) -> tuple[int, ...]:
    return (0, *range(2, x.ndim))


def _space(x: Operand) -> tuple[int, ...]:
    return tuple(range(2, x.ndim))


def _first(call: Call) -> int:
    return int(call["input"].ndim - len(call["normalized_shape"]))


# what they become over split dims


def _over(dims: Callable[[Operand], tuple[int, ...]], first: int) -> Decompose:
    def decompose(call: Call, emit: Emit) -> Operand:
        x = call["input"]
        return _normalized(call, emit, x, emit(statistics, x, dims(x)), dims(x), first)

    return decompose


def _normalized(call: Call, emit: Emit, x: Operand, moments: Operand, dims: Any, first: int) -> Operand:
    eps = call["eps"] if call["eps"] is not None else torch.finfo(wide_dtype(x.dtype)).eps
    name = name_of(call.target)
    like = name if name in ("group_norm", "layer_norm", "rms_norm") else ""
    made: Operand = emit(normalize, x, moments, call["weight"], call.args.get("bias"), eps, tuple(dims), first, like)
    return made


def _updated(call: Call, emit: Emit, dims: Callable[[Operand], tuple[int, ...]]) -> tuple[Operand, Operand, Operand]:
    x = call["x"]
    moments = emit(statistics, x, dims(x))
    y = _normalized(call, emit, x, moments, dims(x), 1)
    fixed = emit(aten.detach.default, moments)
    mean, var = emit(running, fixed, call["running_mean"], call["running_var"], call["momentum"])
    return y, mean, var


def _by_groups(call: Call, emit: Emit) -> Operand:
    """The statistics of channels, which may be split, merged into those of their groups."""
    x = call["input"]
    moments = emit(grouped, emit(statistics, x, _space(x)), call["num_groups"])
    return _normalized(call, emit, x, moments, _space(x), 1)


def _by_layers(call: Call, emit: Emit) -> Operand:
    x, dims = call["input"], tuple(range(_first(call), call["input"].ndim))
    return _normalized(call, emit, x, emit(statistics, x, dims), dims, dims[0])


def _by_root(call: Call, emit: Emit) -> Operand:
    x, dims = call["input"], tuple(range(_first(call), call["input"].ndim))
    moments = emit(around_zero, emit(statistics, x, dims))
    return _normalized(call, emit, x, moments, dims, dims[0])
