"""Hold parameters and buffers as the shards that are read of them: filters and channels over axis ``channel``.

before    conv.weight: f32[64, 32, 3, 3, 3]              every user reads its block of dim 0
after     conv.weight: f32[64@channel, 32, 3, 3, 3]      nothing to cut; gradient and optimizer state are shards too

State that some user reads otherwise stays whole, and so does what does not divide evenly: DTensor, in which checkpoints are
written, cuts that into other blocks. The option ``held`` names what earlier programs of a net have decided.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from halofx.compiler.emit import operand_nodes
from halofx.compiler.errors import MeshError
from halofx.compiler.facts import bound_of, is_op, set_layout, shape_of
from halofx.compiler.index_map import span
from halofx.compiler.interval import blocks
from halofx.compiler.layout import Layout
from halofx.compiler.program import Program
from halofx.passes.infer_homes import CHANNEL


def plan_state(program: Program) -> None:
    """Set the layout of every parameter and buffer; raises `MeshError` where axis ``channel`` splits nothing."""
    if program.mesh[CHANNEL] == 1:
        return
    held: Mapping[str, Layout] | None = program.options.get("held")
    for node in program.placeholders("state"):
        dim, ndim = _read_as_blocks(program, node), len(shape_of(node))
        if held is not None:
            set_layout(node, held.get(node.meta["state"], Layout.whole(ndim)))
        else:
            set_layout(node, Layout(tuple(CHANNEL if d == dim else None for d in range(ndim))))
    ops = [node for node in program.graph.nodes if is_op(node)]
    if not any(CHANNEL in node.meta["split"].values() for node in ops):
        raise MeshError(
            f"mesh axis {CHANNEL}={program.mesh[CHANNEL]} splits nothing: no layer of the model has as many filters; "
            f"drop the axis, or make it smaller"
        )


def _read_as_blocks(program: Program, node: fx.Node) -> int | None:
    """The dim of which every user reads its canonical block along axis ``channel``; None where they do not agree."""
    found: set[int | None] = set()
    for user in node.users:
        if not is_op(user):
            return None
        for key, source in operand_nodes(user).items():
            if source is node:
                found.add(_block_dim(program, user, key))
    return found.pop() if len(found) == 1 else None


def _block_dim(program: Program, user: fx.Node, key: str) -> int | None:
    bound, parts = bound_of(user), program.mesh[CHANNEL]
    for factor in bound.factors.values():
        if user.meta["split"].get(factor.name) != CHANNEL:
            continue
        for at, dim, index_map in factor.ins:
            if at == key:
                extent = bound.call.tensors[key].shape[dim]
                if extent % parts:
                    return None
                reads = [index_map.read(block, extent) for block in blocks(factor.extent, parts)]
                return dim if reads == [span(block) for block in blocks(extent, parts)] else None
    return None
