"""With micro-batches, find what can run only once all of them have: what follows a sum over the batch.

    loss.addend: nll_sum(...) +data       of each micro-batch, as it comes
    loss.sum:    all_reduce(..., data)    after all of them: the addends of all micro-batches are added up
    loss:        div(loss.sum, 16)        after

What is after must not need the micro-batches one by one again: a value of each that depends on all of them cannot be pipelined.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from halofx.compiler.emit import label_of, name_of
from halofx.compiler.errors import CompileError, at
from halofx.compiler.facts import axes_of, calls, layout_of
from halofx.compiler.primitives import COLLECTIVES, all_reduce, redistribute
from halofx.compiler.program import Program


def split_micro(program: Program) -> None:
    """Set ``after`` on the nodes that run once; raises `CompileError` where samples of several micro-batches mix before."""
    if program.stages is None or program.stages.micro == 1:
        return
    fed = _fed(program)
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        starts = calls(node, all_reduce) and "data" in axes_of(node) and not node.meta.get("each")
        node.meta["after"] = starts or any(source.meta.get("after") for source in node.all_input_nodes)
        if calls(node, redistribute) and node.meta["move"].axis == "data":
            raise _mixes(program, node, "reads other samples of the batch")
        for source in node.all_input_nodes if node.meta["after"] and not starts else ():
            if not source.meta.get("after") and source in fed:
                raise _mixes(program, node, f"needs both the sum over the batch and {label_of(source)}")
    for node in program.graph.nodes:
        if any(user.meta.get("after") for user in node.users) and not node.meta.get("after") and node in fed:
            node.meta["known"] = not _computed(node)
    _settle_schedule(program)
    outputs, _ = program.results()
    for node in outputs:
        if not node.meta.get("after") and node in fed and "data" not in layout_of(node).split:
            raise _mixes(program, node, "is an output that is not split over the batch")


def _computed(node: fx.Node) -> bool:
    """Whether a value depends on a parameter or buffer, and so on what earlier stages compute."""
    seen, stack = set[fx.Node](), [node]
    while stack:
        at_ = stack.pop()
        if "state" in at_.meta or "rng" in at_.meta:
            return True
        if at_ not in seen:
            seen.add(at_)
            stack += at_.all_input_nodes
    return False


def _settle_schedule(program: Program) -> None:
    """A schedule that begins with backward before all of forward is done needs a loss that is linear in sums over the batch.

    Raises `CompileError` where it is not and the user asked for such a schedule; otherwise takes GPipe and says so.
    """
    stages, asked = program.stages, program.options.get("schedule")
    assert stages is not None
    if stages.schedule == "gpipe" or program.options.get("forward"):  # "forward": nothing will go backward
        return
    reason = None if program.options.get("loss") else "there is no loss="
    bent = reason or _bent(program)
    if bent is None:
        return
    if asked is not None:
        raise CompileError(
            f"schedule={asked!r} begins the backward pass of the first micro-batch before the last one has gone forward, but "
            f"{bent}; use schedule='gpipe'"
        )
    program.stages = replace(stages, schedule="gpipe")
    program.notes.append(f"schedule gpipe, not 1f1b: {bent}")


LINEAR = {
    "add", "sub", "neg", "sum", "mean", "reshape", "view", "squeeze", "unsqueeze", "expand", "stack", "cat", "to_copy", "to",
    "clone", "select", "slice", "all_reduce", "vary", "getitem", "flatten", "permute", "transpose", "alias", "contiguous",
}  # fmt: skip
"""Ops that are linear in their operands together; products and quotients are where one factor is fixed."""


def _bent(program: Program) -> str | None:
    """Why what runs after is not linear in the sums that the model computes; None where it is."""
    varying: set[fx.Node] = set()
    for node in program.graph.nodes:
        if not node.meta.get("after"):
            continue
        sources = node.all_input_nodes
        if not any(s.meta.get("after") for s in sources):
            if not all(s.meta.get("known", s.op == "get_attr") for s in sources):
                varying.add(node)
            continue
        moving = [s for s in sources if s in varying]
        if not moving:
            continue
        varying.add(node)
        name = name_of(node.target)
        divides = name in ("div", "ratio", "true_divide") and moving == [node.args[0]]
        if not (
            name in LINEAR
            or divides
            or (name in ("mul", "multiply") and len(moving) == 1 and node.args[0] is not node.args[1])
        ):
            return f"the loss is not a sum over samples ({label_of(node)}{at(node.meta.get('source'))})"
    outputs, _ = program.results()
    if any(not n.meta.get("after") for n in outputs):
        return f"the loss ({', '.join(label_of(n) for n in outputs)}) is not a sum over the batch"
    return None


def _fed(program: Program) -> set[fx.Node]:
    """The values that depend on an input, and so differ between micro-batches."""
    found: set[fx.Node] = set()
    for node in program.graph.nodes:
        if "input" in node.meta or "rng" in node.meta or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _mixes(program: Program, node: fx.Node, what: str) -> CompileError:
    assert program.stages is not None
    named = node
    while calls(named, *COLLECTIVES) and not named.meta.get("source") and named.users:
        named = next(iter(named.users))
    return CompileError(
        f"{label_of(node)}{at(named.meta.get('source'))} {what}, so the batch cannot be cut into "
        f"microbatches={program.stages.micro}; use microbatches=1"
    )
