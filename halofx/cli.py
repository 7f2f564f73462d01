"""The command line: look at what halofx makes of a model without running a single rank."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

import halofx
from halofx import zoo
from halofx.compiler.errors import CompileError, HalofxError, MeshError
from halofx.compiler.table import op_table

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)

MODEL = Annotated[str, typer.Argument(help=f"a zoo model ({', '.join(zoo.MODELS)}) or module:factory of your own")]
INPUT = Annotated[
    list[str], typer.Option("--input", "-i", help="global shape of an input, as 1,1,197,233,189; once an input")
]
MESH = Annotated[str, typer.Option("--mesh", "-m", help="axes and sizes, as data=2,depth=4")]


@app.callback()
def main() -> None:
    """halofx splits 3D CNNs over devices, exactly."""


@app.command()
def show(
    model: MODEL,
    inputs: INPUT,
    mesh: MESH,
    train: Annotated[bool, typer.Option("--train/--eval", help="which mode to compile")] = True,
    after: Annotated[str | None, typer.Option(help="the listing as this pass left it")] = None,
    node: Annotated[str | None, typer.Option(help="explain one node of the listing instead")] = None,
    strict: Annotated[bool, typer.Option(help="refuse ops without a rule")] = False,
) -> None:
    """Print the listing of a model: every op and every message, on any number of ranks, without running one."""
    with _one_line_errors():
        shapes = [parse_shape(text) for text in inputs]
        start = time.perf_counter()
        net = halofx.compile(build_model(model, shapes).train(train), parse_mesh(mesh), inputs=shapes, strict=strict)
        seconds = time.perf_counter() - start
        if node is not None:
            print(net.explain(node))
            return
        print(net.listing(after))
        print()
        print(net.summary())
        print(f"compiled for {net.mesh.size} ranks in {seconds:.1f} s")


@app.command()
def ops() -> None:
    """Print the op table as Markdown: every op that halofx splits, and the rule of each."""
    print(op_table(), end="")


class _one_line_errors:
    """Ends the command with the message of an error of ours and exit code 2, without a traceback."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, (HalofxError, typer.BadParameter, ValueError)):
            print(f"halofx: {error}", file=sys.stderr)
            raise typer.Exit(2) from error


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


def build_model(name: str, shapes: list[tuple[int, ...]]) -> nn.Module:
    """A zoo model, or what ``module:factory`` returns; on the meta device where it lets itself be built there."""
    if ":" not in name:
        with torch.device("meta"):
            return zoo.build(name, shapes[0] if shapes and len(shapes[0]) == 5 else None)
    factory = load_factory(name)
    try:
        with torch.device("meta"):
            model = factory()
    except TypeError as error:
        raise CompileError(f"{name}() could not be called: {error}; give a factory that needs no arguments") from error
    except Exception:  # some factories load or compute values
        model = factory()
    if not isinstance(model, nn.Module):
        raise CompileError(f"{name}() returned {type(model).__name__}, not a torch.nn.Module")
    return model


def load_factory(name: str) -> Callable[[], Any]:
    """The object behind ``module:factory``, found from the current directory too."""
    module_name, _, attribute = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise CompileError(
            f"{name}: cannot import {module_name} ({error}); run from the directory that holds it"
        ) from error
    if not hasattr(module, attribute):
        known = ", ".join(n for n in vars(module) if not n.startswith("_"))
        raise CompileError(f"{name}: {module_name} has no {attribute!r}; it has {known}")
    factory: Callable[[], Any] = getattr(module, attribute)
    return factory
