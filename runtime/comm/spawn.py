"""Ranks as new processes of this machine, for `launch(..., backend="processes")`.

The parent holds the store over which the ranks meet, so that no port is guessed and none is lost with rank 0;
the ranks find it in the environment, as under torchrun. Each rank reports over a pipe of its own: its result,
or the text of its error, or, by the pipe's end without either, its death.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from time import monotonic
from typing import Any, TypeVar, cast

import torch
import torch.multiprocessing as multiprocessing
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from halofx.compiler.errors import RankError
from halofx.runtime.comm import select

R = TypeVar("R")
_GRACE = 1.0
"""Seconds in which a first cause may follow its consequence, and in which ranks may end by themselves."""


@dataclass
class _Task:
    """All that a rank needs to know; pickled into the new process."""

    fn: Callable[[int], Any]
    size: int
    port: int
    timeout: float
    grad: bool
    dtype: torch.dtype


@dataclass
class _Rank:
    """A started process, seen from the parent.

    `kind` is "" until it reports, then "result", "error" (an exception of its own), "lost" (a RankError, which may
    follow from another rank's failure) or "died"; `content` a pickled result, a text or an exit code.
    """

    number: int
    process: SpawnProcess
    pipe: connection.Connection
    kind: str = ""
    content: Any = None

    def failed(self) -> bool:
        return self.kind not in ("", "result")

    def read(self) -> None:
        """Take the report; the end of the pipe without one is the process's death."""
        try:
            kind = self.pipe.recv_bytes().decode()
            self.kind, self.content = kind, self.pipe.recv_bytes()
        except (EOFError, OSError):
            self.process.join(_GRACE)
            self.kind, self.content = "died", self.process.exitcode


def launch_processes(fn: Callable[[int], R], size: int, timeout: float) -> list[R]:
    """Run `fn(rank)` in `size` new processes; see `halofx.runtime.launch.launch`.

    Raises:
        RankError: `fn` cannot be pickled, or a rank raised or died.
    """
    # The results come from processes started here, so reading their pickles trusts nobody else.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    task = _Task(fn, size, store.port, timeout, torch.is_grad_enabled(), torch.get_default_dtype())
    ranks: list[_Rank] = []
    try:
        for number in range(size):
            ranks.append(_start(task, number))
        _collect(ranks)
        return [pickle.loads(rank.content) for rank in ranks]
    finally:
        _end(ranks)


def _start(task: _Task, number: int) -> _Rank:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(task, number, theirs), name=f"rank {number}")
    try:
        process.start()
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RankError(
            f"launch: {task.fn!r} cannot be sent to a new process ({error}); "
            "define it at the top level of a module, or use backend='threads'"
        ) from error
    theirs.close()
    return _Rank(number, process, ours)


def _collect(ranks: list[_Rank]) -> None:
    """Read reports until all ranks have given a result, or one has failed.

    Raises:
        RankError: a rank raised or died.
    """
    until: float | None = None
    while waiting := {rank.pipe.fileno(): rank for rank in ranks if not rank.kind}:
        left = None if until is None else max(until - monotonic(), 0)
        ready = connection.wait(list(waiting), left)
        for pipe in ready:
            waiting[cast(int, pipe)].read()
        failed = _first_cause(ranks)
        if failed is not None:
            # One rank's death is another's lost message; whichever is seen first, the cause is named.
            until = until or monotonic() + _GRACE
            if not ready or failed.kind != "lost":
                break
    failed = _first_cause(ranks)
    if failed is not None:
        raise _error(failed, len(ranks))


def _first_cause(ranks: list[_Rank]) -> _Rank | None:
    """Of the failed ranks, the one that failed first: a death or an own exception before a lost message."""
    order = ("died", "error", "lost")
    return min((rank for rank in ranks if rank.failed()), key=lambda rank: order.index(rank.kind), default=None)


def _error(rank: _Rank, size: int) -> RankError:
    who = f"launch: rank {rank.number} of {size}"
    if rank.kind != "died":
        return RankError(f"{who} raised {rank.content.decode()}")
    code = rank.content
    how = f"was killed by signal {-code}" if code and code < 0 else f"ended with exit code {code}"
    return RankError(f"{who} {how}, without an exception; look at its output")


def _end(ranks: list[_Rank]) -> None:
    """Let ranks that have reported end, and end the others."""
    for rank in ranks:
        if not rank.kind:
            rank.process.terminate()
    for rank in ranks:
        rank.process.join(5 * _GRACE)
        if rank.process.is_alive():
            rank.process.kill()
            rank.process.join()
        rank.pipe.close()


def _child(task: _Task, number: int, pipe: connection.Connection) -> None:
    """The life of a rank: meet, run, report, leave."""
    _end_with_parent()
    os.environ.update(
        RANK=str(number),
        WORLD_SIZE=str(task.size),
        LOCAL_RANK=str(number),
        LOCAL_WORLD_SIZE=str(task.size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(task.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        HALOFX_LAUNCHED="1",
    )
    torch.set_default_dtype(task.dtype)
    try:
        with torch.set_grad_enabled(task.grad):
            select.init(timeout=task.timeout)
            # Plain pickles hold their data; torch's own would need this process to live until they are read.
            kind, content = "result", pickle.dumps(task.fn(number))
    except BaseException as error:
        kind = "lost" if isinstance(error, RankError) else "error"
        summary = "".join(traceback.format_exception_only(error)).strip()
        content = f"{summary}\n\n{''.join(traceback.format_exception(error))}".encode()
    pipe.send_bytes(kind.encode())
    pipe.send_bytes(content)
    pipe.close()
    # Only now, reported, may the connections go: the others fail the moment they do.
    if kind != "result":
        sys.exit(1)
    select.finalize()


def _end_with_parent() -> None:
    """End this process when the parent's ends, however that came about."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()
