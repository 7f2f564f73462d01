"""Follow each split dim of the inputs through the ops: which axis would split each dim if it could be split everywhere.

    x:     [1, 4, 16, 8]    homes (None, None, depth, height)
    conv:  [1, 8, 8, 4]     homes (None, None, depth, height)        through the factors d, h
    mean:  [1, 8]           homes (None, None)

A level that leaves its split keeps its homes, so that what follows is split again where it is wide enough.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import fx

from halofx.compiler.emit import operand_nodes
from halofx.compiler.facts import Homes, bound_of, homes_of, is_op, is_tensor
from halofx.compiler.program import Program


def infer_homes(program: Program) -> None:
    """Set ``homes`` (one entry an output) on every node; inputs have theirs already."""
    for node in program.graph.nodes:
        if is_op(node):
            node.meta["homes"] = _outputs(node)
        elif "homes" not in node.meta and is_tensor(node) and node.op in ("placeholder", "get_attr"):
            node.meta["homes"] = ((None,) * node.meta["val"].dim(),)


def factor_homes(node: fx.Node) -> dict[str, str]:
    """The axis at home on each factor of an op: the largest operand decides, an axis is given out once.

    Dims of the output go first: an axis on a dim that is summed away would leave all that follows whole.
    """
    bound, found = bound_of(node), dict[str, str]()
    nodes = operand_nodes(node)
    tensors = sorted(bound.call.tensors.items(), key=lambda item: -item[1].numel)
    for stays, (key, _) in product((True, False), tensors):
        pattern = bound.spec.patterns.get(key, ()) if bound.spec else ()
        for token, axis in zip(pattern, homes_of(nodes[key]), strict=False):
            factor = bound.factors.get(token.strip("[]"))
            if axis and factor and factor.reduces != stays and factor.name not in found and axis not in found.values():
                found[factor.name] = axis
    return found


def _outputs(node: fx.Node) -> tuple[Homes, ...]:
    bound = bound_of(node)
    if bound.spec is None:
        return _by_extent(node)
    homes = factor_homes(node)
    return tuple(tuple(homes.get(t.strip("[]")) for t in pattern.split()) for pattern in bound.spec.outs)


def _by_extent(node: fx.Node) -> tuple[Homes, ...]:
    """An op without a rule runs whole; a dim of its output is at home where an input dim at that place is as long."""
    value = node.meta["val"]
    outs = value if isinstance(value, (tuple, list)) else (value,)
    inputs = [n for n in node.all_input_nodes if is_tensor(n)]
    found: list[Homes] = []
    for out in outs:
        shape = tuple(out.shape) if isinstance(out, torch.Tensor) else ()
        like = [n for n in inputs if n.meta["val"].dim() == len(shape) and any(homes_of(n))]
        pick = like[0] if like else None
        pairs = zip(shape, pick.meta["val"].shape, homes_of(pick), strict=True) if pick is not None else ()
        found.append(tuple(axis if n == m else None for n, m, axis in pairs) or (None,) * len(shape))
    return tuple(found)
