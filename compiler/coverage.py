"""What becomes of a model on a mesh, in words: which ops are split, which run whole and why, and the entry that is missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from halofx.compiler.cost import human
from halofx.compiler.emit import full_name, is_getitem, label_of, name_of, operand_nodes
from halofx.compiler.facts import Homes, bound_of, calls, homes_of, is_op, is_tensor, move_of, source_of
from halofx.compiler.index_map import Table
from halofx.compiler.primitives import COLLECTIVES, reduce_scatter, vary_all
from halofx.compiler.program import Program
from halofx.compiler.rules import find_rule

LARGE = 0.01
"""The share of all activation bytes from which on what lost its split is worth a line."""


@dataclass(frozen=True)
class Loss:
    """Where values lose a split, and why: ``bytes`` [global] of all values from there on that are whole for this reason."""

    node: fx.Node
    reason: str
    bytes: int = 0


@dataclass
class Coverage:
    """Counts of ops, and bytes [one pass, global] of what they make; see `coverage`."""

    ops: int = 0
    unruled: dict[str, list[fx.Node]] = field(default_factory=dict)  # target -> nodes without a rule
    movements: dict[str, int] = field(default_factory=dict)  # kind -> nodes
    bytes: int = 0  # of all values that ops make from an input
    split: int = 0  # of those that are split over at least one axis of a split input
    whole: list[Loss] = field(default_factory=list)  # the large ones

    @property
    def share(self) -> float:
        """The share of activation bytes that stays split."""
        return self.split / self.bytes if self.bytes else 1.0


def coverage(program: Program) -> Coverage:
    """Read off a planned program how much of it is split."""
    found = Coverage()
    fed = _fed(program)
    for node in program.graph.nodes:
        move = move_of(node)
        if move is not None:
            found.movements[move.kind] = found.movements.get(move.kind, 0) + 1
        if not is_op(node):
            continue
        found.ops += 1
        if find_rule(node.target) is None:
            found.unruled.setdefault(full_name(node.target), []).append(node)
        if node in fed:
            size = bytes_of(node)
            found.bytes += size
            found.split += size if is_split(node) else 0
    found.whole = [loss for loss in _losses(program, fed) if loss.bytes >= LARGE * found.bytes]
    return found


def _losses(program: Program, fed: list[fx.Node]) -> list[Loss]:
    """Every place where a split is lost, with the bytes of what is whole because of it, over the worst axis."""
    totals: dict[tuple[fx.Node, str], int] = {}
    for axis in program.mesh.axes:
        sums: dict[tuple[fx.Node, str], int] = {}
        origin: dict[fx.Node, tuple[fx.Node, str]] = {}  # of a value that is whole over the axis: where it became so
        for node in fed if program.mesh[axis] > 1 else ():
            if any(axis in layout for _, layout in _outs(node)) or _scattered(node, axis):
                continue
            reason = why_whole(program, node, axis)
            sources = [_op(_origin(s)) for s in operand_nodes(node).values()]
            known = next((origin[s] for s in sorted(sources, key=_size, reverse=True) if s in origin), None)
            root = (node, reason) if reason else known
            if root is not None:
                origin[node] = root
                sums[root] = sums.get(root, 0) + bytes_of(node)
        for root, size in sums.items():
            totals[root] = max(totals.get(root, 0), size)
    return [Loss(node, reason, size) for (node, reason), size in totals.items()]


def _scattered(node: fx.Node, axis: str) -> bool:
    """Whether the addends that an op makes are summed in blocks."""
    return any(calls(user, reduce_scatter) and move_axis(user) == axis for user in node.users)


def move_axis(node: fx.Node) -> str:
    """The axis of a `redistribute` or `reduce_scatter`."""
    return str(node.meta["move"].axis)


def _op(node: fx.Node) -> fx.Node:
    return source_of(node) if is_getitem(node) else node


def _size(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else 0


def _fed(program: Program) -> list[fx.Node]:
    """The ops that compute from an input, in order: what they make grows with the volume."""
    reached: dict[fx.Node, None] = {}
    for node in program.graph.nodes:
        if "input" in node.meta or any(source in reached for source in node.all_input_nodes):
            reached[node] = None
    return [node for node in reached if is_op(node)]


def _outs(node: fx.Node) -> Iterator[tuple[torch.Tensor, tuple[str | None, ...]]]:
    value = node.meta["val"]
    values = value if isinstance(value, (tuple, list)) else (value,)
    for v, layout in zip(values, node.meta["layout"], strict=True):
        if isinstance(v, torch.Tensor):
            yield v, layout.split


def bytes_of(node: fx.Node) -> int:
    """The bytes of the global outputs of an op."""
    return sum(v.numel() * v.element_size() for v, _ in _outs(node))


def is_split(node: fx.Node) -> bool:
    """Whether the largest output of an op is split."""
    return any(max(_outs(node), key=lambda out: out[0].numel(), default=(None, ()))[1])


def why_whole(program: Program, node: fx.Node, axis: str) -> str | None:
    """Why what an op makes is whole over an axis at home on an operand; None where no operand has it at home."""
    parts = program.mesh[axis]
    at_home = [
        (key, homes_of(source).index(axis))
        for key, source in ((key, _origin(source)) for key, source in operand_nodes(node).items())
        if is_tensor(source) and axis in _homes(source)
    ]
    if not at_home:
        return None
    bound = bound_of(node)
    taken = next((name for name, a in node.meta["split"].items() if a == axis), None)
    if taken is not None and bound_of(node).factors[taken].reduces:
        return f"{name_of(node.target)} sums the dim of {axis} away"
    if taken is not None:
        return f"{name_of(node.target)} is split over its own dim {taken} instead"
    if bound.spec is None:
        known = find_rule(node.target) is not None
        return (
            f"{name_of(node.target)} runs whole with these arguments"
            if known
            else f"no rule for {name_of(node.target)}"
        )
    key, dim = at_home[0]
    pattern = bound.spec.patterns.get(key, ())
    factor = bound.factors.get(pattern[dim].strip("[]")) if dim < len(pattern) else None
    if factor is None or not factor.splittable:
        return f"{name_of(node.target)} needs dim {dim} of {key} whole"
    if factor.extent < parts:
        return f"{factor.extent} {'index' if factor.extent == 1 else 'indices'} on the {parts} ranks of {axis}"
    if any(isinstance(index_map, Table) for _, _, index_map in factor.ins):
        return f"{name_of(node.target)} reads any index of dim {dim} of {key}"
    return f"another dim of {key} has taken {axis}"


def _origin(node: fx.Node) -> fx.Node:
    """The value that lowering moved, summed or marked on its way to an op."""
    while calls(node, *COLLECTIVES) and not calls(node, vary_all):
        node = source_of(node)
    return node


def _homes(node: fx.Node) -> Homes:
    """The homes of a tensor; none of a parameter that lowering has bucketed."""
    return homes_of(node) if "homes" in (source_of(node) if is_getitem(node) else node).meta else ()


def losses(found: Coverage) -> Iterator[str]:
    """One line for every place where much loses a split: label, bytes from there on, reason."""
    for loss in found.whole:
        yield f"{label_of(loss.node)}: {loss.reason}; {human(loss.bytes)} are whole from there on"


LETTERS = {5: "n c d h w", 4: "n c h w", 3: "n c w", 2: "n c", 1: "n", 0: ""}


def entry(node: fx.Node) -> str:
    """The entry of the op table to write for an op without a rule: every dim may be split, until a bracket says otherwise."""
    bound, target = bound_of(node), full_name(node.target)
    patterns = {key: _pattern(operand.ndim) for key, operand in bound.call.tensors.items()}
    ins = ", ".join(f'"{key}": "{pattern}"' for key, pattern in patterns.items())
    outs = ", ".join(f'"{_pattern(out.ndim)}"' for out in bound.call.outs)
    name = name_of(node.target).replace(".", "_")
    path = f"torch.ops.{target}" if isinstance(node.target, torch._ops.OpOverload) else target
    shapes = ", ".join(f"{key} {list(operand.shape)}" for key, operand in bound.call.tensors.items())
    made = ", ".join(str(list(out.shape)) for out in bound.call.outs)
    return "\n".join(
        [
            f"    # {label_of(node)}: {shapes} -> {made}",
            f"    @halofx.rule({path})",
            f"    def {name}(call):",
            f"        return Spec(ins={{{ins}}}, outs=[{outs}])   # dims of one name belong together; [d]: needed whole",
        ]
    )


def _pattern(ndim: int) -> str:
    return LETTERS.get(ndim) or " ".join("abcdefghijkl"[:ndim])
