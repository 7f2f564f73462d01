"""The op without side effects that computes what an in-place op writes.

add_(x, y)         ->  add(x, y)                 copy_(x, y)        ->  y
div(x, y, out=z)   ->  div(x, y)                 fill_(x, 3)        ->  full([2, 4], 3)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from halofx.compiler.capture.views import aten, complete


@dataclass(frozen=True)
class Written:
    """What is written, yet to be cast and expanded to its target: the value of a node, or ``op(*args, **kwargs)``.

    ``detached``: the op has no derivative, where the in-place op has one of zero.
    """

    op: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    value: fx.Node | None = None
    detached: bool = False


def functional_form(op: Any, node: fx.Node) -> Written | None:
    """What the recorded in-place call writes; None when ATen has no such op."""
    args, kwargs = complete(op, node.args, node.kwargs)
    if op is aten.copy_.default:
        return Written(value=args[1])
    if op is aten.fill_.Tensor:
        return Written(value=args[1])
    if op in (aten.zero_.default, aten.fill_.Scalar):
        fill = args[1] if len(args) > 1 else 0
        return Written(aten.full.default, (_shape(args[0]), fill), _typed(args[0]))
    if op is getattr(aten.random_, "from"):  # its own functional form has an overload name that is a Python keyword
        _, low, high = args
        return None if high is None else Written(aten.randint.low, (low, high, _shape(args[0])), _typed(args[0]))
    outs = {a.name for a in op._schema.arguments if a.kwarg_only and a.is_out}
    found = _overload(op, outs)
    if found is None:
        return None
    rest = {k: v for k, v in kwargs.items() if k not in outs}
    return Written(found, args, rest, detached=op._schema.name in _RANDOM_FILLS)


_RANDOM_FILLS = frozenset(
    f"aten::{name}_"
    for name in ("bernoulli", "uniform", "normal", "exponential", "geometric", "cauchy", "log_normal", "random")
)


def factory_form(node: fx.Node) -> Written | None:
    """One spelling for constant tensors; None for other ops.

    ``x.new_zeros([3])`` -> ``zeros([3], dtype=..., device=...)``, which does not depend on x; memory that nobody
    has written (``empty``) is zero, so that all ranks agree.
    """
    if node.target in (aten.empty_like.default, aten.zeros_like.default):
        return Written(aten.zeros_like.default, (node.args[0],), _typed(node))
    op: Any = _FACTORIES.get(node.target)
    if op is None:
        return None
    fill = complete(node.target, node.args, node.kwargs)[0][-1:] if op is aten.full.default else ()
    return Written(op, (_shape(node), *fill), _typed(node))


def _shape(node: fx.Node) -> list[int]:
    return list(node.meta["val"].shape)


def _typed(node: fx.Node) -> dict[str, Any]:
    val = node.meta["val"]
    return {"dtype": val.dtype, "device": val.device}


_FACTORIES: dict[Any, Any] = {
    **dict.fromkeys((aten.zeros.default, aten.new_zeros.default, aten.new_empty.default), aten.zeros.default),
    **dict.fromkeys((aten.empty.memory_format, aten.empty_strided.default), aten.zeros.default),
    **dict.fromkeys((aten.empty_permuted.default, aten.new_empty_strided.default), aten.zeros.default),
    **dict.fromkeys((aten.ones.default, aten.new_ones.default), aten.ones.default),
    **dict.fromkeys((aten.full.default, aten.new_full.default), aten.full.default),
}


def _overload(op: Any, outs: set[str]) -> Any:
    """The overload that takes the same arguments and writes to nothing; the one of the same name if there is one."""
    packet = _packet(op, outs)
    if packet is None:
        return None
    wanted = _arguments(op, outs)
    same_name = [op._overloadname] if op._overloadname in packet.overloads() else []
    for name in [*same_name, *packet.overloads()]:
        candidate = getattr(packet, name)
        if not candidate._schema.is_mutable and _arguments(candidate, set()) == wanted:
            return candidate
    return None


def _arguments(op: Any, outs: set[str]) -> list[tuple[str, str]]:
    """Names and types of the arguments; the first is called ``self`` or ``input`` as it happens."""
    found = [(a.name, str(a.type)) for a in op._schema.arguments if a.name not in outs]
    return [("", found[0][1]), *found[1:]] if found else []


def _packet(op: Any, outs: set[str]) -> Any:
    """The family of ops to look in: ``add`` for ``add_``, ``__and__`` for ``__iand__``, itself for ``out=``."""
    namespace, _, name = op._schema.name.partition("::")
    if not outs and name.startswith("__i") and name.endswith("__"):
        name = f"__{name[3:]}"
    elif not outs:
        name = {"normal_": "normal_functional"}.get(name, name.removesuffix("_"))
    return getattr(getattr(torch.ops, namespace), name, None)
