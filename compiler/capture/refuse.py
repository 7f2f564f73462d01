"""What cannot be captured exactly, and the way out of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules import module as nn_module
from torch.utils import _pytree as pytree

from halofx.compiler.capture.state import Changes
from halofx.compiler.errors import CompileError


def check_model(model: nn.Module) -> None:
    """Refuse wrappers, scripted parts, lazy parameters and backward hooks."""
    if not isinstance(model, nn.Module):
        raise CompileError(f"the model is a {type(model).__name__}, not a torch.nn.Module; wrap it in one")
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    for path, module in model.named_modules():
        name = f"{path or 'the model'} ({type(module).__name__})"
        if isinstance(module, wrappers):
            raise CompileError(f"{name} already spreads the model over devices; pass its .module instead")
        if isinstance(module, torch.jit.ScriptModule):
            raise CompileError(f"{name} is a torch.jit.ScriptModule; pass the nn.Module that it was made from")
        if module._backward_hooks or module._backward_pre_hooks:
            raise CompileError(f"{name} has backward hooks, which a captured graph would lose; remove them")
        for key, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if torch.nn.parameter.is_lazy(tensor):
                raise CompileError(f"{key} of {name} has no shape yet; run the model once before compiling it")
    if nn_module._global_backward_hooks or nn_module._global_backward_pre_hooks:
        raise CompileError("global backward hooks are set, which a captured graph would lose; remove them")


def check_tensor(name: str, tensor: Tensor) -> None:
    """Refuse inputs that are not plain dense tensors."""
    wrapper = torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor)
    if tensor.layout is not torch.strided or tensor.is_nested or wrapper:
        kind = type(tensor).__name__ if wrapper else str(tensor.layout)
        raise CompileError(f"the input {name} is a {kind} tensor; pass a plain dense tensor")


def check_autograd(output: Any, recorded: set[Any]) -> None:
    """Refuse autograd Functions that were not recorded as one op, whose backward a graph of their forward loses."""
    stack = [t.grad_fn for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]
    seen: set[Any] = set()
    while stack:
        node: Any = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        custom = isinstance(node, torch.autograd.function.BackwardCFunction)
        function = getattr(node, "_forward_cls") if custom else None  # noqa: B009
        name = function.__name__ if function is not None and function not in recorded else ""
        if name and not name.startswith("GeneratedBackwardFor_"):  # torch.library ops stay one node of the graph
            raise CompileError(
                f"the custom autograd Function {name} has its own backward, which a capture of its forward would lose; "
                "write it with differentiable torch functions"
            )
        stack += [following for following, _ in node.next_functions]


def check_changes(changes: Changes, is_constant: Callable[[Tensor], bool]) -> list[str]:
    """Notes on the attributes that the forward assigned. Refuses state that the next call would read."""
    notes = []
    for path, name, old, new in changes.attributes:
        full = f"{path}.{name}" if path else name
        if isinstance(old, Tensor) and is_constant(old):
            raise CompileError(
                f"the forward reads and assigns the attribute {full}, so that calls depend on each other; register it "
                "with register_buffer"
            )
        if not (isinstance(old, Tensor) and isinstance(new, Tensor)):
            notes.append(f"the forward assigns the attribute {full}; the compiled net does not")
    return notes


def check_assigned(key: str, old: fx.Node, new: fx.Node) -> None:
    """Refuse a buffer whose new value has another shape or dtype: the program would not fit the next call."""
    a, b = old.meta["val"], new.meta["val"]
    if a.shape != b.shape or a.dtype != b.dtype:
        raise CompileError(
            f"the forward changes the buffer {key} from {a.dtype}{list(a.shape)} to {b.dtype}{list(b.shape)}; give it "
            "its final shape and dtype when it is registered"
        )
