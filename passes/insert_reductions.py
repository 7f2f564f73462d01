"""Complete pending sums: an all-reduce after every op whose split factor is summed away.

before    head.mean: f32[2, 8] +depth      sum(x, dim=(2, 3, 4))
after     head.mean.addend: f32[2, 8] +depth      sum(x, dim=(2, 3, 4))
          head.mean:        f32[2, 8]             all_reduce(head.mean.addend, axes=(depth,))
"""

from __future__ import annotations

from halofx.compiler.emit import is_getitem, label_of
from halofx.compiler.facts import bound_of, is_op, is_tensor, layout_of, set_layout
from halofx.compiler.layout import Layout
from halofx.compiler.primitives import all_reduce
from halofx.compiler.program import Program


def insert_reductions(program: Program) -> None:
    """Insert ``all_reduce`` after every tensor whose layout has pending axes."""
    for node in list(program.graph.nodes):
        source = node.args[0] if is_getitem(node) else node
        if not is_op(source) or not is_tensor(node):
            continue
        layout, spec = layout_of(node), bound_of(source).spec
        if not layout.partial or spec is None:
            continue
        with program.graph.inserting_after(node):
            whole = program.graph.call_function(all_reduce, (node, layout.partial, spec.reduce))
        node.replace_all_uses_with(whole, delete_user_cb=lambda user, whole=whole: user is not whole)
        whole.meta.update(val=node.meta["val"], label=label_of(node), source=node.meta.get("source"))
        whole.meta["grad"] = node.meta.get("grad", True)
        node.meta["label"] = f"{label_of(node)}.addend"
        set_layout(whole, Layout(layout.split))
