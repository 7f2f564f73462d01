"""The parameters and buffers of a net on one rank: whole, or as the shards that its program reads.

    model.conv.weight [64, 32, 3, 3, 3]       channel=4       ->      the same Parameter, holding [16, 32, 3, 3, 3]

A net that is compiled on its ranks turns the model's own tensors into shards, under their names: so much less memory, for the
gradients and the optimizer's state too. Where torch.distributed runs its parameters become DTensors, which checkpoints
(``torch.distributed.checkpoint``) and ``clip_grad_norm_`` know how to treat; among threads and under MPI the same Parameters hold
the shards. A net that is compiled outside of its ranks (threads then share the model) leaves the model whole, and every call
cuts what it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from halofx.compiler.errors import HalofxError
from halofx.compiler.facts import layout_of, shape_of
from halofx.compiler.layout import Layout
from halofx.compiler.mesh import Mesh
from halofx.compiler.program import Program
from halofx.compiler.stages import Stages
from halofx.runtime import shards
from halofx.runtime.agree import PARAMETERS, tensor_digest
from halofx.runtime.comm import Comm, current


class State:
    """The tensors of a model (and of a loss with parameters) by the keys of the program."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any] | None, mesh: Mesh) -> None:
        self.model, self.loss, self.mesh = model, loss, mesh
        self.on_ranks = current().size == mesh.size > 1  # so the model is this rank's own
        self.layouts: dict[str, Layout] = {}  # of the tensors that are shards
        self.shapes: dict[str, tuple[int, ...]] = {}  # their global shapes
        self.placed: dict[str, int] = {}  # the pipeline stage of each tensor
        self.stages: Stages | None = None
        self.settled = False
        self.digest = ""  # of the values before they were cut
        self.cut: dict[str, str] = {}  # what `_held` was just after
        self.device_mesh: DeviceMesh | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Every parameter and buffer; those of the loss under ``loss.``."""
        found: dict[str, Tensor] = {}
        for prefix, module in (("", self.model), ("loss.", self.loss)):
            if isinstance(module, nn.Module):
                found |= {prefix + name: p for name, p in module.named_parameters(remove_duplicate=False)}
                found |= {prefix + name: b for name, b in module.named_buffers(remove_duplicate=False)}
        return found

    def of(self, program: Program) -> list[Tensor]:
        """What a program's placeholders of state take on this rank."""
        tensors = self.tensors()
        return [local(tensors[n.meta["state"]]) for n in program.placeholders("state")]

    @torch.no_grad()
    def write(self, updates: Sequence[tuple[str, Tensor]]) -> None:
        """Give buffers their new values."""
        tensors = self.tensors() if updates else {}
        for name, value in updates:
            local(tensors[name]).copy_(value)

    # shards

    def settle(self, program: Program) -> None:
        """Hold the state as the first program reads it. The same call on every rank."""
        apart = any(layout_of(n).axes or n.meta.get("stage") for n in program.placeholders("state"))
        if self.settled or not self.on_ranks or not apart:
            return
        tensors, made = self.tensors(), dict[int, Tensor]()
        self.digest, self.settled = tensor_digest(tensors), True
        comm = current()
        for node in program.placeholders("state"):
            name = str(node.meta["state"])
            tensor, layout, stage = tensors[name], layout_of(node), int(node.meta.get("stage", 0))
            for alias, other in tensors.items():
                if other is tensor:
                    self.placed[alias] = stage
                    if layout.axes:
                        self.layouts[alias], self.shapes[alias] = layout, shape_of(node)
            if id(tensor) not in made:
                here = program.stages is None or program.stages.coordinate(stage) == self.mesh.coordinate(
                    comm.rank, "pipe"
                )
                made[id(tensor)] = self._hold(tensor, layout, comm) if here else _absent(tensor)
        for name, node in zip(program.updates, program.results()[1], strict=True):  # buffers that are only written
            self.placed.setdefault(name, int(node.meta.get("stage", 0)))
        self.stages = program.stages
        for module in (self.model, self.loss):
            if isinstance(module, nn.Module):
                _replace(module, made)
        self.cut = self._held(comm.rank)

    def facts(self, rank: int) -> dict[str, str]:
        """Hashes of the values, for ranks to compare: of what they hold, and of the whole that it was cut from."""
        if not self.settled:
            return {PARAMETERS: tensor_digest(self.tensors())}
        held = self._held(rank)
        return {PARAMETERS: self.digest if held == self.cut else "loaded since it was compiled", **held}

    def _held(self, rank: int) -> dict[str, str]:
        """Hashes of this rank's tensors by the coordinates that they depend on."""
        found: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self.tensors().items():
            if self.here(name):
                axes = [*self.layouts[name].axes] if name in self.layouts else []
                axes += ["pipe"] if self.stages is not None and self.stages.pipe > 1 and name in self.placed else []
                where = ", ".join(f"{axis}={self.mesh.coordinate(rank, axis)}" for axis in axes)
                found.setdefault(where, {})[name] = local(tensor)
        return {
            f"{PARAMETERS} at {where}" if where else f"{PARAMETERS} at all coordinates": tensor_digest(t)
            for where, t in found.items()
        }

    def _hold(self, tensor: Tensor, layout: Layout, comm: Comm) -> Tensor:
        """The tensor that takes the place of a whole one: itself, holding a shard, or a DTensor."""
        part = shards.take(tensor.detach(), layout, self.mesh, comm.rank)
        tensor.grad = None
        if comm.name not in ("gloo", "nccl"):
            tensor.data = part
            return tensor
        if not isinstance(tensor, nn.Parameter):
            return self.distributed(part, layout) if layout.axes else tensor
        _forbid(tensor)
        return nn.Parameter(self.distributed(part, layout), tensor.requires_grad)

    def distributed(self, part: Tensor, layout: Layout) -> DTensor:
        """A shard as a DTensor over the mesh."""
        if self.device_mesh is None:
            sizes = tuple(self.mesh[a] for a in self.mesh.axes)
            self.device_mesh = init_device_mesh(part.device.type, sizes, mesh_dim_names=self.mesh.axes)
        dims = [layout.dim(axis) for axis in self.mesh.axes]
        placements: list[Placement] = [Replicate() if d is None else Shard(d) for d in dims]
        return DTensor.from_local(part, self.device_mesh, placements, run_check=False)

    # in and out

    def full(self, dst: int | None = None) -> dict[str, Tensor]:
        """The model's ``state_dict`` with whole tensors: on every rank, or with ``dst`` there alone (empty elsewhere)."""
        comm, found = current(), dict[str, Tensor]()
        with torch.no_grad():
            for name, tensor in self.model.state_dict().items():
                value = local(tensor) if isinstance(tensor, Tensor) else tensor
                if self.stages is not None and self.stages.pipe > 1 and name in self.placed:
                    value = self._from_stage(name, value, comm)
                if name in self.layouts:
                    value = shards.gather(value, self.layouts[name], self.shapes[name], self.mesh, comm, dst)
                if dst in (None, comm.rank):
                    found[name] = value.clone() if isinstance(value, Tensor) and name not in self.layouts else value
        return found

    def _from_stage(self, name: str, value: Tensor, comm: Comm) -> Tensor:
        """A tensor (this rank's shard of it) from the stage that has it, at the other ranks of the pipeline."""
        assert self.stages is not None
        owner, mine = self.stages.coordinate(self.placed[name]), self.mesh.coordinate(comm.rank, "pipe")
        peers = [self.mesh.peer(comm.rank, "pipe", c) for c in range(self.stages.pipe) if c != owner]
        if owner == mine:
            comm.start_exchange(
                [(p, value.contiguous()) for p in peers], [], shards.GATHER_TAG - 4, f"the state {name}"
            ).wait()
            return value
        shape = list(self.shapes.get(name, tuple(value.shape)))
        layout = self.layouts.get(name, Layout.whole(len(shape)))
        device = next((t.device for t in self.tensors().values() if not t.is_meta), torch.device("cpu"))
        value = torch.empty(layout.local_shape(shape, self.mesh, comm.rank), dtype=value.dtype, device=device)
        source = self.mesh.peer(comm.rank, "pipe", owner)
        comm.start_exchange([], [(source, value)], shards.GATHER_TAG - 4, f"the state {name}").wait()
        return value

    def here(self, name: str) -> bool:
        """Whether this rank has a tensor, or its shard: not where it lies in another stage."""
        if self.stages is None or not self.settled or name not in self.placed:
            return True
        return self.stages.coordinate(self.placed[name]) == self.mesh.coordinate(current().rank, "pipe")

    def fitting(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """A ``state_dict`` of whole tensors, of this rank's shards or of DTensors as the model's tensors want it."""
        held = self.tensors()
        return {name: self._fitting(name, value, held.get(name)) for name, value in given.items()}

    def _fitting(self, name: str, value: Any, target: Tensor | None) -> Any:
        if not isinstance(value, Tensor) or target is None:
            return value
        if not self.here(name):
            return target  # nothing to load here
        layout, value = self.layouts.get(name), local(value.detach())
        if layout is not None and tuple(value.shape) == self.shapes[name]:
            value = shards.take(value, layout, self.mesh, current().rank)
        if isinstance(target, DTensor) and value.shape == local(target).shape:
            return self.distributed(value, layout or Layout.whole(value.dim()))
        return value

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        """Scale the gradients so that their norm, of the whole model, is at most ``max_norm``; returns the norm before."""
        comm, power = current(), float(norm_type)
        grads: dict[bool, list[Tensor]] = {False: [], True: []}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                grads[name in self.layouts].append(local(parameter.grad).detach())
        sums = [torch.stack([_power(g, power) for g in grads[split]] or [torch.zeros(())]) for split in (False, True)]
        combine = torch.max if power == float("inf") else torch.sum
        whole, split = (combine(s.double()).reshape(1) for s in sums)
        axes = {axis for layout in self.layouts.values() for axis in layout.axes}
        op = "max" if power == float("inf") else "sum"
        if axes:
            comm.prepare([self.mesh.groups(axes)])
            comm.start_all_reduce(split, self.mesh.group(comm.rank, axes), op, "the norm of the gradients").wait()
        if self.stages is not None and self.stages.pipe > 1:
            comm.prepare([self.mesh.groups(("pipe",))])
            for part in (whole, split):
                comm.start_all_reduce(
                    part, self.mesh.group(comm.rank, ("pipe",)), op, "the norm of the gradients"
                ).wait()
        total = combine(torch.cat([whole, split]))
        norm = total if power == float("inf") else total ** (1 / power)
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for grad in [*grads[False], *grads[True]]:
            grad.mul_(scale.to(grad.device, grad.dtype))
        return norm


def _absent(tensor: Tensor) -> Tensor:
    """What stands for a tensor of another stage: its shape and dtype without memory."""
    made = torch.empty_like(tensor, device="meta")
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _replace(module: nn.Module, made: Mapping[int, Tensor]) -> None:
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            held.update({name: made[id(t)] for name, t in held.items() if t is not None and id(t) in made})  # type: ignore[misc]


_REPLACED = WeakTensorKeyDictionary()
"""Parameters that DTensors have replaced."""


def _forbid(tensor: Tensor) -> None:
    """Let no optimizer train a parameter that is not the net's any more."""
    if not _REPLACED:
        register_optimizer_step_pre_hook(_check_optimizer)
    _REPLACED[tensor] = True


def _check_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if any(p in _REPLACED for group in optimizer.param_groups for p in group["params"]):
        raise HalofxError(
            f"{type(optimizer).__name__} was made before halofx.compile, which has made the parameters shards; "
            "make it from net.parameters()"
        )


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor (differentiable)."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _power(grad: Tensor, power: float) -> Tensor:
    if power == float("inf"):
        return grad.abs().max() if grad.numel() else grad.new_zeros(())
    return grad.abs().pow(power).sum()
