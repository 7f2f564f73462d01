"""Recording a user's autograd Function as one node, forward and backward as the user wrote them.

y = Swish.apply(x)                %swish = FunctionCall(Swish)(%x)        what its forward calls is recorded too, and dead

``apply`` is watched rather than replaced, because models keep bound ones (``swish = Swish.apply``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from halofx.compiler.capture.record import Recorder
from halofx.compiler.errors import CompileError, at
from halofx.compiler.opaque import FunctionCall

_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


@contextmanager
def custom_functions(recorder: Recorder) -> Iterator[set[Any]]:
    """Within this, calls of autograd Functions that are neither torch's nor ours are recorded as one node each.

    Yields the set of those that were. Costs nothing unless some library or the user has defined one.
    """
    recorded: set[Any] = set()
    before = sys.getprofile()
    replaceable = before is None or callable(before)  # under cProfile nobody can watch: `check_autograd` refuses then
    if not replaceable or not any(_theirs(function) for function in _all(torch.autograd.Function)):
        yield recorded
        return
    watch = _Watch(recorder, recorded)
    sys.setprofile(watch)
    try:
        yield recorded
    finally:
        sys.setprofile(before)


def _all(owner: Any) -> Iterator[Any]:
    for function in owner.__subclasses__():
        yield function
        yield from _all(function)


def _theirs(function: Any) -> bool:
    return not function.__module__.startswith(("torch.", "halofx."))


class _Watch:
    """A profile function that sees ``apply`` begin and end; of nested calls the outermost counts."""

    def __init__(self, recorder: Recorder, recorded: set[Any]) -> None:
        self.recorder, self.recorded = recorder, recorded
        self.frame: FrameType | None = None
        self.args: tuple[Any, ...] = ()
        self.last: Any = None  # the last node before the call

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code is not _APPLY or self.recorder.paused:
            return
        if event == "call" and self.frame is None and _theirs(frame.f_locals["cls"]):
            self.frame, self.args = frame, tuple(frame.f_locals["args"])
            self.last = next(reversed(self.recorder.graph.nodes), None)
        elif event == "return" and frame is self.frame:
            function, self.frame = frame.f_locals["cls"], None
            if argument is not None:  # None: it raised
                self._record(function, argument)

    def _record(self, function: Any, outs: Any) -> None:
        recorder, place = self.recorder, self.recorder.places.here()
        inside = list(self._inside())
        name = f"the custom autograd Function {function.__name__}"
        if any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in inside):
            raise CompileError(
                f"{name} draws random numbers{at(str(place))}, which would differ between ranks; draw them outside of it"
            )
        inputs = [t for t in self.args if isinstance(t, Tensor)]
        if any(out is t for out in pytree.tree_leaves(outs) for t in inputs):
            raise CompileError(f"{name} changes its input in place{at(str(place))}; return a new tensor")
        args = [recorder.node_of(a) if isinstance(a, Tensor) else a for a in self.args]
        node = recorder.graph.create_node("call_function", FunctionCall(function), tuple(args))
        node.meta.update(place=place, grad=torch.is_grad_enabled())
        recorder.bind(outs, node, alias=True)
        self.recorded.add(function)

    def _inside(self) -> Iterator[Any]:
        for node in reversed(self.recorder.graph.nodes):
            if node is self.last:
                return
            yield node
