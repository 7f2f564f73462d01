"""Follow cotangents: into which values can one flow, and into which does one flow when the inputs need no gradient.

    x (input)              grad maybe    needs_grad no
    w (parameter)          grad yes      needs_grad yes
    running_mean (buffer)  grad no       needs_grad no
    conv(x, w)             grad yes      needs_grad yes

``grad`` decides where `vary` stands, ``needs_grad`` what the summary counts. Runs first, and last for the nodes made since.
"""

from __future__ import annotations

from halofx.compiler.emit import name_of
from halofx.compiler.program import Program


def infer_gradients(program: Program) -> None:
    """Set ``grad`` and ``needs_grad`` on every node; the option ``frozen`` names the state that takes no gradient."""
    frozen = program.options.get("frozen", frozenset())
    for node in program.graph.nodes:
        if node.op == "placeholder":
            state = node.meta.get("state")
            node.meta["needs_grad"] = state is not None and state not in frozen
            node.meta["grad"] = node.meta["needs_grad"] or "input" in node.meta
        else:
            stops = node.op == "get_attr" or (node.op == "call_function" and name_of(node.target) == "detach")
            for flag in ("grad", "needs_grad"):
                node.meta[flag] = not stops and any(source.meta.get(flag) for source in node.all_input_nodes)
