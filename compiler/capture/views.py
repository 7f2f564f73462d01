"""Views: one spelling for each, how to derive one from its parent, and how to write through one.

y.flatten(1)      ->  reshape(y, [2, 12])              and back:  reshape(v, [2, 3, 4])
y.transpose(1,2)  ->  permute(y, [0, 2, 1])                       permute(v, [0, 2, 1])
y[:, 1:3]         ->  slice(y, 1, 1, 3, 1)                        slice_scatter(y, v, 1, 1, 3, 1)
y.chunk(2, 1)[1]  ->  slice(y, 1, 2, 4, 1)                        slice_scatter(y, v, 1, 2, 4, 1)
y[:, 1]           ->  select(y, 1, 1)                             select_scatter(y, v, 1, 1)
y.detach()        ->  detach(y)                                   replace_value(y, v)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

Tail = tuple[Any, ...]


@dataclass(frozen=True)
class Step:
    """One view op, ``op(x, *tail)``."""

    op: Any
    tail: Tail


DETACH = Step(aten.detach.default, ())


@dataclass(frozen=True)
class View:
    """A value that is a view of ``parent``, by one step or several; by none it is the parent itself."""

    parent: fx.Node
    steps: tuple[Step, ...]


def complete(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """All positional arguments of an op, defaults filled in; keyword-only ones as given.

    >>> complete(aten.add.Tensor, ("x",), {"other": 1})
    (('x', 1), {})
    >>> complete(aten.softmax.int, ("x",), {"dim": 1})
    (('x', 1, None), {})
    """
    rest = dict(kwargs)
    full = list(args)
    for argument in op._schema.arguments[len(args) :]:
        if argument.kwarg_only:
            break
        full.append(rest.pop(argument.name, argument.default_value))
    return tuple(full), rest


def canonical(node: fx.Node) -> tuple[fx.Node, tuple[Step, ...]] | None:
    """The input and steps of a view op in its one spelling; None for any other op.

    Also for those that copied this time, as ``reshape`` may. The item of a list of views counts as a view.
    """
    if node.op != "call_function":
        return None
    if isinstance(node.target, torch._ops.OpOverload):
        rule, source = _VIEWS.get(_name(node.target)), node
        if node.target in (aten.view.dtype, aten.narrow.Tensor):
            rule = None
    elif isinstance(node.args[0], fx.Node) and isinstance(node.args[0].target, torch._ops.OpOverload):
        rule, source = _ITEMS.get(_name(node.args[0].target)), node.args[0]
    else:
        return None
    if rule is None:
        return None
    args, kwargs = complete(source.target, source.args, source.kwargs)
    inputs = args[0][node.args[1]] if isinstance(args[0], (list, tuple)) else args[0]  # type: ignore[index]
    if not isinstance(inputs, fx.Node):
        return None
    index = node.args[1] if source is not node else None
    steps = rule(_Call(inputs.meta["val"], node.meta["val"], args, kwargs, index, source))
    return None if steps is None else (inputs, tuple(s for s in steps if s is not None))


def _name(op: Any) -> str:
    """The name of an ATen op without overload and without the underscore of in-place ops; others have none."""
    namespace, _, name = op._schema.name.partition("::")
    return name.rstrip("_") if namespace == "aten" else ""


@dataclass(frozen=True)
class _Call:
    """A call of a view op: its fake input and output, all arguments, and the index into a list of outputs."""

    x: Tensor
    out: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: Any
    source: fx.Node


Steps = list["Step | None"] | None


def _reshape(call: _Call) -> Steps:
    same = call.out.shape == call.x.shape
    return [] if same else [Step(aten.reshape.default, (list(call.out.shape),))]


def _permuted(dims: list[int]) -> Steps:
    same = dims == list(range(len(dims)))
    return [] if same else [Step(aten.permute.default, (dims,))]


def _permute(call: _Call) -> Steps:
    return _permuted([d % call.x.ndim for d in call.args[1]])


def _transpose(call: _Call) -> Steps:
    dims = list(range(call.x.ndim))
    if dims:
        a, b = call.args[1] % len(dims), call.args[2] % len(dims)
        dims[a], dims[b] = dims[b], dims[a]
    return _permuted(dims)


def _reverse(call: _Call) -> Steps:
    return _permuted(list(range(call.x.ndim))[::-1])


def _matrix_transpose(call: _Call) -> Steps:
    dims = list(range(call.x.ndim))
    return None if call.x.is_complex() else _permuted([*dims[:-2], dims[-1], dims[-2]])


def _movedim(call: _Call) -> Steps:
    n = call.x.ndim
    pairs = [[v] if isinstance(v, int) else list(v) for v in call.args[1:3]]
    source, target = ([d % n for d in dims] for dims in pairs)
    rest = iter(d for d in range(n) if d not in source)
    placed = dict(zip(target, source, strict=True))
    return _permuted([placed[d] if d in placed else next(rest) for d in range(n)])


def _squeeze(call: _Call) -> Steps:
    asked = call.args[1] if len(call.args) > 1 else range(call.x.ndim)
    asked = [asked] if isinstance(asked, int) else asked
    dims = sorted({d % call.x.ndim for d in asked} if call.x.ndim else ())
    dims = [d for d in dims if call.x.shape[d] == 1]
    return [Step(aten.squeeze.dims, (dims,))] if dims else []


def _unsqueeze(call: _Call) -> Steps:
    return [Step(aten.unsqueeze.default, (call.args[1] % call.out.ndim,))]


def _expand(call: _Call) -> Steps:
    same = call.out.shape == call.x.shape
    return [] if same else [Step(aten.expand.default, (list(call.out.shape),))]


def _sliced(x: Tensor, dim: int, start: int, stop: int, step: int = 1) -> Steps:
    if (start, stop, step) == (0, x.shape[dim], 1):
        return []
    return [Step(aten.slice.Tensor, (dim, start, stop, step))]


def _slice(call: _Call) -> Steps:
    _, dim, start, stop, step = call.args
    dim %= call.x.ndim
    start, stop, _ = slice(start, stop, step).indices(call.x.shape[dim])
    return _sliced(call.x, dim, start, max(start, stop), step)


def _narrow(call: _Call) -> Steps:
    _, dim, start, length = call.args
    dim %= call.x.ndim
    start += call.x.shape[dim] if start < 0 else 0
    return _sliced(call.x, dim, start, start + length)


def _select(call: _Call) -> Steps:
    dim = call.args[1] % call.x.ndim
    return [Step(aten.select.int, (dim, call.args[2] % call.x.shape[dim]))]


def _diagonal(call: _Call) -> Steps:
    if len(call.args) != 4:
        return None
    _, offset, dim1, dim2 = call.args
    return [Step(aten.diagonal.default, (offset, dim1 % call.x.ndim, dim2 % call.x.ndim))]


def _detach(call: _Call) -> Steps:
    return [DETACH]


def _nothing(call: _Call) -> Steps:
    return []


def _split_along(dim_of: Callable[[_Call], int]) -> Callable[[_Call], Steps]:
    """Item ``index`` of a list of slices: it starts where the ones before it end."""

    def rule(call: _Call) -> Steps:
        dim = dim_of(call) % call.x.ndim
        parts = [part.shape[dim] for part in call.source.meta["val"]]
        start = sum(parts[: call.index])
        if sum(parts) != call.x.shape[dim]:
            return None  # tensor_split at indices that overlap
        return _sliced(call.x, dim, start, start + parts[call.index])

    return rule


def _unbind(call: _Call) -> Steps:
    return [Step(aten.select.int, (call.args[1] % call.x.ndim, call.index))]


def _meshgrid(call: _Call) -> Steps:
    count, place = len(call.args[0]), call.index
    if call.kwargs.get("indexing", "ij") == "xy" and count > 1 and place < 2:
        place = 1 - place
    ones = [1] * count
    ones[place] = call.x.numel()
    return [Step(aten.reshape.default, (ones,)), Step(aten.expand.default, (list(call.out.shape),))]


_VIEWS: dict[str, Callable[[_Call], Steps]] = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "view_as", "reshape_as"), _reshape),
    **dict.fromkeys(("flatten", "unflatten", "ravel", "_reshape_alias"), _reshape),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _transpose),
    **dict.fromkeys(("t", "numpy_T"), _reverse),
    **dict.fromkeys(("mT", "mH", "matrix_H", "adjoint"), _matrix_transpose),
    **dict.fromkeys(("movedim", "moveaxis"), _movedim),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expand),
    "permute": _permute,
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "slice": _slice,
    "narrow": _narrow,
    "select": _select,
    "diagonal": _diagonal,
    "detach": _detach,
    "alias": _nothing,
}

_last_by_rank: dict[str, Callable[[_Call], int]] = {
    "hsplit": lambda call: 0 if call.x.ndim == 1 else 1,
    "vsplit": lambda call: 0,
    "dsplit": lambda call: 2,
}

_ITEMS: dict[str, Callable[[_Call], Steps]] = {
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), _split_along(lambda call: int(call.args[2]))),
    **dict.fromkeys(("unsafe_split", "unsafe_split_with_sizes"), _split_along(lambda call: int(call.args[2]))),
    **dict.fromkeys(("unsafe_chunk", "tensor_split"), _split_along(lambda call: int(call.args[2]))),
    **{name: _split_along(dim) for name, dim in _last_by_rank.items()},
    "unbind": _unbind,
    "meshgrid": _meshgrid,
    "broadcast_tensors": _expand,
}


def inverse(step: Step, parent: Tensor, view: Tensor) -> tuple[str, Any, Tail] | None:
    """How a value written to a view becomes the parent's value; None where it cannot be said exactly.

    ``("view", op, tail)`` is ``op(value, *tail)``; ``("scatter", op, tail)`` is ``op(parent, value, *tail)``.
    """
    if step.op in _SCATTERS:
        return "scatter", _SCATTERS[step.op], step.tail
    if step.op is aten.permute.default:
        (dims,) = step.tail
        return "view", aten.permute.default, ([dims.index(d) for d in range(len(dims))],)
    if step.op is aten.unsqueeze.default:
        return "view", aten.squeeze.dims, ([step.tail[0]],)
    if step.op in (aten.reshape.default, aten.squeeze.dims) or (parent.numel() == view.numel() and step.op in _SAME):
        return "view", aten.reshape.default, (list(parent.shape),)
    return None


_SAME = (aten.expand.default,)  # without repetition an expand only adds dims of size 1

_SCATTERS = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}
