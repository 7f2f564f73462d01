"""The program: a ``torch.fx`` graph, the mesh it is split over, and facts on its nodes.

Capture makes one, every pass of ``passes/`` edits one in place, the runtime binds one to a rank.

Facts in ``node.meta`` (all shapes are global, none depends on a rank):

=============  ==========================================================================================
``val``        fake tensor (or tuple of them) of the value
``label``      unique display name from the module path: ``enc.conv``, ``enc.conv.pad``, ``add``
``source``     ``"model.py:12: x = self.conv(x)"``, the line of the user's code, or None
``state``      of a placeholder: state_dict key of a parameter or buffer
``input``      of a placeholder: name of an input or target leaf (``x``, ``args.1``, ``target``)
=============  ==========================================================================================

Passes add their own: ``spec`` and ``homes`` (infer), ``split`` and ``layout`` (plan), ``move`` (insert).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx
from torch.utils._pytree import TreeSpec

from halofx.compiler.mesh import Mesh
from halofx.compiler.stages import Stages
from halofx.compiler.trees import rebuild


@dataclass
class Program:
    """One captured model for one set of global input shapes and one mode (train or eval).

    ``graph``: placeholders are first the state (parameters, buffers), then the tensor leaves of the inputs, then of
    the targets; ``call_function`` nodes have ``OpOverload`` targets (pre-dispatch ATen, functional: no in-place op,
    no op with several outputs that is a mere view) or functions of ``halofx.compiler``; ``get_attr`` nodes name
    ``constants``; the output node holds ``(outputs, updates)``, two tuples of nodes: the leaves of the result and
    the new values of the buffers named by ``updates``.
    """

    graph: fx.Graph
    mesh: Mesh
    training: bool = False
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    updates: tuple[str, ...] = ()  # state_dict keys of the buffers that the program assigns
    in_spec: TreeSpec | None = None  # of (args, kwargs); non-tensor leaves are baked in
    in_leaves: tuple[Any, ...] = ()  # the leaves of the inputs, None where a tensor is expected
    target_spec: TreeSpec | None = None  # of the tuple of targets of a captured loss
    target_leaves: tuple[Any, ...] = ()
    out_spec: TreeSpec | None = None
    out_leaves: tuple[Any, ...] = ()  # the leaves of the output, None where the graph has a node
    notes: list[str] = field(default_factory=list)  # warnings for the user, shown under the listing
    listings: dict[str, str] = field(default_factory=dict)  # pass name -> listing after it
    options: dict[str, Any] = field(default_factory=dict)  # choices of the user that passes read
    stages: Stages | None = None  # of a pipeline or of micro-batches; ``mesh`` is then that of one stage

    @property
    def world(self) -> Mesh:
        """The mesh of all ranks: of every stage of a pipeline, without micro-batches."""
        return self.mesh if self.stages is None else self.stages.mesh

    def placeholders(self, kind: str) -> list[fx.Node]:
        """The placeholders of one kind, ``"state"`` or ``"input"``, in order."""
        return [n for n in self.graph.nodes if n.op == "placeholder" and kind in n.meta]

    def outputs(self) -> tuple[fx.Node, ...]:
        """The nodes whose values are the tensor leaves of the result."""
        return self.results()[0]

    def results(self) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
        """The outputs and the new values of buffers."""
        outputs, updates = cast(Any, self.output_node().args[0])
        return tuple(outputs), tuple(updates)

    def unflatten(self, outs: Sequence[Any]) -> Any:
        """The result of the model from its tensor leaves."""
        assert self.out_spec is not None
        return rebuild(self.out_spec, self.out_leaves, outs)

    def output_node(self) -> fx.Node:
        """The single output node."""
        return cast(fx.Node, next(iter(reversed(self.graph.nodes))))
