"""Where in the user's code, and in which module, an op was called: read off the Python stack.

model.py:31  forward          x = self.enc(x)         <- module ""
  module.py  _call_impl       self = enc
    model.py:12  forward      x = self.conv(x)        <- module "enc"; the innermost line of the user is the source
      module.py  _call_impl   self = conv             <- module "enc.conv", the innermost one with a name
        conv.py  forward      F.conv3d(...)
"""

from __future__ import annotations

import inspect
import linecache
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import TypeVar

import torch
import torch.utils.checkpoint
from torch import nn

T = TypeVar("T")

_OURS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_CALL = nn.Module._call_impl.__code__
_CHECKPOINT = inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__


@dataclass(frozen=True)
class Place:
    """The innermost line of user code, the innermost named module, and the checkpointed region (None outside of any)."""

    file: str | None
    line: int
    module: str | None
    region: int | None = None

    @property
    def way_round(self) -> str:
        """The end of a remedy: how to keep the module here as it is; empty in the model's own forward."""
        if not self.module:
            return ""
        return f", or keep the module as it is, to run whole: halofx.opaque(model{_attribute(self.module)})"

    def __str__(self) -> str:
        """``model.py:12: x = self.conv(x)``; empty when no user code is on the stack."""
        if self.file is None:
            return ""
        code = linecache.getline(self.file, self.line).strip()
        return f"{os.path.basename(self.file)}:{self.line}: {code}".rstrip(": ")


def _attribute(path: str) -> str:
    """``.enc[0].gate`` of the module path ``enc.0.gate``."""
    return "".join(f"[{p}]" if p.isdigit() else f".{p}" for p in path.split("."))


class Places:
    """Finds the place of the op that is being called, below the function that started the model.

    ``names`` maps ``id(module)`` to the module's path; ``default`` is the path where no named module is on the stack.
    """

    def __init__(self, names: Mapping[int, str], default: str = "") -> None:
        self.names = dict(names)
        self.default = default
        self._user: dict[str, bool] = {}
        self._regions: list[FrameType] = []  # calls of torch.utils.checkpoint, kept so that none looks like another

    def here(self) -> Place:
        """The place of the running op."""
        file: str | None = None
        line, path, region = 0, None, None
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not _RUN:
            code = frame.f_code
            if file is None and self.is_user(code.co_filename):
                file, line = code.co_filename, frame.f_lineno
            elif code is _CALL and path is None:
                path = self.names.get(id(frame.f_locals["self"]))
            elif code is _CHECKPOINT:
                region = frame  # the outermost stays
            frame = frame.f_back
        if frame is None:  # not within a run
            return Place(None, 0, self.default)
        return Place(file, line, self.default if path is None else path, self._number(region))

    def _number(self, region: FrameType | None) -> int | None:
        if region is None:
            return None
        if not any(region is known for known in self._regions):
            self._regions.append(region)
        return next(i for i, known in enumerate(self._regions) if known is region)

    def of_error(self, error: BaseException) -> Place:
        """The innermost line of user code that an exception came through."""
        place, started = Place(None, 0, None), False
        trace: TracebackType | None = error.__traceback__
        while trace is not None:
            code = trace.tb_frame.f_code
            started = started or code is _RUN
            if started and self.is_user(code.co_filename):
                place = Place(code.co_filename, trace.tb_lineno, None)
            trace = trace.tb_next
        return place

    def is_user(self, file: str) -> bool:
        """Whether a file is neither of torch nor of this compiler; generated code has no file."""
        known = self._user.get(file)
        if known is None:
            generated = file.startswith(("<string>", "<frozen", "<eval_with_key>", "<attrs", "<__array"))
            known = self._user[file] = not generated and not file.startswith(_OURS)
        return known


def run(call: Callable[[], T]) -> T:
    """Call the model; frames further out belong to the caller of halofx and are no place in the model."""
    return call()


_RUN = run.__code__
