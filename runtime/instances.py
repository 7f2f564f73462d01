"""The programs of one net: built on demand for each mode and each set of global shapes, bound to ranks, run."""

from __future__ import annotations

import inspect
import json
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_map, tree_unflatten

from halofx.compiler.errors import HalofxError, RankError
from halofx.compiler.facts import layout_of, shape_of
from halofx.compiler.inputs import default_homes, leaf_name
from halofx.compiler.layout import Layout
from halofx.compiler.mesh import Mesh
from halofx.compiler.program import Program
from halofx.runtime import shards
from halofx.runtime.agree import agree, digest
from halofx.runtime.comm import Comm
from halofx.runtime.executor import Binder, groups_of
from halofx.runtime.gradients import SyncSwitch
from halofx.runtime.pipeline import Pipeline
from halofx.runtime.recall import recalling
from halofx.runtime.state import State

Build = Callable[..., Program]
"""``build(model, args, kwargs, mesh, loss=, targets=, options=) -> Program``, all passes run."""


@dataclass(frozen=True)
class Request:
    """One call: shards (or global tensors, when a program is declared), and the mode."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    targets: tuple[Any, ...]
    training: bool


@dataclass
class Instance:
    """A program and its graph modules by communicator."""

    program: Program
    modules: dict[int, fx.GraphModule | Pipeline] = field(default_factory=dict)
    comms: list[Comm] = field(default_factory=list)  # kept alive: modules are found by id

    @property
    def random(self) -> bool:
        """Whether the program draws random numbers."""
        return bool(self.program.placeholders("rng"))


class Instances:
    """Builds, caches and runs the programs of one net."""

    def __init__(
        self, model: nn.Module, mesh: Mesh, build: Build, loss: Callable[..., Any] | None,
        options: Mapping[str, Any], sync: SyncSwitch, state: State | None = None,
    ) -> None:  # fmt: skip
        self.model, self.mesh, self.build, self.loss, self.sync = model, mesh, build, loss, sync
        self.state = State(model, loss, mesh) if state is None else state
        self.options = dict(options)
        self.declared: Request | None = None
        self.cache: dict[Any, Instance] = {}
        self.draws: dict[Any, bool] = {}  # whether a request draws random numbers
        self.lock = threading.RLock()
        self.main: tuple[int, ...] | None = None
        self.outputs: list[
            tuple[Layout, tuple[int, ...], tuple[int, ...]]
        ] = []  # layout, global, local of the last call
        self.step = 0  # the highest number of a call that drew random numbers, in any world
        self.steps = weakref.WeakKeyDictionary[Comm, int]()  # that of each rank: in threads they share this object

    # building

    def declare(self, inputs: Sequence[Any], targets: Sequence[Any] | None) -> None:
        """Fix the global shapes, and build the program where everything is known."""
        args = tuple(self._as_meta(v) for v in inputs)
        known = (targets is not None or self.loss is None) and not _needs_keywords(self.model)
        given = tuple(self._as_meta(v) for v in targets or ())
        self.declared = Request(args, {}, given, self.model.training)
        self.main = max((tuple(t.shape) for t in tree_flatten(args)[0] if isinstance(t, Tensor)), key=len, default=None)
        if known:
            self._instance(self.declared)

    def _as_meta(self, value: Any) -> Any:
        """Shapes (tuples of integers) and tensors as meta tensors."""
        if isinstance(value, (tuple, list, torch.Size)) and value and all(isinstance(n, int) for n in value):
            return torch.empty(*value, dtype=self._dtype(), device="meta")
        if isinstance(value, Tensor):
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        if isinstance(value, (tuple, list)):
            return type(value)(self._as_meta(v) for v in value)
        return {k: self._as_meta(v) for k, v in value.items()} if isinstance(value, dict) else value

    def _dtype(self) -> torch.dtype:
        floats = (p.dtype for p in self.model.parameters() if p.is_floating_point())
        return next(floats, torch.get_default_dtype())

    def _instance(self, request: Request) -> Instance:
        """The instance of a request that holds global (meta) tensors."""
        leaves, spec = tree_flatten((request.args, dict(request.kwargs), request.targets))
        frozen = tuple(name for name, p in self.model.named_parameters() if not p.requires_grad)
        described = tuple((tuple(v.shape), v.dtype) if isinstance(v, Tensor) else repr(v) for v in leaves)
        key = (request.training, described, str(spec), frozen)
        with self.lock:
            if key not in self.cache:
                s = self.state
                held = {"held": s.layouts, "shapes": s.shapes, "placed": s.placed} if s.settled else {}
                program = self.build(
                    self.model, request.args, dict(request.kwargs), self.mesh,
                    loss=self.loss, targets=request.targets, options={**self.options, **held},
                )  # fmt: skip
                self.state.settle(program)
                for note in program.notes:
                    warnings.warn(f"halofx: {note}", stacklevel=6)
                self.cache[key] = Instance(program)
            return self.cache.setdefault(key, self.cache.pop(key))  # latest last

    def latest(self, training: bool) -> Instance:
        """The instance used or declared last, in the wanted mode if there is one."""
        if not self.cache and self.declared is not None and self.loss is None:
            self._instance(self.declared)
        if not self.cache:
            raise HalofxError(
                "nothing is compiled yet: pass inputs=[shape, ...] to halofx.compile, or call the net first"
            )
        if self.declared is not None and not any(i.program.training == training for i in self.cache.values()):
            self._instance(Request(self.declared.args, {}, self.declared.targets, training))
        fitting = [i for i in self.cache.values() if i.program.training == training]
        return (fitting or list(self.cache.values()))[-1]

    def any(self) -> bool:
        """Whether something is compiled."""
        return bool(self.cache)

    def clear(self) -> None:
        """Forget all programs (the model has moved or changed its dtype)."""
        with self.lock:
            self.cache.clear()

    def bound(self, instance: Instance, comm: Comm) -> fx.GraphModule | Pipeline:
        """The graph module of an instance for this rank."""
        with self.lock:
            if id(comm) not in instance.modules:
                instance.modules[id(comm)] = self._bind(instance.program, comm)
                instance.comms.append(comm)
            return instance.modules[id(comm)]

    def _bind(self, program: Program, comm: Comm) -> fx.GraphModule | Pipeline:
        device = next((p.device for p in self.model.parameters() if not p.is_meta), torch.device("cpu"))
        if program.stages is not None:
            return Pipeline(program, comm, device, self.sync, self.state)
        return Binder(program, comm, device, self.sync, cut=not self.state.settled).bind()

    # layouts

    def input_layout(self, name: str, shape: Sequence[int]) -> Layout:
        """The layout of an input of global ``shape``."""
        given = (self.options.get("layouts") or {}).get(name)
        if given is None:
            if (
                self.main is None
                or len(shape) > len(self.main)
                or (len(shape) == len(self.main) and name[:6] != "target")
            ):
                self.main = tuple(shape) if self.declared is None else self.main
            given = default_homes(shape, self.main or shape)
        return Layout(tuple(a if a and self.mesh[a] > 1 else None for a in given))

    def main_shape(self) -> tuple[int, ...]:
        """The global shape of the input with most dims."""
        if self.main is None:
            raise HalofxError("the input's shape is not known yet: give it, or pass inputs= to halofx.compile")
        return self.main

    def layout_like(self, y: Tensor, like: Tensor | None) -> tuple[Layout, tuple[int, ...]]:
        """The layout and global shape of a tensor that came from an output (or lies like ``like``)."""
        for tensor in (y, like):
            known = getattr(tensor, "_halofx", None)
            if known is not None:
                layout, shape = known
                return layout, tuple(g if a else n for n, g, a in zip(y.shape, shape, layout.split, strict=True))
        for layout, shape, local in reversed(self.outputs):
            if _fits(y.shape, local, layout):
                return layout, tuple(g if a else n for n, g, a in zip(y.shape, shape, layout.split, strict=True))
            if len(local) == y.dim() + 1 and y.dim() > 1 and _fits(y.shape, local[:1] + local[2:], _without(layout, 1)):
                cut, sizes = _without(layout, 1), shape[:1] + shape[2:]
                return cut, tuple(g if a else n for n, g, a in zip(y.shape, sizes, cut.split, strict=True))
        raise HalofxError(
            f"gather: a tensor of shape {list(y.shape)} lies like no output of the last call; "
            "pass the output that it was computed from as like="
        )

    # running

    def run(self, comm: Comm, request: Request) -> Any:
        """Run a request of shards on this rank."""
        alone = self.mesh.size == 1 and self.options.get("microbatches", 1) == 1
        if alone and not self._random_alone(request):
            out = self.model(*request.args, **request.kwargs)
            return out if self.loss is None else self.loss(out, *request.targets)
        instance, module = self._ready(comm, request)
        program = instance.program
        leaves = tree_flatten((request.args, dict(request.kwargs), request.targets))[0]
        tensors = [v for v in leaves if isinstance(v, Tensor)]
        if isinstance(module, Pipeline):
            return self._result(program, module.run(tensors, self._rng(comm, instance)))
        state = self.state.of(program)
        with recalling():
            outs, updates = module(*state, *tensors, *self._rng(comm, instance))
        self.state.write(list(zip(program.updates, updates, strict=True)))
        return self._result(program, outs)

    def _random_alone(self, request: Request) -> bool:
        """Whether the one rank has to draw the random numbers that more ranks would draw."""
        key = (request.training, str(tree_map(_describe, (request.args, dict(request.kwargs), request.targets))))
        if key not in self.draws:
            globals_ = tree_map(self._as_meta, (request.args, dict(request.kwargs), request.targets))
            self.draws[key] = self._instance(Request(globals_[0], globals_[1], globals_[2], request.training)).random
        return self.draws[key]

    def _ready(self, comm: Comm, request: Request) -> tuple[Instance, fx.GraphModule | Pipeline]:
        """The instance for these shards, bound to this rank; ranks compare notes before its first use."""
        error: Exception | None = None
        instance, module = None, None
        globals_ = self._globals(comm, request)
        try:
            instance = self._instance(globals_)
            if id(comm) in instance.modules:
                self._check(comm, instance, request)
                return instance, instance.modules[id(comm)]
            self._check(comm, instance, request)
            module = self.bound(instance, comm)
        except Exception as e:  # told to the other ranks, then raised
            error = e
        facts = {} if instance is None else self._facts(comm, instance)
        agree(comm, facts, error, "the first call of the net")
        assert instance is not None and module is not None
        comm.prepare(groups_of(instance.program))
        return instance, module

    def _facts(self, comm: Comm, instance: Instance) -> dict[str, str]:
        return {
            "the versions of torch and Python": torch.__version__,
            "the mesh": str(self.mesh),
            "the program (shapes, code, options)": digest(next(reversed(instance.program.listings.values()))),
            **self.state.facts(comm.rank),
        }

    def _globals(self, comm: Comm, request: Request) -> Request:
        """The request with global meta tensors: as declared, or from everybody's shards (one small message).

        Keyword arguments are not declared: with a tensor among them the shapes are asked for.
        """
        named = any(isinstance(v, Tensor) for v in tree_flatten(dict(request.kwargs))[0])
        if self.declared is not None and not named and (self.loss is None or self.declared.targets):
            return Request(self.declared.args, request.kwargs, self.declared.targets, request.training)
        tree = (request.args, dict(request.kwargs), request.targets)
        paths, spec = tree_flatten_with_path(tree)
        mine = [list(v.shape) if isinstance(v, Tensor) else None for _, v in paths]
        everyone = [json.loads(b) for b in comm.all_gather_bytes(json.dumps(mine).encode(), "the shapes of the shards")]
        if any(len(other) != len(mine) for other in everyone):
            raise RankError(
                "the ranks call the net with different numbers of arguments; give every rank its shards of the same"
            )
        shapes = [e for e in everyone[0] if e is not None]
        main: list[int] = max(shapes, key=len, default=[])
        made = []
        for i, (path, value) in enumerate(paths):
            if not isinstance(value, Tensor):
                made.append(value)
                continue
            name = leaf_name(path, self.model, len(request.targets))
            given = (self.options.get("layouts") or {}).get(name) or default_homes(everyone[0][i], main)
            layout = Layout(tuple(a if a and self.mesh[a] > 1 else None for a in given))
            shape = shards.global_shape([e[i] for e in everyone], layout, self.mesh, f"input {name}")
            made.append(torch.empty(shape, dtype=value.dtype, device="meta"))
        args, kwargs, given_targets = tree_unflatten(made, spec)
        return Request(args, kwargs, given_targets, request.training)

    def _check(self, comm: Comm, instance: Instance, request: Request) -> None:
        """The shards have the shapes, dtypes and device that the program expects."""
        given = [
            v for v in tree_flatten((request.args, dict(request.kwargs), request.targets))[0] if isinstance(v, Tensor)
        ]
        expected = instance.program.placeholders("input")
        if len(given) != len(expected):
            raise RankError(
                f"the net takes {len(expected)} tensors ({', '.join(n.meta['input'] for n in expected)}), got {len(given)}"
            )
        device = next((p.device for p in self.model.parameters() if not p.is_meta), None)
        for node, tensor in zip(expected, given, strict=True):
            layout, shape = layout_of(node), shape_of(node)
            local = layout.local_shape(shape, self.mesh, comm.rank)
            where = f"input {node.meta['input']} on rank {comm.rank}"
            if tuple(tensor.shape) != local:
                raise RankError(
                    f"{where} has shape {list(tensor.shape)}, its shard of {layout.show(shape)} is {list(local)}; "
                    "cut it with net.shard(x), or read net.input_slices()"
                )
            if tensor.dtype != node.meta["val"].dtype:
                raise RankError(
                    f"{where} has dtype {tensor.dtype}, the net was compiled for {node.meta['val'].dtype}; "
                    "convert the input, or compile for this dtype"
                )
            if device is not None and tensor.device != device:
                raise RankError(f"{where} is on {tensor.device}, the model on {device}; move one of them with .to(...)")

    def _rng(self, comm: Comm, instance: Instance) -> list[Tensor]:
        """The number that all random draws of this call depend on: the seed and the count of calls that drew."""
        if not instance.random:
            return []
        if torch._C._current_graph_task_id() != -1:
            raise HalofxError(
                "the net draws random numbers (dropout) and was called again in a backward pass, as activation checkpointing "
                "does: it would draw others than before; checkpoint inside the model, or call net.eval()"
            )
        if comm not in self.steps:  # ranks of a world begin together, after all that came before
            before = [int(b) for b in comm.all_gather_bytes(str(self.step).encode(), "the count of random steps")]
            self.steps[comm] = max(before)
        self.steps[comm] += 1
        self.step = max(self.step, self.steps[comm])
        number = (int(self.options.get("seed", 0)) << 32) + self.steps[comm]
        return [torch.tensor((number + 2**63) % 2**64 - 2**63)]

    def _result(self, program: Program, outs: Sequence[Tensor]) -> Any:
        self.outputs = []
        for node, out in zip(program.outputs(), outs, strict=True):
            layout, shape = layout_of(node), shape_of(node)
            self.outputs.append((layout, shape, tuple(out.shape)))
            out._halofx = (layout, shape)  # type: ignore[attr-defined]
        return program.unflatten(outs)


def _needs_keywords(model: nn.Module) -> bool:
    """Whether forward has keyword-only arguments without defaults: the program waits for the first call."""
    parameters = inspect.signature(model.forward).parameters.values()
    return any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters)


def _describe(value: Any) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else repr(value)


def _fits(shape: Sequence[int], local: Sequence[int], layout: Layout) -> bool:
    return len(shape) == len(local) and all(n == m for n, m, a in zip(shape, local, layout.split, strict=True) if a)


def _without(layout: Layout, dim: int) -> Layout:
    return Layout(layout.split[:dim] + layout.split[dim + 1 :])
