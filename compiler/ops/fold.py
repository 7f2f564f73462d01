"""Windows of images as columns, and back.

F.unfold [n, c, h, w] -> [n, c kh kw, oh ow]      rows of windows in order: a split of h becomes one of the columns
F.fold   [n, c kh kw, oh ow] -> [n, c, h, w]      the columns are needed whole
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from halofx.compiler.ops.conv import per_dim
from halofx.compiler.rules import Call, Operand, Sample, Spec, rule

if TYPE_CHECKING:
    from halofx.compiler.emit import Emit

aten = torch.ops.aten


def _fold_samples(rng: Random) -> Sample:
    k, d, p, s = (tuple(rng.randint(low, high) for _ in range(2)) for low, high in ((1, 3), (1, 2), (0, 1), (1, 3)))
    size = [rng.randint(max(1, d[i] * (k[i] - 1) + 1 - 2 * p[i]), 9) for i in range(2)]
    batch = (rng.randint(1, 2),) if rng.random() < 0.8 else ()
    label = f"k{k} d{d} p{p} s{s} of {size}"
    if rng.random() < 0.7:
        return Sample(lambda x: F.unfold(x, k, d, p, s), ((*batch, rng.randint(1, 2), *size),), label=f"unfold {label}")
    made = [(n + 2 * p[i] - d[i] * (k[i] - 1) - 1) // s[i] + 1 for i, n in enumerate(size)]
    columns = (*batch, rng.randint(1, 2) * k[0] * k[1], made[0] * made[1])
    return Sample(lambda x: F.fold(x, tuple(size), k, d, p, s), (columns,), label=f"fold {label}")


@rule(aten.im2col.default, samples=_fold_samples)
def im2col(call: Call) -> Spec:
    """y[n, (c i j), (a b)] = x[n, c, s a + d i - p, s b + d j - p]"""
    batch = "n " if call["self"].ndim == 4 else ""
    return Spec({"self": f"{batch}[c] [h] [w]"}, [f"{batch}. ."], decompose=_windows, flops=0)


def _windows(call: Call, emit: Emit) -> Operand:
    x, out = call["self"], call.outs[0]
    kernel, dilation, padding, stride = (per_dim(call[a], 2) for a in ("kernel_size", "dilation", "padding", "stride"))
    if any(padding):
        x = emit(aten.pad.default, x, [padding[1], padding[1], padding[0], padding[0]], "constant", 0.0)
    first = x.ndim - 2
    for i in range(2):
        x = emit(aten.unfold.default, x, first + i, dilation[i] * (kernel[i] - 1) + 1, stride[i])
        if dilation[i] > 1:
            x = emit(aten.slice.Tensor, x, x.ndim - 1, 0, x.shape[-1], dilation[i])
    order = [*range(first), first + 2, first + 3, first, first + 1]
    made: Operand = emit(aten.reshape.default, emit(aten.permute.default, x, order), list(out.shape))
    return made


@rule(aten.col2im.default, samples=_fold_samples)
def col2im(call: Call) -> Spec:
    """y[n, c, h, w] = sum of all x[n, (c i j), (a b)] that `im2col` would take from there"""
    batch = "n " if call["self"].ndim == 3 else ""
    return Spec({"self": f"{batch}. ."}, [f"{batch}. . ."], flops=call["self"].numel)
