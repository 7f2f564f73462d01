"""Fourier transforms: the dims that are transformed are whole, all others may be split."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import Tensor

from halofx.compiler.index_map import IndexMap
from halofx.compiler.ops.dims import as_it_is, pattern, wrap_all
from halofx.compiler.ops.samples import random_shape
from halofx.compiler.rules import Call, Local, Sample, Spec, rule

aten = torch.ops.aten

ONE_DIM = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
MANY_DIMS = tuple(f"{name}{many}" for name in ONE_DIM for many in ("2", "n"))


def _samples(rng: Random) -> Sample:
    shape = random_shape(rng, 2, 4, 6)
    norm = rng.choice([None, "ortho", "forward"])
    if rng.random() < 0.5:
        name, dim = rng.choice(ONE_DIM), rng.randrange(-len(shape), len(shape))
        options: dict[str, Any] = {"dim": dim, "n": rng.choice([None, None, 4, 5])}
        shape = tuple(max(n, 2) if i == dim % len(shape) else n for i, n in enumerate(shape))
    else:
        name, dims = rng.choice(MANY_DIMS), tuple(rng.sample(range(len(shape)), 2))
        shape = tuple(max(n, 2) if i in dims else n for i, n in enumerate(shape))
        options = {"dim": dims, "s": rng.choice([None, None, (4, 3)])}
        if name[-1] == "n" and rng.random() < 0.2:
            options = {}
            shape = tuple(max(n, 2) for n in shape)
    transform = getattr(torch.fft, name)

    def function(x: Tensor) -> Tensor:
        y = transform(x, norm=norm, **options)
        return torch.view_as_real(y.resolve_conj()) if y.is_complex() else y

    return Sample(function, (shape,), label=f"{name} {options} {norm}")


@rule(*(getattr(aten, f"fft_{name}").default for name in (*ONE_DIM, *MANY_DIMS)), samples=_samples)
def fft(call: Call) -> Spec:
    """y[k] = sum over n of x[n] exp(-2 pi i k n / N), in some dims"""
    x = call["self"]
    dims = pattern(x.ndim, transformed(call))
    return Spec(ins={"self": dims}, outs=[dims], flops=5 * max(x.numel, call.outs[0].numel), saves=())


def transformed(call: Call) -> tuple[int, ...]:
    """The dims that a transform runs over."""
    ndim, dim = call["self"].ndim, call["dim"]
    if dim is not None:
        return wrap_all(dim, ndim)
    sizes = call.args.get("s")
    return tuple(range(ndim - len(sizes) if sizes is not None else 0, ndim))


def _shift_samples(rng: Random) -> Sample:
    shape = random_shape(rng)
    op = rng.choice([torch.fft.fftshift, torch.fft.ifftshift])
    dim = rng.choice([None, rng.randrange(len(shape)), rng.sample(range(len(shape)), rng.randint(1, len(shape)))])
    return Sample(lambda x: op(x, dim), (shape,), label=f"{op.__name__} {dim}")


@rule(aten.fft_fftshift.default, aten.fft_ifftshift.default, samples=_shift_samples)
def fft_shift(call: Call) -> Spec:
    """y[o] = x[o - N // 2 mod N], the inverse x[o + N // 2 mod N]: a roll, which the movement does where a dim is split"""
    x, sign = call["self"], 1 if call.target is aten.fft_ifftshift.default else -1
    shifts = {d: sign * (x.shape[d] // 2) for d in _shifted(call)}
    maps = {f"d{d}": IndexMap(1, 1, n, n, "circular") for d, n in shifts.items()}
    return Spec(ins={"self": pattern(x.ndim)}, outs=[pattern(x.ndim)], maps=maps, local=_unshifted, flops=0)


def _shifted(call: Call) -> tuple[int, ...]:
    ndim, dim = call["self"].ndim, call["dim"]
    return tuple(range(ndim)) if dim is None else wrap_all(dim, ndim)


def _unshifted(local: Local) -> Call:
    """Shift the dims that are not split."""
    call = local.call
    rest = [d for d in _shifted(call) if not local.is_split(f"d{d}")]
    return call.with_(dim=rest) if rest else call.with_(target=as_it_is, input=call["self"])
