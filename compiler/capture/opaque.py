"""Recording a marked module as one node.

def forward(self, x):             %opaque_solver = ModuleCall([%x], [%solver.weight])
    return self.solver(x)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from halofx.compiler.capture.record import Recorder
from halofx.compiler.errors import CompileError, at
from halofx.compiler.opaque import MARK, ModuleCall, state_of
from halofx.compiler.trees import flatten


class _NoRandom(TorchDispatchMode):
    """Refuses random ops: each rank would draw its own numbers."""

    def __init__(self, path: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.path = path

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise CompileError(
                f"the opaque module {self.path} draws random numbers ({func}), which would differ between ranks; "
                "take the drawing out of it, or do not mark it opaque"
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def opaque_modules(roots: Mapping[str, nn.Module], recorder: Recorder) -> Iterator[None]:
    """Within this, calls of marked modules are recorded as one node each."""
    replaced: list[nn.Module] = []
    try:
        for prefix, root in roots.items():
            for path, module in root.named_modules():
                if hasattr(module, MARK):
                    name = f"{prefix}{path}" or type(module).__name__
                    module.forward = _recorded(name, module, recorder)
                    replaced.append(module)
        yield
    finally:
        for module in replaced:
            del module.__dict__["forward"]


def _recorded(path: str, module: nn.Module, recorder: Recorder) -> Any:
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        spec, leaves, tensors = flatten((args, kwargs), "input")
        target = ModuleCall(path, module, spec, leaves)
        inputs, state = [t for _, t in tensors], list(state_of(module).values())
        place = recorder.places.here()
        before = [t._version for t in state]
        with _disable_current_modes(), _NoRandom(path):
            out = original(*args, **kwargs)
        if target.split != "whole" and before != [t._version for t in state]:
            raise CompileError(
                f"the opaque module {path} writes to its buffers{at(str(place))}, on each rank from its own shard; "
                "mark it split='whole'"
            )
        values, out_spec = tree_flatten(out)
        if not all(isinstance(v, Tensor) for v in values):
            raise CompileError(
                f"the opaque module {path} returns more than tensors{at(str(place))}; return tensors only"
            )
        nodes = ([recorder.node_of(t) for t in inputs], [recorder.node_of(t) for t in state])
        node = recorder.graph.create_node("call_function", target, nodes)
        node.meta.update(place=place, grad=torch.is_grad_enabled())
        recorder.bind(out if isinstance(out, Tensor) else tuple(values), node)
        return tree_unflatten(values, out_spec)

    return forward
