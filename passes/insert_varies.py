"""Mark where a whole value meets shards: its cotangents are summed over the axes along which the shards differ.

before    enc.conv: conv3d(x, w)         x split over data and depth, w whole
after     w.v: vary(w, axes=(data, depth))        backward: all-reduce
          enc.conv: conv3d(x, w.v)
"""

from __future__ import annotations

from torch import fx

from halofx.compiler.emit import label_of, set_operands
from halofx.compiler.facts import attached_operands, is_op, layout_of, set_layout
from halofx.compiler.primitives import vary
from halofx.compiler.program import Program


def insert_varies(program: Program) -> None:
    """Insert one ``vary`` for each (value, axes) that needs it."""
    made: dict[tuple[fx.Node, tuple[str, ...]], fx.Node] = {}
    for node in list(program.graph.nodes):
        if not is_op(node) or not node.meta.get("split"):
            continue
        axes, changes = set(node.meta["split"].values()), dict[str, fx.Node]()
        for key, source in attached_operands(node).items():
            missing = tuple(a for a in program.mesh.axes if a in axes - layout_of(source).axes)
            if missing:
                if (source, missing) not in made:
                    made[source, missing] = _vary(program, source, missing)
                changes[key] = made[source, missing]
        if changes:
            set_operands(node, changes)


def _vary(program: Program, source: fx.Node, axes: tuple[str, ...]) -> fx.Node:
    at = program.graph.inserting_after(source)
    if source.op == "placeholder":  # behind all placeholders
        at = program.graph.inserting_before(
            next(n for n in program.graph.nodes if n.op not in ("placeholder", "get_attr"))
        )
    with at:
        node = program.graph.call_function(vary, (source, axes))
    node.meta.update(val=source.meta["val"], label=f"{label_of(source)}.v", source=source.meta.get("source"))
    set_layout(node, layout_of(source))
    return node
