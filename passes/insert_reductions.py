"""Complete pending sums: an all-reduce after every op whose split factor is summed away.

before    head.mean: f32[2, 8] +depth      sum(x, dim=(2, 3, 4))
after     head.mean.addend: f32[2, 8] +depth      sum(x, dim=(2, 3, 4))
          head.mean:        f32[2, 8]             all_reduce(head.mean.addend, axes=(depth,))

Where the axis is at home on a dim of the result, every rank gets its block of the sum: ``reduce_scatter``.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from halofx.compiler.emit import is_getitem, label_of
from halofx.compiler.facts import bound_of, homes_of, is_op, is_tensor, layout_of, set_layout, shape_of, source_of
from halofx.compiler.layout import Layout
from halofx.compiler.primitives import all_reduce, reduce_scatter
from halofx.compiler.program import Program
from halofx.compiler.redistribution import spread
from halofx.passes.plan_splits import wide


def insert_reductions(program: Program) -> None:
    """Insert ``all_reduce`` after every tensor whose layout has pending axes."""
    for node in list(program.graph.nodes):
        source = node.args[0] if is_getitem(node) else node
        if not is_op(source) or not is_tensor(node):
            continue
        layout, spec = layout_of(node), bound_of(source).spec
        if not layout.partial or spec is None:
            continue
        label, users, at = label_of(node), list(node.users), node
        node.meta["each"] = source.meta.get("each", False)
        node.meta["label"] = f"{label}.addend"
        scattered = _scattered(program, node, layout) if spec.reduce == "sum" else {}
        for axis, dim in scattered.items():
            plan = spread(axis, program.mesh[axis], dim, shape_of(node)[dim])
            at = _after(program, at, reduce_scatter, (at, plan), f"{label}.{axis}")
            at.meta["move"] = plan
            before = layout_of(source_of(at))
            split = tuple(axis if d == dim else a for d, a in enumerate(before.split))
            set_layout(at, Layout(split, tuple(a for a in before.partial if a != axis)))
        rest = layout_of(at).partial
        if rest:
            at = _after(program, at, all_reduce, (at, rest, spec.reduce), label)
            set_layout(at, Layout(layout_of(source_of(at)).split))
        at.meta["label"] = label
        for user in users:
            user.replace_input_with(node, at)


def _scattered(program: Program, node: fx.Node, layout: Layout) -> dict[str, int]:
    """The pending axes that have a home on a dim of the result, and that dim."""
    homes, shape = homes_of(node), shape_of(node)
    found = {axis: homes.index(axis) for axis in layout.partial if axis in homes}
    return {a: d for a, d in found.items() if layout.split[d] is None and wide(program, shape[d], a)}


def _after(program: Program, at: fx.Node, target: Any, args: tuple[Any, ...], label: str) -> fx.Node:
    with program.graph.inserting_after(at):
        made = program.graph.call_function(target, args)
    made.meta.update(val=at.meta["val"], label=label, source=at.meta.get("source"), grad=at.meta.get("grad", True))
    made.meta["each"] = at.meta.get("each", False)
    return made
