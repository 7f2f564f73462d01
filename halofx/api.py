"""Where the parts meet: capture, the passes and the runtime behind one function."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from halofx import passes
from halofx.compiler.capture import capture
from halofx.compiler.errors import MeshError
from halofx.compiler.mesh import Mesh
from halofx.compiler.program import Program
from halofx.compiler.stages import Stages
from halofx.compiler.stages import of as pipeline_of
from halofx.runtime import comm
from halofx.runtime.net import Net


def build(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], mesh: Mesh, *,
    loss: Callable[..., Any] | None = None, targets: tuple[Any, ...] = (), options: Mapping[str, Any] | None = None,
) -> Program:  # fmt: skip
    """Capture a model on global (real, fake or meta) inputs and run every pass."""
    given = options or {}
    plan = stages_of(mesh, given, loss)
    inner = mesh if plan is None else plan.inner
    program = capture(model, args, dict(kwargs), inner, loss=loss, targets=targets, shapes=given.get("shapes"))
    program.stages = plan
    program.options.update(options or {}, frozen=frozen(model, loss), loss=loss is not None)
    return passes.run(program)


_build: ContextVar[Callable[..., Program]] = ContextVar("build", default=build)


class SameEverywhere:
    """For threads that all compile the same model: inside ``with``, the first that wants a program builds it for all.

    Without it every rank compiles by itself, as processes do, and the ranks compare the programs.
    """

    def __init__(self) -> None:
        self.lock, self.programs = threading.Lock(), dict[str, Program]()

    def _build(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], mesh: Mesh, *,
        options: Mapping[str, Any], **rest: Any,
    ) -> Program:  # fmt: skip
        shapes = tree_map(lambda v: (v.shape, v.dtype) if isinstance(v, Tensor) else v, (args, kwargs, rest))
        key = f"{model.training} {mesh} {shapes} {sorted(options.items())}"
        with self.lock:
            if key not in self.programs:
                self.programs[key] = build(model, args, kwargs, mesh, options=options, **rest)
            return self.programs[key]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """In this thread."""
        token = _build.set(self._build)
        try:
            yield
        finally:
            _build.reset(token)


def stages_of(mesh: Mesh, options: Mapping[str, Any], loss: object) -> Stages | None:
    """The stages of a mesh under the options of `compile`; None without a pipeline and micro-batches."""
    micro, schedule = int(options.get("microbatches", 1)), options.get("schedule")
    if mesh["pipe"] == 1 and micro == 1:
        return None
    if schedule is None:
        schedule = "1f1b" if loss is not None and micro > 1 else "gpipe"
    return pipeline_of(mesh, micro, schedule)


def frozen(model: nn.Module, loss: Callable[..., Any] | None) -> frozenset[str]:
    """The names of the state that takes no gradient: buffers, and parameters with ``requires_grad=False``."""
    names: list[str] = []
    for prefix, module in (("", model), ("loss.", loss)):
        if isinstance(module, nn.Module):
            names += [prefix + name for name, _ in module.named_buffers(remove_duplicate=False)]
            parameters = module.named_parameters(remove_duplicate=False)
            names += [prefix + name for name, p in parameters if not p.requires_grad]
    return frozenset(names)


def compile(
    model: nn.Module,
    mesh: Any,
    inputs: Sequence[Any] | None = None,
    loss: Callable[..., Any] | None = None,
    targets: Sequence[Any] | None = None,
    *,
    layouts: Mapping[str, Sequence[str | None]] | None = None,
    strict: bool = False,
    thin: str = "whole",
    seed: int = 0,
    bucket: int = 4 << 20,
    batchnorm: str = "global",
    microbatches: int = 1,
    schedule: str | None = None,
    stages: Sequence[int] | Sequence[str] | None = None,
) -> Net:
    """Compile a model for a mesh: the result runs as one SPMD program, exactly equal to the model on one device.

    Args:
        model: any ``nn.Module``; its parameters are shared, not copied. Train and eval mode are compiled on demand.
        mesh: a `Mesh`, a mapping of axis sizes or a torch ``DeviceMesh`` whose dim names are our axes.
        inputs: the GLOBAL inputs, one entry a positional argument: shapes, tensors (real or meta), or nested tuples, lists
            and dicts of tensors. When absent, shapes come from the shards of each call (one small message more a call).
        loss: a function of ``(output, *targets)`` that is captured with the model; the net then returns its whole value.
        targets: the GLOBAL targets of ``loss``, as ``inputs``.
        layouts: for inputs that are not [N, C, spatial...]: the axis of every dim by the argument's name.
        strict: refuse ops without a rule instead of running them whole.
        thin: what a dim does that has fewer indices than its axis has ranks: ``"whole"`` leaves the split there, ``"split"``
            keeps it (some ranks hold nothing).
        seed: what dropout masks and other random numbers depend on, besides the call and the global index.
        bucket: bytes of gradients that are summed in one message.
        batchnorm: the statistics of batch norms in training: ``"global"``, of the whole batch, or ``"replica"``, of the samples
            of each coordinate of ``data`` (all of space), as DistributedDataParallel has them.
        microbatches: how many parts the batch of each rank is cut into, which go through the stages of axis ``pipe`` one after
            another. Batch norms in training then have the statistics of each micro-batch.
        schedule: ``"gpipe"``, ``"1f1b"``, ``"interleaved"``, ``"zero-bubble"`` or ``"zbv"``; by default 1f1b where the loss
            allows it.
        stages: where axis ``pipe`` cuts the model: numbers of layers (calls of leaf modules), or the names of the modules with
            which each stage after the first begins; by default so that the costliest stage costs least.

    Raises:
        CompileError: the model cannot be captured or compiled exactly; names the node and the line.
        MeshError: the mesh does not fit the world, or an axis fits no dim.
    """
    mesh = Mesh.of(mesh)
    world = comm.current().size
    if world > 1 and world != mesh.size:
        raise MeshError(
            f"{mesh!r} has {mesh.size} ranks, the world has {world}; change the mesh or start {mesh.size} ranks"
        )
    if thin not in ("whole", "split"):
        raise ValueError(f"thin={thin!r} is neither 'whole' nor 'split'")
    if batchnorm not in ("global", "replica"):
        raise ValueError(f"batchnorm={batchnorm!r} is neither 'global' nor 'replica'")
    options: dict[str, Any] = {"layouts": layouts, "strict": strict, "thin": thin, "seed": seed, "bucket": bucket}
    options |= {"batchnorm": batchnorm, "microbatches": microbatches, "schedule": schedule, "stages": stages}
    return Net(model, mesh, _build.get(), loss, inputs, targets, options)
