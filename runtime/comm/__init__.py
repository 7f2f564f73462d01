"""How bytes move between ranks: one small protocol, over threads, torch.distributed or MPI."""

from halofx.runtime.comm.base import Comm, Counters, Group, Message, Pending, Traffic
from halofx.runtime.comm.select import current, finalize, init
from halofx.runtime.comm.threads import ThreadComm, ThreadWorld

__all__ = [
    "Comm",
    "Counters",
    "Group",
    "Message",
    "Pending",
    "ThreadComm",
    "ThreadWorld",
    "Traffic",
    "current",
    "finalize",
    "init",
]
