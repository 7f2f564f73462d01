"""Training with axis ``channel`` under a real launcher, compared with one device; checkpoints by torch.distributed.checkpoint."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import halofx
from tests.models import TinyUNet, relative


def _norm(value: torch.Tensor) -> float:
    return float(value.full_tensor() if isinstance(value, DTensor) else value)


def _step(net: Any, one: Any, x: torch.Tensor, optimizers: list[torch.optim.Optimizer]) -> list[float]:
    """Train both by a step with clipped gradients; the errors of the output and of the norm."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    y, expected = net(net.shard(x)), one(x)
    net.gather(y).square().sum().backward()
    expected.square().sum().backward()
    norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (net, one)]
    for optimizer in optimizers:
        optimizer.step()
    return [abs(_norm(norms[0]) / _norm(norms[1]) - 1), relative(net.gather(y.detach(), like=y), expected)]


def train_and_save(folder: str, rank: int) -> float:
    """Three steps on channel=2, depth=2, saved after the second; the largest error."""
    torch.manual_seed(0)
    model, x = TinyUNet().double(), torch.randn(2, 1, 8, 8, 8, dtype=torch.float64)
    one = copy.deepcopy(model)
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    net = halofx.compile(model, halofx.Mesh(channel=2, depth=2), inputs=[x.shape])
    with pytest.raises(halofx.HalofxError, match=r"make it from net\.parameters"):
        early.step()
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (net, one)]
    errors = []
    for i in range(3):
        errors += _step(net, one, x, optimizers)
        if i == 1:
            parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizers[0]), strict=True))
            dcp.save(parts, checkpoint_id=folder)
    full = net.full_state_dict()
    errors += [relative(full[name].double(), value.double()) for name, value in one.state_dict().items()]
    assert sum(p.to_local().numel() for p in net.parameters()) < 0.51 * sum(p.numel() for p in one.parameters())
    dist.barrier()
    return max(errors)


def resume(folder: str, rank: int) -> dict[str, torch.Tensor]:
    """The third step from the checkpoint, on another mesh: the whole state after it."""
    torch.manual_seed(1)
    model = TinyUNet().double()
    torch.manual_seed(0)
    TinyUNet()
    x = torch.randn(2, 1, 8, 8, 8, dtype=torch.float64)
    net = halofx.compile(model, halofx.Mesh(height=2, channel=2), inputs=[x.shape])
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    _step(net, copy.deepcopy(TinyUNet().double()), x, [optimizer])
    return net.full_state_dict()


def last_state(rank: int) -> dict[str, torch.Tensor]:
    """The state of one device after the three steps."""
    torch.manual_seed(0)
    model, x = TinyUNet().double(), torch.randn(2, 1, 8, 8, 8, dtype=torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return model.state_dict()
