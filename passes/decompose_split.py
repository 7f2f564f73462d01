"""Rewrite an op that must see a split dim whole into ops that need not, where its rule knows how.

before    enc.norm: group_norm(x, 4)                      D split, group_norm needs D whole
after     enc.norm.moments: moments(x, ...)               a reduction that can be split: (count, mean, M2)
          enc.norm: normalize(x, enc.norm.moments, ...)   pointwise
"""

from __future__ import annotations

from torch import fx

from halofx.compiler.emit import Emit, identifier, is_getitem, label_of, operand_nodes
from halofx.compiler.facts import bound_of, is_op, source_of
from halofx.compiler.program import Program
from halofx.compiler.rules import Operand, bind
from halofx.passes.infer_gradients import infer_gradients
from halofx.passes.infer_homes import infer_homes, split_homes
from halofx.passes.plan_splits import wide


def decompose_split(program: Program) -> None:
    """Decompose until nothing changes, then infer the gradients and homes of the new nodes."""
    changed = False
    for node in list(program.graph.nodes):
        spec = bound_of(node).spec if is_op(node) else None
        if spec is not None and spec.decompose is not None and _known(node) and _cut(program, node):
            changed |= _replace(node)
    if changed:
        for node in program.graph.nodes:
            if is_op(node) and "bound" not in node.meta:
                node.meta["bound"] = bind(node)
        infer_gradients(program)
        infer_homes(program)
        decompose_split(program)


def _known(node: fx.Node) -> bool:
    """Whether the homes of all operands are known: not those of ops that this round has made."""
    return all("homes" in (source_of(n) if is_getitem(n) else n).meta for n in operand_nodes(node).values())


def _cut(program: Program, node: fx.Node) -> bool:
    factors = bound_of(node).factors
    return any(
        not factors[name].splittable and wide(program, factors[name].extent, axis)
        for name, axis in split_homes(node).items()
    )


def _replace(node: fx.Node) -> bool:
    bound = bound_of(node)
    assert bound.spec is not None and bound.spec.decompose is not None
    result = bound.spec.decompose(bound.call, Emit(node))
    if result is None:
        return False
    label, results = label_of(node), result if isinstance(result, tuple) else (result,)
    if is_getitem_only(node):
        for user in list(node.users):
            by: Operand = results[user.args[1]]  # type: ignore[index]
            by.node.meta["label"] = label_of(user)  # type: ignore[union-attr]
            _take_over(user, by)
    else:
        _take_over(node, results[0])
        results[0].node.meta["label"] = label
        results[0].node._rename(identifier(label))
        return True
    node.graph.erase_node(node)
    return True


def is_getitem_only(node: fx.Node) -> bool:
    """Whether a node has several outputs, read through getitem nodes."""
    return isinstance(node.meta["val"], (tuple, list)) and all(is_getitem(user) for user in node.users)


def _take_over(node: fx.Node, by: Operand) -> None:
    assert by.node is not None
    users = [user for user in node.users if is_op(user)]
    node.replace_all_uses_with(by.node)
    node.graph.erase_node(node)
    for user in users:
        user.meta["bound"] = bind(user)  # its operands name the nodes that they come from
