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
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from halofx.compiler.capture.record import Recorder, fake_like, is_fake, storage_of
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
        out = _run(path, original, (args, kwargs), state, recorder)
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
        recorder.bind(values[0] if isinstance(out, Tensor) else tuple(values), node)
        return tree_unflatten(values, out_spec)

    return forward


def _run(path: str, forward: Any, arguments: Any, state: list[Tensor], recorder: Recorder) -> Any:
    """The output on fake tensors; where the module reads values, on random ones of these shapes and its own parameters."""
    recorder.paused = True
    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            try:
                with _NoRandom(path):
                    out = forward(*arguments[0], **arguments[1])
            except CompileError:
                raise
            except Exception:
                args, kwargs, values = _values(forward, arguments, recorder)
                with _NoRandom(path):
                    out = functional_call(_Forward(forward), values, args, kwargs)
            return tree_map_only(Tensor, lambda t: _fresh(t, [*tree_leaves(arguments), *state], recorder), out)
    finally:
        recorder.paused = False


def _values(forward: Any, arguments: Any, recorder: Recorder) -> tuple[Any, Any, dict[str, Tensor]]:
    """Random inputs, and the parameters of the model, or random ones too where those are on ``meta``."""
    generator = torch.Generator().manual_seed(0)

    def real(t: Tensor) -> Tensor:
        original = recorder.originals.get(id(t))
        if original is not None and original.device.type != "meta":
            return original.detach().clone().requires_grad_(t.requires_grad)
        if not t.is_floating_point():
            return torch.zeros(t.shape, dtype=t.dtype)
        return torch.randn(t.shape, generator=generator).to(t.dtype).requires_grad_(t.requires_grad)

    args, kwargs = tree_map_only(Tensor, real, arguments)
    return args, kwargs, {f"module.{name}": real(t) for name, t in state_of(forward.__self__).items()}


class _Forward(nn.Module):
    """A module whose forward is a given one of another module."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.module = forward.__self__
        self.__dict__["call"] = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["call"](*args, **kwargs)


def _fresh(out: Tensor, inputs: list[Any], recorder: Recorder) -> Tensor:
    """A fake tensor like an output, without its history; the output itself where it lies in the memory of an input."""
    known = {storage_of(t) for t in inputs if isinstance(t, Tensor)}
    if is_fake(out) and storage_of(out) in known:
        return out
    fake = fake_like(recorder.fake_mode, out)
    return fake.requires_grad_().clone() if out.requires_grad else fake
