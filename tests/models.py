"""Small models and helpers that several tests use."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import halofx
from halofx.runtime import shards


class TinyUNet(nn.Module):
    """Two levels, strided conv down, transposed conv up, a skip."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm3d, width: int = 4) -> None:
        super().__init__()
        self.enc = nn.Conv3d(1, width, 3, padding=1, bias=False)
        self.norm = norm(width)
        self.down = nn.Conv3d(width, 2 * width, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose3d(2 * width, width, 2, stride=2)
        self.head = nn.Conv3d(2 * width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.norm(self.enc(x)))
        up = self.up(F.relu(self.down(skip)))
        if up.shape != skip.shape:
            up = F.pad(up, [v for n, m in zip(skip.shape[:1:-1], up.shape[:1:-1], strict=True) for v in (0, n - m)])
        return self.head(torch.cat([up, skip], 1))


class Convs(nn.Module):
    """Plain convolutions: its only messages are halos."""

    def __init__(self, count: int = 4, width: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv3d(1 if i == 0 else width, width, 3, padding=1) for i in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.leaky_relu(layer(x))
        return x


def relative(actual: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """The largest error relative to the largest value, or to ``floor`` if that is larger."""
    if expected.numel() == 0:
        return 0.0
    scale = max(1e-30, floor, float(expected.detach().abs().max()))
    return float((actual.detach() - expected.detach()).abs().max()) / scale


def same_as_one_device(
    model: nn.Module,
    inputs: tuple[Any, ...],
    mesh: halofx.Mesh,
    *,
    loss: Callable[..., Any] | None = None,
    targets: tuple[Any, ...] = (),
    steps: int = 0,
    tolerance: float = 1e-10,
    **options: Any,
) -> list[halofx.Net]:
    """Assert the law for a model: outputs, loss, gradients of parameters and inputs, buffers, and Adam steps.

    ``model`` and ``inputs`` should be float64. Returns the nets, one a rank.
    """
    weights = _Weights()
    expected = _one_device(copy.deepcopy(model), inputs, loss, targets, steps, weights)

    def run(rank: int) -> tuple[dict[str, Tensor], halofx.Net]:
        own = copy.deepcopy(model)
        net = halofx.compile(own, mesh, inputs=inputs, loss=loss, targets=targets if loss else None, **options)
        return _distributed(net, own, inputs, targets, steps, weights, loss is not None), net

    # A gradient that is zero but for rounding (a bias before a norm) is compared with the others' size.
    chaos = _chaos(model, inputs, loss, targets, steps, weights, expected) if steps else 0.0
    floor = 1e-3 * max(
        (float(v.abs().max()) for n, v in expected.items() if n.startswith("grad") and v.numel()), default=0.0
    )
    results = halofx.launch(run, mesh, timeout=60)
    for rank, (found, net) in enumerate(results):
        layouts = net.instances.state.layouts
        apart = mesh["pipe"] > 1  # parameters are on their stage only
        assert found.keys() == expected.keys() or (apart and found.keys() <= expected.keys()), (
            f"rank {rank}: {found.keys() ^ expected.keys()}"
        )
        for name, value in ((n, v) for n, v in expected.items() if n in found):
            if name.startswith("grad input"):
                layout = net.instances.input_layout(name.split()[2], value.shape)
                value = shards.take(value, layout, mesh, rank)
            elif (name.split()[-1] in layouts) and not name.startswith("output"):
                value = shards.take(value, layouts[name.split()[-1]], mesh, rank)
            assert found[name].shape == value.shape, (
                f"{mesh} rank {rank} {name}: {found[name].shape} is not {value.shape}"
            )
            error = relative(found[name], value, floor if name.startswith("grad") else 0.0)
            assert error <= (max(tolerance, 10 * chaos) if name.startswith("after") else tolerance), (
                f"{mesh} rank {rank} {name}: relative error {error:.2e}"
            )
    everything = set[str]().union(*(found.keys() for found, _ in results))
    assert everything == expected.keys(), f"on no rank: {expected.keys() - everything}"
    return [net for _, net in results]


class _Weights:
    """The same random cotangents for equal shapes, in order."""

    def dot(self, values: list[Any]) -> Tensor:
        generator = torch.Generator().manual_seed(7)
        terms = [
            (v * torch.randn(v.shape, generator=generator, dtype=torch.float64).to(v.dtype)).sum()
            for v in values
            if isinstance(v, Tensor) and v.is_floating_point()
        ]
        return torch.stack(terms).sum()


def _chaos(
    model: nn.Module, inputs: Any, loss: Any, targets: Any, steps: int, weights: _Weights, expected: dict[str, Tensor]
) -> float:
    """How far the one-device model itself moves within the steps when its input moves by 2 units in the last place.

    Training is chaotic: a deep net under Adam multiplies rounding; no other order of summation can be nearer than that.
    """
    moved = tuple(x * (1 + 4e-16) if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)
    other = _one_device(copy.deepcopy(model), moved, loss, targets, steps, weights)
    return max(relative(other[n], v) for n, v in expected.items() if n.startswith("after"))


def _leaf(value: Any) -> Any:
    return value.detach().clone().requires_grad_() if isinstance(value, Tensor) and value.is_floating_point() else value


def _facts(model: nn.Module, xs: tuple[Any, ...], names: tuple[str, ...]) -> dict[str, Tensor]:
    found = {f"grad {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    found |= {f"buffer {n}": b.clone() for n, b in model.named_buffers() if b.is_floating_point() and not b.is_meta}
    pairs = zip(names, xs, strict=False)
    return found | {f"grad input {n}": x.grad for n, x in pairs if isinstance(x, Tensor) and x.grad is not None}


def _steps(model: nn.Module, count: int, step: Callable[[], Tensor]) -> dict[str, Tensor]:
    if not count:
        return {}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(count):
        optimizer.zero_grad()
        step().backward()
        optimizer.step()
    return {f"after {count} steps {n}": p.detach() for n, p in model.named_parameters() if not p.is_meta}


def _one_device(
    model: nn.Module, inputs: tuple[Any, ...], loss: Any, targets: tuple[Any, ...], steps: int, weights: _Weights
) -> dict[str, Tensor]:
    xs = tuple(_leaf(x) for x in inputs)

    def value(*args: Any) -> Any:
        out = model(*args)
        return loss(out, *targets) if loss is not None else out

    outs = tree_flatten(value(*xs))[0]
    weights.dot(outs).backward()
    found = {f"output {i}": v.detach() for i, v in enumerate(outs) if isinstance(v, Tensor)}
    found |= _facts(model, xs, _names(model))
    return found | _steps(model, steps, lambda: weights.dot(tree_flatten(value(*inputs))[0]))


def _distributed(
    net: halofx.Net, model: nn.Module, inputs: Any, targets: Any, steps: int, weights: _Weights, whole: bool
) -> dict[str, Tensor]:
    cut = [net._cut(x, n) for x, n in zip(inputs, net.names, strict=False)]
    wanted = net.shard_target(*targets) if targets else ()
    wanted = wanted if isinstance(wanted, tuple) and len(targets) != 1 else (wanted,) if targets else ()
    xs = tuple(_leaf(x) for x in cut)

    def value(*args: Any) -> list[Any]:
        outs = tree_flatten(net(*args, *wanted))[0]
        return outs if whole else [net.gather(v) if isinstance(v, Tensor) else v for v in outs]

    outs = value(*xs)
    weights.dot(outs).backward()
    found = {f"output {i}": v.detach() for i, v in enumerate(outs) if isinstance(v, Tensor)}
    found |= _facts(model, xs, net.names)
    return found | _steps(model, steps, lambda: weights.dot(value(*cut)))


def _names(model: nn.Module) -> tuple[str, ...]:
    from halofx.compiler.inputs import parameter_names

    return parameter_names(model)
