"""Elementwise ops: every dim of the output runs together with the same dim of each input, broadcasting from the right."""

from __future__ import annotations

import torch

from halofx.compiler.rules import Call, Operand, Spec, fallback_rule


def broadcast(call: Call) -> Spec:
    """The spec of an elementwise call: output dims ``d0 d1 ...``; an input dim of extent 1 that is broadcast stays whole.

    [2, 8, 16, 16], [8, 1, 1]  ->  "d0 d1 d2 d3", "d1 . ."  ->  "d0 d1 d2 d3"
    """
    out = max(call.outs, key=lambda o: o.ndim)
    names = [f"d{i}" for i in range(out.ndim)]

    def pattern(operand: Operand) -> str:
        aligned = names[out.ndim - operand.ndim :]
        sizes = out.shape[out.ndim - operand.ndim :]
        return " ".join(d if n == m else "." for d, n, m in zip(aligned, operand.shape, sizes, strict=True))

    return Spec(
        ins={key: pattern(operand) for key, operand in call.tensors.items()},
        outs=[pattern(o) for o in call.outs],
        flops=out.numel,
    )


def pointwise_tagged(target: object) -> bool:
    """Whether torch itself tags an overload as elementwise."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


fallback_rule(pointwise_tagged, broadcast)
