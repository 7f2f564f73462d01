"""Look every op up in the op table.

before    enc.conv: call_function aten.conv3d.default
after     enc.conv: ... bound = (call, spec with factors n, o, d, h, w, i)      or spec None: no rule, runs whole
"""

from __future__ import annotations

import halofx.compiler.ops  # noqa: F401  (fills the table)
from halofx.compiler.emit import full_name
from halofx.compiler.errors import CompileError, at
from halofx.compiler.facts import is_op
from halofx.compiler.program import Program
from halofx.compiler.rules import bind, find_rule


def infer_rules(program: Program) -> None:
    """Attach ``bound`` to every op; note ops without a rule, or refuse them under ``strict=True``."""
    unknown: dict[str, list[str]] = {}
    for node in program.graph.nodes:
        if not is_op(node):
            continue
        node.meta["bound"] = bind(node)
        if find_rule(node.target) is None:
            unknown.setdefault(full_name(node.target), []).append(f"{node.meta['label']}{at(node.meta.get('source'))}")
    for target, places in unknown.items():
        if program.options.get("strict"):
            raise CompileError(
                f"no rule for op {target}, used by {places[0]}; add an entry to compiler/ops/ or register one with "
                f"@halofx.rule({target}), or compile without strict=True to run it whole on every rank"
            )
        program.notes.append(
            f"no rule for op {target}: its inputs are gathered and it runs whole on every rank, in {', '.join(places)}"
        )
