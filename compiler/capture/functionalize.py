"""Rewrite a recorded graph so that no value ever changes.

    %y = conv3d(%x, %w)                        %y      = conv3d(%x, %w)
    %v = slice(%y, 1, 0, 1)             ->     %v      = slice(%y, 1, 0, 1, 1)
    %relu_ = relu_(%v)                         %relu   = relu(%v)
    %z = add(%y, %v)                           %y2     = slice_scatter(%y, %relu, 1, 0, 1, 1)
                                               %z      = add(%y2, %relu)

Every piece of memory (storage) has one base, the node that made it; its other nodes are views of the base. A write to
a node makes new values for the node and for everything on the way to its base; all other views of that memory are
derived again from the base when they are next read. Which nodes share memory is not guessed: it was recorded.

What happened under ``torch.no_grad`` carries no gradient: values get a ``detach``, writes a ``replace_value``.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx

from halofx.compiler import functional
from halofx.compiler.capture.functional_ops import Written, factory_form, functional_form
from halofx.compiler.capture.record import written
from halofx.compiler.capture.views import DETACH, Step, View, aten, canonical, complete, inverse
from halofx.compiler.errors import CompileError, at
from halofx.compiler.opaque import FunctionCall

GETITEM = operator.getitem


class Functionalizer:
    """Reads the recorded nodes in order and appends to ``graph``; `values` and `version` are the memory it models."""

    def __init__(self, recorded: fx.Graph, fake_mode: torch._subclasses.FakeTensorMode) -> None:
        self.recorded = recorded
        self.fake_mode = fake_mode
        self.graph = fx.Graph()
        self.version: dict[int, int] = {}  # of a storage: how often it was written
        self.first_write: dict[int, fx.Node] = {}
        self.bases: dict[int, fx.Node] = {}
        self.views: dict[fx.Node, View] = {}
        self.values: dict[fx.Node, tuple[int, fx.Node]] = {}
        self._opaque: dict[int, fx.Node] = {}  # storages with a view that cannot be derived again
        self._state: dict[str, fx.Node] = {}
        self._same: dict[fx.Node, fx.Node] = {}  # the result of an in-place op -> the node it wrote to
        self._grad: dict[fx.Node, bool] = {}
        self._here: fx.Node = next(iter(recorded.nodes))  # the node that is being rewritten

    def run(self) -> None:
        """Rewrite every node."""
        for node in self.recorded.nodes:
            self._here = node
            self._node(node)
            if "marked" in node.meta:
                value = self.read(node)
                made_here = value.meta.get("maker") is node
                if made_here:
                    value.meta["marked"] = node.meta["marked"]

    # -- reading and writing the model of memory

    def read(self, node: fx.Node) -> fx.Node:
        """The present value of a recorded node, derived again if its memory was written since it was last read."""
        node = self._same.get(node, node)
        chain = []
        while not self._is_current(node):
            chain.append(node)
            node = self.views[node].parent
        value = self.values[node][1]
        for view in reversed(chain):
            value = self._derive(view, self.views[view].steps, value)
            self.values[view] = (self._version(view), value)
        return value

    def write(self, node: fx.Node, value: fx.Node) -> None:
        """Make ``value`` the present value of a recorded node, and with it of everything that shares its memory."""
        node = self._same.get(node, node)
        storage = node.meta["storage"]
        self._check_writable(node)
        news = [(node, value)]
        while node in self.views:
            view = self.views[node]
            value = self._invert(view, self.read(view.parent), value)
            node = view.parent
            news.append((node, value))
        self.version[storage] = self._version(node) + 1
        self.first_write.setdefault(storage, self._here)
        for changed, new in news:
            self.values[changed] = (self.version[storage], new)

    def final(self, node: fx.Node) -> fx.Node:
        """The value of a recorded node at the end, without gradient: the new value of a buffer."""
        return self._step(DETACH, self.read(node))

    def _version(self, node: fx.Node) -> int:
        return self.version.get(node.meta["storage"], 0) if "storage" in node.meta else 0

    def _is_current(self, node: fx.Node) -> bool:
        known = self.values.get(node)
        return known is not None and (node not in self.views or known[0] == self._version(node))

    def _derive(self, node: fx.Node, steps: tuple[Step, ...], value: fx.Node) -> fx.Node:
        """The recorded view ``node`` of a value. A detached view keeps the history of gradients of its last value."""
        last = self.values.get(node)
        for index, step in enumerate(steps):
            if step is DETACH and last is not None and self._grad[last[1]]:
                value = self.emit(functional.replace_value, (last[1], value), val=value.meta["val"])
            else:
                value = self._step(step, value, node.meta["val"] if index == len(steps) - 1 else None)
        return value

    def _step(self, step: Step, value: fx.Node, val: Any = None) -> fx.Node:
        if step is DETACH:
            return self.emit(step.op, (value,), val=value.meta["val"]) if self._grad[value] else value
        return self.emit(step.op, (value, *step.tail), val=val)

    def _invert(self, view: View, old: fx.Node, value: fx.Node) -> fx.Node:
        """The parent's new value, given its old one and the new value of the view: steps are undone last to first."""
        olds = [old]
        for step in view.steps[:-1]:
            olds.append(self._step(step, olds[-1]))
        for step in reversed(view.steps):
            value = self._invert_step(step, olds.pop(), value)
        return value

    def _invert_step(self, step: Step, parent: fx.Node, value: fx.Node) -> fx.Node:
        if step is DETACH:
            if self._grad[parent]:
                return self.emit(functional.replace_value, (parent, value), val=parent.meta["val"])
            return self._step(DETACH, value)
        found = inverse(step, parent.meta["val"], value.meta["val"])
        if found is None:
            raise CompileError(
                f"{self._here.target} writes through {step.op}{step.tail}{self._where}, which cannot be undone "
                "exactly; write to a clone instead"
            )
        kind, op, tail = found
        if kind == "scatter" and parent.meta["val"].is_complex():
            return self._scatter_complex(op, parent, value, tail)
        args = (parent, value, *tail) if kind == "scatter" else (value, *tail)
        return self.emit(op, args, val=parent.meta["val"])

    def _scatter_complex(self, op: Any, parent: fx.Node, value: fx.Node, tail: tuple[Any, ...]) -> fx.Node:
        """A scatter of the real and imaginary parts: torch has no derivative of a complex one."""
        old, new = (
            self.emit(aten.view_as_real.default, (self.emit(aten.resolve_conj.default, (v,)),)) for v in (parent, value)
        )
        dims = slice(0, 1)
        if op is aten.diagonal_scatter.default:  # the diagonal is the last dim, behind the parts
            new, dims = self.emit(aten.transpose.int, (new, -1, -2)), slice(1, 3)
        positive = [d % parent.meta["val"].dim() for d in tail[dims]]
        tail = (*tail[: dims.start], *positive, *tail[dims.stop :])
        return self.emit(aten.view_as_complex.default, (self.emit(op, (old, new, *tail)),), val=parent.meta["val"])

    def _check_writable(self, node: fx.Node) -> None:
        opaque = self._opaque.get(node.meta["storage"])
        if opaque is not None:
            raise CompileError(
                f"{self._here.target} writes to memory that {opaque.target} shares in a way that cannot be followed"
                f"{self._where}; write to a clone instead"
            )

    # -- emitting nodes

    @property
    def _where(self) -> str:
        return at(str(self._here.meta["place"]))

    def emit(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, val: Any = None
    ) -> fx.Node:
        """Append an op on new nodes; ``val`` is computed on fake tensors when it is not given."""
        kwargs = kwargs or {}
        if val is None:
            with self.fake_mode, torch.no_grad():
                fakes = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
                val = target(*fakes[0], **fakes[1])
        node = self.graph.create_node("call_function", target, args, kwargs)
        node.meta.update(val=val, place=self._here.meta["place"], maker=self._here)
        self._grad[node] = self._may_need_grad(node)
        return node

    def _may_need_grad(self, node: fx.Node) -> bool:
        """Whether a gradient could flow through a value: it is computed from a parameter or an input."""
        val = node.meta["val"]
        if isinstance(val, Tensor) and not (val.is_floating_point() or val.is_complex()):
            return False
        if node.target is aten.detach.default or _is_like(node.target):
            return False
        if node.target is GETITEM and node.args[0].target in _STATISTICS and node.args[1] != 0:  # type: ignore[union-attr]
            return False
        return any(self._grad[n] for n in node.all_input_nodes)

    # -- one recorded node

    def _node(self, node: fx.Node) -> None:
        if node.op != "call_function":
            self._source(node)
        elif node.target in _STATISTICS_OF and self._has_statistics(node):
            self._norm(node)
        elif isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            self._mutation(node)
        else:
            self._op(node)

    def _source(self, node: fx.Node) -> None:
        """A placeholder or constant: the base of its memory."""
        new = self.graph.create_node(node.op, node.target, name=node.name)
        new.meta.update({k: v for k, v in node.meta.items() if k not in ("storage", "geometry", "grad")})
        if "state" in node.meta:
            self._state[node.meta["state"]] = node
        val = new.meta["val"]
        self._grad[new] = bool(node.meta.get("needs_grad")) and val.is_floating_point()
        self._set_base(node, new)

    def _set_base(self, node: fx.Node, new: fx.Node) -> None:
        storage = node.meta.get("storage")
        if storage is not None and self.bases.setdefault(storage, node) is not node:
            self._opaque[storage] = node  # a second name for one memory: right as long as nobody writes again
        self.values[node] = (self._version(node), new)

    def _op(self, node: fx.Node) -> None:
        """An op without side effects: a view if it shares memory with its input, else a value of its own."""
        found = canonical(node)
        parent = self._shared_input(node)
        detached = () if node.meta["grad"] else (DETACH,)
        if isinstance(node.target, FunctionCall):
            self._set_base(node, self._value(node, None))  # its backward is its own, even where it returns its input
        elif found is not None and parent is not None and self._storage(found[0]) == node.meta["storage"]:
            self.views[node] = View(self._same.get(found[0], found[0]), (*found[1], *detached))
            self.read(node)
        elif parent is not None and self._is_identity(parent, node):
            self.views[node] = View(self._same.get(parent, parent), detached)
            self.read(node)
        else:
            self._set_base(node, self._value(node, found))

    def _value(self, node: fx.Node, found: tuple[fx.Node, tuple[Step, ...]] | None) -> fx.Node:
        """The value of an op that is no view of what it reads; a list of mere views has none."""
        if found is not None:
            value = self._derive(node, found[1], self.read(found[0]))
        elif node.target is aten.as_strided.default:
            value = self._strided(node)
        else:
            value = self._plain(node)
        return value if node.meta["grad"] or not isinstance(value.meta["val"], Tensor) else self._step(DETACH, value)

    def _plain(self, node: fx.Node) -> fx.Node:
        """The same op on present values, with all its arguments spelled out."""
        form = factory_form(node) or Written(node.target, node.args, node.kwargs)
        args, kwargs = fx.node.map_arg((form.args, form.kwargs), self.read)
        if isinstance(form.op, torch._ops.OpOverload):
            args, kwargs = complete(form.op, args, kwargs)
        return self.emit(form.op, args, kwargs, node.meta["val"])

    def _strided(self, node: fx.Node) -> fx.Node:
        """``as_strided`` reads memory, not a tensor: of a whole contiguous one its meaning is sure."""
        x, size, stride, offset = complete(node.target, node.args, node.kwargs)[0]
        if self._same.get(x, x) in self.views or not x.meta["val"].is_contiguous():
            raise CompileError(f"as_strided on a view{self._where} depends on its memory; call contiguous() before it")
        whole = self.emit(aten.contiguous.default, (self.read(x),))
        return self.emit(aten.as_strided.default, (whole, size, stride, offset or 0), val=node.meta["val"])

    def _storage(self, node: fx.Node) -> Any:
        return node.meta.get("storage")

    def _shared_input(self, node: fx.Node) -> fx.Node | None:
        """The first input that shares memory with the result; for an item of a list, an input of the list's op."""
        storage = self._storage(node)
        inputs = node.all_input_nodes
        if node.target is GETITEM:
            inputs = inputs[0].all_input_nodes
        return next((n for n in inputs if storage is not None and self._storage(n) == storage), None)

    def _is_identity(self, parent: fx.Node, node: fx.Node) -> bool:
        """Whether a result is its input, as of dropout in eval mode: the same memory read in the same way."""
        return bool(parent.meta["geometry"] == node.meta["geometry"])

    # -- ops that write

    def _mutation(self, node: fx.Node) -> None:
        """``foo_(x, ...)`` or ``foo(..., out=x)``."""
        op: Any = node.target
        reshapes = torch.Tag.inplace_view in op.tags
        if reshapes and canonical(node) is not None:
            return self._op(node)  # x.unsqueeze_(0): from here on the name x means the view
        targets = written(op, node.args, node.kwargs)
        form = functional_form(op, node) if len(targets) == 1 and not reshapes else None
        if form is None:
            raise CompileError(
                f"{op} changes a tensor in place{self._where} and has no form that does not; use the op without the "
                "trailing underscore"
            )
        target: fx.Node = targets[0]
        self.write(target, self._settled(form, target))
        self._same[node] = self._same.get(target, target)

    def _settled(self, form: Written, target: fx.Node) -> fx.Node:
        """What an in-place op leaves in its target: the result, in the target's dtype and shape."""
        old = self.read(target)
        if form.value is not None:
            value = self.read(form.value)
        else:
            read = (lambda n: self._step(DETACH, self.read(n))) if form.detached else self.read
            args, kwargs = fx.node.map_arg((form.args, form.kwargs), read)
            value = self.emit(form.op, *complete(form.op, args, kwargs))
        want, have = target.meta["val"], value.meta["val"]
        if have.dtype != want.dtype:
            value = self.emit(aten.to.dtype, complete(aten.to.dtype, (value, want.dtype), {})[0])
        if have.device != want.device:
            value = self.emit(aten.to.device, complete(aten.to.device, (value, want.device, want.dtype), {})[0])
        if have.shape != want.shape:
            self._check_expandable(have, want)
            value = self.emit(aten.expand.default, (value, list(want.shape)))
        if self._here.meta["grad"]:
            return value
        if self._grad[old]:
            return self.emit(functional.replace_value, (old, value), val=want)
        return self._step(DETACH, value)

    def _check_expandable(self, have: Tensor, want: Tensor) -> None:
        if torch.broadcast_shapes(have.shape, want.shape) != want.shape:
            raise CompileError(
                f"{self._here.target} changes the shape of a tensor from {tuple(want.shape)} to {tuple(have.shape)}"
                f"{self._where}; use the result of the op instead of out="
            )

    # -- norms that write to their running statistics without saying so

    def _has_statistics(self, node: fx.Node) -> bool:
        args, _ = complete(node.target, node.args, node.kwargs)
        return args[3] is not None and bool(args[5])

    def _norm(self, node: fx.Node) -> None:
        """``y = batch_norm(x, w, b, mean, var, True, ...)`` -> ``y, mean, var = batch_norm_train(x, w, b, mean, var, ...)``."""
        (x, weight, bias, mean, var, _, momentum, eps, _), _ = complete(node.target, node.args, node.kwargs)
        args = [self.read(a) if isinstance(a, fx.Node) else a for a in (x, weight, bias, mean, var)]
        if math.isnan(momentum):
            momentum = self._count_of(mean)
        fakes = [self.read(n).meta["val"] for n in (mean, var)]
        triple = self.emit(
            _STATISTICS_OF[node.target], (*args, momentum, eps), val=(node.meta["val"], fakes[0], fakes[1])
        )
        new_mean, new_var, y = (self.emit(GETITEM, (triple, i), val=triple.meta["val"][i]) for i in (1, 2, 0))
        new_mean.meta["name"], new_var.meta["name"] = "new_mean", "new_var"
        self.write(mean, new_mean)
        self.write(var, new_var)
        self._set_base(node, y if node.meta["grad"] else self._step(DETACH, y))

    def _count_of(self, mean: fx.Node) -> fx.Node:
        """The present ``num_batches_tracked`` beside a ``running_mean``, for a batch norm with ``momentum=None``."""
        key = str(mean.meta.get("state", "")).removesuffix("running_mean") + "num_batches_tracked"
        if key not in self._state:
            raise CompileError(f"a batch norm with momentum=None has no {key}{self._where}; give it a momentum")
        return self.read(self._state[key])


def _is_like(target: Any) -> bool:
    """Whether an op, such as ``zeros_like``, takes nothing but the shape of its input."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.name.endswith("_like")


_STATISTICS_OF: dict[Any, Any] = {
    aten.batch_norm.default: functional.batch_norm_train,
    aten.instance_norm.default: functional.instance_norm_train,
}
_STATISTICS = tuple(_STATISTICS_OF.values())
