"""Ranks as processes over torch.distributed: gloo for CPU tensors, NCCL for CUDA tensors.

Three private process groups span the world: one for halos (point-to-point), one for collectives, and one on
the CPU for digests and shapes. The default group, which may be the user's, serves for meeting only.

The NCCL parts were written from the documentation and never run: no machine with two GPUs was at hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from time import monotonic

import torch
import torch.distributed as dist
from torch import Tensor

from halofx.compiler.errors import RankError
from halofx.runtime.comm.base import Comm, Group, Message, Pending, as_bytes, late, lost
from halofx.runtime.comm.wire import Wire, to_wire

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_LATE = re.compile(r"timed out|timeout", re.IGNORECASE)
_OWN_CLOSURE = "Application timeout caused pair closure"

Started = tuple[dist.Work | None, Sequence[int]]
"""A started operation and the peers it depends on; None where the backend had nothing to do."""


class ProcessComm(Comm):
    """This process's rank in a torch.distributed world that is initialized already.

    With NCCL a wait makes the current CUDA stream wait, not the host, so a message that never comes is found
    by NCCL's watchdog, which ends the process after `timeout`; under TORCH_NCCL_BLOCKING_WAIT=1 it is a RankError
    with the node's name, as it is with gloo.

    Args:
        timeout: seconds that any one wait may take.
        device: the device of the tensors to come; a CUDA device selects NCCL.
        owner: `close` also destroys the default group.

    Raises:
        RankError: the other ranks did not come to create the groups.
    """

    def __init__(self, timeout: float, device: torch.device, owner: bool) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size(), timeout)
        self.name = "nccl" if device.type == "cuda" else "gloo"
        self.device = device
        self._owner = owner
        world = tuple(range(self.size))
        self._control = self._new_group(world, "gloo")
        self._halos = self._new_group(world, self.name)
        self._collectives = {world: self._new_group(world, self.name)}
        if self.name == "nccl":
            # NCCL connects in a group's first call, in which all ranks must take part. In a first exchange
            # only some may have messages, so it is connected here.
            dist.all_reduce(torch.zeros(1, device=device), group=self._halos)

    def all_gather_bytes(self, data: bytes, what: str) -> list[bytes]:
        sizes = self._gather_padded(torch.tensor([len(data)]), what)
        longest = max(int(size) for size in sizes)
        if longest == 0:
            return [b""] * self.size
        padded = torch.zeros(longest, dtype=torch.uint8)
        if data:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        gathered = self._gather_padded(padded, what)
        return [bytes(row[: int(size)].numpy()) for row, size in zip(gathered, sizes, strict=True)]

    def close(self) -> None:
        if not dist.is_initialized():
            return
        if self._owner:
            dist.destroy_process_group()
            return
        for group in (self._control, self._halos, *self._collectives.values()):
            with suppress(ValueError):  # the user has destroyed all groups, ours with them
                dist.destroy_process_group(group)

    def _new_group(self, ranks: Group, backend: str) -> dist.ProcessGroup:
        """A private group; all ranks take part, members or not.

        torch's cheaper way, in which only members do (use_local_synchronization), names a group by the number of
        groups a rank is in: where that differs between the members, they wait for each other under two names.
        """
        try:
            group: dist.ProcessGroup = dist.new_group(
                list(ranks), timeout=timedelta(seconds=self.timeout), backend=backend
            )
            return group
        except (RuntimeError, ValueError) as error:
            raise RankError(
                f"init: ranks {ranks} did not form a {backend} group within {self.timeout:g} s "
                f"({_brief(error)}); look for the first error in their output"
            ) from error

    def _create_groups(self, groups: list[Group]) -> None:
        for ranks in groups:
            group = self._new_group(ranks, self.name)
            if self.rank in ranks:
                self._collectives[ranks] = group

    def _gather_padded(self, row: Tensor, what: str) -> list[Tensor]:
        rows = [torch.empty_like(row) for _ in range(self.size)]
        peers = self._others(range(self.size))
        with self.reporting(what, peers):
            work = dist.all_gather(rows, row, group=self._control, async_op=True)
        _Works(self, [(work, peers)], what).wait()
        return rows

    def _exchange(self, sends: list[Message], receives: list[Message], tag: int, what: str) -> Pending:
        outgoing = [(peer, self._bytes(tensor, what)) for peer, tensor in sends]
        incoming = [(peer, self._bytes(tensor, what)) for peer, tensor in receives]
        start = self._start_nccl if self.name == "nccl" else self._start_gloo
        return _Works(self, start(outgoing, incoming, tag, what), what, keep=(outgoing, incoming))

    def _start_gloo(self, sends: list[Message], receives: list[Message], tag: int, what: str) -> list[Started]:
        sent: list[Started] = []
        received: list[Started] = []
        for peer, buffer in sends:
            with self.reporting(what, [peer]):
                sent.append((dist.isend(buffer, peer, self._halos, tag), [peer]))
        for peer, buffer in receives:
            with self.reporting(what, [peer]):
                received.append((dist.irecv(buffer, peer, self._halos, tag), [peer]))
        # Posted last, awaited first: it is the receives that say which peer is late.
        return received + sent

    def _start_nccl(self, sends: list[Message], receives: list[Message], tag: int, what: str) -> list[Started]:
        """NCCL has no tags: a pair's exchanges match in their order, the same on both ends. (Not run.)"""
        operations = [dist.P2POp(dist.isend, buffer, peer, self._halos) for peer, buffer in sends]
        operations += [dist.P2POp(dist.irecv, buffer, peer, self._halos) for peer, buffer in receives]
        peers = [peer for peer, _ in sends + receives]
        with self.reporting(what, peers):
            return [(work, peers) for work in dist.batch_isend_irecv(operations)]

    def _all_reduce(self, tensor: Tensor, ranks: Group, op: str, what: str) -> Pending:
        self._check_device(tensor, what)
        wire = to_wire(tensor, op)
        peers = self._others(ranks)
        with self.reporting(what, peers):
            work = dist.all_reduce(wire.buffer, _OPS[wire.op], self._collectives[ranks], async_op=True)
        return _Works(self, [(work, peers)], what, wire=wire)

    @contextmanager
    def reporting(self, what: str, peers: Iterable[int]) -> Iterator[None]:
        """Turn an exception of the backend into a RankError that names the node and the peers."""
        try:
            yield
        except RuntimeError as error:
            text = str(error)
            if _OWN_CLOSURE in text:
                raise lost(what, self.rank, peers, "given up after an earlier time-out") from error
            if _LATE.search(text):
                raise late(what, self.rank, peers, self.timeout) from error
            raise lost(what, self.rank, peers, _brief(error)) from error

    def _others(self, ranks: Iterable[int]) -> list[int]:
        return [rank for rank in ranks if rank != self.rank]

    def _bytes(self, tensor: Tensor, what: str) -> Tensor:
        self._check_device(tensor, what)
        return as_bytes(tensor)

    def _check_device(self, tensor: Tensor, what: str) -> None:
        if tensor.device.type != self.device.type:
            raise RankError(
                f"{what}: rank {self.rank} communicates over {self.name} from {self.device.type}, but the tensor "
                f"is on {tensor.device}; move the model and the inputs to {self.device}"
            )


class _Works(Pending):
    """Operations that torch.distributed has started."""

    def __init__(
        self,
        comm: ProcessComm,
        works: list[Started],
        what: str,
        wire: Wire | None = None,
        keep: object = None,
    ) -> None:
        self._comm = comm
        self._works = works
        self._what = what
        self._wire = wire
        self._keep = keep  # the buffers must live until the backend is done with them

    def wait(self) -> None:
        deadline = monotonic() + self._comm.timeout
        while self._works:
            work, peers = self._works[0]
            if work is not None:
                self._await(work, peers, deadline)
            del self._works[0]
        if self._wire is not None:
            self._wire.finish()
        self._wire = self._keep = None

    def _await(self, work: dist.Work, peers: Sequence[int], deadline: float) -> None:
        # Zero would mean "no time-out" to the backend.
        left = timedelta(seconds=max(deadline - monotonic(), 0.001))
        with self._comm.reporting(self._what, peers):
            work.wait(left)


def _brief(error: BaseException) -> str:
    """An exception's first sentence without the place in the C++ source."""
    text = re.sub(r"^\[[^\]]*\]\s*", "", str(error)).strip()
    return text.split(". ")[0].splitlines()[0] if text else type(error).__name__
