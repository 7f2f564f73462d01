"""One training step of a net under a real launcher, compared with one device: ``torchrun ... -m tests.net_worker depth=2``."""

from __future__ import annotations

import copy
import sys

import torch

import halofx
from halofx.cli import parse_mesh
from halofx.runtime.comm import current
from tests.models import TinyUNet, relative


def work(mesh: halofx.Mesh) -> float:
    """The largest relative error of output and gradients on this rank."""
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device()) if current().name == "nccl" else torch.device("cpu")
    model = TinyUNet().double().to(device)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(2, 1, 9, 8, 7, dtype=torch.float64).to(device)
    one = copy.deepcopy(model)
    net = halofx.compile(model, mesh, inputs=[x.shape])
    errors, trained = [], torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):  # twice: messages of the second step must not meet those of the first
        expected = one(x)
        one.zero_grad()
        expected.square().mean().backward()
        torch.optim.SGD(one.parameters(), lr=0.1).step()
        trained.zero_grad()
        y = net(net.shard(x))
        (y.square().sum() / expected.numel()).backward()
        trained.step()
        errors.append(relative(net.gather(y.detach(), like=y), expected))
    state = net.full_state_dict()  # with what the gradients did, of the parameters of every stage and channel
    for name, value in one.state_dict().items():
        assert not torch.equal(value, start[name])
        errors.append(relative(state[name], value))
    return max(errors)


def rank_work(rank: int) -> float:
    """For ``halofx.launch(rank_work, 2, backend="processes")``."""
    return work(halofx.Mesh(depth=2))


if __name__ == "__main__":
    comm = halofx.init(timeout=60)
    error = work(parse_mesh(sys.argv[1]))
    print(
        f"rank {comm.rank} of {comm.size} over {comm.name}: error {error:.1e} {'EXACT' if error < 1e-10 else 'WRONG'}",
        flush=True,
    )
    halofx.finalize()
