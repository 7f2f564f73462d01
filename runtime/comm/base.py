"""What every transport gives: messages between two ranks, all-reduces over groups, and a count of both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from halofx.compiler.errors import MeshError, RankError

Group = tuple[int, ...]
"""Global ranks, ascending, written the same way on every member."""

Message = tuple[int, Tensor]
"""A peer's global rank and the tensor that goes to it or comes from it."""

OPS = ("sum", "max", "min")


class Pending(ABC):
    """A started communication. Its buffers belong to the transport until `wait` returns."""

    @abstractmethod
    def wait(self) -> None:
        """Block until done; a second call does nothing.

        Raises:
            RankError: a message did not arrive in time, or a peer failed or died.
        """


class _Done(Pending):
    def wait(self) -> None:
        pass


DONE: Pending = _Done()


@dataclass
class Traffic:
    """What one kind of communication of one node has sent from this rank."""

    messages: int = 0
    bytes: int = 0


class Counters(dict[tuple[str, str], Traffic]):
    """Traffic by (kind, what): "exchange", counted where it is sent, or "all_reduce"; and the node's name."""

    def add(self, kind: str, what: str, size: int) -> None:
        traffic = self.get((kind, what))
        if traffic is None:
            traffic = self[(kind, what)] = Traffic()
        traffic.messages += 1
        traffic.bytes += size

    def total(self, kind: str | None = None) -> Traffic:
        """The sum over all nodes, of one kind or of both."""
        chosen = [traffic for (of, _), traffic in self.items() if kind in (None, of)]
        return Traffic(sum(t.messages for t in chosen), sum(t.bytes for t in chosen))

    def reset(self) -> None:
        self.clear()


class Comm(ABC):
    """One rank's way to the others. The public methods check and count; the transports move the bytes.

    Every rank makes the same calls in the same order (the compiler derives one node list for all), so nothing
    here negotiates: no sizes, no tags and no order are agreed on at run time.

    Args:
        rank: this rank, 0 <= rank < size.
        size: the number of ranks in the world.
        timeout: seconds that any one wait may take.
    """

    name: str = "abstract"
    """The transport: "threads", "gloo", "nccl" or "mpi"."""

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.counters = Counters()
        self._groups: set[Group] = {tuple(range(size))}  # known to all ranks, whoever is in them

    def prepare(self, partitions: Sequence[Sequence[Group]]) -> None:
        """Create what all-reduces over these groups need. The same call on every rank; known groups are kept.

        Args:
            partitions: each lists all groups of the world along some axes; every rank is in exactly one.

        Raises:
            MeshError: a partition leaves a rank out or names one twice.
            RankError: a member of a group did not come in time.
        """
        for partition in partitions:
            groups = self._checked_partition(partition)
            unknown = [group for group in groups if len(group) > 1 and group not in self._groups]
            self._create_groups(unknown)
            self._groups.update(unknown)

    def start_exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int, what: str) -> Pending:
        """Send tensors to peers and receive others in place. No receive is awaited before all sends are posted.

        Messages of one pair of ranks and one tag arrive in the order in which both ends posted them. Empty
        tensors are skipped on both ends.

        Args:
            sends: contiguous tensors, not to be changed before `wait` returns.
            receives: contiguous tensors, overwritten between now and the return of `wait`.
            tag: small, not negative, the same on both ends.
            what: the node's name, for errors and counters.

        Raises:
            RankError: a peer is known to have failed or died.
        """
        outgoing = [self._checked(peer, tensor, what) for peer, tensor in sends if tensor.numel()]
        incoming = [self._checked(peer, tensor, what) for peer, tensor in receives if tensor.numel()]
        if not outgoing and not incoming:
            return DONE
        for _, tensor in outgoing:
            self.counters.add("exchange", what, tensor.nbytes)
        return self._exchange(outgoing, incoming, tag, what)

    def start_all_reduce(self, tensor: Tensor, ranks: Group, op: str, what: str) -> Pending:
        """Combine a tensor over a group, in place; afterwards it is bitwise the same on all members.

        Half-precision floats are added in float32 and rounded once; booleans add as "or"; max and min keep
        NaN. A group of one and an empty tensor send nothing.

        Args:
            tensor: contiguous, of the same shape and dtype on every member.
            ranks: a group given to `prepare`, or the whole world.
            op: "sum", "max" or "min".
            what: the node's name, for errors and counters.

        Raises:
            RankError: a member is known to have failed or died.
        """
        assert op in OPS, f"{what}: op={op!r} is none of {OPS}"
        assert self.rank in ranks, f"{what}: rank {self.rank} is not in {ranks}"
        assert not (tensor.is_complex() and op != "sum"), f"{what}: complex numbers have no {op}"
        if len(ranks) == 1 or not tensor.numel():
            return DONE
        assert ranks in self._groups, f"{what}: the group {ranks} was not given to prepare()"
        tensor = self._own(tensor, what)
        self.counters.add("all_reduce", what, tensor.nbytes)
        return self._all_reduce(tensor, ranks, op, what)

    @abstractmethod
    def all_gather_bytes(self, data: bytes, what: str) -> list[bytes]:
        """Every rank's bytes, in rank order, on every rank; sizes may differ.

        For digests and shapes, of the whole world; not counted.

        Raises:
            RankError: a rank did not come in time, or failed or died.
        """

    def close(self) -> None:  # noqa: B027  (a transport may hold nothing)
        """Give back what the transport holds; nothing may be started afterwards."""

    @abstractmethod
    def _create_groups(self, groups: list[Group]) -> None:
        """Create disjoint groups, each of two ranks or more; this rank may be in none. The same call everywhere."""

    @abstractmethod
    def _exchange(self, sends: list[Message], receives: list[Message], tag: int, what: str) -> Pending: ...

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, ranks: Group, op: str, what: str) -> Pending: ...

    def _checked(self, peer: int, tensor: Tensor, what: str) -> Message:
        assert 0 <= peer < self.size, f"{what}: no rank {peer} in a world of {self.size}"
        assert peer != self.rank, f"{what}: rank {peer} exchanges with itself; that is a local copy"
        return peer, self._own(tensor, what)

    def _own(self, tensor: Tensor, what: str) -> Tensor:
        """The tensor without its autograd history, its memory certain to hold its values in order."""
        assert tensor.is_contiguous(), f"{what}: strides {tensor.stride()} of shape {tuple(tensor.shape)}"
        # A lazy conjugate or negative is contiguous, but its memory holds other values.
        assert not tensor.is_conj() and not tensor.is_neg(), f"{what}: resolve_conj() and resolve_neg() first"
        return tensor.detach() if tensor.requires_grad else tensor

    def _checked_partition(self, partition: Sequence[Group]) -> list[Group]:
        if sorted(chain.from_iterable(partition)) != list(range(self.size)):
            raise MeshError(
                f"prepare: the groups {[tuple(group) for group in partition]} must hold each of the ranks "
                f"0..{self.size - 1} exactly once; build them with the mesh's groups"
            )
        return [tuple(group) for group in partition]


def ranks_text(ranks: Iterable[int]) -> str:
    """``"rank 3"``, ``"ranks 1, 3"``, each rank once, ascending."""
    unique = sorted(set(ranks))
    return f"rank{'s' * (len(unique) > 1)} {', '.join(map(str, unique))}"


def late(what: str, rank: int, peers: Iterable[int], timeout: float) -> RankError:
    """The error of a wait that ran out of time."""
    return RankError(
        f"{what}: no message from {ranks_text(peers)} to rank {rank} within {timeout:g} s; "
        "if they are only slow, raise timeout= of halofx.init or halofx.launch"
    )


def lost(what: str, rank: int, peers: Iterable[int], reason: str) -> RankError:
    """The error of a wait whose peer is known to be gone."""
    return RankError(
        f"{what}: rank {rank} lost {ranks_text(peers)} ({reason}); look for the first error in their output"
    )


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory, uint8 [nbytes], shared: any dtype can be sent this way."""
    return tensor.view(-1).view(torch.uint8)
