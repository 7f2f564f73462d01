"""Building nodes: the one place where a pass or a rule's decomposition adds an op to a graph."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten

from halofx.compiler.rules import Operand, bind_arguments, signature

INHERITED = ("source", "region", "module", "each")
"""The facts that the ops of a decomposition take over."""


class Emit:
    """Adds ops before a node, on behalf of it: ``emit(aten.mul.Tensor, x, 2.0)`` returns the result as an `Operand`.

    Arguments may be operands; the shapes of the result come from running the op on fake tensors. New nodes take over the
    source line of ``node`` and are labeled ``<label of node>.<op>`` (an op's own name at the end of the label is dropped, a
    second one of a kind is numbered).
    """

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        self.base = label_of(node).removesuffix(f".{name_of(node.target)}")
        self.made = Counter[str]()

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        graph = self.node.graph
        unwrap = lambda a: a.node if isinstance(a, Operand) else a  # noqa: E731
        args, kwargs = fx.node.map_aggregate(args, unwrap), fx.node.map_aggregate(kwargs, unwrap)
        label = f"{self.base}.{name_of(target)}"
        self.made[label] += 1
        label += str(self.made[label]) if self.made[label] > 1 else ""
        with graph.inserting_before(self.node):
            made = new_call(graph, target, args, kwargs, label)
        made.meta.update({key: self.node.meta[key] for key in INHERITED if key in self.node.meta})
        return operands(made)


def operands(node: fx.Node) -> Any:
    """The value of a node as an `Operand`; a tuple of them (with their getitem nodes) when it has several outputs."""
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        return Operand(tuple(value.shape), value.dtype, node)
    with after(node):
        return tuple(operands(getitem(node, i)) for i in range(len(value)))


def getitem(node: fx.Node, index: int) -> fx.Node:
    """A new node for one output of a node with several, at the insertion point."""
    made = node.graph.call_function(operator.getitem, (node, index))
    made.meta.update(val=node.meta["val"][index], label=f"{label_of(node)}.{index}", source=node.meta.get("source"))
    return made


@contextmanager
def after(node: fx.Node) -> Iterator[None]:
    """Insert right after a node."""
    with node.graph.inserting_after(node):
        yield


def new_call(graph: fx.Graph, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], label: str) -> fx.Node:
    """A call node at the insertion point, its ``val`` computed on fake tensors."""
    node = graph.create_node("call_function", target, tuple(args), dict(kwargs), name=identifier(label))
    fakes = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    node.meta["val"] = _value(target, *fakes)
    node.meta["label"] = label
    return node


def _value(target: Any, args: Any, kwargs: Any) -> Any:
    """The result of an op on fake tensors; of equal calls in one capture the same: layers repeat, and fakes are slow."""
    leaves, spec = tree_flatten((args, kwargs))
    mode = next((leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor)), None)
    known: dict[Any, Any] = (
        vars(mode).setdefault("_halofx_values", {}) if mode is not None else {}
    )  # lives as long as it
    described = [
        (tuple(v.shape), v.stride(), v.dtype, v.device) if isinstance(v, torch.Tensor) else (type(v), repr(v))
        for v in leaves
    ]
    key = (target, str(spec), tuple(described), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"))
    if key not in known:
        with torch.no_grad():
            known[key] = target(*args, **kwargs)
    return known[key]


def identifier(label: str) -> str:
    """A Python identifier for a label: ``enc.conv`` -> ``enc_conv``."""
    name = "".join(c if c.isalnum() else "_" for c in label)
    return name if name[:1].isalpha() else f"n_{name}"


def label_of(node: fx.Node) -> str:
    """The display name of a node."""
    return str(node.meta.get("label", node.name))


def name_of(target: Any) -> str:
    """The short name of an op: ``conv3d``."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[1]
    return str(getattr(target, "__name__", target)).strip("_")


def full_name(target: Any) -> str:
    """The name under which the op table knows an op: ``aten.conv3d.default``, ``halofx.compiler.functional.batch_norm_train``."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


def is_getitem(node: fx.Node) -> bool:
    """Whether a node picks one output of another."""
    return node.op == "call_function" and node.target is operator.getitem


def positional(target: Any, arguments: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by name as ``(args, kwargs)`` of a call, what equals the defaults left out at the end."""
    keyword_only = (
        {a.name for a in target._schema.arguments if a.kwarg_only}
        if isinstance(target, torch._ops.OpOverload)
        else frozenset()
    )
    names = [(name, default) for name, default in signature(target) if name in arguments]
    place = [(name, default) for name, default in names if name not in keyword_only]
    while place and same(arguments[place[-1][0]], place[-1][1]):
        place.pop()
    rest = {n: arguments[n] for n, d in names if n in keyword_only and not same(arguments[n], d)}
    return tuple(arguments[name] for name, _ in place), rest


def same(value: Any, default: Any) -> bool:
    """Whether an argument equals its default (never true of nodes and operands)."""
    if isinstance(value, (fx.Node, Operand)) or isinstance(default, (fx.Node, Operand)):
        return False
    return type(value) is type(default) and bool(value == default)


def set_operands(node: fx.Node, changes: Mapping[str, fx.Node]) -> None:
    """Replace tensor arguments of a node, by key (``"input"``, ``"tensors.0"``)."""
    arguments = bind_arguments(node.target, node.args, node.kwargs)
    for key, value in changes.items():
        name, _, index = key.partition(".")
        if index:
            items = list(arguments[name])
            items[int(index)] = value
            arguments[name] = items
        else:
            arguments[name] = value
    node.args, node.kwargs = positional(node.target, arguments)


def operand_nodes(node: fx.Node) -> dict[str, fx.Node]:
    """The nodes that a call's tensor arguments are, by key."""
    found: dict[str, fx.Node] = {}
    for name, value in bind_arguments(node.target, node.args, node.kwargs).items():
        if isinstance(value, fx.Node):
            found[name] = value
        elif isinstance(value, (tuple, list)):
            found.update({f"{name}.{i}": v for i, v in enumerate(value) if isinstance(v, fx.Node)})
    return found
