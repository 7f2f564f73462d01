"""Law tests generated from the op table: every entry with samples, random sizes, parameters, splits and meshes."""

from __future__ import annotations

from random import Random

import pytest
import torch

import halofx.compiler.ops  # noqa: F401
from halofx.compiler.emit import name_of
from halofx.compiler.rules import RULES, Rule
from tests.laws import check, draw

ENTRIES = {
    f"{entry.function.__name__}-{i}": entry for i, entry in enumerate(dict.fromkeys(RULES.values())) if entry.samples
}
CASES = 32
"""Random cases of each entry in one run; the seed is fixed, so a failure repeats."""


@pytest.mark.parametrize("name", ENTRIES)
def test_law(name: str) -> None:
    entry: Rule = ENTRIES[name]
    assert entry.samples is not None
    for seed in range(CASES):
        rng = Random(f"{entry.function.__name__} {seed}")
        case = draw(entry.samples(rng), rng)
        try:
            check(case, seed)
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(f"{case} (seed {seed})") from error


def test_every_rule_has_samples() -> None:
    """Every op of torch, that is: functions of ours stand in graphs only where an op of torch was decomposed."""
    missing = [
        name_of(target)
        for target, entry in RULES.items()
        if entry.samples is None
        and isinstance(target, torch._ops.OpOverload)
        and entry.function.__module__ != "halofx.compiler.ops.pointwise"
    ]
    assert not missing, f"entries without samples: {missing}"
