"""Follow each split dim of the inputs through the ops: which axis would split each dim if it could be split everywhere.

    x:     [1, 4, 16, 8]    homes (None, None, depth, height)
    conv:  [1, 8, 8, 4]     homes (None, None, depth, height)        through the factors d, h
    mean:  [1, 8]           homes (None, None)

A weight that brings a dim of its own into a result has axis ``channel`` at home there: filters, rows of a linear layer.

A level that leaves its split keeps its homes, so that what follows is split again where it is wide enough.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import fx

from halofx.compiler.emit import is_getitem, operand_nodes
from halofx.compiler.facts import Homes, bound_of, homes_of, is_op, is_tensor, source_of
from halofx.compiler.program import Program

CHANNEL = "channel"
"""The axis over which filters and channels are split."""


def infer_homes(program: Program) -> None:
    """Set ``homes`` (one entry an output) on every node; inputs have theirs already."""
    fed = _fed(program)
    for node in program.graph.nodes:
        if is_op(node):
            if program.mesh[CHANNEL] > 1:
                _seed(program, node, fed)
            node.meta["homes"] = _outputs(node)
        elif "homes" not in node.meta and is_tensor(node) and node.op in ("placeholder", "get_attr"):
            node.meta["homes"] = ((None,) * node.meta["val"].dim(),)


def _fed(program: Program) -> set[fx.Node]:
    """The values that depend on an input."""
    found: set[fx.Node] = set()
    for node in program.graph.nodes:
        if "input" in node.meta or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _seed(program: Program, node: fx.Node, fed: set[fx.Node]) -> None:
    """Give axis ``channel`` a home where weights bring a dim into the result that no other operand has."""
    bound, nodes = bound_of(node), operand_nodes(node)
    weights = {key for key, source in nodes.items() if source not in fed}
    if len(weights) == len(nodes):
        return
    for factor in bound.factors.values():
        readers = {key for key, _, _ in factor.ins}
        wide = factor.extent >= program.mesh[CHANNEL]
        if not (factor.outs and factor.splittable and readers and readers <= weights and wide):
            continue
        for key, dim, _ in factor.ins:
            homes = list(homes_of(nodes[key]))
            if CHANNEL not in homes and homes[dim] is None:
                homes[dim] = CHANNEL
                _set_homes(nodes[key], tuple(homes))
        return


def _set_homes(node: fx.Node, homes: Homes) -> None:
    source, index = (source_of(node), node.args[1]) if is_getitem(node) else (node, 0)
    source.meta["homes"] = tuple(homes if i == index else old for i, old in enumerate(source.meta["homes"]))


def split_homes(node: fx.Node) -> dict[str, str]:
    """The axis that would split each factor of an op: as `factor_homes`, but filters or channels by what moves less.

        x [n, i@channel, ..]  w [o@channel, i]  ->  y [n, o@channel, ..]

        split o    x is gathered, each rank makes its filters of y                  bytes of x
        split i    each rank makes an addend of all of y, which is then scattered   bytes of y

    Dryden et al., "Channel and filter parallelism for large-scale CNN training", SC'19: stationary-y and stationary-x.
    """
    found, bound, nodes = factor_homes(node), bound_of(node), operand_nodes(node)
    spec = bound.spec
    if CHANNEL not in found.values() or spec is None or (spec.reduce != "sum"):
        return found
    filters = next(name for name, axis in found.items() if axis == CHANNEL)
    for key, operand in bound.call.tensors.items():
        tokens = [t.strip("[]") for t in spec.patterns.get(key, ())]
        homes = homes_of(nodes[key])
        if filters in tokens or CHANNEL not in homes:
            continue
        channels = bound.factors.get(tokens[homes.index(CHANNEL)])
        if channels is None or not channels.reduces or channels.name in found:
            continue
        if bound.call.outs[0].numel < operand.numel and (channels.splittable or spec.decompose is not None):
            return {name: axis for name, axis in found.items() if name != filters} | {channels.name: CHANNEL}
    return found


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
