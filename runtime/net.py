"""The compiled net: a module with the parameters of the model, that takes and returns this rank's shards."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from halofx.compiler.errors import MeshError
from halofx.compiler.explain import explain
from halofx.compiler.inputs import parameter_names
from halofx.compiler.mesh import Mesh
from halofx.compiler.program import Program
from halofx.compiler.summary import Summary, summary
from halofx.runtime import shards
from halofx.runtime.comm import Comm, current
from halofx.runtime.gradients import SyncSwitch
from halofx.runtime.instances import Build, Instances, Request


class Net(nn.Module):
    """A model compiled for a mesh; made by `halofx.compile`.

    It has the same parameters, buffers and ``state_dict`` keys as the model (they are the same objects), takes this rank's
    shards of the inputs and returns this rank's shards of the outputs, or the whole loss when one was compiled in.
    """

    model: nn.Module

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        build: Build,
        loss: Callable[..., Any] | None = None,
        inputs: Sequence[Any] | None = None,
        targets: Sequence[Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        loss = _own(loss)
        self.__dict__["model"], self.__dict__["loss"] = model, loss
        for name in ("_parameters", "_buffers", "_modules"):
            self.__dict__[name] = getattr(model, name)
        self.training = model.training
        self.mesh, self.sync = mesh, SyncSwitch()
        self.instances = Instances(model, mesh, build, loss, options or {}, self.sync)
        self.plain: Instances | None = None  # the model without the loss
        self.names = parameter_names(model)
        self.count = len(inputs) if inputs is not None else None
        if inputs is not None:
            self.instances.declare(inputs, targets)

    # running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for this rank's shards, as shards; the whole loss when the net was compiled with one.

        With a loss, the positional arguments after the model's inputs are the targets (the last one when ``inputs=`` was
        not given). Raises `MeshError` without the right number of ranks, `RankError` when ranks disagree, a shard does not
        fit or a message is late, `CompileError` when the model cannot be compiled exactly for these shapes.
        """
        comm = self._comm()
        targets: tuple[Any, ...] = ()
        if self.loss is not None:
            cut = self.count if self.count is not None else len(args) - 1
            args, targets = args[:cut], args[cut:]
        run = self.instances.run
        if "torch._dynamo" in sys.modules:  # torch.compile(net) compiles nothing inside: Dynamo knows no threads
            run = torch.compiler.disable(run)
        return run(comm, Request(args, kwargs, targets, self.model.training))

    @torch.no_grad()
    def predict(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's output as this rank's shards, also where the net was compiled with a loss; without gradients."""
        if self.plain is None:
            i = self.instances
            options = {**i.options, "forward": True}
            self.plain = (
                i if self.loss is None else Instances(self.model, self.mesh, i.build, None, options, self.sync, i.state)
            )
        return self.plain.run(self._comm(), Request(inputs, kwargs, (), self.model.training))

    forward._torchdynamo_disable = True  # type: ignore[attr-defined]  # torch.compile runs the net as it is

    def shard(self, *inputs: Any) -> Any:
        """This rank's shards of global inputs [N, C, D, H, W], in the order of the model's arguments (one: not in a tuple)."""
        cut = tuple(self._cut(x, name) for x, name in zip(inputs, self.names, strict=False))
        return cut[0] if len(inputs) == 1 else cut

    def shard_target(self, *targets: Any) -> Any:
        """This rank's shards of global targets, split like the input where they have its batch and space."""
        cut = tuple(self._cut(t, "target" if len(targets) == 1 else f"target.{i}") for i, t in enumerate(targets))
        return cut[0] if len(targets) == 1 else cut

    def input_slices(self, shape: Sequence[int] | None = None, name: str | None = None) -> tuple[slice, ...]:
        """Where this rank's shard lies in a global input of ``shape`` (the first one of ``inputs=`` when None)."""
        shape = self.instances.main_shape() if shape is None else tuple(shape)
        layout = self.instances.input_layout(name or self.names[0], shape)
        return shards.slices(shape, layout, self.mesh, self._comm().rank)

    def gather(self, y: Tensor, dst: int | None = None, like: Tensor | None = None) -> Any:
        """The global tensor of an output's shards: on every rank (differentiable), or on rank ``dst`` and None elsewhere.

        ``like`` is the output of the net whose layout ``y`` has, when it cannot be told from the shape.
        """
        comm = self._comm()
        if comm.size == 1:
            return y
        layout, shape = self.instances.layout_like(y, like)
        if dst is None:
            return shards.gather(y, layout, shape, self.mesh, comm)
        with torch.no_grad():
            whole = shards.gather(y, layout, shape, self.mesh, comm, dst)
        return whole if comm.rank == dst else None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients back: backward passes in here are summed over ranks with the next one outside.

        Until then ``.grad`` does not have their share, so step the optimizer only after a backward pass outside.
        """
        before, self.sync.on = self.sync.on, False
        try:
            yield
        finally:
            self.sync.on = before

    def _comm(self) -> Comm:
        comm = current()
        if comm.size != self.mesh.size:
            n = self.mesh.size
            raise MeshError(
                f"the net is compiled for the {n} ranks of {self.mesh!r}, the world has {comm.size}; start the program with "
                f"torchrun --nproc-per-node {n} or mpirun -n {n}, or call it inside halofx.launch(fn, mesh)"
            )
        return comm

    def _cut(self, x: Any, name: str) -> Any:
        rank = self._comm().rank
        if isinstance(x, (list, tuple)):
            return type(x)(self._cut(v, f"{name}.{i}") for i, v in enumerate(x))
        if isinstance(x, dict):
            return {k: self._cut(v, f"{name}.{k}") for k, v in x.items()}
        if not isinstance(x, Tensor):
            return x
        return shards.take(x, self.instances.input_layout(name, x.shape), self.mesh, rank)

    # looking

    @property
    def program(self) -> Program:
        """The program of the latest shapes and mode."""
        return self.instances.latest(self.model.training).program

    def listing(self, after: str | None = None) -> str:
        """The program, one line a node; ``after`` names a pass to see it as that pass left it."""
        listings = self.program.listings
        if after is None:
            return next(reversed(listings.values()))
        if after not in listings:
            raise ValueError(f"no pass {after!r}; the passes are {', '.join(listings)}")
        return listings[after]

    def explain(self, node: str) -> str:
        """All about one node of the listing: messages by pair of ranks, local shapes by coordinate, bytes."""
        return explain(self.program, node)

    def summary(self) -> Summary:
        """Messages and bytes by kind and axis, forward and backward, flops, activation memory; prints as a table."""
        return summary(self.program)

    @property
    def graph_module(self) -> fx.GraphModule:
        """The rewritten graph of this rank; of its first stage and micro-batch where there are several."""
        bound = self.instances.bound(self.instances.latest(self.model.training), self._comm())
        return bound if isinstance(bound, fx.GraphModule) else next(iter(bound.modules.values()))

    def __str__(self) -> str:
        return self.listing() if self.instances.any() else f"halofx net on {self.mesh!r}, nothing compiled yet"

    def __repr__(self) -> str:
        return f"Net({type(self.model).__name__}, {self.mesh!r})"

    # being the model

    def train(self, mode: bool = True) -> Net:
        """Switch mode, of the model too."""
        self.training = mode
        self.model.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of the model as this rank holds it, under the model's keys: axis ``channel`` makes it shards.

        Where torch.distributed runs the shards are DTensors, for ``torch.distributed.checkpoint``. Axis ``pipe`` leaves out what
        lies in the stages of other ranks.
        """
        found = self.model.state_dict(*args, **kwargs)
        for name in [n for n in found if not self.instances.state.here(n)]:
            del found[name]
        return found

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this rank has: of its stages of a pipeline, as shards where axis ``channel`` makes them some."""
        return ((n, p) for n, p in super().named_parameters(*args, **kwargs) if self.instances.state.here(n))

    def full_state_dict(self, dst: int | None = None) -> dict[str, Tensor]:
        """The state of the model with whole tensors, as the model on one device loads it; every rank must call it.

        On every rank, or on rank ``dst`` and an empty dict elsewhere.
        """
        return self.instances.state.full(dst)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state of the model: of whole tensors (from any mesh, or one device), or of this rank's shards."""
        return self.model.load_state_dict(self.instances.state.fitting(state_dict), strict=strict, assign=assign)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients by their norm over the whole model, as `torch.nn.utils.clip_grad_norm_` does on one device.

        Every rank must call it. Returns the norm [] before clipping.
        """
        return self.instances.state.clip(max_norm, norm_type)

    def _apply(self, fn: Any, recurse: bool = True) -> Net:
        self.model._apply(fn, recurse)
        if isinstance(self.loss, nn.Module):
            self.loss._apply(fn, recurse)
        self.instances.clear()
        return self


def _own(loss: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """A loss for this rank alone: threads share what they did not copy, and a rank may hold only part of its weights.

    A loss that is trained stays the caller's object: whoever trains it on threads makes one in every thread, as the model.
    """
    comm = current()
    if comm.name != "threads" or comm.size == 1 or not isinstance(loss, nn.Module):
        return loss
    return loss if any(p.requires_grad for p in loss.parameters()) else copy.deepcopy(loss)
