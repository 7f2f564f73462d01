"""The transport over MPI, under a real mpirun."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from halofx.runtime.comm import select

ROOT = Path(__file__).parent.parent
BESIDE_PYTHON = Path(sys.executable).parent / "mpirun"
MPIRUN = str(BESIDE_PYTHON) if BESIDE_PYTHON.exists() else shutil.which("mpirun")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(90),
    pytest.mark.skipif(MPIRUN is None, reason="no mpirun beside Python or on PATH"),
    pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed"),
]


def mpirun(size: int, *code: str, timeout: float = 60, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(MPIRUN), "-n", str(size), sys.executable, *code],
        env=os.environ | extra,
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=timeout,
        check=False,
    )


def test_every_check() -> None:
    done = mpirun(4, "-m", "tests.comm_worker", "run_all")
    assert done.returncode == 0, done.stderr
    # mpirun may merge two ranks' lines into one.
    assert sorted(re.findall(r"rank (\d): mpi", done.stdout)) == ["0", "1", "2", "3"]


def test_an_exception_on_one_rank_ends_the_job() -> None:
    start = time.monotonic()
    done = mpirun(3, "-m", "tests.comm_worker", "raise_on_last")
    assert done.returncode != 0
    assert time.monotonic() - start < 30
    assert "ValueError: bad weather" in done.stderr
    assert "halofx: rank 2 failed and ends the MPI job" in done.stderr


def test_a_killed_rank_ends_the_job() -> None:
    start = time.monotonic()
    assert mpirun(3, "-m", "tests.comm_worker", "kill_last").returncode != 0
    assert time.monotonic() - start < 30


def test_a_time_out_names_node_and_peer() -> None:
    done = mpirun(2, "-m", "tests.comm_worker", "dawdle", TEST_TIMEOUT="1")
    assert done.returncode != 0
    assert "enc.conv.h0: no message from rank 1 to rank 0 within 1 s" in done.stderr


def test_a_missing_mpi4py_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.delitem(sys.modules, "halofx.runtime.comm.mpi", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'halofx\[mpi\]'"):
        select._join("mpi", 1)
