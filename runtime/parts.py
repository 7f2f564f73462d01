"""Taking a program apart into the graphs of a rank's stages: what each takes, computes and gives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import fx

from halofx.compiler.facts import calls, ends_of, source_of
from halofx.compiler.primitives import transfer, vary_all
from halofx.compiler.program import Program
from halofx.compiler.stages import Action, Stages
from halofx.runtime.executor import Part
from halofx.runtime.shards import GATHER_TAG

PIPE_TAG = 20000
"""Tags of the messages between stages lie above those of a program's movements, below those of gathers."""


@dataclass
class Parts:
    """The graphs of one rank's stages; dicts by stage."""

    stages: dict[int, Part] = field(default_factory=dict)
    incoming: dict[int, tuple[fx.Node, ...]] = field(default_factory=dict)  # transfer nodes
    outgoing: dict[int, tuple[fx.Node, ...]] = field(default_factory=dict)
    wanted: dict[int, tuple[fx.Node, ...]] = field(default_factory=dict)  # outputs, and what the part after takes
    updates: dict[int, tuple[tuple[str, fx.Node], ...]] = field(default_factory=dict)  # (buffer, new value)
    buckets: dict[int, tuple[fx.Node, ...]] = field(default_factory=dict)  # vary_all nodes
    written: frozenset[str] = frozenset()  # the buffers that the program writes
    after: Part | None = None  # what runs once, where the last stage is
    sources: tuple[fx.Node, ...] = ()  # of its inputs, those that stages make
    known: Part | None = None  # those of them that depend on the inputs alone
    tags: dict[fx.Node, int] = field(default_factory=dict)
    output_tag: int = GATHER_TAG - 2

    @staticmethod
    def last_backward(order: Sequence[Action], stage: int) -> Action:
        """The action after which a stage's gradients are complete."""
        return next(a for a in reversed(order) if a.stage == stage and a.kind in ("B", "W"))


def parts_of(program: Program, stages: Stages, me: int) -> Parts:
    """The parts of the stages at one coordinate of axis ``pipe``."""
    nodes = [n for n in program.graph.nodes if n.op != "output"]
    transfers = [n for n in nodes if calls(n, transfer)]
    found = Parts(written=frozenset(program.updates), tags={t: PIPE_TAG + 2 * i for i, t in enumerate(transfers)})
    outputs, updates = program.results()
    after = [n for n in nodes if n.meta.get("after")]
    sources = tuple(dict.fromkeys(_starts(after)))
    named = list(zip(program.updates, updates, strict=True))
    for stage in stages.own(me):
        own = [n for n in nodes if stage_of(n) == stage and not n.meta.get("after")]
        found.incoming[stage] = tuple(t for t in transfers if ends_of(t)[1] == stage)
        found.outgoing[stage] = tuple(t for t in transfers if ends_of(t)[0] == stage)
        inside = set(own)
        found.wanted[stage] = tuple(n for n in dict.fromkeys((*outputs, *sources)) if n in inside)
        found.updates[stage] = tuple((name, n) for name, n in named if n in inside)
        found.buckets[stage] = tuple(n for n in own if calls(n, vary_all))
        sent = [source_of(t) for t in found.outgoing[stage]]
        gives = tuple(dict.fromkeys((*sent, *found.wanted[stage], *(n for _, n in found.updates[stage]))))
        found.stages[stage] = part(nodes, own, gives)
    if after and stages.count - 1 in found.stages:
        gives = tuple(n for n in dict.fromkeys((*outputs, *updates)) if n.meta.get("after"))
        found.after, found.sources = _part_after(nodes, after, sources, gives), sources
        ready = [n for n in sources if n.meta.get("known")]
        found.known = part(nodes, _ancestors(ready), tuple(ready)) if ready else None
    return found


def stage_of(node: fx.Node) -> int | None:
    """The stage of a node; None for what every stage has (inputs and constants)."""
    if node.op == "get_attr" or "input" in node.meta or "rng" in node.meta:
        return None
    return int(node.meta.get("stage", 0))


def part(nodes: Sequence[fx.Node], own: Iterable[fx.Node], outputs: tuple[fx.Node, ...]) -> Part:
    """The part that computes ``own``: with the inputs and constants that it uses."""
    inside = set(own)
    used = inside | {s for n in inside if not calls(n, transfer) for s in n.all_input_nodes if stage_of(s) is None}
    needed = [n for n in nodes if n in used]
    inputs = tuple(n for n in needed if n.op == "placeholder" or calls(n, transfer))
    return Part(inputs, tuple(needed), outputs)


def _starts(after: Sequence[fx.Node]) -> Iterable[fx.Node]:
    """What the part after takes of the stages: addends of the sums over the batch, and values that all micro-batches share."""
    for node in after:
        for source in node.all_input_nodes:
            if not source.meta.get("after") and stage_of(source) is not None and "state" not in source.meta:
                yield source


def _part_after(
    nodes: Sequence[fx.Node], after: Sequence[fx.Node], sources: tuple[fx.Node, ...], gives: tuple[fx.Node, ...]
) -> Part:
    inside = set(after)
    state = [s for n in after for s in n.all_input_nodes if "state" in s.meta]
    constants = {s for n in after for s in n.all_input_nodes if s.op == "get_attr"}
    inputs = (*sources, *dict.fromkeys(state))
    return Part(inputs, tuple(n for n in nodes if n in inside or n in constants or n in set(inputs)), gives)


def _ancestors(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    found: dict[fx.Node, None] = {}
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found and stage_of(node) is not None:
            found[node] = None
            stack += node.all_input_nodes
    return list(found)
