"""Choose over which samples a batch norm has its statistics: of the whole batch, or of each replica (``batchnorm="replica"``).

With micro-batches they are those of each micro-batch (of all replicas), as on one device that takes one after another.

before    bn: batch_norm_train(x, weight, bias, running_mean, running_var, momentum, eps)          mesh data=2
after     bn: batch_norm_replicas(x, weight, bias, running_mean, running_var, momentum, eps, replicas=2)
"""

from __future__ import annotations

import torch
from torch import fx

from halofx.compiler.emit import label_of, name_of
from halofx.compiler.errors import CompileError
from halofx.compiler.facts import calls
from halofx.compiler.functional import batch_norm_train
from halofx.compiler.ops.norm_replica import batch_norm_replicas
from halofx.compiler.program import Program
from halofx.compiler.rules import bind_arguments


def plan_statistics(program: Program) -> None:
    """Under ``batchnorm="replica"`` give every batch norm in training one set of statistics a coordinate of ``data``."""
    micro = program.stages.micro if program.stages is not None else 1
    for node in program.graph.nodes if micro > 1 else ():
        if calls(node, batch_norm_train) or (calls(node, torch.ops.aten.batch_norm.default) and _trains(node)):
            node.meta["each"] = True
    replicas = program.mesh["data"]
    if program.options.get("batchnorm") != "replica" or replicas == 1:
        return
    if micro > 1:
        raise CompileError('batchnorm="replica" and microbatches above 1 do not go together; use batchnorm="global"')
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target in (batch_norm_train, torch.ops.aten.batch_norm.default):
            _by_replica(node, replicas)


def _trains(node: fx.Node) -> bool:
    return bool(bind_arguments(node.target, node.args, node.kwargs)["training"])


def _by_replica(node: fx.Node, replicas: int) -> None:
    given = bind_arguments(node.target, node.args, node.kwargs)
    if not given.pop("training", True) or (node.target is not batch_norm_train and given["running_mean"] is not None):
        return
    x, label = given["x"] if "x" in given else given["input"], label_of(node)
    if label.endswith(f".{name_of(node.target)}"):
        node.meta["label"] = label.removesuffix(name_of(node.target)) + name_of(batch_norm_replicas)
    rest = [given[name] for name in ("weight", "bias", "running_mean", "running_var", "momentum", "eps")]
    node.target, node.args, node.kwargs = batch_norm_replicas, (x, *rest, replicas), {}
