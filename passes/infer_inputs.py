"""Give every dim of every input the mesh axis that splits it.

    mesh data=2 depth=2 height=2
    x:       [2, 1, 64, 64, 64]    homes (data, None, depth, height, None)
    target:  [2, 64, 64, 64]       homes (data, depth, height, None)          no channel dim: the extents of x say so

Dim 0 is the batch; the last dims are depth, height, width, as many as the first input has beyond batch and channel.
``layouts={"x": (None, None, "depth")}`` says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from halofx.compiler.errors import MeshError
from halofx.compiler.facts import Homes, shape_of
from halofx.compiler.inputs import default_homes
from halofx.compiler.interval import blocks
from halofx.compiler.program import Program
from halofx.passes.infer_homes import CHANNEL


def infer_inputs(program: Program) -> None:
    """Set ``homes`` on the input placeholders; raises `MeshError` for an axis that no input has a dim for."""
    inputs = program.placeholders("input")
    given: Mapping[str, Sequence[str | None]] = program.options.get("layouts") or {}
    unknown = set(given) - {n.meta["input"] for n in inputs}
    if unknown:
        names = ", ".join(n.meta["input"] for n in inputs)
        raise MeshError(f"layouts names {', '.join(sorted(unknown))}; the tensor inputs of the model are {names}")
    main = max(inputs, key=lambda n: len(shape_of(n)), default=None)
    shape = shape_of(main) if main is not None else ()
    for node in inputs:
        name = node.meta["input"]
        homes = _checked(program, node, tuple(given[name])) if name in given else default_homes(shape_of(node), shape)
        node.meta["homes"] = (tuple(a if a and program.mesh[a] > 1 else None for a in homes),)
    _check_axes(program, inputs)


def _checked(program: Program, node: fx.Node, homes: Homes) -> Homes:
    shape, name = shape_of(node), node.meta["input"]
    if len(homes) != len(shape):
        raise MeshError(f"layouts[{name!r}] has {len(homes)} entries, the input has shape {list(shape)}")
    for axis in homes:
        if axis is not None and axis not in program.mesh.axes:
            raise MeshError(f"layouts[{name!r}] names axis {axis!r}; the axes of the mesh are {program.mesh}")
    return homes


def _check_axes(program: Program, inputs: Sequence[fx.Node]) -> None:
    used = {axis for node in inputs for axis in node.meta["homes"][0] if axis}
    for axis in program.mesh.axes:
        if program.mesh[axis] > 1 and axis not in used and axis != CHANNEL:
            name = inputs[0].meta["input"] if inputs else "x"
            shapes = ", ".join(f"{n.meta['input']} {list(shape_of(n))}" for n in inputs)
            raise MeshError(
                f"mesh axis {axis}={program.mesh[axis]} splits no dim of the inputs ({shapes}); "
                f"drop the axis, or say which dim it splits with layouts={{{name!r}: (...)}}"
            )
    micro = program.stages.micro if program.stages is not None else 1
    for node in inputs:
        name, shape = node.meta["input"], shape_of(node)
        for n, axis in zip(shape, node.meta["homes"][0], strict=True):
            if axis == "data" and micro > 1 and not all(blocks(n, program.mesh["data"])):
                raise MeshError(
                    f"microbatches={micro} is more than the samples of input {name} {list(shape)} on a rank; make it smaller"
                )
    for node in inputs:
        for n, axis in zip(shape_of(node), node.meta["homes"][0], strict=True):
            if axis and n < program.mesh[axis]:
                program.notes.append(
                    f"input {node.meta['input']} has {n} indices for the {program.mesh[axis]} ranks of axis {axis}: "
                    f"some ranks hold none of it"
                )
