"""The transport over torch.distributed: real processes, started by `launch` and as torchrun starts them."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from halofx.compiler.errors import RankError
from halofx.runtime.launch import launch
from tests import comm_worker as worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]
ROOT = Path(__file__).parent.parent


class Ranks:
    """Processes with the environment of torchrun; what they print, and how they end."""

    def __init__(self, size: int, code: list[str], timeout: float = 60, **extra: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.processes = [self.start(rank, size, port, code, extra) for rank in range(size)]
        deadline = time.monotonic() + timeout
        try:
            outputs = [p.communicate(timeout=max(deadline - time.monotonic(), 0.1)) for p in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        self.out = [out for out, _ in outputs]
        self.err = [err for _, err in outputs]
        self.codes = [process.returncode for process in self.processes]

    def start(self, rank: int, size: int, port: int, code: list[str], extra: dict[str, str]) -> subprocess.Popen[str]:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        environment = os.environ | {name: str(value) for name, value in place.items()}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **extra}
        return subprocess.Popen(
            [sys.executable, *code],
            env=environment,
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )


def worker_ranks(size: int, name: str, **extra: str) -> Ranks:
    return Ranks(size, ["-m", "tests.comm_worker", name], 60, **extra)


@pytest.mark.parametrize("size", [2, 3])
def test_every_check(size: int) -> None:
    assert launch(worker.run_all, size, backend="processes", timeout=30) == ["gloo"] * size


def test_results_and_modes_cross_over() -> None:
    with torch.no_grad():
        results = launch(worker.run_values, 2, backend="processes")
    for rank, (own, values, dtype, grad) in enumerate(results):
        assert (own, dtype, grad) == (rank, torch.get_default_dtype(), False)
        assert values.eq(rank).all()


def test_an_exception_ends_all_ranks_and_is_named() -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 raised ValueError: bad weather"):
        launch(worker.raise_on_last, 2, backend="processes")


def test_a_killed_rank_ends_all_ranks_and_is_named() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 2 was killed by signal 9"):
        launch(worker.kill_last, 2, backend="processes", timeout=60)
    assert time.monotonic() - start < 30


def test_a_time_out_names_node_and_peer() -> None:
    with pytest.raises(RankError, match=r"enc\.conv\.h0: no message from rank 1 to rank 0 within 1 s"):
        launch(worker.dawdle, 2, backend="processes", timeout=1)


def test_launch_within_launch_is_refused() -> None:
    with pytest.raises(RankError, match="inside a rank of another launch"):
        launch(worker.launch_within, 2, backend="processes")


def test_a_function_that_cannot_be_sent_is_refused() -> None:
    with pytest.raises(RankError, match=r"cannot be sent to a new process .* backend='threads'"):
        launch(lambda rank: rank, 2, backend="processes")


def test_ranks_of_torchrun() -> None:
    ranks = worker_ranks(2, "run_all")
    assert ranks.codes == [0, 0], ranks.err
    assert ranks.out == ["rank 0: gloo\n", "rank 1: gloo\n"]


@pytest.mark.parametrize(
    "name, node, peers",
    [
        ("kill_last", r"enc\.conv\.h0", "rank 2"),
        ("kill_last_before_reduction", r"norm\.merge", "ranks 1, 2"),
    ],
)
def test_the_ranks_left_by_a_killed_one_name_node_and_peer(name: str, node: str, peers: str) -> None:
    start = time.monotonic()
    ranks = worker_ranks(3, name)
    assert ranks.codes == [1, 1, -9]
    assert time.monotonic() - start < 30
    lines = [line for line in ranks.err[0].splitlines() if "RankError: " in line]
    assert len(lines) == 1
    assert re.search(rf"{node}: rank 0 lost {peers} \(.*(closed|reset) by peer", lines[0])


USER_OWNED = """
import torch, torch.distributed as dist
from halofx.runtime.comm import finalize, init
from halofx.compiler.errors import RankError
dist.init_process_group("gloo")
comm = init(timeout=20)
value = torch.ones(2)
comm.start_all_reduce(value, (0, 1), "sum", "n").wait()
finalize()
dist.all_reduce(value)                      # the user's group lives on, undisturbed
assert value.eq(4).all() and comm.name == "gloo"
try:
    init()
except RankError as error:
    print(error)
dist.destroy_process_group()
"""


def test_a_group_of_the_user_is_used_and_left_alone() -> None:
    ranks = Ranks(2, ["-c", USER_OWNED])
    assert ranks.codes == [0, 0], ranks.err
    assert all("has left its world" in out for out in ranks.out)


WITHOUT_FINALIZE = """
import torch
from halofx.runtime.comm import init
comm = init(timeout=20)
value = torch.ones(2)
comm.start_exchange([(1 - comm.rank, value)], [(1 - comm.rank, torch.empty(2))], 0, "n").wait()
if comm.rank == 0:
    raise ValueError("rank 0 is unwell")
comm.start_exchange([], [(0, value)], 0, "next").wait()
"""


def test_a_rank_that_ends_by_an_exception_frees_the_others() -> None:
    start = time.monotonic()
    ranks = Ranks(2, ["-c", WITHOUT_FINALIZE])
    assert ranks.codes == [1, 1]
    assert time.monotonic() - start < 15
    assert "rank 0 is unwell" in ranks.err[0]
    assert "next: rank 1 lost rank 0" in ranks.err[1]


def test_ranks_that_do_not_come_are_reported() -> None:
    code = "from halofx.runtime.comm import init; init(timeout=2)"
    ranks = Ranks(1, ["-c", code], WORLD_SIZE="2")
    assert ranks.codes == [1]
    assert "init: rank 0 of 2 did not meet the others at 127.0.0.1:" in ranks.err[0]
