"""The op table: all that the compiler knows of one op is one entry.

    @rule(aten.conv3d.default)
    def conv3d(call: Call) -> Spec:
        x, w = call["input"].dims("n i d h w"), call["weight"].dims("o i . . .")
        ...
        return Spec(ins={"input": "n i d h w", "weight": "o i . . .", "bias": "o"}, outs=["n o d h w"], maps=..., local=...)

A `Spec` names the loops (factors) of one call, as in an einsum: a name that stands on a dim of an input and on a dim of the
output means that the two run together, related by an index map (identity unless ``maps`` says otherwise). A name only among
the inputs is a reduction. ``.`` and ``[name]`` mark a dim that the op must see whole.

Inference, planning, movement insertion, localization, the memory model and the generated tests read nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from halofx.compiler.errors import CompileError
from halofx.compiler.index_map import IDENTITY, DimMap, Indices
from halofx.compiler.interval import Interval, blocks

if TYPE_CHECKING:
    from halofx.compiler.emit import Emit


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that an op reads or writes: global shape, dtype, and the graph node that makes it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    node: fx.Node | None = None

    @property
    def numel(self) -> int:
        """The number of elements of the global tensor."""
        return int(torch.Size(self.shape).numel())

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)


@dataclass(frozen=True)
class Call:
    """One call of an op: its target, its arguments by name (defaults filled in; tensors as `Operand`), its outputs."""

    target: Any
    args: Mapping[str, Any]
    outs: tuple[Operand, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    def with_(self, /, target: Any = None, **changes: Any) -> Call:
        """The same call with another target or some other arguments; a new target is called with all keywords."""
        if target is None:
            return replace(self, args={**self.args, **changes})
        return replace(self, target=target, args=changes)

    @cached_property
    def tensors(self) -> dict[str, Operand]:
        """The tensor arguments by key, in order: ``"input"``, or ``"tensors.0"`` inside a list."""
        found: dict[str, Operand] = {}
        for name, value in self.args.items():
            if isinstance(value, Operand):
                found[name] = value
            elif isinstance(value, (tuple, list)):
                found.update({f"{name}.{i}": v for i, v in enumerate(value) if isinstance(v, Operand)})
        return found


@dataclass(frozen=True, slots=True)
class Factor:
    """One loop of a call: the dims it runs over, how each input reads it, and whether it may be split over an axis."""

    name: str
    ins: tuple[tuple[str, int, DimMap], ...]  # (tensor key, dim, map)
    outs: tuple[tuple[int, int], ...]  # (output, dim)
    extent: int
    splittable: bool

    @property
    def reduces(self) -> bool:
        """Whether the factor is summed away."""
        return not self.outs


LocalForm = Callable[["Local"], Call]


@dataclass(frozen=True)
class Spec:
    """What one call does with every dim.

    ``ins`` and ``outs``: a pattern of names for each tensor argument (by key: ``"input"``, ``"tensors.0"``; a sequence of
    patterns for a list argument) and for each output. ``maps``: index map of a factor, by ``"d"`` (all inputs) or
    ``"input.d"``. ``fill`` stands outside the tensor. ``reduce`` names how addends of a split reduction are combined
    (`halofx.compiler.primitives.REDUCTIONS`), None when a split is not possible. ``local`` gives the call that one rank makes
    (by default the same call). ``decompose`` rewrites the call into other ops when a dim that it must see whole is split.
    ``flops`` counts floating-point operations of the whole call, ``saves`` what autograd keeps (argument names, ``"output"``).
    ``detached`` names arguments into which no cotangent flows, because they lend only a shape, a dtype or fixed values.
    """

    ins: Mapping[str, str | Sequence[str]]
    outs: Sequence[str]
    maps: Mapping[str, DimMap] = field(default_factory=dict)
    fill: float | Mapping[str, float] = 0.0
    reduce: str | None = None
    local: LocalForm | None = None
    decompose: Callable[[Call, Emit], Any] | None = None
    flops: int | None = None
    saves: tuple[str, ...] = ()
    detached: tuple[str, ...] = ()

    @cached_property
    def patterns(self) -> dict[str, tuple[str, ...]]:
        """The dim names of every tensor argument by key."""
        found: dict[str, tuple[str, ...]] = {}
        for name, pattern in self.ins.items():
            if isinstance(pattern, str):
                found[name] = tuple(pattern.split())
            else:
                found.update({f"{name}.{i}": tuple(p.split()) for i, p in enumerate(pattern)})
        return found

    def map(self, key: str, factor: str) -> DimMap:
        """How one tensor argument reads one factor."""
        return self.maps.get(f"{key}.{factor}", self.maps.get(factor, IDENTITY))

    def fill_of(self, key: str) -> float:
        """What stands outside one tensor argument."""
        return self.fill if isinstance(self.fill, (int, float)) else self.fill.get(key, 0.0)


@dataclass(frozen=True)
class Bound:
    """A call with its spec and the factors read from it; ``spec=None`` is an op without a rule (runs whole)."""

    call: Call
    spec: Spec | None

    @cached_property
    def factors(self) -> dict[str, Factor]:
        """The factors by name, in the order of the outputs' dims first."""
        return _factors(self.call, self.spec) if self.spec is not None else {}

    def name_of(self, key: str, dim: int) -> str | None:
        """The factor on a dim of an input, None when the op must see that dim whole."""
        if self.spec is None or key not in self.spec.patterns:
            return None
        name = self.spec.patterns[key][dim].strip("[]")
        return name if name in self.factors and self.factors[name].splittable else None


def _factors(call: Call, spec: Spec) -> dict[str, Factor]:
    names: dict[str, None] = {}
    ins: dict[str, list[tuple[str, int, DimMap]]] = {}
    outs: dict[str, list[tuple[int, int]]] = {}
    extent: dict[str, int] = {}
    closed: set[str] = set()
    for i, pattern in enumerate(spec.outs):
        _match(f"output {i}", call, call.outs[i].shape, pattern.split())
        for dim, token in enumerate(pattern.split()):
            name = token.strip("[]")
            names[name] = None
            outs.setdefault(name, []).append((i, dim))
            extent.setdefault(name, call.outs[i].shape[dim])
            closed |= {name} if token != name else set()
    for key, tokens in spec.patterns.items():
        operand = call.tensors.get(key)
        if operand is None:
            continue
        _match(key, call, operand.shape, tokens)
        for dim, token in enumerate(tokens):
            name = token.strip("[]")
            names[name] = None
            ins.setdefault(name, []).append((key, dim, spec.map(key, name)))
            extent.setdefault(name, operand.shape[dim])
            closed |= {name} if token != name else set()
    names.pop(".", None)
    return {
        name: Factor(
            name,
            tuple(ins.get(name, ())),
            tuple(outs.get(name, ())),
            extent[name],
            name not in closed and (name in outs or spec.reduce is not None),
        )
        for name in names
    }


def _match(key: str, call: Call, shape: tuple[int, ...], tokens: Sequence[str]) -> None:
    if len(tokens) != len(shape):
        raise CompileError(
            f"the rule of {call.target} gives {key} the dims {' '.join(tokens)!r}, its shape is {list(shape)}"
        )


@dataclass(frozen=True)
class Local:
    """One rank's view of a call, for a rule's local form: what it reads and makes, in global coordinates."""

    call: Call
    bound: Bound
    split: Mapping[str, tuple[int, int]]  # factor -> (coordinate, parts) for the factors that are split

    def is_split(self, factor: str) -> bool:
        """Whether this factor is split over an axis here."""
        return factor in self.split

    def out(self, factor: str) -> Interval:
        """The indices of a factor that this rank computes."""
        extent = self.bound.factors[factor].extent
        if factor not in self.split:
            return Interval(0, extent)
        coordinate, parts = self.split[factor]
        return blocks(extent, parts)[coordinate]

    def reads(self, key: str, factor: str) -> Indices:
        """The indices of its dim that this rank was given for a tensor argument (all of them when not split)."""
        for name, dim, index_map in self.bound.factors[factor].ins:
            if name == key:
                extent = self.call.tensors[key].shape[dim]
                if factor not in self.split:
                    return IDENTITY.read(Interval(0, extent), extent)
                return index_map.read(self.out(factor), extent)
        raise KeyError(f"{key} has no dim {factor}")

    def shape(self, output: int = 0) -> tuple[int, ...]:
        """The shape of this rank's shard of an output."""
        tokens = self.bound.spec.outs[output].split() if self.bound.spec else []
        sizes = self.call.outs[output].shape
        return tuple(
            len(self.out(t.strip("[]"))) if t.strip("[]") in self.split else n
            for t, n in zip(tokens, sizes, strict=True)
        )


RuleFunction = Callable[[Call], Spec | None]


@dataclass(frozen=True)
class Rule:
    """An entry of the op table."""

    function: RuleFunction
    where: str  # file:line of the entry, for messages
    samples: Callable[[Any], Any] | None = None


RULES: dict[Any, Rule] = {}
"""The op table, by target."""


def rule(*targets: Any, samples: Callable[[Any], Any] | None = None) -> Callable[[RuleFunction], RuleFunction]:
    """Register the rule of one or several ops (``torch.ops`` overloads, or functions that a graph calls).

    The decorated function takes a `Call` and returns a `Spec`, or None when the op has to run whole for these arguments.
    ``samples(rng)`` makes a random `Sample` of the op for the generated law tests.
    """

    def register(function: RuleFunction) -> RuleFunction:
        code = function.__code__
        entry = Rule(function, f"{code.co_filename}:{code.co_firstlineno}", samples)
        for target in targets:
            RULES[target] = entry
        return function

    return register


FALLBACKS: list[Callable[[Any], Rule | None]] = []
"""Ways to find the rule of a target that has no entry of its own."""


def fallback_rule(matches: Callable[[Any], bool], function: RuleFunction) -> None:
    """Register one rule for every op without an entry for which ``matches(target)`` is true."""
    entry = Rule(function, f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}")
    FALLBACKS.append(lambda target: entry if matches(target) else None)


def find_rule(target: Any) -> Rule | None:
    """The entry of an op, or None."""
    if target in RULES:
        return RULES[target]
    return next((entry for find in FALLBACKS if (entry := find(target)) is not None), None)


@dataclass(frozen=True)
class Sample:
    """A random case of an op for the law tests: a function of tensors, the global shapes, and what to check.

    ``make`` builds input ``i`` from its shape (standard normal by default); ``grad`` says which inputs take gradients.
    """

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    make: Mapping[int, Callable[[torch.Size], torch.Tensor]] = field(default_factory=dict)
    label: str = ""


def bind(node: fx.Node) -> Bound:
    """The call of a ``call_function`` node with its rule applied."""
    call = call_of(node)
    entry = find_rule(node.target)
    if entry is None:
        return Bound(call, None)
    where = f"the rule of {node.meta.get('label', node.name)} ({entry.where})"
    try:
        spec = entry.function(call)
    except Exception as error:
        raise CompileError(f"{where} fails with {type(error).__name__}: {error}") from error
    if spec is not None:
        _check(where, call, spec)
    return Bound(call, spec)


def _check(where: str, call: Call, spec: Any) -> None:
    """Refuse what a rule returned if it does not describe the call."""
    if not isinstance(spec, Spec):
        raise CompileError(f"{where} returns {type(spec).__name__}; return a Spec, or None to run the op whole")
    if len(spec.outs) != len(call.outs):
        raise CompileError(f"{where} gives dims for {len(spec.outs)} outputs; the op has {len(call.outs)}")
    known = [name for name, _ in signature(call.target)]
    strange = [key for key in spec.patterns if key.partition(".")[0] not in known]
    missing = [key for key, operand in call.tensors.items() if key not in spec.patterns and operand.ndim]
    if missing and strange:  # a rule of several ops may name arguments that this one has not
        raise CompileError(f"{where} gives no dims to {', '.join(missing)}, but to {', '.join(strange)}; mend the name")


def call_of(node: fx.Node) -> Call:
    """The call of a node: arguments by name, tensors as operands."""
    values = node.meta["val"]
    outs = tuple(values) if isinstance(values, (tuple, list)) else (values,)
    arguments = fx.node.map_aggregate(bind_arguments(node.target, node.args, node.kwargs), _operand)
    made = tuple(Operand(tuple(v.shape), v.dtype, node) for v in outs if isinstance(v, torch.Tensor))
    return Call(node.target, dict(arguments), made)


def _operand(value: Any) -> Any:
    if isinstance(value, fx.Node):
        meta = value.meta["val"]
        return Operand(tuple(meta.shape), meta.dtype, value) if isinstance(meta, torch.Tensor) else value
    return value


@lru_cache(maxsize=2048)
def signature(target: Any) -> tuple[tuple[str, Any], ...]:
    """The parameters of a target with their defaults (`inspect.Parameter.empty` where there is none)."""
    if isinstance(target, torch._ops.OpOverload):
        arguments: Iterable[Any] = target._schema.arguments
        return tuple((a.name, a.default_value if a.has_default_value() else inspect.Parameter.empty) for a in arguments)
    return tuple((p.name, p.default) for p in inspect.signature(target).parameters.values())


def bind_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Positional and keyword arguments by name, defaults filled in."""
    bound: dict[str, Any] = {}
    for i, (name, default) in enumerate(signature(target)):
        bound[name] = args[i] if i < len(args) else kwargs.get(name, default)
    return bound
