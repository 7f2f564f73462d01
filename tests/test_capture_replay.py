"""Captured programs, run on one device, equal the model: outputs, gradients and buffers, bit for bit in float64.

`check` is the oracle for all capture tests: it captures a model, runs the graph's generated code on real tensors and
compares with a copy of the model run eagerly; and it checks what every captured graph promises.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from halofx.compiler.capture import capture
from halofx.compiler.capture_trees import rebuild
from halofx.compiler.mesh import Mesh
from halofx.compiler.program import Program

GETITEM_OF_VIEWS = ("split", "chunk", "unbind", "tensor_split", "hsplit", "vsplit", "dsplit", "meshgrid", "broadcast_tensors")


def replay(program: Program, state: dict[str, Tensor], inputs: list[Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """Run the graph on real tensors: the output tree and the new values of the buffers."""
    module = fx.GraphModule(program.constants, program.graph)
    values = [state[n.meta["state"]] for n in program.placeholders("state")]
    outputs, updates = module(*values, *inputs)
    tree = rebuild(program.out_spec, program.out_leaves, outputs)
    return tree, dict(zip(program.updates, updates, strict=True))


def state_of(model: nn.Module, loss: object) -> dict[str, Tensor]:
    """Parameters and buffers by the keys that a program uses."""
    state = dict([*model.named_buffers(), *model.named_parameters()])
    if isinstance(loss, nn.Module):
        state |= {f"loss.{k}": v for k, v in [*loss.named_buffers(), *loss.named_parameters()]}
    return state


def check(
    model: nn.Module,
    *args: Any,
    loss: Callable[..., Any] | None = None,
    targets: tuple[Any, ...] = (),
    grad: bool = True,
    exact: bool = True,
    **kwargs: Any,
) -> Program:
    """Capture a model in double precision and compare the replay with eager; returns the program."""
    model = model.double()
    loss = loss.double() if isinstance(loss, nn.Module) else loss
    before = copy.deepcopy((state_of(model, loss), torch.get_rng_state()))
    program = capture(model, args, kwargs, Mesh(), loss=loss, targets=targets)
    assert_same((state_of(model, loss), torch.get_rng_state()), before)
    check_graph(program)
    eager_model, eager_loss = copy.deepcopy((model, loss))
    (a, k, t), leaves = fresh((args, kwargs, targets), grad)
    torch.manual_seed(3)
    want = eager_model(*a, **k)
    want = eager_loss(want, *t) if eager_loss is not None else want
    _, mine = fresh((args, kwargs, targets), grad)
    torch.manual_seed(3)
    got, updates = replay(program, state_of(model, loss), mine)
    compare = assert_same if exact else torch.testing.assert_close
    compare(pytree.tree_map(detached, got), pytree.tree_map(detached, want))
    old = before[0]
    after = {k: v for k, v in state_of(eager_model, eager_loss).items() if not isinstance(v, nn.Parameter)}
    compare({k: updates.get(k, old[k]) for k in after}, {k: detached(v) for k, v in after.items()})
    assert not any(v.requires_grad for v in updates.values())
    if grad:
        parameters = {k: v for k, v in state_of(model, loss).items() if isinstance(v, nn.Parameter)}
        eager = {k: v for k, v in state_of(eager_model, eager_loss).items() if isinstance(v, nn.Parameter)}
        compare(gradients(got, mine, parameters), gradients(want, leaves, eager))
    return program


def fresh(tree: Any, grad: bool) -> tuple[Any, list[Tensor]]:
    """A copy of a tree of inputs whose float tensors require grad (through a leaf, so that they may be written to)."""
    leaves: list[Tensor] = []

    def one(x: Tensor) -> Tensor:
        leaf = x.detach().clone().requires_grad_(grad and x.is_floating_point())
        leaves.append(leaf)
        return leaf.clone() if leaf.requires_grad else leaf

    return pytree.tree_map_only(Tensor, one, tree), leaves


def gradients(output: Any, inputs: list[Tensor], parameters: dict[str, Tensor]) -> list[Tensor]:
    """Gradients of a fixed random combination of all outputs, for the inputs and every parameter; none is zero."""
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros((), dtype=torch.float64)
    for y in pytree.tree_leaves(output):
        if isinstance(y, Tensor):
            weights = torch.rand(y.shape, generator=generator, dtype=torch.float64)
            total = total + (y * weights).sum() if y.requires_grad else total
    wanted = [t for t in [*inputs, *parameters.values()] if t.requires_grad]
    for t in wanted:
        t.grad = None
    if total.requires_grad:
        total.backward()
    return [torch.zeros_like(t) if t.grad is None else t.grad.clone() for t in wanted]


def detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def assert_same(got: Any, want: Any) -> None:
    """Equal bit for bit, in the same tree."""
    flat, spec = pytree.tree_flatten(got)
    flat_want, want_spec = pytree.tree_flatten(want)
    assert spec == want_spec
    for a, b in zip(flat, flat_want, strict=True):
        if isinstance(a, Tensor):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        else:
            assert a == b or a is b


def check_graph(program: Program) -> None:
    """What the docstring of `Program` promises of every graph."""
    graph = program.graph
    graph.lint()
    labels = [n.meta["label"] for n in graph.nodes if n.op != "output"]
    assert len(set(labels)) == len(labels)
    assert {n.op for n in graph.nodes} <= {"placeholder", "get_attr", "call_function", "output"}
    order = ["state" if "state" in n.meta else "input" for n in graph.nodes if n.op == "placeholder"]
    assert order == sorted(order, reverse=True)
    for node in graph.nodes:
        assert node.name.isidentifier()
        if node.op == "get_attr":
            assert program.constants[node.target].shape == node.meta["val"].shape
        if node.op == "call_function":
            check_op(node)


def check_op(node: fx.Node) -> None:
    if not isinstance(node.target, torch._ops.OpOverload):
        assert node.target.__module__ in ("_operator", "halofx.compiler.functional")
        return
    assert not node.target._schema.is_mutable, node.target
    assert node.target._schema.name.partition("::")[2] not in GETITEM_OF_VIEWS
    positional = [a for a in node.target._schema.arguments if not a.kwarg_only]
    assert len(node.args) == len(positional), node.format_node()
    with torch.no_grad(), node.meta["val"].fake_mode if isinstance(node.meta["val"], Tensor) else torch.no_grad():
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        again = node.target(*args, **kwargs)
    assert kinds(again) == kinds(node.meta["val"]), node.format_node()


def kinds(value: Any) -> list[Any]:
    return [(t.shape, t.dtype) for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
