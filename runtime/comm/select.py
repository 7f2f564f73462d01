"""Which transport this process uses: read off what started it."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from halofx.compiler.errors import RankError
from halofx.runtime.comm.base import Comm
from halofx.runtime.comm.threads import ThreadWorld

if TYPE_CHECKING:
    from halofx.runtime.comm.processes import ProcessComm

BACKENDS = ("gloo", "nccl", "mpi", "threads")
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_MPI_RANKS = ("PMIX_RANK", "PMI_RANK")


class _Here(threading.local):
    """The communicator of this thread, where it is a rank of a `ThreadWorld`."""

    comm: Comm | None = None


_here = _Here()
_lock = threading.RLock()
_process: Comm | None = None
_left_world = False


def init(backend: str | None = None, timeout: float = 300.0) -> Comm:
    """Join the world of ranks that this process was started in; a second call returns the same communicator.

    Under torchrun it is torch.distributed (NCCL if each rank of the machine has a GPU, else gloo) and the
    CUDA device is set; a torch.distributed that is initialized already is used as it is. Under mpirun it is MPI.
    Alone it is a world of one. Intra-op threads are shared out among the ranks of a machine, unless
    OMP_NUM_THREADS is set (1 under torchrun is torchrun's own default and does not count: call
    torch.set_num_threads afterwards).

    Args:
        backend: "gloo", "nccl", "mpi" or "threads" (a world of one) to choose by hand.
        timeout: seconds that any one wait may take.

    Raises:
        ImportError: mpirun started this process and mpi4py is missing.
        RankError: the ranks did not meet in time, or `backend` is not the one in use.
        ValueError: no such backend.
    """
    global _process
    if backend not in (None, *BACKENDS):
        raise ValueError(f"init: backend={backend!r} is none of {', '.join(BACKENDS)}")
    comm = _here.comm or _process
    if comm is None:
        with _lock:
            comm = _process = _process or _join(backend or _detect(os.environ), timeout)
    if backend not in (None, comm.name):
        raise RankError(
            f"init: backend={backend!r}, but rank {comm.rank} communicates over {comm.name!r} already; "
            "call halofx.init first, and once"
        )
    return comm


def current() -> Comm:
    """The communicator of this rank: the thread's inside `launch`, else the process's, joined if need be."""
    return _here.comm or _process or init()


def finalize() -> None:
    """Leave the process's world, if one was joined. A world of processes cannot be joined again."""
    global _process, _left_world
    with _lock:
        if _process is not None:
            _left_world = _left_world or _process.name in ("gloo", "nccl")
            comm, _process = _process, None
            comm.close()


def in_thread_rank() -> bool:
    """Whether this thread is a rank of a `ThreadWorld`."""
    return _here.comm is not None


@contextmanager
def use(comm: Comm) -> Iterator[None]:
    """Make a communicator this thread's `current`."""
    previous, _here.comm = _here.comm, comm
    try:
        yield
    finally:
        _here.comm = previous


def _detect(environment: Mapping[str, str]) -> str:
    """The launcher, as "torch" (gloo or NCCL), "mpi" or "threads" (alone)."""
    if dist.is_available() and dist.is_initialized():
        return "torch"
    if all(name in environment for name in _TORCHRUN):
        return "torch"
    size = _mpi_size(environment)
    if size is None:
        return "mpi" if any(name in environment for name in _MPI_RANKS) else "threads"
    return "mpi" if size > 1 else "threads"


def _mpi_size(environment: Mapping[str, str]) -> int | None:
    return next((int(environment[name]) for name in _MPI_SIZES if name in environment), None)


def _join(backend: str, timeout: float) -> Comm:
    if backend == "threads":
        return ThreadWorld(1, timeout).comm(0)
    if backend == "mpi":
        return _join_mpi(timeout)
    return _join_torch(backend, timeout)


def _join_mpi(timeout: float) -> Comm:
    from halofx.runtime.comm import mpi

    size = _mpi_size(os.environ)
    if size is not None:
        mpi.check_launcher(size)
    mpi.abort_on_exception()
    place, neighbors = mpi.local_rank()
    if torch.cuda.is_available():  # (not run)
        torch.cuda.set_device(place % torch.cuda.device_count())
    _share_cores(neighbors)
    return mpi.MpiComm(timeout)


def _join_torch(backend: str, timeout: float) -> ProcessComm:
    from halofx.runtime.comm.processes import ProcessComm

    if _left_world:
        raise RankError("init: this process has left its world (halofx.finalize); start a new process to join one")
    owner = not dist.is_initialized()
    neighbors = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = _device(backend, neighbors)
    if owner:
        _rendezvous("nccl" if device.type == "cuda" else "gloo", timeout)
    _share_cores(neighbors)
    comm = ProcessComm(timeout, device, owner)
    atexit.register(_finalize_at_exit)
    return comm


def _device(backend: str, neighbors: int) -> torch.device:
    """The device of this rank; NCCL needs one GPU a rank. (The CUDA branch was not run.)"""
    if backend != "gloo" and torch.cuda.is_available():
        count = torch.cuda.device_count()
        if backend == "nccl" or count >= neighbors:
            place = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))) % count
            torch.cuda.set_device(place)
            return torch.device("cuda", place)
    if backend == "nccl":
        raise RankError("init: backend='nccl', but torch finds no CUDA device; use backend='gloo'")
    return torch.device("cpu")


def _rendezvous(backend: str, timeout: float) -> None:
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        where = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise RankError(
            f"init: rank {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')} did not meet the others "
            f"at {where} within {timeout:g} s ({str(error).splitlines()[0]}); start the ranks with torchrun"
        ) from error


def _share_cores(neighbors: int) -> None:
    """Give each rank of a machine its share of the cores, as intra-op threads."""
    chosen = os.environ.get("OMP_NUM_THREADS")
    by_torchrun = chosen == "1" and "TORCHELASTIC_RUN_ID" in os.environ
    if chosen is None or by_torchrun:
        torch.set_num_threads(max(1, core_count() // neighbors))


def core_count() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _finalize_at_exit() -> None:
    # After an uncaught exception the others may never answer; the end of the process tells them anyhow.
    if getattr(sys, "last_value", None) is None:
        finalize()
