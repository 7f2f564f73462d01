"""Send what a stage makes to the stages that use it, however many lie between: straight, not by relay.

before    cat: cat(up0, enc0.relu)           cat in stage 3, enc0.relu in stage 0
after     enc0.relu.to3: transfer(enc0.relu, source=0, target=3)
          cat: cat(up0, enc0.relu.to3)

A rank sends its shard to the rank of the other stage with the same coordinates; the cotangent comes back the same way. A
parameter that several stages use lies in the first of them and is sent like any value, so its gradients are summed there.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from halofx.compiler.emit import is_getitem, label_of
from halofx.compiler.facts import calls, is_tensor, layout_of, set_layout, source_of
from halofx.compiler.primitives import all_reduce, reduce_scatter, transfer
from halofx.compiler.program import Program


def insert_transfers(program: Program) -> None:
    """Give every node a stage and insert the ``transfer`` nodes."""
    if program.stages is None or program.stages.count == 1:
        return
    last = program.stages.count - 1
    nodes = [n for n in program.graph.nodes if n.op != "output" and not _everywhere(n)]
    for node in nodes:
        if "stage" not in node.meta and (calls(node, all_reduce, reduce_scatter) or is_getitem(node)):
            node.meta["stage"] = source_of(node).meta.get("stage")
    for node in reversed(nodes):
        if node.meta.get("stage") is None:
            node.meta["stage"] = min(
                (u.meta["stage"] for u in node.users if u.meta.get("stage") is not None), default=None
            )
    for node in nodes:  # what no op uses, the new value of a buffer, stays where it was made
        if node.meta["stage"] is None:
            node.meta["stage"] = max((n.meta.get("stage") or 0 for n in node.all_input_nodes), default=0)
    for node in nodes:  # what follows the sum over all micro-batches runs once, at the end
        if node.meta.get("after"):
            node.meta["stage"] = last
    for node in nodes:
        if is_tensor(node):
            _send(
                program, node, {u for u in node.users if u.meta.get("stage", node.meta["stage"]) != node.meta["stage"]}
            )


def _everywhere(node: fx.Node) -> bool:
    """Whether every stage has a value: inputs and constants."""
    return node.op == "get_attr" or "input" in node.meta or "rng" in node.meta


def _send(program: Program, node: fx.Node, users: Iterable[fx.Node]) -> None:
    for target in sorted({user.meta["stage"] for user in users}):
        here = [user for user in users if user.meta["stage"] == target]
        assert target > node.meta["stage"], f"{label_of(node)} goes back from stage {node.meta['stage']} to {target}"
        first = next(n for n in program.graph.nodes if n in set(here))
        with program.graph.inserting_before(first):
            made = program.graph.call_function(transfer, (node, node.meta["stage"], target))
        made.meta.update({key: node.meta[key] for key in ("val", "grad", "needs_grad", "source") if key in node.meta})
        made.meta.update(label=f"{label_of(node)}.to{target}", stage=target)
        set_layout(made, layout_of(node))
        for user in here:
            user.replace_input_with(node, made)
