"""A backward pass in two: first the cotangents of what came in, which another stage waits for; the weights' gradients later.

    out <- conv2 <- relu <- conv1 <- x           first: conv2, relu, conv1 with respect to x alone
             |                |                  later: conv2 and conv1 with respect to their weights, from the cotangents
             w2               w1                         that reached them, which were kept

Qi et al., "Zero bubble pipeline parallelism", ICLR 2024. Nodes are visited in an order that is the same on all ranks, because
the weights' part may hold messages. A weight that several nodes reach has its gradient in the first phase.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass
class Later:
    """The second phase: where cotangents were kept, and for which weights."""

    borders: list[tuple[Node, list[int]]] = field(default_factory=list)  # node, positions of the weights behind it
    kept: dict[Node, Sequence[Tensor | None]] = field(default_factory=dict)
    weights: Sequence[Tensor] = ()
    first: dict[int, Tensor] = field(default_factory=dict)  # gradients that the first phase has made

    def run(self) -> list[Tensor | None]:
        """The gradients of the weights."""
        found: list[Tensor | None] = [self.first.get(i) for i in range(len(self.weights))]
        for node, behind in self.borders:
            grads = [(i, g) for i, g in enumerate(self.kept.pop(node, ())) if g is not None]
            if not grads:
                continue
            edges = [GradientEdge(node, i) for i, _ in grads]
            wanted = [self.weights[i] for i in behind]
            made = torch.autograd.grad(edges, wanted, [g for _, g in grads], allow_unused=True)
            for i, grad in zip(behind, made, strict=True):
                found[i] = grad
        self.borders.clear()
        return found


def first_phase(
    outs: Sequence[Tensor], cotangents: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[list[Tensor | None], Later]:
    """The gradients of the inputs, and what the second phase needs."""
    roots = [get_gradient_edge(y).node for y in outs]
    order = _visited(roots)
    ends = {get_gradient_edge(x).node for x in inputs}
    to_inputs = _reaching(order, {node: frozenset({0}) for node in ends})
    leaves = {get_gradient_edge(w).node: i for i, w in enumerate(weights)}
    to_weights = _reaching(order, {node: frozenset({i}) for node, i in leaves.items()})
    later = Later(weights=weights)
    behind: dict[Node, list[int]] = {}
    for node in order:
        inner = bool(to_inputs[node]) and node not in ends
        if inner or node in roots:
            children = [n for n, _ in node.next_functions if n is not None and (not inner or not to_inputs[n])]
            reached = frozenset[int]().union(*(to_weights[n] for n in children)) if inner else to_weights[node]
            if reached:
                behind[node] = sorted(reached)
    times = [0] * len(weights)
    for positions in behind.values():
        for i in positions:
            times[i] += 1
    alone = {node: [i for i in positions if times[i] == 1] for node, positions in behind.items()}
    later.borders = [(node, positions) for node, positions in alone.items() if positions]
    shared = [i for i, count in enumerate(times) if count > 1]
    hooks = [node.register_prehook(_keeper(later.kept, node)) for node, _ in later.borders]
    try:
        asked = [*inputs, *(weights[i] for i in shared)]
        made = torch.autograd.grad(outs, asked, cotangents, retain_graph=True, allow_unused=True) if asked else ()
    finally:
        for hook in hooks:
            hook.remove()
    ran = set(later.kept)
    for root, cotangent, y in zip(roots, cotangents, outs, strict=True):  # roots that lead to no input did not run
        if root in alone and root not in ran:
            slots, at = list(later.kept.get(root, ())), get_gradient_edge(y).output_nr
            slots += [None] * (at + 1 - len(slots))
            slots[at] = cotangent if slots[at] is None else slots[at] + cotangent  # type: ignore[operator]
            later.kept[root] = slots
    later.first = {i: g for i, g in zip(shared, made[len(inputs) :], strict=True) if g is not None}
    return list(made[: len(inputs)]), later


def _keeper(kept: dict[Node, Sequence[Tensor | None]], node: Node) -> Callable[..., None]:
    def keep(grads: Any) -> None:
        kept[node] = tuple(grads)

    return keep


def _visited(roots: Sequence[Node]) -> list[Node]:
    """Every node behind some, each before those that it reads: in an order that depends on the graph alone."""
    found: dict[Node, None] = {}
    stack = [(node, False) for node in reversed(roots)]
    opened: set[Node] = set()
    while stack:
        node, closed = stack.pop()
        if closed:
            found[node] = None
        elif node not in opened:
            opened.add(node)
            stack.append((node, True))
            stack += [(n, False) for n, _ in reversed(node.next_functions) if n is not None and n not in opened]
    return list(reversed(found))


def _reaching(order: Sequence[Node], ends: dict[Node, frozenset[int]]) -> dict[Node, frozenset[int]]:
    """Which ends can be reached from every node."""
    found: dict[Node, frozenset[int]] = {}
    for node in reversed(order):
        own = ends.get(node, frozenset())
        found[node] = own.union(*(found[n] for n, _ in node.next_functions if n is not None))
    return found
