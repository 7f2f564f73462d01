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


def test_torchrun() -> None:
    text = outcome(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "tests.net_worker",
            "height=2",
        ]
    )
    assert text.count("EXACT") == text.count("over gloo") == 2


def test_mpirun() -> None:
    mpirun = shutil.which("mpirun", path=f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}")
    pytest.importorskip("mpi4py", reason="needs the extra mpi")
    if mpirun is None:
        pytest.skip("needs mpirun")
    text = outcome([mpirun, "-n", "4", sys.executable, "-m", "tests.net_worker", "data=2,depth=2"])
    assert text.count("EXACT") == text.count("over mpi") == 4
