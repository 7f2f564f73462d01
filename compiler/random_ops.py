"""What every random op becomes: plain functions of (rng, op, global index), see `halofx.compiler.random_functions`.

dropout(x, 0.5, True)   ->   mask = draw_like(x, rng, op, "bernoulli", 0.5);  dropout(x, mask, 0.5)
dropout3d(x)            ->   mask = draw([n, c, 1, 1, 1], rng, ...)           whole on every rank: it is small
randn([2, 3])           ->   draw([2, 3], rng, op, "normal", 0, 1)            whole on every rank
poisson(x)              ->   OwnWay(...)(rng, [x])                            runs whole, generator seeded alike
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from halofx.compiler import random_functions as functions
from halofx.compiler.emit import Emit, label_of, name_of, operands, positional
from halofx.compiler.rules import Call, Operand, bind_arguments

aten = torch.ops.aten


@dataclass
class Draws:
    """Adds nodes that draw random numbers in the place of one random op. ``rng`` makes the placeholder when needed."""

    node: fx.Node
    rng: Callable[[], Operand]
    op: int  # the id of the next draw: its place among the draws of the program

    @property
    def emit(self) -> Emit:
        """Adds other nodes."""
        return Emit(self.node)

    def like(self, x: Operand, kind: str, a: float = 0.0, b: float = 0.0, dtype: Any = None, part: str = "") -> Operand:
        """Random numbers in the shape of ``x``, split as ``x``."""
        return self._draw(functions.draw_like, part, x, self.rng(), self.op, kind, a, b, dtype or x.dtype)

    def new(self, size: Sequence[int], kind: str, a: float, b: float, dtype: Any, part: str = "") -> Operand:
        """Random numbers of a size: split as the operand of that shape that they meet, else whole on every rank."""
        like = self._met(tuple(size))
        if like is not None:
            return self.like(like, kind, a, b, dtype, part)
        at = (list(size), self.rng(), self.op, kind, a, b, dtype)
        return self._draw(functions.draw, part, *at, device=self.device)

    def _met(self, size: tuple[int, ...]) -> Operand | None:
        """What the result is first used with, if that has its shape and is there already: ``x + randn(x.shape)``."""
        for other in (n for user in self.node.users for n in user.all_input_nodes):
            value = other.meta.get("val")
            if isinstance(value, Tensor) and tuple(value.shape) == size and other < self.node:
                return Operand(size, value.dtype, other)
        return None

    def _draw(self, function: Any, part: str, *args: Any, **kwargs: Any) -> Operand:
        made: Operand = self.emit(function, *args, **kwargs)
        assert made.node is not None
        if part:
            made.node.meta["label"] = f"{label_of(self.node)}.{part}"
        self.op += 1
        return made

    @property
    def device(self) -> torch.device:
        """The device of the op's result."""
        value = self.node.meta["val"]
        first: Tensor = value[0] if isinstance(value, (tuple, list)) else value
        return first.device

    def own_way(self) -> Operand | tuple[Operand, ...]:
        """The op itself, whole, with its generator seeded."""
        node, rng = self.node, self.rng().node
        leaves, spec = tree_flatten((node.args, node.kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
        plain = tuple(None if isinstance(leaf, fx.Node) else leaf for leaf in leaves)
        holes = tuple(isinstance(leaf, fx.Node) for leaf in leaves)
        target = OwnWay(node.target, self.op, spec, plain, holes)
        with node.graph.inserting_before(node):
            made = node.graph.call_function(target, (rng, tensors))
        made.meta.update(node.meta)
        self.op += 1
        return operands(made)  # type: ignore[no-any-return]


Handler = Callable[[Call, Draws], "Operand | tuple[Operand, ...] | None"]
"""Emits what a random op becomes and returns the result; None leaves the op as it is."""


# -- dropout


def _mask(x: Operand, p: float, draws: Draws, whole_channels: bool = False) -> Operand:
    """True where a value (or a whole channel) is kept."""
    if whole_channels and x.ndim > 2:
        return draws.new((*x.shape[:2], *(1,) * (x.ndim - 2)), "bernoulli", 1.0 - p, 0.0, torch.bool, "mask")
    return draws.like(x, "bernoulli", 1.0 - p, dtype=torch.bool, part="mask")


def _dropout_of(function: Any, whole_channels: bool) -> Handler:
    def handler(call: Call, draws: Draws) -> Operand:
        x, p = call["input"], call["p"]
        made = draws.emit(function, x, _mask(x, p, draws, whole_channels), p) if call["train"] and p else x
        return made  # type: ignore[no-any-return]

    return handler


def _native_dropout(call: Call, draws: Draws) -> tuple[Operand, Operand]:
    x, p = call["input"], call["p"] if call["train"] is not False else 0.0
    mask = _mask(x, p, draws)
    return draws.emit(functions.dropout, x, mask, p), mask


def _rrelu(call: Call, draws: Draws) -> Operand | None:
    if not call["training"]:
        return None
    noise = draws.like(call["self"], "uniform", call["lower"], call["upper"], part="noise")
    return draws.emit(functions.rrelu, call["self"], noise)  # type: ignore[no-any-return]


def _attention(call: Call, draws: Draws) -> Operand | None:
    """softmax(q k^T scale + mask) with dropout, times v; written out, for its weights are dropped inside the op."""
    if not call["dropout_p"]:
        return None
    emit, q, k, v, mask = draws.emit, *(call[name] for name in ("query", "key", "value", "attn_mask"))
    if call["enable_gqa"]:
        k, v = (emit(aten.repeat_interleave.self_int, t, q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    q = emit(aten.mul.Tensor, q, call["scale"] or 1.0 / math.sqrt(q.shape[-1]))
    order = [*range(k.ndim - 2), k.ndim - 1, k.ndim - 2]
    weights = emit(aten.matmul.default, q, emit(aten.permute.default, k, order))
    if mask is not None and mask.dtype == torch.bool:
        weights = emit(aten.where.ScalarOther, mask, weights, -math.inf)
    elif mask is not None:
        weights = emit(aten.add.Tensor, weights, mask)
    if call["is_causal"]:
        weights = emit(functions.mask_future, weights)
    weights = emit(aten._safe_softmax.default, weights, -1)
    p = call["dropout_p"]
    return emit(aten.matmul.default, emit(functions.dropout, weights, _mask(weights, p, draws), p), v)  # type: ignore[no-any-return]


# -- numbers


def _like(kind: str, a: Any = 0.0, b: Any = 0.0) -> Handler:
    """Numbers in the shape of the first argument; the parameters are numbers, or names of arguments."""

    def handler(call: Call, draws: Draws) -> Operand:
        first, second = (float(call[v]) if isinstance(v, str) else v for v in (a, b))
        return draws.like(call["self"], kind, first, second, call.outs[0].dtype)

    return handler


def _new(kind: str, a: Any = 0.0, b: Any = 0.0) -> Handler:
    def handler(call: Call, draws: Draws) -> Operand:
        return draws.new(call["size"], kind, a, b, call.outs[0].dtype)

    return handler


def _integers(call: Call, draws: Draws) -> Operand:
    low, high, dtype = call.args.get("low", 0), call["high"], call.outs[0].dtype
    if "size" in call.args:
        return draws.new(call["size"], "integers", low, high, dtype)
    return draws.like(call["self"], "integers", low, high, dtype)


def _any_integers(call: Call, draws: Draws) -> Operand:
    """``random_()``: from 0 to the largest integer of the dtype, or to where a float still has all integers."""
    dtype = call["self"].dtype
    low, high = call.args.get("from", 0), call.args.get("to")
    if high is None:
        high = 2 ** functions.DIGITS[dtype] + 1 if dtype in functions.DIGITS else _largest(dtype)
    return draws.like(call["self"], "integers", low, high, dtype)


def _largest(dtype: torch.dtype) -> int:
    return 2 if dtype == torch.bool else min(torch.iinfo(dtype).max, 2**63 - 2) + 1


def _permutation(call: Call, draws: Draws) -> Operand:
    at = (call["n"], draws.rng(), draws.op, call.outs[0].dtype)
    return draws._draw(functions.permutation, "", *at, device=draws.device)


def _bernoulli(call: Call, draws: Draws) -> Operand:
    p = call.args.get("p", call["self"])
    if isinstance(p, Operand):
        shape, dtype = call.outs[0].shape, call.outs[0].dtype
        p = draws.emit(aten.expand.default, p, list(shape)) if p.shape != shape else p
        drawn = draws._draw(functions.bernoulli, "", p, draws.rng(), draws.op)
        return drawn if drawn.dtype == dtype else draws.emit(aten.to.dtype, drawn, dtype)
    return draws.like(call["self"], "bernoulli", p, 0.0, call.outs[0].dtype)


def _normal(call: Call, draws: Draws) -> Operand:
    mean, std, out = call["mean"], call["std"], call.outs[0]
    if "size" in call.args:
        return draws.new(call["size"], "normal", mean, std, out.dtype)
    like = next((t for t in (mean, std) if isinstance(t, Operand) and t.shape == out.shape), None)
    if like is None:
        like = draws.emit(aten.expand.default, mean, list(out.shape))
    noise = draws.like(like, "normal", 0.0, 1.0, out.dtype, "noise")
    return draws.emit(functions.normal, mean, std, noise)  # type: ignore[no-any-return]


# -- ops with a generator of their own


_SEEDING = threading.Lock()
"""Held while the global generator is seeded for one op: threads share it."""


@dataclass(frozen=True, eq=False)
class OwnWay:
    """A random op that runs whole on every rank, its generator seeded alike; takes ``(rng, tensors)``."""

    target: Any
    op: int
    spec: TreeSpec
    plain: tuple[Any, ...]  # the leaves of (args, kwargs), None in the places of tensors
    holes: tuple[bool, ...]

    @property
    def __name__(self) -> str:
        return name_of(self.target)

    def __call__(self, rng: Tensor, tensors: Sequence[Tensor]) -> Any:
        given = iter(tensors)
        leaves = [next(given) if hole else leaf for leaf, hole in zip(self.plain, self.holes, strict=True)]
        args, kwargs = tree_unflatten(leaves, self.spec)
        seed = int(functions.key_of(rng, self.op)) & (2**63 - 1)
        device = tensors[0].device
        bound = bind_arguments(self.target, args, kwargs)
        if "generator" in bound:
            args, kwargs = positional(self.target, bound | {"generator": torch.Generator(device).manual_seed(seed)})
            return self.target(*args, **kwargs)
        with _SEEDING, torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            return self.target(*args, **kwargs)


def _own_way(call: Call, draws: Draws) -> Operand | tuple[Operand, ...]:
    return draws.own_way()


def _recurrent(call: Call, draws: Draws) -> Operand | tuple[Operand, ...] | None:
    return draws.own_way() if call["dropout"] and call["train"] and call["num_layers"] > 1 else None


# -- the table


def _table() -> dict[Any, Handler]:
    found: dict[Any, Handler] = {
        aten.dropout.default: _dropout_of(functions.dropout, False),
        aten.feature_dropout.default: _dropout_of(functions.dropout, True),
        aten.alpha_dropout.default: _dropout_of(functions.alpha_dropout, False),
        aten.feature_alpha_dropout.default: _dropout_of(functions.alpha_dropout, True),
        aten.native_dropout.default: _native_dropout,
        aten.scaled_dot_product_attention.default: _attention,
    }
    by_name: dict[str, Handler] = {
        "rrelu": _rrelu, "bernoulli": _bernoulli, "normal": _normal, "randperm": _permutation,
        "rand": _new("uniform", 0.0, 1.0), "randn": _new("normal", 0.0, 1.0), "randint": _integers,
        "rand_like": _like("uniform", 0.0, 1.0), "randn_like": _like("normal", 0.0, 1.0), "randint_like": _integers,
        "uniform": _like("uniform", "from", "to"), "normal_functional": _like("normal", "mean", "std"),
        "exponential": _like("exponential", "lambd"), "cauchy": _like("cauchy", "median", "sigma"),
        "log_normal": _like("log_normal", "mean", "std"), "geometric": _like("geometric", "p"), "random": _any_integers,
        "lstm": _recurrent, "gru": _recurrent, "rnn_tanh": _recurrent, "rnn_relu": _recurrent,
    }  # fmt: skip
    for name, handler in by_name.items():
        packet = getattr(aten, name)
        for overload in (getattr(packet, name) for name in packet.overloads()):
            if not overload._schema.is_mutable:
                found[overload] = handler
    return found


_TABLE = _table()


def handler_of(target: Any) -> Handler | None:
    """What to do with an op; None for one that draws nothing."""
    if target in _TABLE:
        return _TABLE[target]
    random = isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags
    return _own_way if random else None
