"""What one rank does of an op: its view of the dims, and the call that it makes."""

from __future__ import annotations

from torch import fx

from halofx.compiler.facts import bound_of, calls, layout_of, shape_of, source_of
from halofx.compiler.index_map import length
from halofx.compiler.primitives import redistribute, transfer, vary
from halofx.compiler.program import Program
from halofx.compiler.rules import Call, Local


def local_view(program: Program, node: fx.Node, rank: int) -> Local:
    """One rank's view of an op, in global coordinates."""
    bound, mesh = bound_of(node), program.mesh
    split = {factor: (mesh.coordinate(rank, axis), mesh[axis]) for factor, axis in node.meta["split"].items()}
    split.update(dict.fromkeys(node.meta["fetched"], (0, 1)))
    return Local(bound.call, bound, split)


def local_call(local: Local) -> Call:
    """The call that a rank makes: the rule's local form where something is split, the call itself otherwise."""
    spec = local.bound.spec
    if spec is None or spec.local is None or not local.split:
        return local.call
    return spec.local(local)


def common_arguments(program: Program, node: fx.Node) -> dict[str, object]:
    """The arguments that the local form changes alike on the first and the last rank: what a listing can show for all."""
    if "split" not in node.meta or not node.meta["split"]:
        return {}
    first, last = (local_call(local_view(program, node, rank)) for rank in (0, program.mesh.size - 1))
    if first.target is not node.target or last.target is not node.target:
        return {}
    return {n: v for n, v in first.args.items() if _plain(v) and n in last.args and v == last.args[n]}


def _plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(isinstance(v, (int, float, bool)) for v in value)
    return isinstance(value, (int, float, bool, str))


def shard_shape(program: Program, node: fx.Node, rank: int) -> tuple[int, ...]:
    """The shape of what a rank of the program's mesh has of a value, halos included."""
    mesh, moves = program.mesh, []
    while calls(node, redistribute, transfer, vary):
        if calls(node, redistribute):
            moves.append(node.meta["move"])
        node = source_of(node)
    local = list(layout_of(node).local_shape(shape_of(node), mesh, rank))
    for move in reversed(moves):
        if move.have is not None:
            local[move.have] = move.have_extent
        local[move.dim] = length(move.reads[mesh.coordinate(rank, move.axis)])
    return tuple(local)
