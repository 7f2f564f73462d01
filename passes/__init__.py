"""The passes, and the order in which they run. A pass is one function ``(program) -> None`` in one file of this package."""

from __future__ import annotations

from collections.abc import Callable

from halofx.compiler.printer import listing
from halofx.compiler.program import Program
from halofx.compiler.verify import verify
from halofx.passes.decompose_split import decompose_split
from halofx.passes.infer_gradients import infer_gradients
from halofx.passes.infer_homes import infer_homes
from halofx.passes.infer_inputs import infer_inputs
from halofx.passes.infer_rules import infer_rules
from halofx.passes.insert_movements import insert_movements
from halofx.passes.insert_reductions import insert_reductions
from halofx.passes.insert_transfers import insert_transfers
from halofx.passes.insert_varies import insert_varies
from halofx.passes.merge_gradients import merge_gradients
from halofx.passes.merge_movements import merge_movements
from halofx.passes.plan_splits import plan_splits
from halofx.passes.plan_stages import plan_stages
from halofx.passes.plan_state import plan_state
from halofx.passes.plan_statistics import plan_statistics
from halofx.passes.seed_random import seed_random
from halofx.passes.split_micro import split_micro

PIPELINE: tuple[Callable[[Program], None], ...] = (
    seed_random,
    infer_gradients,
    infer_inputs,
    plan_statistics,
    infer_rules,
    infer_homes,
    decompose_split,
    plan_splits,
    plan_state,
    plan_stages,
    insert_reductions,
    insert_movements,
    merge_movements,
    insert_varies,
    merge_gradients,
    infer_gradients,
    split_micro,
    insert_transfers,
)


def run(program: Program) -> Program:
    """Run every pass; after each one verify the program and record its listing."""
    for step in PIPELINE:
        step(program)
        program.graph.lint()
        verify(program, step.__name__)
        program.listings[step.__name__] = listing(program)
    return program
