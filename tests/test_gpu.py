"""The CUDA paths. Skipped where there is no CUDA device; they have not been run by the project's own CI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import halofx
from tests.models import TinyUNet, same_as_one_device

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("sizes", [{"depth": 2}, {"data": 2, "depth": 2}, {"height": 2, "width": 2}], ids=str)
def test_rank_threads_on_one_device(sizes: dict[str, int]) -> None:
    """Ranks as threads that share one GPU: the executor, the movements and the backward threads of autograd on CUDA."""
    torch.manual_seed(0)
    model, x = TinyUNet().double().cuda(), torch.randn(2, 1, 9, 8, 7, dtype=torch.float64, device="cuda")
    target = torch.randint(0, 3, (2, 9, 8, 7), device="cuda")
    same_as_one_device(model, (x,), halofx.Mesh(**sizes), tolerance=1e-9)
    same_as_one_device(model, (x,), halofx.Mesh(**sizes), loss=F.cross_entropy, targets=(target,), tolerance=1e-9)


def test_nccl_under_torchrun() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a device a rank; this machine has one")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "tests.net_worker",
        "depth=2",
    ]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0 and done.stdout.count("EXACT") == done.stdout.count("over nccl") == 2, (
        done.stdout + done.stderr
    )
