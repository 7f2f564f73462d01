"""`fit`: one call that trains a model with data, model or hybrid parallelism, as HyPar-Flow's does (Awan et al., ISC 2020)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halofx.api import SameEverywhere, compile
from halofx.compiler.errors import MeshError
from halofx.compiler.mesh import Mesh
from halofx.runtime.comm import current
from halofx.runtime.launch import launch
from halofx.runtime.net import Net

Strategy = Literal["data", "model", "hybrid"]
Data = tuple[Tensor, Tensor]
"""Inputs [N, ...] and targets [N, ...]."""

_FURTHER = ("channel", "depth", "height", "width")
"""Axes beside partitions and replicas."""


@dataclass
class History:
    """What happened: the loss of every step, and after every epoch the accuracy on the validation data."""

    losses: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class _Job:
    """What the ranks of one call of `fit` do."""

    mesh: Mesh
    epochs: int
    batch_size: int
    loss: Callable[..., Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    seed: int
    validation: Data | None
    options: dict[str, Any]


def fit(
    model: nn.Module,
    data: Data,
    num_partitions: int = 1,
    num_replicas: int = 1,
    strategy: Strategy = "hybrid",
    *,
    epochs: int = 1,
    batch_size: int = 32,
    loss: Callable[..., Tensor] = F.cross_entropy,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    layers: Sequence[int] | None = None,
    microbatches: int | None = None,
    schedule: str | None = None,
    validation: Data | None = None,
    seed: int = 0,
    **options: Any,
) -> History:
    """Train a model that is cut into partitions, in replicas; the model has the trained weights afterwards.

    Where the program was started with as many ranks (torchrun, mpirun) it runs on them; alone, it makes them threads.

    Args:
        model: any ``nn.Module``, the same weights on every rank.
        data: all inputs [N, ...] and targets [N, ...], on every rank; batches are drawn from them in one random order.
        num_partitions: stages of the pipeline (axis ``pipe``); 1 under strategy "data".
        num_replicas: copies that share every batch (axis ``data``); 1 under strategy "model".
        strategy: "data", "model" or "hybrid".
        epochs, batch_size: a batch is that of all replicas together; the rest of an epoch that fills no batch is left out.
        loss: ``loss(output, target)``, a mean or sum over samples for every schedule but GPipe.
        optimizer: makes one from parameters; Adam with learning rate 1e-3 when None.
        layers: how many layers each partition has; by default partitions take about the same time.
        microbatches: parts of a replica's batch; by default one a partition.
        schedule: as for `halofx.compile`.
        validation: inputs and class labels, for `History.accuracy`.
        seed: of the order of the samples, and of dropout.
        options: as for `halofx.compile`, for further mesh axes: ``depth=2``, ``channel=2``, ...

    Raises `MeshError` for a strategy that does not fit the numbers, or a world of another size.
    """
    _check_strategy(strategy, num_partitions, num_replicas)
    mesh = Mesh(pipe=num_partitions, data=num_replicas, **{a: options.pop(a) for a in _FURTHER if a in options})
    micro = microbatches if microbatches is not None else min(num_partitions, max(1, batch_size // num_replicas))
    options |= {"stages": layers, "microbatches": micro, "schedule": schedule, "seed": seed}
    job = _Job(mesh, epochs, batch_size, loss, optimizer or torch.optim.Adam, seed, validation, options)
    if batch_size > len(data[0]):
        raise MeshError(f"batch_size={batch_size} is more than the {len(data[0])} samples; make it smaller")
    if current().size not in (1, mesh.size):
        raise MeshError(
            f"{mesh!r} has {mesh.size} ranks, the world has {current().size}; start as many, or change the numbers"
        )
    return _train(model, data, job)[0] if current().size == mesh.size else _train_on_threads(model, data, job)


def _train_on_threads(model: nn.Module, data: Data, job: _Job) -> History:
    same = SameEverywhere()

    def rank(_: int) -> tuple[History, dict[str, Tensor]]:
        with same():
            return _train(copy.deepcopy(model), data, job)

    history, state = launch(rank, job.mesh)[0]
    model.load_state_dict(state)
    return history


def _check_strategy(strategy: str, partitions: int, replicas: int) -> None:
    if strategy not in ("data", "model", "hybrid"):
        raise MeshError(f"strategy={strategy!r} is none of data, model, hybrid")
    for name, count, alone in (("num_partitions", partitions, "data"), ("num_replicas", replicas, "model")):
        if strategy == alone and count != 1:
            raise MeshError(f"strategy={strategy!r} has {name}=1, not {count}; use strategy='hybrid' for both")


def _train(model: nn.Module, data: Data, job: _Job) -> tuple[History, dict[str, Tensor]]:
    """What every rank does."""
    x, y = data
    n = job.batch_size
    batch = [torch.empty(n, *t.shape[1:], dtype=t.dtype, device="meta") for t in data]
    net = compile(model.train(), job.mesh, inputs=batch[:1], loss=job.loss, targets=batch[1:], **job.options)
    optimizer, history = job.optimizer(net.parameters()), History()
    for epoch in range(job.epochs):
        net.train()
        for index in _batches(len(x), n, job.seed + epoch):
            optimizer.zero_grad()
            value = net(net.shard(x[index]), net.shard_target(y[index]))
            value.backward()
            optimizer.step()
            history.losses.append(float(value.detach()))
        if job.validation is not None:
            history.accuracy.append(_accuracy(net, job.validation, n))
    return history, net.full_state_dict()


def _batches(count: int, size: int, seed: int) -> Iterator[Tensor]:
    """The samples of every batch of an epoch: the same on every rank."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    yield from (part for part in order.split(size) if len(part) == size)


def _accuracy(net: Net, data: Data, size: int) -> float:
    """The share of samples whose largest output is that of their class."""
    x, y = data
    net.eval()
    right = 0
    for start in range(0, len(x), size):
        part = x[start : start + size]
        missing = size - len(part)
        full = torch.cat([part, part[:1].expand(missing, *part.shape[1:])]) if missing else part
        found = net.gather(net.predict(net.shard(full)))[: len(part)].argmax(1)
        right += int((found == y[start : start + size]).sum())
    return right / len(x)
