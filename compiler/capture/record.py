"""Record one run of a model on fake tensors as a graph of pre-dispatch ATen ops.

    y = self.conv(x)        %conv2d   = aten.conv2d(%x, %conv.weight, %conv.bias, [1, 1], [0, 0], [1, 1], 1)
    y += 1                  %add_     = aten.add_.Tensor(%conv2d, 1)
    a, b = y.chunk(2, 1)    %chunk    = aten.chunk(%add_, 2, 1);  %getitem = %chunk[0];  %getitem_1 = %chunk[1]

Inputs, parameters and buffers are fake: they have shapes and no values. What the model makes itself from constants
(``torch.arange(4)``) is computed for real, so that Python may branch on it; it is recorded all the same, and a later
pass proves that whatever Python read did not depend on an input.

What `make_fx(pre_dispatch=True)` does, with the tensors behind every node in hand: their storages say exactly which
values alias, and grad mode, module and source line are noted where the op is called.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, PythonKeyTracer
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from halofx.compiler.capture.places import Place, Places
from halofx.compiler.errors import CompileError, at

LARGEST_REAL = 2**24
"""A tensor that the model makes from constants is fake from this number of elements on (128 MiB of float64)."""

READS = frozenset({"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::allclose"})
"""Ops that hand a value to Python."""


def is_fake(value: object) -> bool:
    """Whether a value is a fake tensor."""
    return isinstance(value, FakeTensor)


def fake_like(mode: FakeTensorMode, tensor: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """A fake tensor with the shape, strides and dtype of a tensor, alias of nothing; the CPU stands for ``meta``.

    With ``shape`` it has that one, contiguous.
    """
    device = torch.device("cpu") if tensor.device.type == "meta" else tensor.device
    with torch.no_grad():
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        meta = meta if shape is None else torch.empty(tuple(shape), dtype=tensor.dtype, device="meta")
        return FakeTensor(mode, meta, device)


def storage_of(tensor: Tensor) -> int:
    """The identity of the memory of a tensor: equal for two tensors that alias."""
    return int(tensor.untyped_storage()._cdata)


def autocast_state() -> tuple[tuple[str, torch.dtype], ...]:
    """The device types for which autocast is on in this thread, each with its dtype."""
    return tuple((d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d))


class Recorder(ProxyTorchDispatchMode):
    """Appends a node to ``graph`` for every ATen op that is called under it, before autograd and autocast see it.

    ``node.meta``: ``val`` (fake tensor), ``storage`` (`storage_of`), ``geometry`` (how its memory is read), ``place``
    (`Place`), ``grad`` (grad mode), and ``marked`` once the value is the output of the module of its place.
    ``constants``: real tensors from outside, the values of the ``get_attr`` nodes.
    """

    def __init__(self, fake_mode: FakeTensorMode, places: Places) -> None:
        super().__init__(PythonKeyTracer(), "real", pre_dispatch=True)
        self.graph = fx.Graph()
        self.fake_mode = fake_mode
        self.places = places
        self.constants: dict[str, Tensor] = {}
        self.autocast = autocast_state()
        self.paused = False  # within a module that is one op
        self.originals: dict[int, Tensor] = {}  # of the fake state, by id
        self._nodes: dict[int, fx.Node] = {}
        self._by_geometry: dict[tuple[Any, ...], fx.Node] = {}  # with requires_grad: detached is another value
        self._alive: list[Tensor] = []  # ids and storages are only unique among the living
        self._owned: set[int] = set()  # storages made during the run: the only real ones it may write

    # -- what is known before the run

    def placeholder(self, tensor: Tensor, original: Tensor, **meta: Any) -> fx.Node:
        """A placeholder for a fake tensor, which is also found through the original that it stands for."""
        node = self.graph.create_node("placeholder", f"p{len(self._alive)}")
        node.meta.update(meta, place=Place(None, 0, ""), grad=True)
        self.bind(tensor, node)
        self._nodes[id(original)] = node
        self.originals[id(tensor)] = original
        self._alive.append(original)
        return node

    # -- the run

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[Any, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.lift_fresh.default:
            return self._lift(args[0])
        if func is torch.ops.aten.dropout.default and (args[1] == 0 or not args[2]):
            return args[0]  # as eager does; the fake kernel would copy, and a write to the copy would be lost
        tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        place = self.places.here()
        self._refuse(func, tensors, args, kwargs, place)
        node_args, node_kwargs = pytree.tree_map_only(Tensor, self.node_of, (args, kwargs))
        out = self._compute(func, tensors, args, kwargs, place)
        if isinstance(out, Tensor) and not func._schema.is_mutable and any(out is t for t in tensors):
            return out  # a conversion with nothing to convert: the very tensor that came in
        if not _has_tensors(out) and func._schema.name not in READS:
            return out  # a question about shapes or types, or a profiler mark
        node = self.graph.create_node("call_function", func, node_args, node_kwargs)
        node.meta.update(place=place, grad=torch.is_grad_enabled())
        self.bind(out, node)
        self._own(out, tensors)
        return out

    def _compute(self, func: Any, tensors: list[Tensor], args: Any, kwargs: Any, place: Place) -> Any:
        """The result of an op: real where everything that goes in is real and it is not large."""
        try:
            if not func._schema.is_mutable and not any(is_fake(t) for t in tensors):
                probe = self._probe(func, args, kwargs)
                if any(t.numel() > LARGEST_REAL for t in pytree.tree_leaves(probe) if isinstance(t, Tensor)):
                    return probe
            return func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise CompileError(_data_dependent(func, place)) from error

    def _probe(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an op on real tensors without computing it, None where its shape depends on values."""
        if func._schema.name in READS:
            return None
        try:
            with self.fake_mode:
                return func(*args, **kwargs)
        except Exception:  # no fake kernel, or a shape that depends on values: the real run decides
            return None

    def _lift(self, tensor: Tensor) -> Tensor:
        """``torch.tensor(...)`` and its kin: a fresh constant, whose value is kept before anything writes to it."""
        if id(tensor) not in self._nodes:
            self._owned.add(storage_of(tensor))
            self._constant(tensor, tensor.detach().clone())
        return tensor

    # -- which node a tensor is

    def node_of(self, tensor: Tensor) -> fx.Node:
        """The node whose value a tensor is; a real tensor from outside becomes a constant.

        Raises `CompileError` for a tensor of unknown origin.
        """
        node = self._nodes.get(id(tensor))
        if node is not None:
            return node
        self._refuse_kind(tensor)
        node = self._by_geometry.get((_geometry(tensor), tensor.requires_grad))
        if node is not None:  # another Python object for the same memory, as factories return
            self._nodes[id(tensor)] = node
            self._alive.append(tensor)
            return node
        return self._constant(tensor, tensor.detach())

    def _refuse_kind(self, tensor: Tensor) -> None:
        """Refuse tensors that have no plain strided memory, such as those inside ``torch.func.vmap``."""
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            what = "torch.func transforms (vmap, grad, jvp) cannot be captured{}; write it out"
        elif tensor.layout is not torch.strided or tensor.is_nested:
            what = f"a {tensor.layout} tensor cannot be captured{{}}; use a dense tensor"
        else:
            return
        raise CompileError(what.format(at(str(self.places.here()))))

    def _constant(self, tensor: Tensor, value: Tensor) -> fx.Node:
        """A get_attr node for a real tensor that was not made by a recorded op."""
        where = at(str(self.places.here()))
        if is_fake(tensor):
            raise CompileError(
                f"a tensor of shape {tuple(tensor.shape)} was made out of sight of the capture{where}, perhaps in an "
                "earlier capture that failed or in an extension; compute it in the forward with torch functions"
            )
        if tensor.device.type == "meta":
            raise CompileError(
                f"a tensor of shape {tuple(tensor.shape)} is on the meta device and has no values{where}; register it "
                "as a buffer or make it on the CPU"
            )
        if tensor.requires_grad:
            raise CompileError(
                f"a tensor of shape {tuple(tensor.shape)} that requires grad is not a parameter of the model{where}; "
                "register it (nn.Parameter as an attribute, or in an nn.ParameterList)"
            )
        name = f"const_{len(self.constants)}"
        self.constants[name] = value
        node = self.graph.create_node("get_attr", name)
        node.meta.update(place=self.places.here(), grad=True)
        self.bind(tensor, node)
        return node

    def bind(self, out: Any, node: fx.Node, alias: bool = False) -> None:
        """Note that a value, or every tensor of a tuple of values, is the value of a node.

        With ``alias`` another value may lie in the same memory: only this very object is that of the node.
        """
        if isinstance(out, Tensor):
            self._refuse_kind(out)
            node.meta.update(val=fake_like(self.fake_mode, out), storage=storage_of(out), geometry=_geometry(out))
            self._nodes[id(out)] = node
            if not alias:
                self._by_geometry[_geometry(out), out.requires_grad] = node
            self._alive.append(out)
        elif isinstance(out, (tuple, list)):
            node.meta["val"] = tuple(self._bind_item(item, index, node, alias) for index, item in enumerate(out))
        else:
            node.meta["val"] = out

    def _bind_item(self, item: Any, index: int, node: fx.Node, alias: bool) -> Any:
        getitem = self.graph.create_node("call_function", operator.getitem, (node, index))
        getitem.meta.update(place=node.meta["place"], grad=node.meta["grad"])
        self.bind(item, getitem, alias)
        return getitem.meta["val"]

    def _own(self, out: Any, tensors: list[Tensor]) -> None:
        known = {storage_of(t) for t in tensors}
        made = {storage_of(t) for t in pytree.tree_leaves(out) if isinstance(t, Tensor) and not is_fake(t)}
        self._owned |= made - known

    # -- what is refused while it happens

    def _refuse(self, func: Any, tensors: list[Tensor], args: Any, kwargs: Any, place: Place) -> None:
        if autocast_state() != self.autocast:
            raise CompileError(
                f"the forward turns autocast on or off around {func}{at(str(place))}; put the autocast around the call "
                "of the compiled net instead"
            )
        if kwargs.get("generator") is not None:
            raise CompileError(f"{func} draws from a generator of its own{at(str(place))}; leave generator= out")
        for tensor in written(func, args, kwargs):
            if not is_fake(tensor) and storage_of(tensor) not in self._owned:
                raise CompileError(
                    f"{func} writes to a tensor of shape {tuple(tensor.shape)} that is kept outside of the parameters "
                    f"and buffers{at(str(place))}; register it with register_buffer, or write to a clone"
                )

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether the run used a tensor as a constant from outside."""
        node = self._nodes.get(id(tensor))
        return node is not None and node.op == "get_attr"

    def mark(self, tensor: Tensor, path: str) -> None:
        """Note that a tensor is the output of the module at ``path``, unless an inner module claimed it."""
        node = self._nodes.get(id(tensor))
        if node is not None and node.op == "call_function" and "marked" not in node.meta:
            module = node.meta["place"].module or ""
            if module == path or module.startswith(path + "."):
                node.meta["marked"] = path


class Watch(TorchFunctionMode):
    """Sees what ATen ops do not show: tensors turned into numpy or lists, hooks, backward, ``x.data = y``."""

    def __init__(self, places: Places) -> None:
        self.places = places

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        remedy = _FORBIDDEN.get(func)
        if remedy is not None:
            name = "assignment to .data" if func == _SET_DATA else f"{func.__name__}()"
            place = self.places.here()
            raise CompileError(f"the forward uses {name}{at(str(place))}; {remedy}{place.way_round}")
        if func not in _TO_PYTHON:
            return func(*args, **(kwargs or {}))
        if is_fake(args[0]):
            raise CompileError(_data_dependent(func, self.places.here()))
        torch.equal(args[0], args[0])  # leaves a node: the value is read here
        value = func(*args, **(kwargs or {}))
        if hasattr(value, "flags"):
            value.flags.writeable = False  # a write through numpy would go unseen
        return value


_SET_DATA: Callable[..., Any] = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_TO_PYTHON = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__})
_HOOK = "gradient hooks are lost in a captured graph; change the gradient with torch functions, or remove the hook"
_FORBIDDEN: dict[Any, str] = {
    Tensor.register_hook: _HOOK,
    Tensor.register_post_accumulate_grad_hook: _HOOK,
    Tensor.backward: "call backward() on the result of the compiled net",
    torch.autograd.backward: "call backward() on the result of the compiled net",
    _SET_DATA: "assign under torch.no_grad() with copy_() to a buffer instead",
}


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an op writes to, by its schema; lists of tensors are opened."""
    found = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += list(value) if isinstance(value, (list, tuple)) else [value]
    return [v for v in found if v is not None]


def _has_tensors(out: Any) -> bool:
    return any(isinstance(t, Tensor) for t in pytree.tree_leaves(out))


def _geometry(t: Tensor) -> tuple[Any, ...]:
    """Two tensors of one geometry have the same values: same memory, read in the same way."""
    return storage_of(t), t.storage_offset(), t.shape, t.stride(), t.dtype, t.is_conj(), t.is_neg()


def _data_dependent(func: Any, place: Place) -> str:
    return (
        f"the forward needs the value of a tensor where only its shape is known, for {getattr(func, '__name__', func)}"
        f"{at(str(place))}; branch on shapes instead, use torch.where or a mask of fixed size{place.way_round}"
    )
