"""Summing the gradients of a bucket of parameters: one all-reduce, started early and awaited late.

    forward     Enter(all buckets) ... layer 1 ... Launch(bucket of layer 2) ... layer 2 ...
    backward    ... layer 2 ... Launch: start the all-reduce ... layer 1 ... Enter: await it, hand the sums to the parameters

Autograd runs what was recorded later first, so `Enter`, recorded before everything else, waits after everything else has run.
Nothing here touches ``.grad``: accumulation, ``torch.autograd.grad`` and higher derivatives are autograd's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from halofx.runtime.comm.base import Pending
from halofx.runtime.movement import Group, _AllReduce


@dataclass
class Bucket:
    """The parameters of one message, the group that it runs over, and what is under way."""

    group: Group
    sync: SyncSwitch
    pending: list[tuple[Pending, Tensor]] = field(default_factory=list)
    held: dict[int, Tensor] = field(default_factory=dict)  # gradients kept back by no_sync, by position


@dataclass
class SyncSwitch:
    """Whether gradients are summed now (`Net.no_sync` turns it off for a while)."""

    on: bool = True


class Enter(nn.Module):
    """Where the parameters of a bucket enter the graph; its backward awaits the bucket's all-reduce."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__()
        self.bucket = bucket

    def forward(self, *parameters: Tensor) -> tuple[Tensor, ...]:
        """The parameters."""
        return _Enter.apply(self.bucket, *parameters)  # type: ignore[no-any-return,no-untyped-call]


class Launch(nn.Module):
    """Where a bucket is first used; its backward starts the bucket's all-reduce."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__()
        self.bucket = bucket

    def forward(self, *parameters: Tensor) -> tuple[Tensor, ...]:
        """The parameters."""
        return _Launch.apply(self.bucket, *parameters)  # type: ignore[no-any-return,no-untyped-call]

    def extra_repr(self) -> str:
        return self.bucket.group.site.what


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bucket: Bucket, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.bucket = bucket
        ctx.set_materialize_grads(False)
        return tuple(p.view_as(p) for p in parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        while ctx.bucket.pending:
            ctx.bucket.pending.pop()[0].wait()
        return (None, *grads)


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bucket: Bucket, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.bucket = bucket
        ctx.set_materialize_grads(False)
        return tuple(p.view_as(p) for p in parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        bucket: Bucket = ctx.bucket
        present = [i for i, g in enumerate(grads) if g is not None and ctx.needs_input_grad[i + 1]]
        if not bucket.sync.on:
            for i in present:
                bucket.held[i] = bucket.held[i] + grads[i] if i in bucket.held else grads[i].detach().clone()
            return (None,) * (len(grads) + 1)
        present = sorted({*present, *bucket.held})
        given = {i: _with_held(bucket, i, grads[i]) for i in present}
        bucket.held.clear()
        sums = _reduced(bucket, [given[i] for i in present]) if present else []
        result = dict(zip(present, sums, strict=True))
        return (None, *(result.get(i) for i in range(len(grads))))


def _with_held(bucket: Bucket, i: int, grad: Tensor | None) -> Tensor:
    held = bucket.held.get(i)
    if held is None or grad is None:
        summed = grad if held is None else held
        assert summed is not None
        return summed
    return grad + held


def _reduced(bucket: Bucket, grads: Sequence[Tensor]) -> list[Tensor]:
    """The sums over the group, not yet there until `_Enter` has waited; differentiable when a graph is recorded."""
    flat = torch.cat([g.reshape(-1) for g in grads])
    if torch.is_grad_enabled():
        flat = _AllReduce.apply(flat, bucket.group.adjoint, "sum")  # type: ignore[no-untyped-call]
    else:
        site = bucket.group.adjoint.site
        bucket.pending.append((site.comm.start_all_reduce(flat, bucket.group.ranks, "sum", site.what), flat))
    sizes = [g.numel() for g in grads]
    return [part.view(g.shape) for part, g in zip(flat.split(sizes), grads, strict=True)]
