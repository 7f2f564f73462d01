"""Batch norm with the statistics of each replica, as data-parallel training has them: the batch in ``replicas`` blocks.

    x [4@data, c, d, h, w], data=2      rank 0: n 0 1       | rank 1: n 2 3
    moments [3, 2@data, c, ..]          of 0 1              | of 2 3                  no message along data
    rows    [3, 4@data, c, ..]          row 0, row 0        | row 1, row 1
    normalize                           by row n

What it computes depends on the number of replicas alone, not on the mesh. The running statistics are those of replica 0:
`torch.nn.parallel.DistributedDataParallel` broadcasts these before every forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halofx.compiler.functional import batch_norm_train
from halofx.compiler.index_map import Spans, Table
from halofx.compiler.interval import blocks
from halofx.compiler.ops.dims import as_it_is, names
from halofx.compiler.ops.norm_parts import Moments, normalize, running, statistics
from halofx.compiler.ops.reduce import kept
from halofx.compiler.rules import Call, Local, Spec, rule

if TYPE_CHECKING:
    from halofx.compiler.emit import Emit

aten = torch.ops.aten


def batch_norm_replicas(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    momentum: float | Tensor, eps: float, replicas: int,
) -> Any:  # fmt: skip
    """Batch norm of every block of the batch by itself; with running statistics ``(y, new mean, new variance)``."""
    parts = [x[b.start : b.stop] for b in blocks(x.shape[0], replicas) if b]
    y = torch.cat([F.batch_norm(p, None, None, weight, bias, True, 0.0, eps) for p in parts])
    if running_mean is None or running_var is None:
        return y
    return y, *batch_norm_train(parts[0], None, None, running_mean, running_var, momentum, eps)[1:]


@rule(batch_norm_replicas)
def _batch_norm_replicas(call: Call) -> Spec:
    x = call["x"]
    every = " ".join("d1" if i == 1 else f"[{n}]" for i, n in enumerate(names(x.ndim)))
    small = dict.fromkeys(("weight", "bias", "running_mean", "running_var"), "d1")
    outs = [every, "d1", "d1"][: len(call.outs)]
    return Spec({"x": every, **small, "momentum": ""}, outs, decompose=_decompose, flops=8 * x.numel, saves=("x",))


def _decompose(call: Call, emit: Emit) -> Any:
    x, dims = call["x"], (0, *range(2, call["x"].ndim))
    sizes = [len(b) for b in blocks(x.shape[0], call["replicas"])]
    moments = emit(block_statistics, x, sizes)
    of_each = emit(rows, moments, [i for i, size in enumerate(sizes) for _ in range(size)])
    y = emit(normalize, x, of_each, call["weight"], call["bias"], call["eps"], dims[1:], 1)
    if call["running_mean"] is None:
        return y
    first = emit(rows, emit(aten.detach.default, moments), [0])
    mean, var = emit(running, first, call["running_mean"], call["running_var"], call["momentum"])
    return y, mean, var


def block_statistics(input: Tensor, sizes: Sequence[int]) -> Moments:
    """The statistics of consecutive blocks of the batch: [3, len(sizes), c, 1, ..]."""
    dims = [0, *range(2, input.dim())]
    return torch.cat([statistics(part, dims) for part in input.split(list(sizes))], 1)


@rule(block_statistics)
def _block_statistics(call: Call) -> Spec:
    x, sizes = call["input"], call["sizes"]
    first = [sum(sizes[:i]) for i in range(len(sizes))]
    map = Spans.of([(a, a + size - 1) for a, size in zip(first, sizes, strict=True)])
    out = f". d0 {kept(x.ndim, range(2, x.ndim), True).split(maxsplit=1)[1]}"
    return Spec(
        {"input": " ".join(names(x.ndim))}, [out], maps={"d0": map}, reduce="moments", local=_own_blocks,
        flops=4 * x.numel, saves=("input",),
    )  # fmt: skip


def _own_blocks(local: Local) -> Call:
    own = local.out("d0")
    return local.call.with_(sizes=local.call["sizes"][own.start : own.stop])


def rows(moments: Moments, table: Sequence[int]) -> Moments:
    """The statistics of blocks ``table``: [3, len(table), c, 1, ..]."""
    return moments.index_select(1, torch.tensor(table, device=moments.device))


@rule(rows)
def _rows(call: Call) -> Spec:
    every = " ".join([".", *names(call["moments"].ndim)[1:]])
    return Spec({"moments": every}, [every], maps={"d1": Table(tuple(call["table"]))}, local=_selected, flops=0)


def _selected(local: Local) -> Call:
    """Where the rows are split the movement has selected them."""
    return local.call.with_(target=as_it_is, input=local.call["moments"]) if local.is_split("d1") else local.call
