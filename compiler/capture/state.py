"""Lend a model fake parameters for one run, and give everything back as it was.

    conv.weight: Parameter  ->  fake tensor, while the model runs  ->  the same Parameter

The run may re-assign buffers (``self.ema = 0.9 * self.ema + x.mean()``) and other attributes. All of them are restored;
the new buffers are reported, for they become updates of the program.
"""

from __future__ import annotations

import logging
import math
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from halofx.compiler.errors import CompileError

CUMULATIVE = math.nan
"""Momentum of a batch norm that averages cumulatively: it would ask ``num_batches_tracked`` for its value."""


@dataclass
class Changes:
    """What the forward assigned: buffers by state key, and ``(module path, attribute, old, new)`` of the rest."""

    buffers: dict[str, Tensor] = field(default_factory=dict)
    attributes: list[tuple[str, str, Any, Any]] = field(default_factory=list)


@dataclass
class _Saved:
    """The attributes of a module, and shallow copies of its lists, dicts and sets."""

    module: nn.Module
    path: str
    attributes: dict[str, Any]
    containers: dict[str, Any]


def roots_of(model: nn.Module, loss: object) -> dict[str, nn.Module]:
    """The modules whose state a program holds, by the prefix of their keys."""
    return {"": model, "loss.": loss} if isinstance(loss, nn.Module) else {"": model}


def state_of(roots: dict[str, nn.Module]) -> dict[str, Tensor]:
    """Every parameter, then every buffer, once, by its key; those of the loss begin with ``loss.``."""
    state: dict[str, Tensor] = {}
    seen: set[int] = set()
    for prefix, root in roots.items():
        for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
            if id(tensor) not in seen:
                if prefix + name in state:
                    raise CompileError(
                        f"the key {prefix + name!r} names a parameter of the model and one of the loss; "
                        "rename the submodule 'loss' of the model"
                    )
                seen.add(id(tensor))
                state[prefix + name] = tensor
    return state


def sharing(state: dict[str, Tensor]) -> set[str]:
    """The keys whose tensors share memory with that of another key, as views of one flat tensor do."""
    by_storage: dict[int, list[str]] = {}
    for key, tensor in state.items():
        wrapped = torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor)
        if tensor.device.type != "meta" and not wrapped and tensor.layout is torch.strided and tensor.numel():
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(key)
    return {key for keys in by_storage.values() if len(keys) > 1 for key in keys}


@contextmanager
def lend(roots: dict[str, nn.Module], state: dict[str, Tensor], fakes: dict[str, Tensor]) -> Iterator[Changes]:
    """Put fake tensors in the places of parameters and buffers; on leaving, note what changed and restore all."""
    by_id = {id(tensor): fakes[key] for key, tensor in state.items()}
    keys = {id(fakes[key]): key for key in state}
    changes = Changes()
    with put_back(roots) as saved:
        for item in saved:
            _lend_one(item, by_id)
        lent = [_save(item.module, item.path) for item in saved]
        yield changes
        for item in lent:
            _note_changes(item, keys, changes)


@contextmanager
def put_back(roots: dict[str, nn.Module]) -> Iterator[list[_Saved]]:
    """On leaving, every module has the attributes that it had; the values of tensors are not touched."""
    saved = [_save(module, path) for path, module in _modules(roots)]
    try:
        yield saved
    finally:
        for item in saved:
            _restore(item)


def module_paths(roots: dict[str, nn.Module]) -> dict[int, str]:
    """The path of every module by its id; those of the loss begin with ``loss``."""
    return {id(module): path for path, module in _modules(roots)}


def _modules(roots: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    seen: set[int] = set()
    for prefix, root in roots.items():
        for name, module in root.named_modules():
            if id(module) not in seen:
                seen.add(id(module))
                yield (prefix + name).removesuffix("."), module


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, (dict, set, deque)) else list(value)


def _save(module: nn.Module, path: str) -> _Saved:
    attributes = dict(vars(module))
    containers = {k: _copy(v) for k, v in attributes.items() if isinstance(v, (dict, list, set, deque))}
    return _Saved(module, path, attributes, containers)


def _lend_one(saved: _Saved, fakes: dict[int, Tensor]) -> None:
    """Swap the tensors in ``_parameters``, ``_buffers`` and in lists (``nn.LSTM`` keeps its weights in one)."""
    for value in saved.attributes.values():
        items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, tensor in list(items):
            if isinstance(tensor, Tensor) and id(tensor) in fakes:
                value[key] = fakes[id(tensor)]
    module = saved.module
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training and module.running_mean is not None:
        module.momentum = CUMULATIVE if module.momentum is None else module.momentum


def _restore(saved: _Saved) -> None:
    """Attributes as they were, and the contents of their containers, in the same objects."""
    vars(saved.module).clear()
    vars(saved.module).update(saved.attributes)
    for name, copy in saved.containers.items():
        container = saved.attributes[name]
        if _items(container) == _items(copy):
            continue  # some dicts refuse to be written to
        container.clear()
        container.update(copy) if isinstance(container, (dict, set)) else container.extend(copy)


def _items(container: Any) -> list[Any]:
    """The contents of a container by identity, in order."""
    pairs = container.items() if isinstance(container, dict) else ((None, v) for v in container)
    return [(key, id(value)) for key, value in pairs]


def _note_changes(lent: _Saved, keys: dict[int, str], changes: Changes) -> None:
    """Compare a module with what it was when the run began."""
    now = vars(lent.module)
    for name, old in lent.containers["_buffers"].items():
        new = now["_buffers"].get(name)
        if new is not old and old is not None and new is not None:
            changes.buffers[keys[id(old)]] = new
        elif new is not old:
            changes.attributes.append((lent.path, name, old, new))
    for name, new in now.items():
        if name not in lent.containers and new is not lent.attributes.get(name):
            changes.attributes.append((lent.path, name, lent.attributes.get(name), new))


# -- the rest of the world


@contextmanager
def plain_world() -> Iterator[list[str]]:
    """Gradients on, shortcuts that hide ops off, and every random state restored on leaving.

    Yields a list of notes. Raises `CompileError` on leaving when Python's or numpy's random numbers were drawn.
    """
    notes: list[str] = []
    fastpath = torch.backends.mha.get_fastpath_enabled()
    cache = torch.is_autocast_cache_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    torch.set_autocast_cache_enabled(False)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.random.fork_rng(_used_cuda()))
            stack.enter_context(_python_random(notes))
            if "torch._dynamo" in sys.modules:  # compiled parts of the model run as they are written
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            log = logging.getLogger("torch._subclasses.fake_tensor")  # it prints tracebacks of what we explain
            for owner, name, ours in (*_bypassed(), (log, "exception", lambda *args, **kwargs: None)):
                stack.enter_context(_patched(owner, name, ours))
            yield notes
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        torch.set_autocast_cache_enabled(cache)


def _used_cuda() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []


@contextmanager
def _python_random(notes: list[str]) -> Iterator[None]:
    """A forward that draws from Python's or numpy's generator takes another branch each time: refuse it.

    With other threads alive the draw may be theirs, so that it is a note only.
    """
    numpy = sys.modules.get("numpy")
    before, before_numpy = random.getstate(), numpy.random.get_state() if numpy else None
    drawn = False
    try:
        yield
    finally:
        drawn = random.getstate() != before
        random.setstate(before)
        if numpy is not None and before_numpy is not None:
            after = numpy.random.get_state()
            drawn = drawn or after[2] != before_numpy[2] or bool((after[1] != before_numpy[1]).any())
            numpy.random.set_state(before_numpy)
    message = "the forward draws random numbers from Python or numpy; the captured program would repeat the first draw"
    if drawn and threading.active_count() == 1:
        raise CompileError(f"{message}; draw them with torch, or pass them as inputs")
    if drawn:
        notes.append(f"{message} (unless another thread drew them)")


class _Direct:
    """In the place of ``torch.utils.checkpoint.CheckpointFunction``: calls the function, saves nothing."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)


def _no_checkpoint(*args: Any, **kwargs: Any) -> Generator[None, None, None]:
    """In the place of the generator that runs before and after a checkpointed function."""
    yield


def _bypassed() -> list[tuple[Any, str, Any]]:
    """What has no meaning for the result of one device: recomputation, and synchronisation between devices."""
    return [
        (torch.utils.checkpoint, "CheckpointFunction", _Direct),
        (torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", _no_checkpoint),
        (nn.SyncBatchNorm, "forward", nn.modules.batchnorm._BatchNorm.forward),
    ]


@contextmanager
def _patched(owner: Any, name: str, ours: Any) -> Iterator[None]:
    """Replace a function or class for this thread; other threads that call it meanwhile get the original."""
    original, thread = getattr(owner, name), threading.get_ident()

    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (ours if threading.get_ident() == thread else original)(*args, **kwargs)

    class _Chosen:
        apply = staticmethod(lambda *args: (ours if threading.get_ident() == thread else original).apply(*args))

    setattr(owner, name, _Chosen if ours is _Direct else chosen)
    try:
        yield
    finally:
        setattr(owner, name, original)
