"""Scaled dot-product attention: batch, heads, queries and the channels of the values may be split, keys are whole.

    queries of rank 1   3 4 5      causal: query l sees keys 0 .. l

    keys                0 1 2 3 4 5
                        x x x x . .        query 3      rank 1 reads keys 0 .. 5 and masks by the global query
                        x x x x x .        query 4
                        x x x x x x        query 5

Attention with dropout is written out in matrix products by the pass `seed_random`.
"""

from __future__ import annotations

from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halofx.compiler.ops.dims import names, pattern, wrap
from halofx.compiler.ops.samples import booleans, random_dim, random_shape
from halofx.compiler.rules import Call, Local, Operand, Sample, Spec, rule

aten = torch.ops.aten


def _samples(rng: Random) -> Sample:
    batch = [rng.randint(1, 4) for _ in range(rng.randint(0, 2))]
    queries, keys, e, v, heads = (rng.randint(1, 6) for _ in range(5))
    grouped = len(batch) == 2 and rng.random() < 0.3
    few = [*batch[:-1], heads] if grouped else batch
    batch = [*batch[:-1], heads * rng.randint(1, 3)] if grouped else batch
    shapes: list[tuple[int, ...]] = [(*batch, queries, e), (*few, keys, e), (*few, keys, v)]
    options: dict[str, Any] = {"enable_gqa": grouped, "scale": rng.choice([None, 0.7])}
    kind = rng.choice(["plain", "causal", "bias", "mask"])
    if kind == "causal":
        options["is_causal"] = True
    elif kind in ("bias", "mask"):
        lead = [1 if rng.random() < 0.3 else n for n in batch[rng.randint(0, len(batch)) :]]
        shapes.append((*lead, rng.choice([1, queries]), keys))
    make = {3: booleans} if kind == "mask" else {}
    function = lambda q, k, v, *mask: F.scaled_dot_product_attention(q, k, v, *mask, **options)  # noqa: E731
    return Sample(function, tuple(shapes), make, f"attention {kind} {options}")


@rule(aten.scaled_dot_product_attention.default, samples=_samples)
def attention(call: Call) -> Spec:
    """y[b, l, v] = sum over s of softmax over s of (scale sum over e of q[b, l, e] k[b, s, e] + mask[b, l, s]) v[b, s, v]"""
    query, key, value, mask = (call[name] for name in ("query", "key", "value", "attn_mask"))
    out = call.outs[0]
    batch = names(out.ndim - 2)
    if call["enable_gqa"]:  # a group of query heads shares the head of its keys
        batch[-1] = f"[{batch[-1]}]"

    def lead(operand: Operand) -> str:
        aligned = zip(batch[::-1], out.shape[-3::-1], operand.shape[-3::-1], strict=False)
        return " ".join([name if n == m else "." for name, n, m in aligned][::-1])

    ins = {"query": f"{lead(query)} l .", "key": f"{lead(key)} . .", "value": f"{lead(value)} . v"}
    if mask is not None:
        ins["attn_mask"] = f"{lead(mask)} {'l' if mask.shape[-2] == query.shape[-2] else '.'} ."
    scores = out.numel // max(1, out.shape[-1]) * key.shape[-2]
    return Spec(
        ins=ins,
        outs=[" ".join([*batch, "l", "v"])],
        local=_rows,
        flops=2 * scores * (query.shape[-1] + value.shape[-1]),
        saves=("query", "key", "value", "output"),
    )


def _rows(local: Local) -> Call:
    """Causal attention masks by the global number of the query."""
    first = local.out("l").start
    if not local.call["is_causal"] or not first:
        return local.call
    return local.call.with_(target=causal_rows, **{**local.call.args, "first": first})


def causal_rows(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: None, dropout_p: float, is_causal: bool, scale: float | None,
    enable_gqa: bool, first: int,
) -> Tensor:  # fmt: skip
    """Causal attention of the queries ``first``, ``first + 1``, ..., that look at no later keys."""
    rows, keys = query.shape[-2], min(key.shape[-2], first + query.shape[-2])
    mask = torch.ones(rows, keys, dtype=torch.bool, device=query.device).tril(first)
    key, value = key.narrow(-2, 0, keys), value.narrow(-2, 0, keys)
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=enable_gqa)


def _safe_softmax_samples(rng: Random) -> Sample:
    shape = random_shape(rng, 1, 4)
    dim = random_dim(rng, len(shape))
    function = lambda x: aten._safe_softmax.default(x.masked_fill(x < 0.5, -torch.inf), dim)  # noqa: E731
    return Sample(function, (shape,), label=f"safe softmax {dim}")


@rule(aten._safe_softmax.default, samples=_safe_softmax_samples)
def safe_softmax(call: Call) -> Spec:
    """y = exp(x) / sum over d of exp(x), 0 where all of a row is minus infinity"""
    x = call["self"]
    dims = pattern(x.ndim, [wrap(call["dim"], x.ndim)])
    return Spec(ins={"self": dims}, outs=[dims], flops=4 * x.numel, saves=("output",))
