"""`halofx.fit`: data, model and hybrid parallelism by one flag, equal to training on one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halofx
from halofx import zoo
from tests.models import relative


def network() -> nn.Module:
    torch.manual_seed(0)
    return zoo.build("resnet-110", (1, 1, 8, 8), width=2, blocks=1, classes=3).double()


def samples(count: int = 20) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    return torch.randn(count, 1, 8, 8, generator=made, dtype=torch.float64), torch.randint(
        0, 3, (count,), generator=made
    )


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def alone(model: nn.Module, data: tuple[Tensor, Tensor], epochs: int, batch: int) -> list[float]:
    """The loop as one writes it for one device."""
    optimizer, losses = sgd(model.parameters()), []
    for epoch in range(epochs):
        order = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(epoch))
        for index in order.split(batch):
            if len(index) == batch:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(data[0][index]), data[1][index])
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(
    ("strategy", "partitions", "replicas", "more"),
    [
        ("model", 1, 1, {}), ("data", 1, 2, {}), ("model", 3, 1, {}), ("hybrid", 2, 2, {}), ("hybrid", 2, 1, {"channel": 2}),
        ("hybrid", 2, 1, {"height": 2}),
    ],
)  # fmt: skip
def test_every_strategy_trains_as_one_device(
    strategy: Any, partitions: int, replicas: int, more: dict[str, int]
) -> None:
    """The same losses, weights and accuracy; the last batch of 20 samples by 8 is left out, that of 20 to validate is not."""
    data, one, model = samples(), network(), network()
    losses = alone(one, data, 2, 8)
    with torch.no_grad():
        accuracy = float((one.eval()(data[0]).argmax(1) == data[1]).double().mean())
    history = halofx.fit(
        model, data, partitions, replicas, strategy, epochs=2, batch_size=8, microbatches=1, optimizer=sgd,
        validation=data, **more,
    )  # fmt: skip
    assert len(history.losses) == 4 and all(abs(a - b) < 1e-10 for a, b in zip(history.losses, losses, strict=True))
    assert history.accuracy[-1] == accuracy
    assert all(relative(v, one.state_dict()[n]) < 1e-10 for n, v in model.state_dict().items())


def test_layers_and_microbatches() -> None:
    """Partitions by numbers of layers; without batch norms micro-batches change nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 3)).double()
    one, data = copy.deepcopy(model), samples()
    history = halofx.fit(model, data, 2, strategy="model", batch_size=10, layers=[1, 3], optimizer=sgd)
    assert all(abs(a - b) < 1e-12 for a, b in zip(history.losses, alone(one, data, 1, 10), strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "magic"}, "none of data, model, hybrid"),
        ({"strategy": "data", "num_partitions": 2}, "strategy='data' has num_partitions=1, not 2"),
        ({"strategy": "model", "num_replicas": 2}, "strategy='model' has num_replicas=1, not 2"),
        ({"batch_size": 21}, "batch_size=21 is more than the 20 samples"),
    ],
)
def test_what_does_not_fit(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(halofx.MeshError, match=message):
        halofx.fit(network(), samples(), **arguments)
