"""The command line: look at what halofx makes of a model, and prove it on threads."""

from __future__ import annotations

import re
import sys
import time
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import halofx
from halofx import zoo
from halofx.arguments import Made, build_model, parse_input, parse_loss, parse_mesh, parse_shape, target_for
from halofx.compiler.errors import CompileError, HalofxError
from halofx.compiler.table import op_table

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)

MODEL = Annotated[
    str,
    typer.Argument(
        help=f"a zoo model ({', '.join(zoo.MODELS)}) or module:factory of your own, which returns the model, "
        "or (model, args) with example inputs"
    ),
]
INPUT = Annotated[
    list[str], typer.Option("--input", "-i", help="global shape of an input, as 1,1,197,233,189; once an input")
]
INPUTS = Annotated[
    list[str],
    typer.Option("--input", "-i", help="an input, as 1,1,96,96,96, or 1,77:int64:1000 for integers below 1000"),
]
MICRO = Annotated[
    int, typer.Option(help="parts of the batch that go through the stages of axis pipe one after another")
]
SCHEDULE = Annotated[str | None, typer.Option(help="gpipe, 1f1b, interleaved, zero-bubble or zbv")]
STAGES = Annotated[
    str | None, typer.Option(help="where axis pipe cuts: layers in each stage, as 12,20, or first modules, as enc2,up1")
]
MESH = Annotated[str, typer.Option("--mesh", "-m", help="axes and sizes, as data=2,depth=4")]


def _pipeline(microbatches: int, schedule: str | None, stages: str | None) -> dict[str, Any]:
    """The options of `halofx.compile` for axis ``pipe``."""
    parts = stages.split(",") if stages else None
    counts = parts is not None and all(part.strip().isdigit() for part in parts)
    cut = [int(part) for part in parts] if parts is not None and counts else parts
    return {"microbatches": microbatches, "schedule": schedule, "stages": cut}


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
    microbatches: MICRO = 1,
    schedule: SCHEDULE = None,
    stages: STAGES = None,
) -> None:
    """Print the listing of a model: every op and every message, on any number of ranks, without running one."""
    with _one_line_errors():
        shapes = [parse_shape(text) for text in inputs]
        start = time.perf_counter()
        made = build_model(model, shapes).model.train(train)
        plan = _pipeline(microbatches, schedule, stages)
        net = halofx.compile(made, parse_mesh(mesh), inputs=shapes, strict=strict, **plan)
        seconds = time.perf_counter() - start
        if node is not None:
            print(net.explain(node))
            return
        print(net.listing(after))
        print()
        print(net.summary())
        print(f"compiled for {net.mesh.size} ranks in {seconds:.1f} s")


@app.command()
def check(
    model: MODEL,
    mesh: MESH,
    inputs: INPUTS = [],  # noqa: B006
    train: Annotated[bool, typer.Option("--train/--eval", help="which mode to check")] = True,
    loss: Annotated[
        str | None, typer.Option(help="compare this loss: cross_entropy, mse_loss, ... or module:function")
    ] = None,
    targets: Annotated[list[str], typer.Option("--target", "-t", help="a target of the loss, as an --input")] = [],  # noqa: B006
    dtype: Annotated[str, typer.Option(help="float64 tells rounding from mistakes best")] = "float64",
    seed: Annotated[int, typer.Option(help="of the weights and the inputs")] = 0,
    thin: Annotated[str, typer.Option(help="what dims with fewer indices than ranks do: whole or split")] = "whole",
    strict: Annotated[bool, typer.Option(help="refuse ops without a rule")] = False,
    microbatches: MICRO = 1,
    schedule: SCHEDULE = None,
    stages: STAGES = None,
) -> None:
    """Run a model on threads, one a rank, and compare it with one device, forward and backward.

    Ends in one line: exact (exit code 0), the first node that differs (1), or why it was refused (2).
    """
    with _one_line_errors():
        options = {"thin": thin, "strict": strict, **_pipeline(microbatches, schedule, stages)}
        found = _check(model, mesh, inputs, train, loss, targets, dtype, seed, **options)
        if found.status == "refused" and dtype == "float64" and MIXED.search(found.verdict):
            print(f"in float64: {found.verdict}; checked in float32 instead")
            found = _check(model, mesh, inputs, train, loss, targets, "float32", seed, **options)
        print(found)
    raise typer.Exit({"exact": 0, "differs": 1}.get(found.status, 2))


MIXED = re.compile("dtype|scalar type|float", re.IGNORECASE)
"""In the message of a model that makes float32 tensors of its own, whatever the dtype of its input."""


def _check(
    name: str, mesh: str, inputs: list[str], train: bool, loss: str | None, targets: list[str],
    dtype: str, seed: int, **options: Any,
) -> halofx.Check:  # fmt: skip
    wanted = getattr(torch, dtype, None)
    if not isinstance(wanted, torch.dtype) or not wanted.is_floating_point:
        raise ValueError(f"--dtype {dtype!r} is not a floating dtype; write float64 or float32")
    axes, given = parse_mesh(mesh), [parse_input(text) for text in inputs]
    torch.manual_seed(seed)
    made = build_model(name, [g.shape for g in given], meta=False)
    model = made.model.to("cpu", wanted).train(train)
    generator = torch.Generator().manual_seed(seed)
    args = tuple(g.draw(wanted, generator) for g in given) or _as(made.args, wanted)
    if args is None:
        raise ValueError(f"no --input, and {name} returned no example inputs; add --input 1,1,64,64,64")
    kwargs = {} if given else _as(made.kwargs or {}, wanted)
    function = parse_loss(loss) if loss is not None else None
    drawn = [parse_input(text).draw(wanted, generator) for text in targets]
    if loss is not None and not targets and ":" not in loss:
        drawn = [target_for(loss, _output(made, args, kwargs), generator)]
    return halofx.check(model, args, axes, kwargs=kwargs, loss=function, targets=drawn, **options)


def _output(made: Made, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The first tensor of the model's output, to make a target for."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            out = made.model(*args, **kwargs)
    except Exception as error:
        raise CompileError(f"the model fails on one device with {type(error).__name__}: {error}") from error
    found: Tensor = next(t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor))
    return found


def _as(tree: Any, dtype: torch.dtype) -> Any:
    """The floating tensors of a tree in a dtype, on the CPU."""
    convert = lambda t: t.cpu().to(dtype) if t.is_floating_point() else t.cpu()  # noqa: E731
    return torch.utils._pytree.tree_map_only(Tensor, convert, tree)


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
