"""Ranks as processes under mpirun, over mpi4py (the optional extra `mpi`).

CPU tensors are passed to MPI as they lie in memory. CUDA tensors are staged through pinned host memory, or,
with HALOFX_CUDA_AWARE_MPI=1 and an MPI built for it, passed as device pointers. The CUDA paths were never run:
no machine with a GPU and such an MPI was at hand.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from time import monotonic, sleep
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halofx.compiler.errors import RankError
from halofx.runtime.comm.base import Comm, Group, Message, Pending, as_bytes, late
from halofx.runtime.comm.wire import to_wire

try:
    from mpi4py import MPI
except ImportError as error:
    raise ImportError(
        f"this process was started by an MPI launcher, but mpi4py cannot be imported ({error}); "
        "pip install 'halofx[mpi]', or start the ranks with torchrun"
    ) from error

_OPS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}
_PIECE = 1 << 30
"""Bytes of one MPI call: counts were 32-bit until MPI 4."""

Started = tuple[MPI.Request, list[int]]
"""A request and the peers it depends on."""


class MpiComm(Comm):
    """This process's rank in MPI_COMM_WORLD; halos and collectives on communicators of their own.

    `close` does nothing: freeing a communicator may wait for ranks that have failed; MPI's end frees all.

    Args:
        timeout: seconds that any one wait may take.
        cuda_aware: pass device pointers to MPI; by default where HALOFX_CUDA_AWARE_MPI=1.
    """

    name = "mpi"

    def __init__(self, timeout: float, cuda_aware: bool | None = None) -> None:
        super().__init__(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size(), timeout)
        self._cuda_aware = os.environ.get("HALOFX_CUDA_AWARE_MPI") == "1" if cuda_aware is None else cuda_aware
        self._halos = MPI.COMM_WORLD.Dup()
        self._collectives = {tuple(range(self.size)): MPI.COMM_WORLD.Dup()}
        self._tags = int(self._halos.Get_attr(MPI.TAG_UB) or 32767) + 1
        self._abandoned: list[object] = []

    def all_gather_bytes(self, data: bytes, what: str) -> list[bytes]:
        comm = self._collectives[tuple(range(self.size))]
        peers = self._others(range(self.size))
        sizes = np.zeros(self.size, dtype=np.int64)
        mine = np.array([len(data)], dtype=np.int64)
        self.settle([(comm.Iallgather(mine, sizes), peers)], what, keep=(mine, sizes))
        received = np.zeros(int(sizes.sum()), dtype=np.uint8)
        request = comm.Iallgatherv([data, MPI.BYTE], [received, sizes.tolist(), MPI.BYTE])
        self.settle([(request, peers)], what, keep=(data, received))
        return [piece.tobytes() for piece in np.split(received, np.cumsum(sizes)[:-1])]

    def settle(self, started: list[Started], what: str, keep: object) -> None:
        """Wait for requests, polling: MPI has no wait with a time-out.

        Raises:
            RankError: the time is up; names the peers whose requests are open.
        """
        start = monotonic()
        requests = [request for request, _ in started]
        while not MPI.Request.Testall(requests):
            waited = monotonic() - start
            if waited > self.timeout:
                # MPI may still write to the buffers: they must live as long as the process.
                self._abandoned.append((requests, keep))
                open_peers = [peer for request, peers in started if not request.Get_status() for peer in peers]
                raise late(what, self.rank, open_peers, self.timeout)
            # Spin while an answer is likely, then leave the core to the ranks that share it.
            sleep(0 if waited < 2e-4 else min(1e-3, waited / 20))

    def _create_groups(self, groups: list[Group]) -> None:
        if groups:
            # Creating a communicator has no time-out, so it begins when all ranks are known to be here.
            self.all_gather_bytes(b"", "prepare")
        world = self._collectives[tuple(range(self.size))]
        for ranks in groups:
            if self.rank in ranks:
                self._collectives[ranks] = world.Create_group(world.Get_group().Incl(list(ranks)))

    def _exchange(self, sends: list[Message], receives: list[Message], tag: int, what: str) -> Pending:
        # A tag above MPI's limit is folded: order alone keeps equal tags apart, as everywhere.
        tag %= self._tags
        incoming = [(peer, *self._landing(tensor)) for peer, tensor in receives]
        outgoing = [(peer, self._departing(tensor)) for peer, tensor in sends]
        started: list[Started] = []
        for peer, buffer, _ in incoming:
            started += [(self._halos.Irecv([p, MPI.BYTE], peer, tag), [peer]) for p in _pieces(buffer)]
        for peer, buffer in outgoing:
            started += [(self._halos.Isend([p, MPI.BYTE], peer, tag), [peer]) for p in _pieces(buffer)]
        finish = [back for _, _, back in incoming if back is not None]
        return _Requests(self, started, what, finish, (incoming, outgoing))

    def _all_reduce(self, tensor: Tensor, ranks: Group, op: str, what: str) -> Pending:
        wire = to_wire(tensor, op)
        buffer = self._departing(wire.buffer.view(-1), as_is=True)
        finish: list[Callable[[], object]] = [wire.finish]
        if buffer.device != wire.buffer.device:
            finish.insert(0, lambda: wire.buffer.view(-1).copy_(buffer))
        comm, mpi_op, peers = self._collectives[ranks], _OPS[wire.op], self._others(ranks)
        started = [(comm.Iallreduce(MPI.IN_PLACE, piece, op=mpi_op), peers) for piece in _pieces(buffer)]
        return _Requests(self, started, what, finish, (wire, buffer))

    def _departing(self, tensor: Tensor, as_is: bool = False) -> Tensor:
        """What MPI reads: the tensor's own memory where MPI can reach it, else a copy on the host."""
        tensor = tensor if as_is else as_bytes(tensor)
        if tensor.device.type == "cuda":  # (not run)
            if self._cuda_aware:
                # MPI does not know the stream that is still writing the tensor.
                torch.cuda.current_stream(tensor.device).synchronize()
                return tensor
            return _pinned_like(tensor).copy_(tensor)
        return tensor

    def _landing(self, tensor: Tensor) -> tuple[Tensor, Callable[[], object] | None]:
        """What MPI writes, and what brings it into the tensor where that is other memory."""
        target = as_bytes(tensor)
        if target.device.type == "cuda":  # (not run)
            if not self._cuda_aware:
                host = _pinned_like(target)
                return host, lambda: target.copy_(host)
            # A kernel in flight may still read the memory about to be overwritten.
            torch.cuda.current_stream(target.device).synchronize()
        return target, None

    def _others(self, ranks: Iterable[int]) -> list[int]:
        return [rank for rank in ranks if rank != self.rank]


class _Requests(Pending):
    """Requests under way, and what is to be done with the buffers afterwards."""

    def __init__(
        self,
        comm: MpiComm,
        started: list[Started],
        what: str,
        finish: Sequence[Callable[[], object]],
        keep: object,
    ) -> None:
        self._comm = comm
        self._started = started
        self._what = what
        self._finish = finish
        self._keep = keep

    def wait(self) -> None:
        if not self._started:
            return
        self._comm.settle(self._started, self._what, self._keep)
        for step in self._finish:
            step()
        self._started = []
        self._keep = None


def abort_on_exception() -> None:
    """Make an uncaught exception of this rank end the whole mpirun job, after its traceback is printed.

    Without this, a rank that ends by an exception waits in MPI_Finalize for the others, and they for it.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        previous(kind, value, traceback)
        print(f"\nhalofx: rank {MPI.COMM_WORLD.Get_rank()} failed and ends the MPI job", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        sleep(0.5)  # what the launcher has not forwarded when the job ends is lost
        MPI.COMM_WORLD.Abort(1)

    sys.excepthook = hook


def local_rank() -> tuple[int, int]:
    """This process's rank among those of its machine, and their number; collective."""
    comm = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    place = (comm.Get_rank(), comm.Get_size())
    comm.Free()
    return place


def world_size() -> int:
    """The number of ranks that MPI itself sees."""
    return int(MPI.COMM_WORLD.Get_size())


def check_launcher(size: int) -> None:
    """Find an mpirun of another MPI than the one mpi4py was built for, under which every process is alone.

    Raises:
        RankError: MPI sees another number of ranks than the launcher started.
    """
    if world_size() != size:
        raise RankError(
            f"init: the launcher started {size} ranks, but mpi4py sees {world_size()}; "
            "use the mpirun of the MPI that mpi4py is linked with"
        )


def _pieces(buffer: Tensor) -> list[Any]:
    """A flat buffer as mpi4py takes it, without a copy, in pieces that 32-bit counts can hold."""
    chunks = buffer.split(_PIECE // buffer.itemsize)
    if buffer.device.type == "cuda":
        return list(chunks)  # by its __cuda_array_interface__ (not run)
    return [chunk.numpy() for chunk in chunks]


def _pinned_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
