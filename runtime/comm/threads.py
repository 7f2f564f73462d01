"""Ranks as threads of one process: the embedded default, for notebooks, debugging and nearly all tests.

Messages are real (copied at the send, matched by source, tag and order), only the bytes stay in the process:

    rank 0: post(to=1)  ->  mail[1][(src=0, tag, number)]  ->  rank 1: wait, copy into the receive buffer

A rank waits on its own condition only, so a message wakes the one thread that it is for.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from time import monotonic
from typing import Any

from torch import Tensor

from halofx.compiler.errors import RankError
from halofx.runtime.comm.base import Comm, Group, Message, Pending, late, lost
from halofx.runtime.comm.wire import reduce_in_order

_Slot = tuple[int, int, int]  # source, tag, number among the messages of this source and tag


class ThreadWorld:
    """A world of ranks that are threads.

    Args:
        size: the number of ranks.
        timeout: seconds that any one wait of a rank may take.
    """

    def __init__(self, size: int, timeout: float = 300.0) -> None:
        self.size = size
        self.timeout = timeout
        self._conditions = [threading.Condition(threading.Lock()) for _ in range(size)]
        self.reset()

    def reset(self) -> None:
        """Forget messages, failures and counters, to run again after a failure; no rank may be running."""
        self._mail: list[dict[_Slot, Tensor]] = [{} for _ in range(self.size)]
        self._meetings: dict[Hashable, _Meeting] = {}
        self._awaited: list[object] = [None] * self.size
        self._lock = threading.Lock()
        self._failure: tuple[int | None, BaseException] | None = None
        self._finished: frozenset[int] = frozenset()
        self._comms = [ThreadComm(self, rank) for rank in range(self.size)]

    def comm(self, rank: int) -> ThreadComm:
        """The communicator of a rank, always the same one."""
        return self._comms[rank]

    def abort(self, exception: BaseException, rank: int | None = None) -> bool:
        """Wake all waiting ranks with a RankError that names the failed one; True for the first failure."""
        with self._lock:
            first = self._failure is None
            if first:
                self._failure = (rank, exception)
        self._wake(range(self.size))
        return first

    def finish(self, rank: int) -> None:
        """Say that a rank will send nothing more, so that whoever still waits for it fails at once."""
        with self._lock:
            self._finished |= {rank}
        self._wake(range(self.size))

    def post(self, source: int, destination: int, tag: int, number: int, tensor: Tensor) -> None:
        """Put a message, no longer shared with the sender, into a mailbox."""
        slot = (source, tag, number)
        condition = self._conditions[destination]
        with condition:
            self._mail[destination][slot] = tensor
            # Waking a thread for anything but what it waits for costs more than the message.
            if self._awaited[destination] == slot:
                condition.notify_all()

    def take(self, rank: int, slot: _Slot, what: str) -> Tensor:
        """Wait for one message and take it out of the mailbox."""
        mail = self._mail[rank]
        self.wait(rank, slot, lambda: slot in mail, lambda: [slot[0]], what)
        return mail.pop(slot)

    def meet(self, key: Hashable, ranks: Group, rank: int, part: _Part) -> _Meeting:
        """Bring a part to a meeting of a group, opening it if this rank is the first."""
        with self._lock:
            meeting = self._meetings.setdefault(key, _Meeting(ranks))
            meeting.parts[rank] = part
            complete = len(meeting.parts) == len(ranks)
            if complete:
                del self._meetings[key]
        if complete:
            self._wake(ranks, meeting)
        return meeting

    def join(self, rank: int, meeting: _Meeting, what: str) -> None:
        """Wait for all parts of a meeting."""
        self.wait(rank, meeting, meeting.complete, meeting.missing, what)

    def wait(
        self,
        rank: int,
        awaited: object,
        ready: Callable[[], bool],
        missing: Callable[[], Sequence[int]],
        what: str,
    ) -> None:
        """Block a rank until `ready()`, which is asked again when `awaited` comes.

        Raises:
            RankError: a rank failed, a missing rank has finished, or the time is up.
        """
        condition = self._conditions[rank]
        with condition:
            if ready():
                return
            deadline = monotonic() + self.timeout
            self._awaited[rank] = awaited
            while not ready():
                self._check_alive(rank, missing, what)
                left = deadline - monotonic()
                if left <= 0:
                    raise late(what, rank, missing(), self.timeout)
                condition.wait(left)
            self._awaited[rank] = None

    def check_failure(self, what: str) -> None:
        """Raise RankError if a rank has failed."""
        if self._failure is not None:
            failed, exception = self._failure
            who = "the world" if failed is None else f"rank {failed}"
            raise RankError(
                f"{what}: {who} failed with {type(exception).__name__}: {exception}; look there"
            ) from exception

    def _check_alive(self, rank: int, missing: Callable[[], Sequence[int]], what: str) -> None:
        self.check_failure(what)
        # Read before `missing`: a rank that brings its part and then finishes must not look absent.
        finished = self._finished
        gone = [peer for peer in missing() if peer in finished]
        if gone:
            raise lost(what, rank, gone, "finished without sending it")

    def _wake(self, ranks: Sequence[int], awaited: object = None) -> None:
        """Wake ranks; with `awaited` only those that wait for it."""
        for rank in ranks:
            with self._conditions[rank]:
                if awaited is None or self._awaited[rank] is awaited:
                    self._conditions[rank].notify_all()


class _Part:
    """What one rank brings to a meeting; `label` must be the same on all members."""

    def __init__(self, label: tuple[Any, ...], value: Any) -> None:
        self.label = label
        self.value = value


class _Meeting:
    """One collective of a group: the parts by rank, and what they combine to, computed once."""

    def __init__(self, ranks: Group) -> None:
        self.ranks = ranks
        self.parts: dict[int, _Part] = {}
        self._lock = threading.Lock()
        self._result: Any = None

    def complete(self) -> bool:
        return len(self.parts) == len(self.ranks)

    def missing(self) -> list[int]:
        return [rank for rank in self.ranks if rank not in self.parts]

    def result(self, combine: Callable[[list[Any]], Any], what: str) -> Any:
        """`combine` of the values in the order of the ranks, the same object for all members."""
        with self._lock:
            if self._result is None:
                self._check_labels(what)
                self._result = combine([self.parts[rank].value for rank in self.ranks])
            return self._result

    def _check_labels(self, what: str) -> None:
        first = self.parts[self.ranks[0]].label
        for rank in self.ranks:
            if (label := self.parts[rank].label) != first:
                raise RankError(
                    f"{what}: rank {self.ranks[0]} calls {first}, rank {rank} calls {label}; "
                    "every rank must run the same program"
                )


class ThreadComm(Comm):
    """One rank of a `ThreadWorld`; to be used by that rank's thread."""

    name = "threads"

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        super().__init__(rank, world.size, world.timeout)
        self.world = world
        self._sent: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._received: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._met: defaultdict[Group, int] = defaultdict(int)

    def all_gather_bytes(self, data: bytes, what: str) -> list[bytes]:
        ranks = tuple(range(self.size))
        meeting = self._meet(ranks, _Part(("all_gather_bytes",), bytes(data)), what)
        self.world.join(self.rank, meeting, what)
        return list(meeting.result(list, what))

    def _create_groups(self, groups: list[Group]) -> None:
        pass

    def _exchange(self, sends: list[Message], receives: list[Message], tag: int, what: str) -> Pending:
        self.world.check_failure(what)
        for peer, tensor in sends:
            self.world.post(self.rank, peer, tag, _next(self._sent, (peer, tag)), tensor.clone())
        slots = [(peer, tag, _next(self._received, (peer, tag))) for peer, _ in receives]
        return _Receipt(self, slots, [tensor for _, tensor in receives], what)

    def _all_reduce(self, tensor: Tensor, ranks: Group, op: str, what: str) -> Pending:
        label = ("all_reduce", op, tuple(tensor.shape), tensor.dtype)
        return _Reduction(self, self._meet(ranks, _Part(label, tensor), what), op, tensor, what)

    def _meet(self, ranks: Group, part: _Part, what: str) -> _Meeting:
        self.world.check_failure(what)
        return self.world.meet((ranks, _next(self._met, ranks)), ranks, self.rank, part)


def _next(numbers: defaultdict[Any, int], key: Hashable) -> int:
    """Count up. Numbers given at the start match messages as they were posted, however they are awaited."""
    number = numbers[key]
    numbers[key] = number + 1
    return number


class _Receipt(Pending):
    """The receives of one exchange; its sends were copied and need no waiting."""

    def __init__(self, comm: ThreadComm, slots: list[_Slot], buffers: list[Tensor], what: str) -> None:
        self._comm = comm
        self._left = list(zip(slots, buffers, strict=True))
        self._what = what

    def wait(self) -> None:
        while self._left:
            slot, buffer = self._left[0]
            tensor = self._comm.world.take(self._comm.rank, slot, self._what)
            if tensor.shape != buffer.shape or tensor.dtype != buffer.dtype:
                raise RankError(
                    f"{self._what}: rank {slot[0]} sent {tensor.dtype} {tuple(tensor.shape)}, "
                    f"rank {self._comm.rank} expects {buffer.dtype} {tuple(buffer.shape)}; "
                    "every rank must run the same program"
                )
            buffer.copy_(tensor)
            del self._left[0]


class _Reduction(Pending):
    """One member's part of an all-reduce."""

    def __init__(self, comm: ThreadComm, meeting: _Meeting, op: str, target: Tensor, what: str) -> None:
        self._comm = comm
        self._meeting: _Meeting | None = meeting
        self._op = op
        self._target = target
        self._what = what

    def wait(self) -> None:
        meeting = self._meeting
        if meeting is None:
            return
        self._comm.world.join(self._comm.rank, meeting, self._what)
        # The parts need no copy: nobody may write to one before the result, which reads them all, is there.
        self._target.copy_(meeting.result(lambda parts: reduce_in_order(parts, self._op), self._what))
        self._meeting = None
