"""The names of the inputs, and the mesh axis that splits each of their dims unless the user says otherwise."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn

from halofx.compiler.facts import Homes

SPATIAL = ("depth", "height", "width")


def default_homes(shape: Sequence[int], main: Sequence[int]) -> Homes:
    """The axes of an input of ``shape``, where ``main`` is the shape of the input with most dims.

    Dim 0 is the batch; the last dims are depth, height, width, as many as ``main`` has beyond batch and channel.

    >>> default_homes((2, 1, 64, 64, 64), (2, 1, 64, 64, 64))
    ('data', None, 'depth', 'height', 'width')
    >>> default_homes((2, 64, 64, 64), (2, 1, 64, 64, 64))
    ('data', 'depth', 'height', 'width')
    >>> default_homes((2, 4), (2, 1, 64, 64, 64)), default_homes((4,), (2, 1, 64, 64, 64))
    (('data', None), (None,))
    """
    space = len(main) - 2
    axes = SPATIAL[-space:] if 0 < space <= 3 else ()
    if len(shape) < 1 or not main or (shape[0] != main[0]):
        return (None,) * len(shape)
    channels = len(shape) - 1 - len(axes)
    if axes and (len(shape) == len(main) or (channels == 0 and tuple(shape[1:]) == tuple(main[2:]))):
        return ("data",) + (None,) * channels + axes
    return ("data",) + (None,) * (len(shape) - 1)


def parameter_names(model: nn.Module) -> tuple[str, ...]:
    """The names of the model's positional arguments; ``args.0``, ``args.1``, ... where it takes any number."""
    names: list[str] = []
    for name, parameter in inspect.signature(model.forward).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{name}.{i}" for i in range(32)]
        elif parameter.kind is not parameter.VAR_KEYWORD:
            names.append(name)
    return tuple(names)


def leaf_name(path: Sequence[Any], model: nn.Module, targets: int) -> str:
    """The name of a leaf of ``(args, kwargs, targets)``: ``x``, ``x.0``, ``batch.image``, ``target``."""

    def part(key: Any) -> str:
        return str(getattr(key, "idx", getattr(key, "key", getattr(key, "name", key))))

    group, rest = part(path[0]), [part(k) for k in path[1:]]
    if group == "0":
        rest[0] = parameter_names(model)[int(rest[0])]
    elif group == "2":
        rest = ["target", *(rest if targets > 1 else rest[1:])]
    return ".".join(rest)
