"""Sum the gradients of many parameters in one message: `vary` of parameters becomes `vary_all` of a bucket.

    before    w0.v: vary(w0, axes=(depth,))    w1.v: vary(w1, axes=(depth,))   ...
    after     gradients0: vary_all((w0, w1, ...), axes=(depth,))       in order of first use, about ``bucket`` bytes each

A bucket stands right before the first op that uses it, so in the backward pass its all-reduce starts as soon as its last
gradient is there, while earlier layers still compute. A parameter used under several sets of axes is marked once for what
they have in common and once more for the rest, so its gradient is summed over each axis exactly once.
"""

from __future__ import annotations

import operator

from torch import fx

from halofx.compiler.emit import label_of
from halofx.compiler.facts import axes_of, layout_of, set_layout, source_of, val
from halofx.compiler.primitives import vary, vary_all
from halofx.compiler.program import Program

BUCKET = 4 << 20
"""Bytes of gradients in one message; the option ``bucket`` overrides it."""

Marks = dict[fx.Node, fx.Node]
"""parameter -> its one `vary` node over the axes that all uses have in common"""


def merge_gradients(program: Program) -> None:
    """Bucket the `vary` nodes of parameters by axes, in order of first use."""
    limit = int(program.options.get("bucket", BUCKET))
    position = {node: i for i, node in enumerate(program.graph.nodes)}
    marks = [m for p in program.placeholders("state") if (m := _common(program, p)) is not None]
    marks.sort(key=lambda mark: min(position[user] for user in mark.users))
    open_buckets: dict[tuple[object, ...], list[fx.Node]] = {}
    buckets: list[list[fx.Node]] = []
    for mark in marks:
        key = (axes_of(mark), val(mark).dtype, source_of(mark).meta.get("stage"))
        bucket = open_buckets.get(key)
        if bucket is None or sum(_bytes(m) for m in bucket) + _bytes(mark) > limit:
            bucket = open_buckets[key] = []
            buckets.append(bucket)
        bucket.append(mark)
    for i, bucket in enumerate(buckets):
        _merge(program, bucket, f"gradients{i}", position)


def _bytes(node: fx.Node) -> int:
    return val(node).numel() * val(node).element_size()


def _common(program: Program, parameter: fx.Node) -> fx.Node | None:
    """One mark for the axes that all uses of a parameter share, the other marks reading it."""
    marks = [user for user in parameter.users if user.target is vary]
    if not marks:
        return None
    sets = [frozenset(axes_of(mark)) for mark in marks]
    bare = len(marks) < len(parameter.users)
    shared = frozenset() if bare else frozenset.intersection(*sets)
    if not shared:
        return None
    axes = tuple(a for a in program.mesh.axes if a in shared)
    first = next((m for m, s in zip(marks, sets, strict=True) if s == shared), None)
    if first is None:
        with program.graph.inserting_before(marks[0]):
            first = program.graph.call_function(vary, (parameter, axes))
        first.meta.update(val=parameter.meta["val"], label=f"{label_of(parameter)}.v", source=None)
        set_layout(first, layout_of(parameter))
    for mark, held in zip(marks, sets, strict=True):
        if mark is not first:
            mark.args = (first, tuple(a for a in program.mesh.axes if a in held - shared))
    return first


def _merge(program: Program, bucket: list[fx.Node], label: str, position: dict[fx.Node, int]) -> None:
    axes = bucket[0].args[1]
    first = min((user for mark in bucket for user in mark.users), key=lambda user: position[user])
    with program.graph.inserting_before(first):
        node = program.graph.call_function(vary_all, ([mark.args[0] for mark in bucket], axes), name=label)
        node.meta.update(val=[mark.meta["val"] for mark in bucket], label=label, source=None)
        set_layout(node, *(layout_of(mark) for mark in bucket))
        for i, mark in enumerate(bucket):
            item = program.graph.call_function(operator.getitem, (node, i))
            item.meta.update(val=mark.meta["val"], label=label_of(source_of(mark)), source=None)
            mark.replace_all_uses_with(item)
            program.graph.erase_node(mark)
