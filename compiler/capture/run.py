"""Capture: one run of a model on fake inputs becomes a `Program`.

    record         the ATen ops of the run, with in-place ops and views     (record)
    functionalize  no value changes; buffer writes become results           (functionalize, views)
    fold           constants computed, dead ops dropped                     (fold)
    label          nodes named after modules and source lines               (labels)

The model sees shapes and no values, so that the size of its input costs nothing. What would need values, or cannot be
said exactly without in-place ops, is refused with the line of the model that does it.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from halofx.compiler.capture.fold import check_reads, fold
from halofx.compiler.capture.functionalize import Functionalizer
from halofx.compiler.capture.functions import custom_functions
from halofx.compiler.capture.labels import Unique, label_nodes
from halofx.compiler.capture.labels import rebuild as renamed
from halofx.compiler.capture.opaque import opaque_modules
from halofx.compiler.capture.places import Places, run
from halofx.compiler.capture.record import Recorder, Watch, fake_like
from halofx.compiler.capture.refuse import (
    check_assigned,
    check_autograd,
    check_changes,
    check_model,
    check_tensor,
)
from halofx.compiler.capture.state import Changes, lend, module_paths, plain_world, roots_of, sharing, state_of
from halofx.compiler.errors import CompileError, at
from halofx.compiler.mesh import Mesh
from halofx.compiler.program import Program
from halofx.compiler.trees import Path, flatten, rebuild

_LOCK = threading.RLock()
"""One capture at a time: the model's parameters are swapped, and some of torch's modes are global."""


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    mesh: Mesh,
    *,
    loss: Callable[..., Any] | None = None,
    targets: tuple[Any, ...] = (),
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> Program:
    """The program of ``model(*args, **kwargs)``, or of ``loss(model(*args, **kwargs), *targets)``.

    Tensors in the arguments may be real, ``meta`` or fake and have global shapes; other leaves are baked in. The model
    runs in its present mode and is left as it was. ``shapes`` are the global shapes of state of which the model has shards.
    Raises `CompileError` for what cannot be captured exactly.
    """
    with _LOCK:
        for root in roots_of(model, loss).values():
            check_model(root)
        inputs = _Inputs.of(model, args, kwargs or {}, targets)
        with plain_world() as notes:
            recording = _record(model, loss, inputs, shapes or {})
            program = _to_program(recording, inputs, mesh, model.training)
        program.notes[:0] = notes
        return program


@dataclass(frozen=True)
class _Inputs:
    """The inputs and targets taken apart: specs, non-tensor leaves, and the tensors with their names, in order."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    target_spec: pytree.TreeSpec
    target_leaves: tuple[Any, ...]
    tensors: list[tuple[str, Tensor]]  # of the inputs, then of the targets

    @staticmethod
    def of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], targets: tuple[Any, ...]) -> _Inputs:
        spec, leaves, inputs = flatten((tuple(args), dict(kwargs)), "input")
        target_spec, target_leaves, wanted = flatten(tuple(targets), "target")
        positional = _positional_names(model, len(args))
        named = [(_input_name(path, positional), tensor) for path, tensor in inputs]
        for path, tensor in wanted:
            named.append((".".join(("target", *(path[1:] if len(targets) == 1 else path))), tensor))
        unique = Unique()
        tensors = [(unique(name), tensor) for name, tensor in named]
        for name, tensor in tensors:
            check_tensor(name, tensor)
        return _Inputs(spec, leaves, target_spec, target_leaves, tensors)

    def calls(self, fakes: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
        """``args, kwargs, targets`` of the model and the loss with other tensors in the places of tensors."""
        count = sum(leaf is None for leaf in self.leaves)
        args, kwargs = rebuild(self.spec, self.leaves, fakes[:count])
        return args, kwargs, rebuild(self.target_spec, self.target_leaves, fakes[count:])


def _positional_names(model: nn.Module, count: int) -> list[str]:
    """The names of forward's first ``count`` positional parameters; ``args.0`` and so on for ``*args``."""
    names, rest = [], "args"
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            rest = parameter.name
    return names[:count] + [f"{rest}.{i}" for i in range(count - len(names))]


def _input_name(path: Path, positional: list[str]) -> str:
    """``0, 1, image`` (args, index 1, key image) -> ``y.image``; ``1, mask`` (kwargs) -> ``mask``."""
    kind, first, *rest = path
    return ".".join([positional[int(first)] if kind == "0" else first, *rest])


# -- the run


@dataclass(frozen=True)
class _Recording:
    """What one run left behind; ``placeholders`` are those of the state by key, then of the inputs by name."""

    recorder: Recorder
    placeholders: list[tuple[str, fx.Node]]
    output: Any
    changes: Changes
    sharing: set[str]  # state keys whose tensors share memory


def _record(
    model: nn.Module, loss: Callable[..., Any] | None, inputs: _Inputs, shapes: Mapping[str, Sequence[int]]
) -> _Recording:
    """Run the model, and the loss, on fake tensors."""
    roots = roots_of(model, loss)
    state = state_of(roots)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    places = Places(module_paths(roots))
    recorder = Recorder(mode, places)
    fakes, placeholders = [], []
    facts = [("state", item) for item in state.items()] + [("input", item) for item in inputs.tensors]
    for kind, (name, tensor) in facts:
        fakes.append(_fake(mode, tensor, shapes.get(name) if kind == "state" else None))
        needs_grad = kind == "input" or isinstance(tensor, nn.Parameter)
        frozen = kind == "state" and not tensor.requires_grad
        node = recorder.placeholder(fakes[-1], tensor, needs_grad=needs_grad, frozen=frozen, **{kind: name})
        placeholders.append((name, node))
    with lend(roots, state, dict(zip(state, fakes, strict=False))) as changes:
        with _watched(recorder, places), opaque_modules(roots, recorder), custom_functions(recorder) as functions:
            output = _call(model, loss, inputs.calls(fakes[len(state) :]), places)
        check_autograd(output, functions)
    return _Recording(recorder, placeholders, output, changes, sharing(state))


def _fake(mode: FakeTensorMode, tensor: Tensor, shape: Sequence[int] | None) -> Tensor:
    """A fake tensor like a tensor, a Parameter and a leaf of autograd if that is one; ``shape`` is another shape."""
    fake = fake_like(mode, tensor, shape).requires_grad_(tensor.requires_grad)
    if tensor.requires_grad and not tensor.is_leaf:
        return fake.clone()
    if isinstance(tensor, nn.Parameter):
        fake._is_param = True
    return fake


@contextmanager
def _watched(recorder: Recorder, places: Places) -> Iterator[None]:
    """Record ops, and which values modules return, of this thread."""
    thread = threading.get_ident()

    def returned(module: nn.Module, args: Any, output: Any) -> None:
        path = places.names.get(id(module)) if threading.get_ident() == thread else None
        first = next((t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)), None)
        if path and first is not None:
            recorder.mark(first, path)

    hook = nn.modules.module.register_module_forward_hook(returned)
    try:
        with enable_python_dispatcher(), Watch(places), recorder:
            yield
    finally:
        hook.remove()


def _call(model: nn.Module, loss: Callable[..., Any] | None, calls: tuple[Any, ...], places: Places) -> Any:
    """The output of the model, or of the loss. Raises `CompileError` from whatever the forward raises."""
    args, kwargs, targets = calls
    try:
        output = run(lambda: model(*args, **kwargs))
        if loss is not None:
            places.default = "loss"
            output = run(lambda: loss(output, *targets))
        return output
    except CompileError:
        raise
    except Exception as error:
        where = at(str(places.of_error(error)))
        if "Current active mode" in str(error):
            raise CompileError(
                f"torch.cond and other ops that take functions cannot be captured{where}; write it with torch.where"
            ) from error
        raise CompileError(
            f"the forward fails{where} with {type(error).__name__}: {error}; run the model once on one device with "
            "inputs of these shapes to see it fail alone"
        ) from error


# -- from the recording to the program


def _to_program(recording: _Recording, inputs: _Inputs, mesh: Mesh, training: bool) -> Program:
    """Functionalize, fold and label what was recorded."""
    recorder = recording.recorder
    spec, leaves, tensors = flatten(recording.output, "output")
    if not tensors:
        raise CompileError(f"the model returns no tensor but {recording.output!r}; return the tensors to compute")
    outputs = [recorder.node_of(tensor) for _, tensor in tensors]
    notes = check_changes(recording.changes, recorder.is_constant)
    assigned = {key: recorder.node_of(tensor) for key, tensor in recording.changes.buffers.items()}
    memory = Functionalizer(recorder.graph, recorder.fake_mode)
    memory.run()
    updates = _updates(recording, assigned, memory, notes)
    graph = memory.graph
    graph.output((tuple(memory.read(n) for n in outputs), tuple(memory.final(n) for n in updates.values())))
    check_reads(graph)
    constants = fold(graph, recorder.constants)
    label_nodes(graph)
    options = {"autocast": dict(recorder.autocast)} if recorder.autocast else {}
    return Program(
        renamed(graph), mesh, training, constants, tuple(updates), inputs.spec, inputs.leaves, inputs.target_spec,
        inputs.target_leaves, spec, leaves, notes, options=options,
    )  # fmt: skip


def _updates(
    recording: _Recording, assigned: dict[str, fx.Node], memory: Functionalizer, notes: list[str]
) -> dict[str, fx.Node]:
    """The buffers that the run assigned or wrote to, by key; each with the recorded node of its new value."""
    updates: dict[str, fx.Node] = {}
    for name, node in recording.placeholders:
        write = memory.first_write.get(node.meta["storage"])
        is_state = "state" in node.meta
        if is_state and name in assigned:
            check_assigned(name, node, assigned[name])
            updates[name] = assigned[name]
        elif write is not None and not is_state:
            notes.append(f"the model writes to its input {name}; the compiled net leaves the caller's tensor alone")
        elif write is not None and node.meta["needs_grad"] and not node.meta["frozen"]:
            raise CompileError(
                f"{write.target} writes to the parameter {name}{at(str(write.meta['place']))}; do it between the "
                "steps, outside of the forward, or set requires_grad=False if no optimizer trains it"
            )
        elif write is not None:
            updates[name] = node
    for name in recording.sharing.intersection(updates):
        raise CompileError(f"the forward writes to the buffer {name}, which shares memory with another; clone it")
    return updates
