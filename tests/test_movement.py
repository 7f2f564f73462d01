"""The one movement: what every kind delivers, its adjoint law, its messages. Ranks are threads; messages are real."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

import halofx
from halofx.compiler.index_map import IndexMap, Indices, Run, Strided, Table, expand, length, span
from halofx.compiler.interval import Interval, blocks
from halofx.compiler.redistribution import Redistribution
from halofx.runtime.comm import current
from halofx.runtime.movement import AllReduce, Group, Move, Site, Vary, merge_moments, routes

KINDS = ("halo", "edges", "strided", "table", "gather", "slice", "pick", "swap")


def plan_of(kind: str, rng: Random) -> tuple[Redistribution, tuple[int, ...]]:
    """A random movement of a kind, and the global shape that it moves."""
    parts = rng.randint(2, 5)
    shape = [rng.randint(1, 9) for _ in range(3)]
    dim = rng.randrange(3)
    n = shape[dim]
    if kind == "gather":
        return Redistribution("depth", parts, dim, None, n, 0, (span(Interval(0, n)),) * parts), tuple(shape)
    if kind == "pick":
        a = rng.randrange(n)
        return Redistribution("depth", parts, dim, None, n, 0, ((Run(a, 1),),) * parts), tuple(shape)
    if kind == "swap":
        to = (dim + 1) % 3
        reads = tuple(span(b) for b in blocks(shape[to], parts))
        return Redistribution("depth", parts, dim, to, n, shape[to], reads), tuple(shape)
    reads = reads_of(kind, n, parts, rng)
    have = None if kind == "slice" else dim
    return Redistribution(
        "depth", parts, have, dim, n if have is not None else 0, n, reads, rng.choice([0.0, 7.0])
    ), tuple(shape)


def reads_of(kind: str, n: int, parts: int, rng: Random) -> tuple[Indices, ...]:
    out = rng.randint(1, 12)
    if kind in ("halo", "slice"):
        m = IndexMap(rng.randint(1, 3), rng.randint(1, 3), -rng.randint(0, 4), rng.randint(0, 4))
    elif kind == "edges":
        pad = rng.randint(0, n - 1)
        edge = rng.choice(["replicate", "reflect", "circular", "clip"])
        m, out = IndexMap(1, 1, -pad, 0 if rng.random() < 0.5 else min(pad, n - 1), edge), n  # type: ignore[arg-type]
    elif kind == "strided":
        step = rng.choice([-2, -1, 1, 2, 3])
        out = 1 + (n - 1) // abs(step)
        m = Strided(n - 1 if step < 0 else 0, step)  # type: ignore[assignment]
    else:
        m = Table(tuple(rng.randrange(n) for _ in range(out)))  # type: ignore[assignment]
    return tuple(m.read(b, n) for b in blocks(out, parts))


def route(plan: Redistribution) -> Move:
    comm = current()
    return Move(routes(plan, comm.rank, range(plan.parts), Site(comm, "node", 0)))


def held(x: Tensor, plan: Redistribution, rank: int) -> Tensor:
    if plan.have is None:
        return x
    b = blocks(plan.have_extent, plan.parts)[rank]
    return x.narrow(plan.have, b.start, len(b)).clone()


def wanted(x: Tensor, plan: Redistribution, rank: int) -> Tensor:
    """What the movement must deliver, by plain indexing of the global tensor."""
    slabs = [
        torch.full_like(x.narrow(plan.dim, 0, 1), plan.fill) if i is None else x.narrow(plan.dim, i, 1)
        for i in expand(plan.reads[rank])
    ]
    return torch.cat(slabs, plan.dim) if slabs else x.narrow(plan.dim, 0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_delivers_what_is_read_and_its_adjoint(kind: str) -> None:
    for seed in range(40):
        rng = Random(f"{kind} {seed}")
        plan, shape = plan_of(kind, rng)
        x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        forms = torch.Generator().manual_seed(seed + 1)
        whole = plan.need is None
        ys = [
            torch.randn(wanted(x, plan, 0 if whole else r).shape, dtype=torch.float64, generator=forms)
            for r in range(plan.parts)
        ]
        ys = [ys[0]] * plan.parts if whole else ys

        def run(rank: int, plan: Redistribution = plan, x: Tensor = x, ys: list[Tensor] = ys) -> tuple[Tensor, Tensor]:
            shard = held(x, plan, rank).requires_grad_()
            out = route(plan)(shard)
            (grad,) = torch.autograd.grad(out, shard, ys[rank])
            return out.detach(), grad

        results = halofx.launch(run, plan.parts, timeout=20)
        fill_free = x.new_full((), plan.fill)
        left = 0.0
        for rank, (out, _) in enumerate(results):
            assert torch.equal(out, wanted(x, plan, rank)), f"{kind} {seed}: {plan}"
            # the linear part: fill is a constant that the adjoint law does not see
            linear = out - fill_free * mask_of_fill(x, plan, rank)
            left += float((linear * ys[rank]).sum()) if not (whole and rank) else 0.0
        grads = [g for _, g in results]
        right = sum(float((held(x, plan, r) * grads[r]).sum()) for r in range(1 if plan.have is None else plan.parts))
        assert left == pytest.approx(right, rel=1e-10, abs=1e-10), f"{kind} {seed}: {plan}"
        if plan.have is None:
            assert all(torch.equal(g, grads[0]) for g in grads)


def mask_of_fill(x: Tensor, plan: Redistribution, rank: int) -> Tensor:
    marks = torch.tensor([float(i is None) for i in expand(plan.reads[rank])], dtype=x.dtype)
    shape = [1] * x.dim()
    shape[plan.dim] = len(marks)
    return marks.view(shape)


def test_double_backward() -> None:
    plan = Redistribution("depth", 3, 0, 0, 7, 7, tuple(IndexMap(1, 1, -2, 2).read(b, 7) for b in blocks(7, 3)))

    def run(rank: int) -> Tensor:
        x = torch.arange(7, dtype=torch.float64)
        shard = held(x, plan, rank).requires_grad_()
        (g,) = torch.autograd.grad((route(plan)(shard) ** 3).sum(), shard, create_graph=True)
        return torch.autograd.grad((g**2).sum(), shard)[0]

    x = torch.arange(7, dtype=torch.float64, requires_grad=True)
    total = sum((wanted(x, plan, r) ** 3).sum() for r in range(3))
    (g,) = torch.autograd.grad(total, x, create_graph=True)
    (expected,) = torch.autograd.grad((g**2).sum(), x)
    assert torch.allclose(torch.cat(halofx.launch(run, 3)), expected, rtol=1e-12)


@pytest.mark.parametrize(("reads", "kind"), [
    (IndexMap(1, 1, -1, 1), "halo_exchange"), (IndexMap(1, 1, -5, 5), "halo_exchange"), (IndexMap(1, 1, 0, 0, "clip"), "local_slice"),
    (Strided(7, -1), "exchange"),
])  # fmt: skip
def test_kind_is_read_off_the_pieces(reads: IndexMap, kind: str) -> None:
    plan = Redistribution("depth", 4, 0, 0, 8, 8, tuple(reads.read(b, 8) for b in blocks(8, 4)))
    assert plan.kind == kind


def test_messages_are_faces_only() -> None:
    """CONFORMANCE C4: a rank sends its two faces, not its volume."""
    plan = Redistribution("depth", 4, 2, 2, 16, 16, tuple(IndexMap(1, 1, -1, 1).read(b, 16) for b in blocks(16, 4)))

    def run(rank: int) -> tuple[int, int]:
        comm = current()
        comm.counters.reset()
        route(plan)(torch.zeros(1, 2, 4, 5, 5))
        total = comm.counters.total("exchange")
        return total.messages, total.bytes

    face = 1 * 2 * 5 * 5 * 4
    assert halofx.launch(run, 4) == [(1, face), (2, 2 * face), (2, 2 * face), (1, face)]


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last_3d])
def test_memory_format_is_kept(form: torch.memory_format) -> None:
    """CONFORMANCE C6: faces are packed, the tensor keeps its format."""
    plan = Redistribution("depth", 2, 2, 2, 8, 8, tuple(IndexMap(1, 1, -1, 1).read(b, 8) for b in blocks(8, 2)))

    def run(rank: int) -> bool:
        x = torch.randn(1, 3, 4, 5, 6).contiguous(memory_format=form).requires_grad_()
        y = route(plan)(x)
        y.sum().backward()
        return y.is_contiguous(memory_format=form)

    assert halofx.launch(run, 2) == [True, True]


def test_all_reduce_and_vary_are_adjoint() -> None:
    def run(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        group = Group(Site(current(), "node"), (0, 1, 2))
        x = torch.full((2,), float(rank + 1), dtype=torch.float64, requires_grad=True)
        y = AllReduce(group, "sum", rank)(x)
        (gx,) = torch.autograd.grad(y, x, torch.tensor([3.0, 4.0], dtype=torch.float64))
        w = torch.ones(2, dtype=torch.float64, requires_grad=True)
        (gw,) = torch.autograd.grad((Vary(group)(w) * (rank + 1)).sum(), w)
        return y.detach(), gx, gw

    for y, gx, gw in halofx.launch(run, 3):
        assert y.tolist() == [6.0, 6.0] and gx.tolist() == [3.0, 4.0] and gw.tolist() == [6.0, 6.0]


def test_moments_merge_exactly_for_uneven_and_empty_parts() -> None:
    x = 1e6 + torch.randn(3, 11, dtype=torch.float64)
    parts = [x[:, a:b] for a, b in ((0, 5), (5, 5), (5, 6), (6, 11))]
    rows = torch.stack([
        torch.stack([torch.full((3,), float(p.shape[1]), dtype=torch.float64),
                     p.mean(1) if p.numel() else torch.zeros(3, dtype=torch.float64),
                     p.var(1, correction=0) * p.shape[1] if p.numel() else torch.zeros(3, dtype=torch.float64)])
        for p in parts
    ])  # fmt: skip
    count, mean, m2 = merge_moments(rows)
    assert count.tolist() == [11.0] * 3
    assert torch.allclose(mean, x.mean(1), rtol=1e-14) and torch.allclose(m2 / 10, x.var(1), rtol=1e-9)


def test_lengths() -> None:
    assert length((Run(0, 3), Run(None, 2))) == 5


@pytest.mark.parametrize("kind", KINDS)
def test_traffic_is_the_sum_of_the_pieces(kind: str) -> None:
    for seed in range(60):
        plan, shape = plan_of(kind, Random(f"traffic {kind} {seed}"))
        for back, (messages, elements) in ((False, plan.traffic[:2]), (True, plan.traffic[2:])):
            tables = [plan.backward(c) if back else plan.forward(c) for c in range(plan.parts)]
            sizes = [(plan.forward(c) if back else plan.backward(c)).sizes for c in range(plan.parts)]
            moved = {d for d in (plan.have, plan.need) if d is not None}
            sent: dict[tuple[int, int], int] = {}
            for c, table in enumerate(tables):
                for t in table.sends:
                    box = {d: dict(sizes[c]).get(d, shape[d]) for d in moved} | {d: r.count for d, r in t.take}
                    count = 1
                    for n in box.values():
                        count *= n
                    sent[c, t.peer] = sent.get((c, t.peer), 0) + count
            assert sum(1 for n in sent.values() if n) == messages and sum(sent.values()) == elements, (kind, seed, plan)
