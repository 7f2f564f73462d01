"""Run a function on every rank of a mesh inside one Python program.

launch(fn, mesh)                          ranks are threads: notebooks, debugging, tests
launch(fn, mesh, backend="processes")     ranks are new processes of this machine, over gloo or NCCL
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol, TypeVar, cast

import torch

from halofx.compiler.errors import RankError
from halofx.runtime.comm import select
from halofx.runtime.comm.threads import ThreadWorld

R = TypeVar("R")


class HasSize(Protocol):
    """A mesh, or whatever else knows its number of ranks."""

    @property
    def size(self) -> int: ...


def launch(fn: Callable[[int], R], mesh: int | HasSize, backend: str = "threads", timeout: float = 300.0) -> list[R]:
    """Run `fn(rank)` on every rank and return the results in rank order.

    Inside `fn`, `halofx.runtime.comm.current()` is the rank's communicator. Grad mode and default dtype are
    the caller's. The first rank that raises ends all others.

    Args:
        fn: called once a rank. For "processes" it must be importable, as must be the types of its results.
        mesh: a mesh, or the number of ranks.
        backend: "threads" or "processes".
        timeout: seconds that any one wait for a message may take; computing may take longer.

    Raises:
        RankError: called inside a launch; with "processes", a rank raised or died (the text says how).
        ValueError: no such backend, or no ranks.
        BaseException: with "threads", the first exception that a rank raised, with a note naming the rank.
    """
    size = mesh if isinstance(mesh, int) else mesh.size
    if size < 1:
        raise ValueError(f"launch: {size} ranks; give a mesh or a number of at least 1")
    if select.in_thread_rank() or os.environ.get("HALOFX_LAUNCHED") == "1":
        raise RankError(
            f"launch: called with {size} ranks inside a rank of another launch; call it once, outside of fn"
        )
    if backend == "threads":
        return _launch_threads(fn, size, timeout)
    if backend == "processes":
        from halofx.runtime.comm.spawn import launch_processes

        return launch_processes(fn, size, timeout)
    raise ValueError(f"launch: backend={backend!r} is neither 'threads' nor 'processes'")


@dataclass(frozen=True)
class _Outcome:
    rank: int
    result: Any = None
    error: BaseException | None = None
    first: bool = False


def _launch_threads(fn: Callable[[int], R], size: int, timeout: float) -> list[R]:
    world = ThreadWorld(size, timeout)
    outcomes: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
    grad = torch.is_grad_enabled()

    def run(rank: int) -> None:
        # The grad mode is a thread's own; the default dtype is the process's.
        with torch.set_grad_enabled(grad), select.use(world.comm(rank)):
            try:
                outcome = _Outcome(rank, fn(rank))
                world.finish(rank)
            except BaseException as error:
                outcome = _Outcome(rank, error=error, first=world.abort(error, rank))
        outcomes.put(outcome)

    threads = [threading.Thread(target=run, args=(r,), name=f"rank {r}", daemon=True) for r in range(size)]
    with _shared_cores(size):
        for thread in threads:
            thread.start()
        ended = _collect(world, outcomes, size)
        for thread in threads:
            thread.join()
    return [cast(R, outcome.result) for outcome in sorted(ended, key=lambda outcome: outcome.rank)]


def _collect(world: ThreadWorld, outcomes: queue.SimpleQueue[_Outcome], size: int) -> list[_Outcome]:
    """Wait for every rank, after a failure at most a time-out longer; then raise the first failure."""
    ended: list[_Outcome] = []
    deadline: float | None = None
    try:
        while len(ended) < size:
            left = None if deadline is None else max(deadline - monotonic(), 0)
            ended.append(outcomes.get(timeout=left))
            if ended[-1].error is not None and deadline is None:
                deadline = monotonic() + world.timeout
    except queue.Empty:
        pass
    except KeyboardInterrupt as error:
        world.abort(error)
        raise
    failed = next((outcome for outcome in sorted(ended, key=lambda o: not o.first) if outcome.error), None)
    if failed is not None and failed.error is not None:
        failed.error.add_note(f"raised on rank {failed.rank} of {size} (halofx.launch with threads)")
        missing = sorted(set(range(size)) - {outcome.rank for outcome in ended})
        if missing:
            failed.error.add_note(f"ranks {missing} were still running {world.timeout:g} s later")
        raise failed.error
    return ended


@contextmanager
def _shared_cores(size: int) -> Iterator[None]:
    """Share the intra-op threads out among the ranks, as `init` does among processes.

    Set even where nothing changes: after a fork torch's pool has to be made again, and two ranks that do so at once meet
    "Invalid thread pool".
    """
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before // size) if "OMP_NUM_THREADS" not in os.environ else before)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
