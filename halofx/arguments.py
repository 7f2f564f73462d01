"""What the command line takes: shapes, inputs, meshes, models and losses, as text."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halofx
from halofx import zoo
from halofx.compiler.errors import CompileError, MeshError

Shape = tuple[int, ...]


def parse_shape(text: str) -> tuple[int, ...]:
    """``"1,1,64,64,64"`` as a tuple.

    >>> parse_shape("1,1,64,64,64")
    (1, 1, 64, 64, 64)
    """
    try:
        shape = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        raise ValueError(f"--input {text!r} is not a shape; write it as 1,1,64,64,64") from None
    if any(n < 1 for n in shape):
        raise ValueError(f"--input {text!r} has an extent below 1")
    return shape


def parse_mesh(text: str) -> halofx.Mesh:
    """``"data=2,depth=4"`` as a mesh.

    >>> parse_mesh("data=2,depth=4")
    Mesh(data=2, depth=4)
    """
    sizes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, size = part.partition("=")
        if not size.strip().isdigit():
            raise MeshError(f"--mesh {text!r}: {part!r} is not axis=size; write it as data=2,depth=4")
        sizes[name.strip()] = int(size)
    return halofx.Mesh(**sizes)


@dataclass(frozen=True)
class Given:
    """An input as asked for: a global shape, a dtype, and for integers the number that they stay below."""

    shape: Shape
    dtype: torch.dtype | None = None  # that of the model
    high: int = 2

    def draw(self, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        """A random tensor: standard normal, or integers below ``high``."""
        wanted = self.dtype or dtype
        if wanted.is_floating_point or wanted.is_complex:
            return torch.randn(self.shape, generator=generator, dtype=wanted)
        return torch.randint(0, self.high, self.shape, generator=generator).to(wanted)


def parse_input(text: str) -> Given:
    """``"1,1,64,64,64"``, or with a dtype and a bound for integers ``"1,77:int64:1000"``.

    >>> parse_input("1,77:int64:1000")
    Given(shape=(1, 77), dtype=torch.int64, high=1000)
    """
    shape, *rest = text.split(":")
    dtype = getattr(torch, rest[0], None) if rest else None
    if len(rest) > 2 or (rest and not isinstance(dtype, torch.dtype)) or not all(r.isdigit() for r in rest[1:]):
        raise ValueError(f"--input {text!r} is not SHAPE[:DTYPE[:HIGH]]; write it as 1,1,64,64,64 or 1,77:int64:1000")
    return Given(parse_shape(shape), dtype, int(rest[1]) if len(rest) > 1 else 2)


@dataclass
class Made:
    """A model, and the example inputs that its factory returned with it."""

    model: nn.Module
    args: tuple[Any, ...] | None = None
    kwargs: dict[str, Any] | None = None


def build_model(name: str, shapes: Sequence[Shape], meta: bool = True) -> Made:
    """A zoo model, or what ``module:factory`` returns: a model, or ``(model, args)`` or ``(model, args, kwargs)``.

    With ``meta`` it is built on the meta device where it lets itself be. Raises `CompileError` where there is no such factory,
    or it fails, or returns something else.
    """
    if ":" not in name:
        with torch.device("meta") if meta else nullcontext():
            return Made(zoo.build(name, shapes[0] if shapes and len(shapes[0]) == 5 else None))
    factory = load(name)
    if isinstance(factory, nn.Module):
        return _made(name, factory)
    if not callable(factory):
        raise CompileError(f"{name} is {type(factory).__name__}, neither a function that makes a model nor a model")
    _check_arguments(name, factory)
    if meta:
        try:
            with torch.device("meta"):
                return _made(name, factory())
        except CompileError:
            raise
        except Exception:  # some factories load or compute values
            pass
    try:
        return _made(name, factory())
    except CompileError:
        raise
    except Exception as error:
        raise CompileError(f"{name}() fails with {type(error).__name__}: {error}") from error


def _check_arguments(name: str, factory: Callable[..., Any]) -> None:
    """Refuse a factory that cannot be called without arguments."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # builtins have no signature: calling will tell
        return
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]
    if needed:
        module, _, function = name.partition(":")
        values = ", ".join(f"{n}=..." for n in needed)
        raise CompileError(
            f"{name} needs arguments ({', '.join(needed)}); add a factory without to {module}, "
            f"`def small(): return {function}({values})`, and give {module}:small"
        )


def _made(name: str, value: Any) -> Made:
    model, *rest = value if isinstance(value, tuple) and value else (value,)
    if not isinstance(model, nn.Module) or len(rest) > 2:
        raise CompileError(
            f"{name} returned {type(value).__name__}; return a torch.nn.Module, or (model, args) or (model, args, kwargs)"
        )
    args = None if not rest else tuple(rest[0]) if isinstance(rest[0], (tuple, list)) else (rest[0],)
    return Made(model, args, dict(rest[1]) if len(rest) > 1 else None)


def load(name: str) -> Any:
    """The object behind ``module:name``, found from the current directory too."""
    module_name, _, attribute = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise CompileError(
            f"{name}: cannot import {module_name} ({error}); run from the directory that holds it"
        ) from error
    found = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = ", ".join(n for n in vars(found) if not n.startswith("_"))
            raise CompileError(f"{name}: {module_name} has no {attribute!r}; it has {known}")
        found = getattr(found, part)
    return found


def parse_loss(name: str) -> Callable[..., Any]:
    """A loss by its name in ``torch.nn.functional`` or ``torch.nn``, or ``module:function`` of the user's."""
    if ":" in name:
        found = load(name)
    else:
        found = getattr(F, name, None) or getattr(nn, name, None)
    if isinstance(found, type):
        found = found()
    if not callable(found):
        raise ValueError(f"--loss {name!r} is neither in torch.nn.functional nor module:function; try cross_entropy")
    loss: Callable[..., Any] = found
    return loss


def target_for(loss: str, output: Tensor, generator: torch.Generator) -> Tensor:
    """A random target for a loss: classes [N, D, H, W] for those that take them, else like the output."""
    if loss.lower().replace("_", "").removesuffix("loss") in ("crossentropy", "nll"):
        shape = output.shape[:1] + output.shape[2:]
        return torch.randint(0, output.shape[1], shape, generator=generator)
    if "binary" in loss.lower() or "bce" in loss.lower():
        return torch.rand(output.shape, generator=generator, dtype=output.dtype)
    return torch.randn(output.shape, generator=generator, dtype=output.dtype)
