"""A module as one op: its forward is not looked into, and runs whole, or on shards where the user says that it may.

halofx.opaque(model.solver)                      gathered, run whole on every rank
halofx.opaque(model.tone, split="pointwise")     every output element depends on the input element at its place
halofx.opaque(model.head, split="batch")         samples do not depend on each other
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import TreeSpec

from halofx.compiler.ops.pointwise import broadcast
from halofx.compiler.rules import FALLBACKS, RULES, Call, Operand, Spec, fallback_rule
from halofx.compiler.trees import flatten, rebuild

Split = Literal["whole", "batch", "pointwise"]
M = TypeVar("M", bound=nn.Module)

MARK = "_halofx_opaque"
"""The attribute of a marked module that holds its `Split`; copies of the module keep it."""


def opaque(module: M, split: Split = "whole") -> M:
    """Mark a module as one op and return it; capture does not look into its forward.

    ``split``: ``"whole"`` gathers its inputs and runs it on every rank; ``"batch"`` says that dim 0 of every input and output is
    the batch and that samples are independent; ``"pointwise"`` that inputs broadcast to the output and that each output element
    depends on its place alone. A wrong promise gives wrong results. Raises ValueError for another word.
    """
    if split not in ("whole", "batch", "pointwise"):
        raise ValueError(f"split={split!r} is none of 'whole', 'batch', 'pointwise'")
    setattr(module, MARK, split)
    return module


_ONE_AT_A_TIME = threading.RLock()
"""``functional_call`` puts tensors into the module for a while, which ranks that are threads may share."""


class ModuleCall:
    """One call of a marked module as a function of its input tensors and its parameters and buffers."""

    def __init__(self, path: str, module: nn.Module, spec: TreeSpec, leaves: Sequence[Any]) -> None:
        self.module, self.spec, self.leaves = module, spec, tuple(leaves)
        self.split: Split = getattr(module, MARK)
        self.names = tuple(state_of(module))
        self.__name__ = self.__qualname__ = f"opaque_{path.replace('.', '_')}"

    def __call__(self, inputs: Sequence[Tensor], state: Sequence[Tensor]) -> Any:
        """The tensors of the output: one alone, or a tuple."""
        args, kwargs = rebuild(self.spec, self.leaves, inputs)
        with _ONE_AT_A_TIME:
            out = functional_call(self.module, dict(zip(self.names, state, strict=True)), args, kwargs)
        return out if isinstance(out, Tensor) else tuple(t for _, t in flatten(out, "output")[2])


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def module_call(call: Call) -> Spec | None:
    """As the mark says: whole, split over dim 0, or over every dim."""
    target: ModuleCall = call.target
    inputs = {key: operand for key, operand in call.tensors.items() if key.startswith("inputs.")}
    if target.split == "whole":
        return None
    if target.split == "pointwise":
        spec = broadcast(Call(target, {"inputs": list(inputs.values())}, call.outs))
        return Spec(ins=spec.ins, outs=spec.outs, saves=("inputs",))
    size = call.outs[0].shape[:1]

    def pattern(operand: Operand) -> str:
        first = "n" if operand.shape[:1] == size else "."
        return " ".join([first, *"." * (operand.ndim - 1)]) if operand.ndim else ""

    return Spec(
        ins={key: pattern(operand) for key, operand in inputs.items()},
        outs=[pattern(o) for o in call.outs],
        saves=("inputs",),
    )


fallback_rule(lambda target: isinstance(target, ModuleCall), module_call)


class FunctionCall:
    """A user's ``torch.autograd.Function`` as one op: runs whole, unless ``halofx.rule(TheFunction)`` says how it splits."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        self.function = function
        self.__name__ = function.__name__
        self.__module__, self.__qualname__ = function.__module__, function.__qualname__
        parameters = list(inspect.signature(function.forward).parameters.values())
        own = function.setup_context is torch.autograd.Function.setup_context
        self.__signature__ = inspect.Signature(parameters[own:])  # without ctx

    def __call__(self, *args: Any) -> Any:
        """What the function returns; its backward is the user's."""
        return self.function.apply(*args)


FALLBACKS.append(lambda target: RULES.get(target.function) if isinstance(target, FunctionCall) else None)
