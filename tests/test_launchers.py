"""The same net under every launcher: processes of our own, torchrun, mpirun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import halofx
from tests.net_worker import rank_work

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent


def outcome(command: list[str]) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_processes() -> None:
    assert all(error < 1e-10 for error in halofx.launch(rank_work, 2, backend="processes", timeout=60))


def torchrun(ranks: int, *arguments: str) -> str:
    return outcome(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *arguments]
    )


def mpirun(ranks: int, *arguments: str) -> str:
    program = shutil.which("mpirun", path=f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}")
    pytest.importorskip("mpi4py", reason="needs the extra mpi")
    if program is None:
        pytest.skip("needs mpirun")
    return outcome([program, "-n", str(ranks), sys.executable, *arguments])


@pytest.mark.parametrize(("ranks", "mesh"), [(2, "height=2"), (4, "pipe=2,channel=2")])
def test_torchrun(ranks: int, mesh: str) -> None:
    text = torchrun(ranks, "-m", "tests.net_worker", mesh)
    assert text.count("EXACT") == text.count("over gloo") == ranks


@pytest.mark.parametrize("mesh", ["data=2,depth=2", "pipe=2,channel=2"])
def test_mpirun(mesh: str) -> None:
    text = mpirun(4, "-m", "tests.net_worker", mesh)
    assert text.count("EXACT") == text.count("over mpi") == 4
