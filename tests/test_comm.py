"""The transports' protocol, on threads; `launch`; the choice of a transport."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from typing import Any

import pytest
import torch

from halofx.compiler.errors import MeshError, RankError
from halofx.runtime.comm import Comm, ThreadWorld, current, finalize, init, select
from halofx.runtime.comm.wire import to_wire
from halofx.runtime.launch import launch
from tests import comm_worker as worker


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("name", worker.CHECKS)
def test_check(name: str, size: int) -> None:
    launch(lambda rank: worker.CHECKS[name](current()), size, timeout=20)


def test_wire_form_of_extremes_equals_torch() -> None:
    """Two tensors reduced as integers, as gloo and MPI do, give what torch.maximum gives."""
    torch.manual_seed(0)
    for dtype in (torch.float64, torch.float32, torch.float16):
        a, b = torch.randn(2, 500).to(dtype)
        a[:3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
        for op, reference in (("max", torch.maximum), ("min", torch.minimum)):
            wire = to_wire(a.clone(), op)
            wire.buffer.copy_(reference(wire.buffer, to_wire(b, op).buffer))
            wire.finish()
            assert torch.equal(wire.target.nan_to_num(99), reference(a, b).nan_to_num(99))


def test_wire_refuses_what_has_no_exact_form() -> None:
    with pytest.raises(TypeError, match="uint64"):
        to_wire(torch.zeros(2, dtype=torch.uint64), "sum")


class TestThreads:
    def test_a_sent_buffer_may_be_reused_after_wait(self) -> None:
        def run(rank: int) -> float:
            buffer, comm = torch.ones(3), current()
            if rank == 0:
                comm.start_exchange([(1, buffer)], [], 0, "n").wait()
                buffer.zero_()
            else:
                time.sleep(0.05)
                comm.start_exchange([], [(0, buffer.zero_())], 0, "n").wait()
            return float(buffer.sum())

        assert launch(run, 2) == [0, 3]

    def test_time_out_names_node_peer_and_seconds(self) -> None:
        def run(rank: int) -> None:
            if rank == 1:
                time.sleep(0.5)
            worker.await_last(rank)

        with pytest.raises(
            RankError, match=r"enc\.conv\.h0: no message from rank 1 to rank 0 within 0\.1 s; .*timeout="
        ):
            launch(run, 2, timeout=0.1)

    def test_time_out_of_a_reduction_names_the_missing(self) -> None:
        def run(rank: int) -> None:
            if rank < 2:
                current().start_all_reduce(torch.ones(1), (0, 1, 2, 3), "sum", "norm").wait()
            time.sleep(0.5)

        with pytest.raises(RankError, match=r"norm: no message from ranks 2, 3 to rank [01] within"):
            launch(run, 4, timeout=0.1)

    def test_a_rank_that_finished_is_not_waited_for(self) -> None:
        start = time.monotonic()
        with pytest.raises(RankError, match=r"enc\.conv\.h0: rank 0 lost rank 1 \(finished without sending it\)"):
            launch(worker.await_last, 2)
        assert time.monotonic() - start < 5

    def test_messages_of_a_finished_rank_still_arrive(self) -> None:
        def run(rank: int) -> float:
            received = torch.zeros(2)
            if rank == 1:
                current().start_exchange([(0, torch.ones(2))], [], 0, "n").wait()
            else:
                time.sleep(0.1)
                current().start_exchange([], [(1, received)], 0, "n").wait()
            return float(received.sum())

        assert launch(run, 2) == [2, 0]

    @pytest.mark.parametrize("shape, dtype", [((1,), torch.float32), ((3,), torch.float64)])
    def test_a_message_of_another_kind_is_refused(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        def run(rank: int) -> None:
            mine, other = torch.ones(shape, dtype=dtype), torch.ones(3)
            exchange = ([(1, mine)], []) if rank == 0 else ([], [(0, other)])
            current().start_exchange(*exchange, 0, "conv").wait()

        with pytest.raises(RankError, match=r"conv: rank 0 sent .* rank 1 expects .*the same program"):
            launch(run, 2)

    def test_reductions_of_another_kind_are_refused(self) -> None:
        def run(rank: int) -> None:
            current().start_all_reduce(torch.ones(2 + rank), (0, 1), "sum", "norm").wait()

        with pytest.raises(RankError, match=r"norm: rank 0 calls .*\(2,\).*, rank 1 calls .*\(3,\)"):
            launch(run, 2)

    def test_abort_wakes_the_waiting_and_reset_starts_afresh(self) -> None:
        world = ThreadWorld(2, timeout=20)
        caught: list[str] = []

        def wait_for_ever() -> None:
            try:
                world.comm(0).start_exchange([], [(1, torch.empty(1))], 0, "n").wait()
            except RankError as error:
                caught.append(str(error))

        thread = threading.Thread(target=wait_for_ever)
        thread.start()
        time.sleep(0.05)
        world.abort(ValueError("boom"), rank=1)
        thread.join(5)
        assert caught == ["n: rank 1 failed with ValueError: boom; look there"]
        with pytest.raises(RankError, match="rank 1 failed"):
            world.comm(0).start_exchange([(1, torch.ones(1))], [], 0, "n")
        world.reset()
        world.comm(1).start_exchange([(0, torch.ones(1))], [], 0, "n").wait()
        received = torch.zeros(1)
        world.comm(0).start_exchange([], [(1, received)], 0, "n").wait()
        assert received.item() == 1

    def test_a_world_keeps_nothing_of_its_runs(self) -> None:
        world = ThreadWorld(3, timeout=20)
        for _ in range(50):
            threads = [
                threading.Thread(target=worker.check_halos_among_collectives, args=(world.comm(r),)) for r in range(3)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
        assert not any(world._mail)
        assert not world._meetings
        assert world.comm(0).counters.total("exchange").messages == 1000

    def test_abort_in_the_middle_of_a_storm(self) -> None:
        def run(rank: int) -> None:
            comm = current()
            for step in range(10_000):
                if rank == 3 and step == 30:
                    raise ArithmeticError("enough")
                comm.start_all_reduce(torch.ones(2), tuple(range(8)), "sum", "norm").wait()

        with pytest.raises(ArithmeticError, match="enough"):
            launch(run, 8, timeout=20)


class TestProtocol:
    def pair(self) -> Comm:
        return ThreadWorld(2).comm(0)

    @pytest.mark.parametrize("groups", [[(0,)], [(0, 1), (1,)], [(0, 1, 2)]])
    def test_a_partition_must_cover_the_world_once(self, groups: list[tuple[int, ...]]) -> None:
        with pytest.raises(MeshError, match="exactly once"):
            self.pair().prepare([groups])

    def test_programming_errors(self) -> None:
        comm, strided = self.pair(), torch.ones(4, 4).t()
        for peer, tensor in (
            (0, torch.ones(1)),
            (2, torch.ones(1)),
            (1, strided),
            (1, torch.ones(2).to(torch.complex64).conj()),
        ):
            with pytest.raises(AssertionError, match="n: "):
                comm.start_exchange([(peer, tensor)], [], 0, "n")
        for tensor, ranks, op in (
            (strided, (0, 1), "sum"),
            (torch.ones(1), (0, 1), "prod"),
            (torch.ones(1), (1,), "sum"),
            (torch.ones(1).to(torch.complex64), (0, 1), "max"),
        ):
            with pytest.raises(AssertionError, match="n: "):
                comm.start_all_reduce(tensor, ranks, op, "n")

    def test_a_group_must_be_prepared(self) -> None:
        with pytest.raises(AssertionError, match="prepare"):
            ThreadWorld(3).comm(0).start_all_reduce(torch.ones(1), (0, 1), "sum", "n")

    def test_counters_by_kind_and_node(self) -> None:
        def run(rank: int) -> Comm:
            comm = current()
            for _ in range(2):
                worker.check_two_exchanges_in_flight(comm)
            comm.start_all_reduce(torch.ones(3, dtype=torch.float64), (0, 1), "sum", "a").wait()
            return comm

        for comm in launch(run, 2):
            found = {key: (traffic.messages, traffic.bytes) for key, traffic in comm.counters.items()}
            assert found == {("exchange", "a"): (2, 40), ("exchange", "b"): (2, 56), ("all_reduce", "a"): (1, 24)}
            assert (comm.counters.total("exchange").messages, comm.counters.total().bytes) == (4, 120)


class TestLaunch:
    def test_results_in_rank_order(self) -> None:
        def run(rank: int) -> int:
            time.sleep(0.02 * (8 - rank))
            return rank * rank

        assert launch(run, 8) == [rank * rank for rank in range(8)]

    def test_anything_with_a_size_is_a_mesh(self) -> None:
        class Mesh:
            size = 3

        assert launch(lambda rank: current().size, Mesh()) == [3, 3, 3]

    def test_grad_mode_follows(self) -> None:
        with torch.no_grad():
            assert launch(lambda rank: torch.is_grad_enabled(), 2) == [False, False]
        assert launch(lambda rank: torch.is_grad_enabled(), 2) == [True, True]

    def test_the_first_exception_is_raised_with_its_rank(self) -> None:
        with pytest.raises(ValueError, match="bad weather") as caught:
            launch(worker.raise_on_last, 4)
        assert caught.value.__notes__ == ["raised on rank 3 of 4 (halofx.launch with threads)"]

    def test_an_exception_of_the_interpreter_is_raised_too(self) -> None:
        def run(rank: int) -> None:
            if rank == 1:
                raise SystemExit(3)
            worker.await_last(rank)

        with pytest.raises(SystemExit):
            launch(run, 2)

    def test_a_rank_that_does_not_stop_is_named(self) -> None:
        def run(rank: int) -> None:
            if rank == 1:
                raise ValueError("early")
            time.sleep(1)

        with pytest.raises(ValueError, match="early") as caught:
            launch(run, 2, timeout=0.1)
        assert "ranks [0] were still running" in caught.value.__notes__[1]

    def test_launch_within_launch_is_refused(self) -> None:
        with pytest.raises(RankError, match="inside a rank of another launch"):
            launch(worker.launch_within, 2)

    def test_the_caller_is_left_as_it_was(self) -> None:
        threads, before = torch.get_num_threads(), threading.active_count()
        launch(lambda rank: None, 4)
        assert torch.get_num_threads() == threads
        assert threading.active_count() == before
        assert not select.in_thread_rank()

    @pytest.mark.parametrize("size, backend", [(0, "threads"), (2, "fibers")])
    def test_wrong_arguments(self, size: int, backend: str) -> None:
        with pytest.raises(ValueError, match="launch: "):
            launch(lambda rank: None, size, backend=backend)


class TestSelect:
    @pytest.mark.parametrize(
        "environment, expected",
        [
            ({}, "threads"),
            ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}, "torch"),
            ({"RANK": "0"}, "threads"),
            ({"PMI_RANK": "0", "PMI_SIZE": "4"}, "mpi"),
            ({"PMI_RANK": "0", "PMI_SIZE": "1"}, "threads"),
            ({"OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0"}, "mpi"),
            ({"MV2_COMM_WORLD_SIZE": "2"}, "mpi"),
            ({"PMIX_RANK": "0"}, "mpi"),
        ],
    )
    def test_the_launcher_is_read_off_the_environment(self, environment: dict[str, str], expected: str) -> None:
        assert select._detect(environment) == expected

    @pytest.fixture
    def alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in (*select._TORCHRUN, *select._MPI_SIZES, *select._MPI_RANKS):
            monkeypatch.delenv(name, raising=False)
        finalize()

    @pytest.mark.usefixtures("alone")
    def test_alone_is_a_world_of_one(self) -> None:
        comm = init()
        assert (comm.rank, comm.size, comm.name) == (0, 1, "threads")
        assert init("threads") is comm is current()
        assert comm.all_gather_bytes(b"abc", "digest") == [b"abc"]
        value = torch.ones(2)
        comm.start_all_reduce(value, (0,), "sum", "n").wait()
        assert not comm.counters
        with pytest.raises(RankError, match="communicates over 'threads' already"):
            init("gloo")
        finalize()
        assert init() is not comm
        finalize()

    @pytest.mark.usefixtures("alone")
    def test_a_thread_rank_sees_its_own_world(self) -> None:
        outside = current()
        inside = launch(lambda rank: init(), 2)
        assert [comm.rank for comm in inside] == [0, 1]
        assert outside not in inside
        assert current() is outside
        finalize()

    def test_an_unknown_backend_is_refused(self) -> None:
        with pytest.raises(ValueError, match="carrier pigeon"):
            init("carrier pigeon")

    def test_cores_are_shared(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = torch.get_num_threads()
        chosen: list[int] = []
        monkeypatch.setattr(torch, "set_num_threads", chosen.append)
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        select._share_cores(2)
        assert chosen == []
        monkeypatch.delenv("OMP_NUM_THREADS")
        select._share_cores(10**6)
        assert chosen == [1]
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        select._share_cores(1)
        assert chosen == [1, select.core_count()]
        assert torch.get_num_threads() == before
        assert os.environ["OMP_NUM_THREADS"] == "1"


def _at_once(rank: int) -> float:
    """The first op of every rank that uses torch's pool of threads, at the same moment."""
    BARRIER.wait()
    return float(ONES.mul(2).sum())


ONES, BARRIER = torch.ones(400_000), threading.Barrier(8)


def _in_a_fork(queue: Any) -> None:
    try:
        queue.put(launch(_at_once, 8))
    except BaseException as error:
        queue.put(str(error))


def test_launch_in_a_forked_process() -> None:
    """Workers of data loaders and test runners are forks: torch makes its pool of threads again there, once."""
    torch.set_num_threads(torch.get_num_threads())  # the parent has a pool
    ONES.mul(2)
    context = multiprocessing.get_context("fork")
    for _ in range(25):
        queue = context.SimpleQueue()
        child = context.Process(target=_in_a_fork, args=(queue,))
        child.start()
        assert queue.get() == [800_000.0] * 8
        child.join()
