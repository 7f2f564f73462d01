"""Cut the ops into the stages of the pipeline: consecutive ones, so that the slowest stage is as fast as can be.

    mesh pipe=2        enc0.conv ... pool1 ... up1.conv | up0.conv ... head          cost by op: flops and bytes of the op table
                       stage 0                          | stage 1

``stages=[30, 12]`` counts layers (calls of leaf modules), ``stages=["up1"]`` names the module with which each stage after the
first begins. A later program of a net (another mode or shape) is cut where its parameters already lie.
"""

from __future__ import annotations

import difflib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from torch import fx

from halofx.compiler.cost import seconds
from halofx.compiler.emit import label_of
from halofx.compiler.errors import MeshError
from halofx.compiler.facts import is_op
from halofx.compiler.program import Program


def plan_stages(program: Program) -> None:
    """Set ``stage`` on every op and on every parameter and buffer; raises `MeshError` for a cut that cannot be."""
    count = program.stages.count if program.stages is not None else 1
    if count == 1:
        return
    ops = [node for node in program.graph.nodes if is_op(node)]
    for first, (start, stop) in enumerate(pairwise([*_starts(program, ops, count), len(ops)])):
        for node in ops[start:stop]:
            node.meta["stage"] = first
    made = {name: n.meta.get("stage", 0) for name, n in zip(program.updates, program.results()[1], strict=True)}
    for node in program.placeholders("state"):
        written = made.get(str(node.meta["state"]), 0)
        node.meta["stage"] = min((n.meta["stage"] for n in node.users if "stage" in n.meta), default=written)


def _starts(program: Program, ops: Sequence[fx.Node], count: int) -> list[int]:
    """The index of the first op of every stage."""
    given, placed = program.options.get("stages"), program.options.get("placed")
    if placed is not None:
        return _as_placed(ops, placed, count)
    layers = _layers(ops)
    if given is None:
        if len(ops) < count:
            raise MeshError(f"{count} stages for {len(ops)} ops; make the axis pipe smaller")
        return balanced([seconds(node, program.mesh) for node in ops], count)
    if all(isinstance(n, int) for n in given):
        return _by_count(layers, list(given), count)
    return _by_name(ops, [str(name) for name in given], count)


def balanced(costs: Sequence[float], count: int) -> list[int]:
    """The starts of ``count`` runs of which the costliest costs least.

    >>> balanced([4, 1, 1, 1, 1, 4], 3)
    [0, 1, 5]
    """
    total = [0.0, *accumulate(costs)]

    def cut(limit: float) -> list[int] | None:
        starts, at = [0], 0
        for left in range(count - 1, 0, -1):
            stop = bisect_right(total, total[at] + limit, lo=at) - 1
            at = max(at + 1, min(stop, len(costs) - left))
            starts.append(at)
        fits = all(total[b] - total[a] <= limit for a, b in pairwise([*starts, len(costs)]))
        return starts if fits else None

    low, high = max(costs, default=0.0), total[-1]
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if cut(middle) else (middle, high)
    found = cut(high * (1 + 1e-9))
    return found if found is not None else list(range(count))


def _layers(ops: Sequence[fx.Node]) -> list[int]:
    """The index of the first op of every layer: of every call of a leaf module. The loss belongs to the last."""
    paths = [str(node.meta.get("module") or "") for node in ops]
    paths = ["" if path.partition(".")[0] == "loss" else path for path in paths]
    parents = {path.rpartition(".")[0] for path in paths} | {""}
    while more := {p.rpartition(".")[0] for p in parents} - parents:
        parents |= more
    leaves = [(i, path) for i, path in enumerate(paths) if path not in parents]
    return [i for k, (i, path) in enumerate(leaves) if not k or leaves[k - 1] != (i - 1, path)]


def _by_count(layers: Sequence[int], counts: Sequence[int], count: int) -> list[int]:
    if len(counts) != count or sum(counts) != len(layers) or min(counts) < 1:
        raise MeshError(
            f"stages={list(counts)} must be {count} numbers of layers of at least 1 with the sum {len(layers)}, "
            f"the calls of leaf modules in the model"
        )
    return [0, *(layers[n] for n in accumulate(counts[:-1]))]


def _by_name(ops: Sequence[fx.Node], names: Sequence[str], count: int) -> list[int]:
    if len(names) != count - 1:
        raise MeshError(
            f"stages={list(names)} must name the first module of every stage but the first: {count - 1} of them"
        )
    starts = [0]
    for name in names:
        at = next((i for i, node in enumerate(ops) if f"{label_of(node)}.".startswith(f"{name}.")), None)
        if at is None:
            near = difflib.get_close_matches(name, [label_of(n) for n in ops], n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise MeshError(f"stages: no module {name!r} runs in this model{hint}")
        if at <= starts[-1]:
            raise MeshError(
                f"stages: {name} runs before the module named before it; name them in the order in which they run"
            )
        starts.append(at)
    return starts


def _as_placed(ops: Sequence[fx.Node], placed: Mapping[str, int], count: int) -> list[int]:
    """Every stage begins with the first op that reads a parameter that lies there, or in a later one."""
    lies = [max((placed.get(str(s.meta.get("state")), 0) for s in node.all_input_nodes), default=0) for node in ops]
    starts = [0]
    for stage in range(1, count):
        starts.append(next((i for i, at in enumerate(lies) if at >= stage), len(ops)))
    return starts
