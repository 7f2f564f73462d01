r"""Random numbers that are a function of (seed, step, op, global index), so that a mask is the same on any mesh.

    rng = (seed << 32) + step  --mix-->  + op  --mix-->  key               one number a call and op
    x [4, 6], rank 1 of 2 holds columns 3:6                                place ((0, 4), (3, 6))

        index   0  1  2 |  3  4  5          word(index) = mix(key + (index + 1) * GAMMA)
                6  7  8 |  9 10 11
               12 13 14 | 15 16 17          a rank makes the words of its own indices: nothing is drawn in order,
               18 19 20 | 21 22 23          nothing is communicated

``mix`` is the finalizer of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014, with
Stafford's constants 13): the words of one key are the SplitMix64 sequence that starts there. Uniform numbers are their
upper 53 bits (24 in float32, 11 in half, 8 in bfloat16), normal ones the inverse of the normal distribution; decisions
compare the 53 bits, so a mask does not depend on the dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from halofx.compiler.functional import no_gradient

Place = Sequence[tuple[int, int]]
"""For every dim where this rank's part begins, and the global extent."""

CHUNK = {"cpu": 1 << 16}
"""Numbers made at once, by device; what is needed besides the result does not grow with it."""
CHUNK_ELSEWHERE = 1 << 24

CPU = torch.device("cpu")
BITS = 53
ONE = 1 << BITS
DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def _signed(word: int) -> int:
    return (word & (2**64 - 1)) - (word >> 63 & 1) * 2**64


GAMMA = _signed(0x9E3779B97F4A7C15)
_FACTORS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)))


def mix(z: Tensor) -> Tensor:
    """The finalizer of SplitMix64 on int64 numbers taken as 64 bits; overwrites ``z``.

    >>> z = torch.tensor([1, 2]) * GAMMA                           # the sequence of seed 0
    >>> [hex(v % 2**64) for v in mix(z).tolist()]
    ['0xe220a8397b1dcdaf', '0x6e789e6aa1b965f4']
    """
    for shift, factor in _FACTORS:
        z.bitwise_xor_(_shifted(z, shift)).mul_(factor)
    return z.bitwise_xor_(_shifted(z, 31))


def _shifted(z: Tensor, count: int) -> Tensor:
    """A logical shift to the right."""
    return (z >> count).bitwise_and_((1 << (64 - count)) - 1)


def key_of(rng: Tensor, op: int) -> Tensor:
    """The key of an op in one call: int64 []."""
    return mix(mix(rng + GAMMA).add_(_signed((op + 1) * GAMMA)))


def words(key: Tensor, shape: Sequence[int], place: Place, device: torch.device) -> Tensor:
    """One 64-bit word for every index of a part of a global tensor: int64 of ``shape``."""
    z, stride = key + GAMMA, 1
    if device != key.device:
        z = z.to(device)
    for dim in reversed(range(len(shape))):
        start, extent = place[dim]
        index = torch.arange(start, start + shape[dim], device=device)
        z = z + (index * _signed(stride * GAMMA)).view(-1, *(1,) * (len(shape) - 1 - dim))
        stride *= extent
    return mix(z)


# -- what becomes of a word: bits is int64, 0 <= bits < 2**53


def uniform(bits: Tensor, low: float, high: float, dtype: torch.dtype) -> Tensor:
    """Uniform in [low, high), of as many bits as the dtype has."""
    digits = DIGITS.get(dtype, 24)
    u = (bits >> (BITS - digits)).to(torch.float64) * 2.0**-digits
    return u if (low, high) == (0.0, 1.0) else u * (high - low) + low


def _inside(bits: Tensor) -> Tensor:
    """Uniform in (0, 1): the middle of one of 2**52 cells."""
    return ((bits >> 1).to(torch.float64) + 0.5) * (2.0 / ONE)


def _normal(bits: Tensor, mean: float, std: float, dtype: torch.dtype) -> Tensor:
    z: Tensor = torch.special.ndtri(_inside(bits))
    return z * std + mean


def _log_normal(bits: Tensor, mean: float, std: float, dtype: torch.dtype) -> Tensor:
    return _normal(bits, mean, std, dtype).exp()


def _exponential(bits: Tensor, rate: float, _: float, dtype: torch.dtype) -> Tensor:
    return (-_inside(bits).log() / rate).clamp(min=torch.finfo(dtype).tiny)


def _cauchy(bits: Tensor, median: float, sigma: float, dtype: torch.dtype) -> Tensor:
    return median + sigma * torch.tan(math.pi * (_inside(bits) - 0.5))


def _geometric(bits: Tensor, p: float, _: float, dtype: torch.dtype) -> Tensor:
    return (_inside(bits).log() / math.log1p(-p)).ceil().clamp(min=1) if p < 1 else torch.ones_like(bits)


def _integers(bits: Tensor, low: float, high: float, dtype: torch.dtype) -> Tensor:
    """Integers in [low, high); beyond 2**53 of them, one of 1024 apart."""
    span = int(high) - int(low)
    return (bits << 10 if span > ONE else bits) % span + int(low)


def _bernoulli(bits: Tensor, p: float, _: float, dtype: torch.dtype) -> Tensor:
    return bits < round(p * ONE)


KINDS: dict[str, Callable[[Tensor, float, float, torch.dtype], Tensor]] = {
    "uniform": uniform, "normal": _normal, "log_normal": _log_normal, "exponential": _exponential, "cauchy": _cauchy,
    "geometric": _geometric, "integers": _integers, "bernoulli": _bernoulli,
}  # fmt: skip
"""Distributions by name, each with up to two parameters."""


# -- filling tensors


def _fill(out: Tensor, key: Tensor, place: Place, make: Callable[[Tensor], Tensor]) -> Tensor:
    """Fill a tensor chunk by chunk, halving the first dim that can be halved."""
    if out.numel() <= CHUNK.get(out.device.type, CHUNK_ELSEWHERE):
        return out.copy_(make(_shifted(words(key, out.shape, place, out.device), 64 - BITS)))
    dim = next(d for d, n in enumerate(out.shape) if n > 1)
    half, (start, extent) = out.shape[dim] // 2, place[dim]
    for at, count in ((0, half), (half, out.shape[dim] - half)):
        moved = (*place[:dim], (start + at, extent), *place[dim + 1 :])
        _fill(out.narrow(dim, at, count), key, moved, make)
    return out


def _filled(out: Tensor, rng: Tensor, op: int, kind: str, a: float, b: float, place: Place | None) -> Tensor:
    if isinstance(rng, FakeTensor) or rng.is_meta:
        return out
    origin = tuple((0, n) for n in out.shape)
    return _fill(out, key_of(rng, op), place or origin, lambda bits: KINDS[kind](bits, a, b, out.dtype))


@torch.no_grad()
def draw_like(
    input: Tensor, rng: Tensor, op: int, kind: str, a: float = 0.0, b: float = 0.0, dtype: torch.dtype = torch.float32,
    place: Place | None = None,
) -> Tensor:  # fmt: skip
    """Random numbers in the shape of ``input``, whose values are not read; ``place`` says which part of it this is.

    >>> x, rng = torch.empty(4, 6), torch.tensor(1)
    >>> whole = draw_like(x, rng, 0, "bernoulli", 0.5, 0.0, torch.bool)
    >>> part = draw_like(x[:, 3:], rng, 0, "bernoulli", 0.5, 0.0, torch.bool, ((0, 4), (3, 6)))
    >>> bool((whole[:, 3:] == part).all())
    True
    """
    return _filled(input.new_empty(input.shape, dtype=dtype), rng, op, kind, a, b, place)


@torch.no_grad()
def draw(
    size: Sequence[int], rng: Tensor, op: int, kind: str, a: float = 0.0, b: float = 0.0, dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> Tensor:  # fmt: skip
    """Random numbers of a given size, whole on every rank."""
    return _filled(rng.new_empty(list(size), dtype=dtype, device=device), rng, op, kind, a, b, None)


@torch.no_grad()
def permutation(n: int, rng: Tensor, op: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A random order of ``0 .. n-1``: that of the words of n indices, which all differ."""
    if isinstance(rng, FakeTensor) or rng.is_meta:
        return rng.new_empty([n], dtype=dtype, device=device)
    return words(key_of(rng, op), (n,), ((0, n),), device).argsort(stable=True).to(dtype)


def bernoulli(input: Tensor, rng: Tensor, op: int, place: Place | None = None) -> Tensor:
    """1 with probability ``input``, else 0, in its dtype; the gradient is zero, as that of `torch.bernoulli`."""
    with torch.no_grad():
        u = draw_like(input, rng, op, "uniform", 0.0, 1.0, torch.float64, place)
        drawn = (u < input).to(input.dtype)
    return no_gradient(drawn, input)


# -- what the numbers are for


def dropout(input: Tensor, mask: Tensor, p: float) -> Tensor:
    """``input * mask / (1 - p)``."""
    return input * mask * (1.0 / (1.0 - p) if p < 1 else 0.0)


ALPHA = 1.7580993408473766
"""Minus what SELU tends to at minus infinity (Klambauer et al., "Self-normalizing neural networks", 2017)."""


def alpha_dropout(input: Tensor, mask: Tensor, p: float) -> Tensor:
    """``a * (input where mask else -ALPHA) + b`` with the a and b that keep mean 0 and variance 1."""
    if p == 1:
        return input * 0.0
    a = 1.0 / math.sqrt((ALPHA * ALPHA * p + 1.0) * (1.0 - p))
    b = ALPHA * a * p
    return torch.where(mask, input * a + b, b - ALPHA * a)


def rrelu(input: Tensor, noise: Tensor) -> Tensor:
    """``input`` where it is positive, else ``input * noise``."""
    return input * torch.where(input > 0, 1.0, noise)


def normal(mean: Tensor | float, std: Tensor | float, noise: Tensor) -> Tensor:
    """``mean + std * noise`` with a gradient of zero, as that of `torch.normal`."""
    with torch.no_grad():
        value = mean + std * noise
    for argument in (mean, std):
        value = no_gradient(value, argument) if isinstance(argument, Tensor) else value
    return value


def mask_future(input: Tensor, place: Place | None = None) -> Tensor:
    """Attention scores [..., queries, keys] with -inf where the key comes after the query."""
    (row, _), (column, _) = place[-2:] if place else ((0, 0), (0, 0))
    rows, columns = input.shape[-2:]
    later = torch.ones(rows, columns, dtype=torch.bool, device=input.device).triu(row - column + 1)
    return input.masked_fill(later, -torch.inf)
