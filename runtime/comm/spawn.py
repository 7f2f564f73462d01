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
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from time import monotonic
from typing import Any, TypeVar

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
    """A started process, seen from the parent; `report` is (kind, content) once it has come."""

    number: int
    process: SpawnProcess
    pipe: connection.Connection
    report: tuple[str, Any] | None = field(default=None)

    def failed(self) -> bool:
        return self.report is not None and self.report[0] != "result"


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
        return [pickle.loads(rank.report[1]) for rank in ranks if rank.report is not None]
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
    while any(rank.report is None for rank in ranks):
        left = None if until is None else max(until - monotonic(), 0)
        waiting = {rank.pipe: rank for rank in ranks if rank.report is None}
        ready = connection.wait(list(waiting), left)
        for pipe in ready:
            rank = waiting[pipe]  # type: ignore[index]
            rank.report = _read(rank)
        if any(rank.failed() for rank in ranks):
            # One rank's death is another's lost message; whichever is seen first, the cause is named.
            until = until or monotonic() + _GRACE
            if not ready or _cause(ranks).report[0] != "lost":  # type: ignore[index]
                break
    if any(rank.failed() for rank in ranks):
        _raise(_cause(ranks), len(ranks))


def _read(rank: _Rank) -> tuple[str, Any]:
    """A rank's report; the end of its pipe without one is its death."""
    try:
        kind = rank.pipe.recv_bytes().decode()
        return kind, rank.pipe.recv_bytes()
    except (EOFError, OSError):
        rank.process.join(_GRACE)
        return "died", rank.process.exitcode


def _cause(ranks: list[_Rank]) -> _Rank:
    """Of the failed ranks, the one that failed first: a death or an own exception before a lost message."""
    order = {"died": 0, "error": 1, "lost": 2}
    return min((rank for rank in ranks if rank.failed()), key=lambda rank: order[rank.report[0]])  # type: ignore[index]


def _raise(rank: _Rank, size: int) -> None:
    assert rank.report is not None
    kind, content = rank.report
    if kind == "died":
        how = f"was killed by signal {-content}" if content and content < 0 else f"ended with exit code {content}"
        raise RankError(f"launch: rank {rank.number} of {size} {how}, without an exception; look at its output")
    raise RankError(f"launch: rank {rank.number} of {size} raised {content.decode()}")


def _end(ranks: list[_Rank]) -> None:
    """Let ranks that have reported end, and end the others."""
    for rank in ranks:
        if rank.report is None:
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
