"""Make every random number a function of (seed, step, op, global index): the same on any mesh.

before    drop: dropout(x, p=0.5, train=True)                 draws from the generator of each rank
after     rng: i64[]                                          one more input: (seed << 32) + step
          drop.mask: draw_like(x, rng, op=0, kind=bernoulli, a=0.5)
          drop: dropout(x, drop.mask, p=0.5)

What random ops become stands in `halofx.compiler.random_functions`. Ops that draw in ways of their own (Poisson numbers,
dropout between the layers of an LSTM) run whole, with a generator that is seeded alike on every rank. Attention with
dropout is written out, for the weights that it drops are made inside.
"""

from __future__ import annotations

import torch
from torch import fx

from halofx.compiler.emit import Emit, identifier, is_getitem, label_of, name_of
from halofx.compiler.program import Program
from halofx.compiler.random_ops import Draws, draws_of
from halofx.compiler.rules import Operand, call_of


def seed_random(program: Program) -> None:
    """Replace the random ops; add the placeholder ``rng`` where there are any."""
    rng: Operand | None = None
    count = 0
    for node in list(program.graph.nodes):
        rewrite = draws_of(node.target, call_of(node)) if node.op == "call_function" and not is_getitem(node) else None
        if rewrite is None:
            continue
        rng = rng or _placeholder(program)
        draws = Draws(Emit(node), label_of(node), rng, count)
        result = rewrite(draws, call_of(node))
        count = draws.op
        if draws.whole:
            program.notes.append(
                f"{name_of(node.target)} draws random numbers in its own way: it runs whole, and equal, on every rank"
            )
        _replace(node, result)


def _placeholder(program: Program) -> Operand:
    """The input ``rng``, after all others."""
    last = [n for n in program.graph.nodes if n.op == "placeholder"]
    value = next((n.meta["val"] for n in program.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)), None)
    assert value is not None
    with program.graph.inserting_after(last[-1]) if last else program.graph.inserting_before():
        node = program.graph.placeholder("rng")
    scalar = value.new_empty((), dtype=torch.int64, device="cpu" if value.device.type != "meta" else "meta")
    node.meta.update(val=scalar, label="rng", rng=True, source=None, needs_grad=False)
    return Operand((), torch.int64, node)


def _replace(node: fx.Node, result: Operand | tuple[Operand, ...]) -> None:
    """Put the result in the place of a node, under its name."""
    if isinstance(result, tuple):
        for user in list(node.users):
            _take_over(user, result[user.args[1]])  # type: ignore[index]
        node.graph.erase_node(node)
        return
    label = label_of(node)
    made = node not in (result.node, *node.all_input_nodes) and result.node not in node.all_input_nodes
    _take_over(node, result)
    if made and result.node is not None:
        result.node.meta["label"] = label
        result.node._rename(identifier(label))


def _take_over(node: fx.Node, by: Operand) -> None:
    assert by.node is not None
    node.replace_all_uses_with(by.node)
    node.graph.erase_node(node)
