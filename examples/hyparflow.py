"""HyPar-Flow's experiments (Awan et al., ISC 2020, arXiv 1911.05146) with one call: data, model and hybrid parallelism.

    python -m examples.hyparflow                                          sequential and three strategies: the same accuracy
    python -m examples.hyparflow train --partitions 4 --strategy model
    python -m examples.hyparflow count                                    48 partitions x 512 replicas, counted in one process
    torchrun --nproc-per-node 4 -m examples.hyparflow train --partitions 2 --replicas 2

The data are scikit-learn's 1,797 handwritten digits (8 x 8), which come with the package.
"""

from __future__ import annotations

import time
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

import halofx
from halofx.compiler.balance import imbalance, stage_costs

app = typer.Typer(add_completion=False, help=__doc__)
MODEL = Annotated[str, typer.Option(help="resnet-110, resnet-1001, resnet-4997 or vgg-16")]


def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Images [N, 1, 8, 8] and labels [N] to train on, and others to test on."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SystemExit(
            "the digits come with scikit-learn: pip install scikit-learn, or the extra demo of halofx"
        ) from error
    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1
    y = torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1440], order[1440:]
    return (x[train], y[train]), (x[test], y[test])


def build(name: str) -> nn.Module:
    """A network for the digits, from a fixed seed."""
    torch.manual_seed(0)
    return halofx.zoo.build(name, (1, 1, 8, 8))


@app.command()
def train(
    model: MODEL = "resnet-110",
    strategy: Annotated[str, typer.Option(help="data, model or hybrid")] = "hybrid",
    partitions: Annotated[int, typer.Option(help="parts of the model")] = 1,
    replicas: Annotated[int, typer.Option(help="copies of the model")] = 1,
    epochs: int = 2,
    batch: int = 48,
    microbatches: Annotated[int, typer.Option(help="above 1, batch norms see micro-batches")] = 1,
    steps: Annotated[int, typer.Option(help="only so many batches, of one epoch; 0 is all")] = 0,
    lr: Annotated[float, typer.Option(help="learning rate of SGD with momentum 0.9")] = 0.01,
    double: Annotated[bool, typer.Option(help="train in float64")] = False,
) -> float:
    """Train by one strategy; prints the loss and the accuracy."""
    data, test = digits()
    if steps:
        data, epochs = (data[0][: steps * batch], data[1][: steps * batch]), 1
    dtype = torch.float64 if double else torch.float32
    data, test = ((x.to(dtype), y) for x, y in (data, test))
    net, start = build(model).to(dtype), time.perf_counter()
    history = halofx.fit(
        net, data, partitions, replicas, strategy, epochs=epochs, batch_size=batch, microbatches=microbatches,
        validation=None if steps else test, optimizer=lambda p: torch.optim.SGD(p, lr=lr, momentum=0.9),
    )  # fmt: skip
    seconds = time.perf_counter() - start
    accuracy = f", accuracy {history.accuracy[-1]:.4f}" if history.accuracy else ""
    if halofx.current().rank == 0:
        print(
            f"{model} {strategy:<6} {partitions} x {replicas}: last loss {history.losses[-1]:.6f}{accuracy}, {seconds:.0f} s",
            flush=True,
        )
    return history.losses[-1]


@app.command()
def compare(
    model: MODEL = "resnet-110", epochs: int = 3, batch: int = 48, lr: float = 0.01, double: bool = True
) -> None:
    """Sequential, data-, model- and hybrid-parallel training of the same network on the same batches.

    In float64, since training a deep ResNet magnifies every rounding: in float32 the losses part after a few steps.
    """
    for strategy, partitions, replicas in (("model", 1, 1), ("data", 1, 2), ("model", 4, 1), ("hybrid", 2, 2)):
        train(model, strategy, partitions, replicas, epochs, batch, lr=lr, double=double)


@app.command()
def count(model: MODEL = "resnet-1001", partitions: int = 48, replicas: int = 512, microbatches: int = 4) -> None:
    """What a step of a large run sends, counted in this process."""
    with torch.device("meta"):
        net = halofx.zoo.build(model, (1, 3, 32, 32))
    n, start = replicas * microbatches, time.perf_counter()
    compiled = halofx.compile(
        net, halofx.Mesh(pipe=partitions, data=replicas), inputs=[(n, 3, 32, 32)], loss=F.cross_entropy,
        targets=[torch.empty(n, dtype=torch.long, device="meta")], microbatches=microbatches,
    )  # fmt: skip
    costs = stage_costs(compiled.program)
    print(f"{model}, {partitions} partitions x {replicas} replicas, {microbatches} micro-batches of {replicas} samples")
    print(str(compiled.summary()).partition("\nstage 0")[0])
    print(
        f"predicted imbalance of the partitions {imbalance(costs):.1%}; compiled in {time.perf_counter() - start:.0f} s"
    )


@app.callback(invoke_without_command=True)
def main(context: typer.Context) -> None:
    """The four strategies, unless a command says otherwise."""
    if context.invoked_subcommand is None:
        compare()


if __name__ == "__main__":
    app()
