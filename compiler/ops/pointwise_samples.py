"""Elementwise functions with the domains of their arguments, for the generated tests of the one rule that all have.

Each is called with shapes that broadcast, numbers in place of tensors and other dtypes, as its arguments allow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halofx.compiler.ops.samples import Make, booleans, integers, positive, random_shape
from halofx.compiler.rules import Sample

small = integers(1, 7)
signed = integers(-6, 7)


def above_one(shape: torch.Size) -> Tensor:
    """Floats between 1.05 and 2."""
    return 1.0 + positive(shape)


def odd_floats(shape: torch.Size) -> Tensor:
    """Floats with NaN and infinities."""
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, 1.5, -2.0], dtype=torch.float64)
    return values[torch.randint(0, 6, shape)]


def away_from_zero(shape: torch.Size) -> Tensor:
    """Floats whose absolute value is between 0.5 and 1.45."""
    return (positive(shape) + 0.5) * (torch.randint(0, 2, shape).double() * 2 - 1)


@dataclass(frozen=True)
class Elementwise:
    """A function of tensors, and what each of its arguments is made of (None: standard normal)."""

    name: str
    function: Callable[..., Any]
    makes: tuple[Make | None, ...]


def _unary(make: Make | None, source: Any, names: str) -> list[Elementwise]:
    return [Elementwise(name, getattr(source, name), (make,)) for name in names.split()]


def _binary(first: Make | None, second: Make | None, source: Any, names: str) -> list[Elementwise]:
    return [Elementwise(name, getattr(source, name), (first, second)) for name in names.split()]


def _all(**functions: tuple[Any, ...]) -> list[Elementwise]:
    return [Elementwise(name, function, tuple(makes)) for name, (function, *makes) in functions.items()]


COMPARISONS = "eq ne lt le gt ge greater greater_equal less less_equal not_equal"

ELEMENTWISE: tuple[Elementwise, ...] = (
    *_unary(None, torch, "abs absolute neg negative positive sign sgn square exp expm1 exp2 sin cos tan atan arctan sinh cosh"),
    *_unary(None, torch, "tanh asinh arcsinh erf erfc sigmoid sinc floor ceil round trunc fix frac deg2rad rad2deg signbit i0"),
    *_unary(odd_floats, torch, "isnan isinf isfinite isposinf isneginf isreal nan_to_num logical_not"),
    *_unary(positive, torch, "log log2 log10 log1p sqrt rsqrt reciprocal lgamma digamma asin acos arcsin arccos"),
    *_unary(positive, torch, "erfinv angle atanh arctanh logit"),
    *_unary(above_one, torch, "acosh arccosh"),
    *_unary(small, torch, "bitwise_not"),
    *_unary(positive, torch.special, "entr erfcx ndtri log_ndtr ndtr expit gammaln psi digamma i0e i1 i1e sinc round exp2 expm1"),
    *_unary(positive, torch.special, "erf erfc log1p logit i0"),
    *_unary(None, F, "relu relu6 elu selu celu gelu silu mish hardswish hardsigmoid hardtanh softplus softsign"),
    *_unary(None, F, "tanhshrink logsigmoid softshrink hardshrink leaky_relu"),
    *_binary(None, None, torch, "add sub subtract mul multiply maximum minimum fmax fmin hypot logaddexp logaddexp2"),
    *_binary(None, None, torch, "copysign atan2 arctan2 isclose nextafter"),
    *_binary(None, away_from_zero, torch, "div divide true_divide fmod remainder"),
    *_binary(positive, positive, torch, "pow float_power xlogy"),
    *_binary(positive, positive, torch.special, "xlogy xlog1py"),
    *_binary(signed, signed, torch, COMPARISONS),
    *_binary(None, None, torch, COMPARISONS),
    *_binary(signed, small, torch, "floor_divide gcd lcm remainder fmod bitwise_and bitwise_or bitwise_xor heaviside"),
    *_binary(small, small, torch, "bitwise_left_shift bitwise_right_shift"),
    *_binary(booleans, booleans, torch, "logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor add mul"),
    *_binary(None, signed, torch, "add sub mul maximum"),
    *_all(
        rsub=(lambda x: 1.0 - x, None), rsub_tensor=(torch.rsub, None, None), scalar_power=(lambda x: x**3, None),
        power_of=(lambda x: 2.0**x, None), add_scaled=(lambda x, y: torch.add(x, y, alpha=-0.5), None, None),
        scalars=(lambda x: (x * 2 + 1) / 3 - 0.5, None), floor_mod=(lambda x: x.detach() // 0.7 + x % 0.7, None),
        true_integer_division=(lambda x, y: x / y, signed, small), integer_and_scalar=(lambda x: (x & 3) | 8, small),
        divide_floor=(lambda x, y: torch.div(x, y, rounding_mode="floor"), None, away_from_zero),
        divide_trunc=(lambda x: torch.div(x, 0.3, rounding_mode="trunc"), None),
        divide_mode=(lambda x, y: torch.divide(x, y, rounding_mode="floor"), None, away_from_zero),
        compare_scalar=(lambda x: (x > 0.5) | (x <= -0.5) & (x != 0), None), shift=(lambda x: (x << 2) >> 1, small),
        clamp=(lambda x: x.clamp(-0.5, 0.7), None), clamp_below=(lambda x: x.clamp(min=0.1), None),
        clamp_min=(lambda x: torch.clamp_min(x, 0.2), None), clamp_max=(lambda x: torch.clamp_max(x, 0.2), None),
        clamp_tensor=(lambda x, a, b: (x + 0 * a).clamp(a, b), None, None, None), clip=(lambda x: x.clip(max=0.3), None),
        lerp=(torch.lerp, None, None, positive), lerp_scalar=(lambda x, y: torch.lerp(x, y, 0.3), None, None),
        addcmul=(lambda x, y, z: torch.addcmul(x, y, z, value=0.3), None, None, None),
        addcdiv=(lambda x, y, z: torch.addcdiv(x, y, z, value=0.3), None, None, away_from_zero),
        where=(torch.where, booleans, None, None), where_number=(lambda c, x: torch.where(c, x, 0.5), booleans, None),
        number_where=(lambda c, x: torch.where(c, 0.5, x), booleans, None),
        masked_fill=(lambda x, m: (x + m).masked_fill(m, -1.0), None, booleans),
        polygamma=(lambda x: torch.polygamma(2, x), positive), mvlgamma=(lambda x: torch.mvlgamma(x, 2), above_one),
        special_polygamma=(lambda x: torch.special.polygamma(1, x), positive),
        multigammaln=(lambda x: torch.special.multigammaln(x, 2), above_one),
        zeta=(lambda x: torch.special.zeta(2.5, x), above_one),
        gammainc=(lambda x: torch.special.gammainc(x.detach(), x), positive),
        gammaincc=(lambda x: torch.special.gammaincc(x.detach(), x), positive), logit_eps=(lambda x: x.logit(0.2), positive),
        gelu_tanh=(lambda x: F.gelu(x, approximate="tanh"), None), threshold=(lambda x: F.threshold(x, 0.1, 20.0), None),
        elu_alpha=(lambda x: F.elu(x, 1.7), None), softplus_beta=(lambda x: F.softplus(x, 2.0, 1.0), None),
        rrelu_eval=(lambda x: F.rrelu(x, 0.1, 0.3, False), None), leaky=(lambda x: F.leaky_relu(x, 0.3), None),
        round_decimals=(lambda x: torch.round(x, decimals=1), None),
        nan_to_number=(lambda x: x.nan_to_num(1.0, 2.0, 3.0), odd_floats),
        ldexp=(torch.ldexp, None, signed), frexp=(lambda x: torch.frexp(x.detach()), None),
        xlogy_number=(lambda x: torch.xlogy(2.0, x), positive), xlogy_of=(lambda x: torch.special.xlogy(x, 3.0), positive),
        quantize=(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 2, -8, 7), None),
        compose=(lambda x, y: F.silu(x * torch.sigmoid(y)) + x.tanh(), None, None),
        complex_product=(lambda x, y: torch.view_as_real(torch.complex(x, y) * torch.polar(x.abs() + 1, y)), None, None),
    ),
)  # fmt: skip
"""Every elementwise function that the generated tests call."""


def elementwise_sample(rng: Random, chosen: Elementwise) -> Sample:
    """A random case of one function: operands broadcast to each other; sometimes the first is the small one."""
    full = random_shape(rng)
    shapes = [full if i == 0 else _smaller(rng, full) for i in range(len(chosen.makes))]
    if len(shapes) > 1 and rng.random() < 0.3:
        shapes[0], shapes[1] = shapes[1], shapes[0]
    make = {i: m for i, m in enumerate(chosen.makes) if m is not None}
    return Sample(chosen.function, tuple(shapes), make, chosen.name)


def _smaller(rng: Random, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to another."""
    if rng.random() < 0.4:
        return shape
    return tuple(1 if rng.random() < 0.3 else n for n in shape[rng.randint(0, len(shape)) :])


def pointwise_sample(rng: Random) -> Sample:
    """A random case of a random elementwise function."""
    return elementwise_sample(rng, rng.choice(ELEMENTWISE))


def replaced_sample(rng: Random) -> Sample:
    """A value written to without gradient, which a capture makes a ``replace_value``."""

    def function(x: Tensor) -> Tensor:
        y = x * 1.5
        with torch.no_grad():
            y.clamp_(-0.5, 0.7)
        return y * y

    return Sample(function, (random_shape(rng),), label="clamped without gradient")
