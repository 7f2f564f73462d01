"""Name every node after the model.

    conv3d_4 = conv3d(pad_2, p_7, p_8)      ->      enc_conv = conv3d(enc_conv_pad, enc_conv_weight, enc_conv_bias)

The value of a module call is named like the module (``enc.conv``), the ops inside it ``enc.conv.pad``, ops of the model
itself ``cat``; ``_1``, ``_2`` tell repeated calls apart. State is named by its key, inputs by forward's parameter.
"""

from __future__ import annotations

import operator
import re
from typing import Any

from torch import fx

FACTS = ("val", "label", "source", "state", "input", "region", "module")
"""The facts that capture leaves on nodes."""


class Unique:
    """Gives every name out once: a taken one gets the first free suffix."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}

    def __call__(self, name: str) -> str:
        if name not in self._next:
            self._next[name] = 1
            return name
        count = self._next[name]
        while f"{name}_{count}" in self._next:
            count += 1
        self._next[name] = count + 1
        self._next[f"{name}_{count}"] = 1
        return f"{name}_{count}"


def label_nodes(graph: fx.Graph) -> None:
    """Set ``label`` and ``source`` of every node; placeholders come first and so get their plain names."""
    unique = Unique()
    for node in graph.nodes:
        if node.op != "output":
            node.meta["label"] = unique(_name(node))
            node.meta["source"] = str(node.meta["place"]) or None
            node.meta["module"] = node.meta["place"].module
            if node.meta["place"].region is not None:
                node.meta["region"] = node.meta["place"].region


def _name(node: fx.Node) -> str:
    if node.op == "placeholder":
        return str(node.meta.get("state") or node.meta["input"])
    if node.op == "get_attr":
        return "const"
    path = node.meta.get("marked")
    if path:
        return str(path)
    module = node.meta["place"].module
    return f"{module}.{_op_name(node)}" if module else _op_name(node)


def _op_name(node: fx.Node) -> str:
    """``conv3d`` of ``aten.conv3d.default``; an item of a tuple is ``lstm.0``."""
    if "name" in node.meta:
        return str(node.meta["name"])
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return f"{_op_name(node.args[0])}.{node.args[1]}"
    schema = getattr(node.target, "_schema", None)
    name = schema.name.partition("::")[2] if schema is not None else getattr(node.target, "__name__", "op")
    return str(name).strip("_")


def rebuild(graph: fx.Graph) -> fx.Graph:
    """The same nodes in a new graph, with names made from their labels and with no facts but `FACTS`."""
    new = fx.Graph()
    of: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), of.__getitem__)
        name = "output" if node.op == "output" else _identifier(node.meta["label"])
        target: Any = node.target
        copy = of[node] = new.create_node(node.op, target, args, kwargs, name)
        copy.meta.update({k: node.meta[k] for k in FACTS if k in node.meta})
        if node.op == "placeholder":
            copy.target = copy.name
    return new


def _identifier(label: str) -> str:
    name = re.sub(r"\W", "_", label)
    return f"_{name}" if name[:1].isdigit() else name
