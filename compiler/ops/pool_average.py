r"""Average pools.

    avg pool k3 s2 p1, ceil_mode, 8 planes over 2 ranks

    output          0     1     2     3     4
                   /|\   /|\   /|\   /|\   /|
    input         0 0 1 2 3 4 5 6 7 0 -              windows 0, 1 | 2, 3, 4
    count_include_pad   3     3     3     3   2      the last window leaves even the padded tensor
    otherwise       2     3     3     3     1

How many elements a window divides by depends on its global position. A rank whose windows are all full runs the op as it is;
one at the border sums and divides by its own numbers, as the op itself does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halofx.compiler.interval import Interval
from halofx.compiler.ops.conv import conv_map, per_dim, spatial
from halofx.compiler.ops.pool_max import dims_of
from halofx.compiler.ops.reduce import HALVES
from halofx.compiler.rules import Call, Local, Sample, Spec, rule

aten = torch.ops.aten
POOLS: tuple[Any, ...] = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)


@dataclass(frozen=True, slots=True)
class Window:
    """The windows of one dim of an average pool: ``s*o - p .. s*o - p + k - 1`` for the outputs ``first:last``."""

    kernel: int
    stride: int
    padding: int
    extent: int
    first: int
    last: int
    include_pad: bool

    def is_full(self) -> bool:
        """Whether every window divides by the whole kernel."""
        reach = self.padding if self.include_pad else 0
        first, last = (self.stride * o - self.padding for o in (self.first, self.last - 1))
        return first >= -reach and last + self.kernel <= self.extent + reach

    def sizes(self, device: torch.device) -> Tensor:
        """How many elements of this dim each window counts [last - first]."""
        start = torch.arange(self.first, self.last, device=device) * self.stride - self.padding
        stop = (start + self.kernel).clamp(max=self.extent + self.padding)
        return stop - start if self.include_pad else stop.clamp(max=self.extent) - start.clamp(min=0)


def _sample(rng: Random) -> Sample:
    n = rng.choice((1, 2, 3, 3))
    k, s = ([rng.randint(1, hi) for _ in range(n)] for hi in (4, 3))
    p = [rng.randint(0, v // 2) for v in k]
    size = [rng.randint(k[i] if n == 3 else max(1, k[i] - 2 * p[i]), 10) for i in range(n)]
    ceil, include = rng.random() < 0.4, rng.random() < 0.5
    divisor = (rng.choice([rng.randint(1, 9), None, None, None]),) if n > 1 else ()
    lead = (rng.randint(1, 2), rng.randint(1, 2))[rng.choice((0, 0, 0, 1)) :]
    label = f"avg_pool{n}d k{k} s{s} p{p} ceil={ceil} include={include} {divisor}"
    make = {0: lambda shape: torch.randint(-99, 99, shape)} if rng.random() < 0.1 else {}
    return Sample(lambda x: POOLS[n - 1](x, k, s, p, ceil, include, *divisor), ((*lead, *size),), make, label)


@rule(aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default, samples=_sample)
def avg_pool(call: Call) -> Spec:
    """y[n, c, o] = 1 / size(o) sum over 0 <= j < k of x[n, c, s o - p + j]"""
    x, dims = call["self"], _dims(call)
    pattern, windows = dims_of(x, dims), geometry(call, [Interval(0, 0)] * dims)
    return Spec(
        ins={"self": pattern},
        outs=[pattern],
        maps={n: conv_map(w.kernel, w.stride, w.padding, 1) for n, w in zip(spatial(dims), windows, strict=True)},
        local=_local,
        flops=call.outs[0].numel * math.prod(w.kernel for w in windows),
        saves=("self",),
    )


def _dims(call: Call) -> int:
    return int(call.target._schema.name[-2])


def geometry(call: Call, outs: Sequence[Interval]) -> list[Window]:
    """The windows of an average pool call, dim by dim, for some outputs of each dim."""
    dims = len(outs)
    kernel = per_dim(call["kernel_size"], dims)
    stride, padding = per_dim(call["stride"] or kernel, dims), per_dim(call["padding"], dims)
    extents = call["self"].shape[-dims:]
    numbers = zip(kernel, stride, padding, extents, outs, strict=True)
    return [Window(k, s, p, n, out.start, out.stop, call["count_include_pad"]) for k, s, p, n, out in numbers]


def _local(local: Local) -> Call:
    """Split dims come with their padding, filled with zeros; border ranks mind the divisors."""
    call, names = local.call, spatial(_dims(local.call))
    windows = geometry(call, [local.out(n) for n in names])
    split = [local.is_split(n) for n in names]
    padding = [0 if cut else w.padding for cut, w in zip(split, windows, strict=True)]
    full = all(w.is_full() for cut, w in zip(split, windows, strict=True) if cut)
    if full or call.args.get("divisor_override") is not None:
        return call.with_(padding=padding)
    arguments = {"padding": padding, "ceil_mode": call["ceil_mode"], "windows": [astuple(w) for w in windows]}
    return call.with_(target=counted_avg_pool, input=call["self"], **arguments)


def counted_avg_pool(
    input: Tensor, padding: Sequence[int], ceil_mode: bool, windows: Sequence[tuple[int, int, int, int, int, int, bool]]
) -> Tensor:
    """An average pool [.., o] of a piece of a tensor, ``windows`` the fields of a `Window` a dim, global positions."""
    dims = [Window(*w) for w in windows]
    x, dtype = input, input.dtype
    if dtype in HALVES:  # a sum would round, or overflow
        tiny = input.detach().new_zeros([1] * (len(dims) + 2))
        x, dtype = input.float(), POOLS[len(dims) - 1](tiny, 1).dtype  # that of the op under autocast
    kernel, stride = [w.kernel for w in dims], [w.stride for w in dims]
    if len(dims) == 1:
        total = F.avg_pool2d(x.unsqueeze(-1), (*kernel, 1), (*stride, 1), (*padding, 0), ceil_mode, True, 1).squeeze(-1)
    else:
        total = POOLS[len(dims) - 1](x, kernel, stride, list(padding), ceil_mode, True, 1)
    count = torch.ones((), dtype=torch.int64, device=x.device)
    for w in dims:
        count = count.unsqueeze(-1) * w.sizes(x.device)
    return (total / count if total.is_floating_point() else total.div(count, rounding_mode="trunc")).to(dtype)
