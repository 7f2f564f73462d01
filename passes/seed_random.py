"""Make every random number a function of (seed, step, op, global index): the same on any mesh.

before    drop: dropout(x, p=0.5, train=True)                 draws from the generator of each rank
after     rng: i64[]                                          one more input: (seed << 32) + step
          drop.mask: draw_like(x, rng, op=0, kind=bernoulli, a=0.5)
          drop: dropout(x, drop.mask, p=0.5)

Ops that draw in ways of their own (Poisson numbers, dropout between the layers of an LSTM) run whole, with a generator that
is seeded alike on every rank. Attention with dropout is written out, for the weights that it drops are made inside.
"""

from __future__ import annotations

import torch
from torch import fx

from halofx.compiler.emit import identifier, is_getitem, label_of, name_of
from halofx.compiler.program import Program
from halofx.compiler.random_ops import Draws, OwnWay, handler_of
from halofx.compiler.rules import Operand, call_of


def seed_random(program: Program) -> None:
    """Replace the random ops; add the placeholder ``rng`` where there are any."""
    rng: list[Operand] = []

    def placeholder() -> Operand:
        if not rng:
            rng.append(_placeholder(program))
        return rng[0]

    count = 0
    for node in list(program.graph.nodes):
        handler = handler_of(node.target) if node.op == "call_function" and not is_getitem(node) else None
        if handler is None:
            continue
        draws = Draws(node, placeholder, count)
        result = handler(call_of(node), draws)
        count = draws.op
        if result is not None:
            _replace(program, node, result)


def _placeholder(program: Program) -> Operand:
    """The input ``rng``, after all others."""
    nodes = list(program.graph.nodes)
    last = [n for n in nodes if n.op == "placeholder"]
    fake = next(n.meta["val"] for n in nodes if isinstance(n.meta.get("val"), torch.Tensor))
    at = program.graph.inserting_after(last[-1]) if last else program.graph.inserting_before(nodes[0])
    with at:
        node = program.graph.placeholder("rng")
    node.meta.update(val=fake.new_empty((), dtype=torch.int64), label="rng", rng=True, source=None)
    return Operand((), torch.int64, node)


def _replace(program: Program, node: fx.Node, result: Operand | tuple[Operand, ...]) -> None:
    """Put the result in the place of a node, under its name."""
    label, name = label_of(node), name_of(node.target)
    first = result[0] if isinstance(result, tuple) else result
    assert first.node is not None
    if isinstance(result, tuple):
        for user in list(node.users):
            _take_over(user, result[user.args[1]])  # type: ignore[index]
        program.graph.erase_node(node)
    else:
        given = first.node in node.all_input_nodes
        _take_over(node, result)
        if given:
            return
        first.node.meta["label"] = label
        first.node._rename(identifier(label))
    if isinstance(first.node.target, OwnWay):
        program.notes.append(f"{name} draws random numbers in its own way: it runs whole on every rank, in {label}")


def _take_over(node: fx.Node, by: Operand) -> None:
    assert by.node is not None
    node.replace_all_uses_with(by.node)
    node.graph.erase_node(node)
