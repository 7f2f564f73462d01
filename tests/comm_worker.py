"""What every transport must do, as checks of one rank; run by tests/test_comm*.py under each of them.

``python -m tests.comm_worker NAME`` runs one in a process that torchrun or mpirun started.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
from torch import Tensor

from halofx.runtime.comm import Comm, current, finalize, init

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def neighbors(comm: Comm) -> tuple[int, int]:
    """The ranks before and after this one on a ring."""
    return (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size


def sample(dtype: torch.dtype, rank: int, shape: tuple[int, ...] = (3, 4)) -> Tensor:
    """Values that depend on the rank and are exact in every dtype."""
    values = torch.randint(0, 9, shape, generator=torch.Generator().manual_seed(rank))
    return values.to(dtype) if dtype != torch.bool else values > 4


def check_exchange_of_every_dtype(comm: Comm) -> None:
    before, after = neighbors(comm)
    for tag, dtype in enumerate(DTYPES):
        received = torch.empty(3, 4, dtype=dtype)
        comm.start_exchange([(after, sample(dtype, comm.rank))], [(before, received)], tag, f"halo.{tag}").wait()
        assert torch.equal(received, sample(dtype, before)), dtype


def check_sum_of_every_dtype(comm: Comm) -> None:
    world = tuple(range(comm.size))
    for dtype in DTYPES:
        total = sample(dtype, comm.rank)
        comm.start_all_reduce(total, world, "sum", "sum").wait()
        parts = [sample(dtype, rank) for rank in world]
        expected = torch.stack(parts).any(0) if dtype == torch.bool else sum(parts, torch.zeros(3, 4, dtype=dtype))
        assert total.dtype == dtype
        assert torch.equal(total, expected), dtype


def check_extremes_of_every_dtype(comm: Comm) -> None:
    world = tuple(range(comm.size))
    for dtype in (dtype for dtype in DTYPES if not dtype.is_complex):
        for op, reference in (("max", torch.amax), ("min", torch.amin)):
            values = sample(dtype, comm.rank)
            signed = values if dtype in (torch.bool, torch.uint8) else values - 4
            comm.start_all_reduce(signed, world, op, op).wait()
            parts = [sample(dtype, rank) for rank in world]
            stacked = torch.stack(parts if dtype in (torch.bool, torch.uint8) else [part - 4 for part in parts])
            assert torch.equal(signed, reference(stacked, 0)), (dtype, op)


def check_extremes_of_special_floats(comm: Comm) -> None:
    """NaN wins, as in torch, whichever rank has it and whatever its sign; infinities and zeros keep their order."""
    inf, nan = float("inf"), float("nan")
    special = torch.tensor([nan, -inf, inf, -0.0, 0.0, 1e-40, -1e-40, 2.0])
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        rows = torch.stack([special.roll(shift) * (-1) ** shift for shift in range(comm.size)]).to(dtype)
        for op, reference in (("max", torch.amax), ("min", torch.amin)):
            mine = rows[comm.rank].clone()
            comm.start_all_reduce(mine, tuple(range(comm.size)), op, op).wait()
            assert torch.equal(mine.nan_to_num(99), reference(rows, 0).nan_to_num(99)), (dtype, op, mine)


def check_sums_are_bitwise_equal(comm: Comm) -> None:
    torch.manual_seed(comm.rank)
    world = tuple(range(comm.size))
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        total = torch.randn(1013).to(dtype)
        comm.start_all_reduce(total, world, "sum", "norm").wait()
        copies = comm.all_gather_bytes(total.view(torch.uint8).numpy().tobytes(), "digest")
        assert len(set(copies)) == 1, dtype


def check_half_is_summed_in_float32(comm: Comm) -> None:
    # One after the other in bfloat16, the ones would be lost against 256.
    value = torch.tensor([256.0 if comm.rank == 0 else 1.0], dtype=torch.bfloat16)
    comm.start_all_reduce(value, tuple(range(comm.size)), "sum", "sum").wait()
    assert value.item() == torch.tensor(255.0 + comm.size).bfloat16().item()


def check_two_exchanges_in_flight(comm: Comm) -> None:
    before, after = neighbors(comm)
    a, b = torch.empty(5), torch.empty(7)
    mine = [torch.full((5,), float(comm.rank)), torch.full((7,), comm.rank + 0.5)]
    first = comm.start_exchange([(after, mine[0])], [(before, a)], 1, "a")
    second = comm.start_exchange([(after, mine[1])], [(before, b)], 2, "b")
    second.wait()
    first.wait()
    first.wait()
    assert a.eq(before).all()
    assert b.eq(before + 0.5).all()


def check_equal_tags_keep_their_order(comm: Comm) -> None:
    before, after = neighbors(comm)
    received = [torch.empty(3) for _ in range(6)]
    pending = [
        comm.start_exchange([(after, torch.full((3,), float(i)))], [(before, buffer)], 7, f"n{i}")
        for i, buffer in enumerate(received)
    ]
    for started in reversed(pending):
        started.wait()
    assert [int(buffer[0]) for buffer in received] == list(range(6))


def check_halos_among_collectives(comm: Comm) -> None:
    before, after = neighbors(comm)
    world = tuple(range(comm.size))
    for step in range(20):
        halo, total = torch.empty(4), torch.tensor([float(comm.rank + step)])
        reduction = comm.start_all_reduce(total, world, "sum", "norm")
        exchange = comm.start_exchange([(after, torch.full((4,), float(step)))], [(before, halo)], step, "conv")
        for started in (reduction, exchange) if step % 2 else (exchange, reduction):
            started.wait()
        assert halo.eq(step).all()
        assert total.item() == sum(world) + step * comm.size


def check_empty_messages_are_not_sent(comm: Comm) -> None:
    before, after = neighbors(comm)
    comm.counters.reset()
    nothing = torch.empty(0, 4)
    comm.start_exchange([(after, nothing)], [(before, nothing)], 0, "empty").wait()
    comm.start_all_reduce(nothing, tuple(range(comm.size)), "sum", "empty").wait()
    comm.start_all_reduce(torch.ones(3), (comm.rank,), "sum", "alone").wait()
    assert not comm.counters
    received = torch.empty(2)
    comm.start_exchange([(after, torch.ones(2)), (before, nothing)], [(before, received)], 0, "mixed").wait()
    assert set(comm.counters) == {("exchange", "mixed")}
    assert comm.counters.total().messages == 1
    assert comm.counters.total("exchange").bytes == 8


def check_gathered_bytes(comm: Comm) -> None:
    for longest in (0, 1, 1000):
        data = [bytes([rank]) * (longest * rank) for rank in range(comm.size)]
        assert comm.all_gather_bytes(data[comm.rank], "digest") == data


def check_groups_of_partitions(comm: Comm) -> None:
    """Pairs, and those of equal parity: two axes of a mesh; the second `prepare` is a repetition."""
    pairs = [tuple(range(first, min(first + 2, comm.size))) for first in range(0, comm.size, 2)]
    parity = [tuple(range(0, comm.size, 2)), tuple(range(1, comm.size, 2))]
    for _ in range(2):
        comm.prepare([pairs, parity, [(rank,) for rank in range(comm.size)], [tuple(range(comm.size))]])
    mine = [next(group for group in partition if comm.rank in group) for partition in (pairs, parity)]
    values = [torch.tensor([float(comm.rank)]) for _ in mine]
    started = [comm.start_all_reduce(v, group, "sum", "axis") for v, group in zip(values, mine, strict=True)]
    for pending in reversed(started):
        pending.wait()
    assert [value.item() for value in values] == [sum(group) for group in mine]


def check_buffers_of_autograd(comm: Comm) -> None:
    before, after = neighbors(comm)
    leaf, received = torch.ones(2, requires_grad=True), torch.zeros(2)
    comm.start_exchange([(after, leaf)], [(before, received)], 0, "grad").wait()
    assert not received.requires_grad
    assert received.eq(1).all()


def check_large_messages(comm: Comm) -> None:
    before, after = neighbors(comm)
    received = torch.empty(1 << 20)
    comm.start_exchange([(after, torch.full((1 << 20,), float(comm.rank)))], [(before, received)], 0, "big").wait()
    assert received.eq(before).all()
    total = torch.ones(1 << 20)
    comm.start_all_reduce(total, tuple(range(comm.size)), "sum", "big").wait()
    assert total.eq(comm.size).all()


CHECKS = {name: check for name, check in list(globals().items()) if name.startswith("check_")}


def run_all(rank: int) -> str:
    """Every check on this rank; names the transport."""
    comm = current()
    assert comm.rank == rank
    for check in CHECKS.values():
        check(comm)
    return comm.name


def run_values(rank: int) -> tuple[int, Tensor, torch.dtype, bool]:
    return rank, torch.full((2,), rank), torch.get_default_dtype(), torch.is_grad_enabled()


def await_last(rank: int) -> None:
    """Wait for a message that the last rank never sends."""
    comm = current()
    if rank < comm.size - 1:
        comm.start_exchange([], [(comm.size - 1, torch.empty(3))], 0, "enc.conv.h0").wait()


def raise_on_last(rank: int) -> None:
    if rank == current().size - 1:
        raise ValueError("bad weather")
    await_last(rank)


def kill_last(rank: int) -> None:
    if rank == current().size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    await_last(rank)


def kill_last_before_reduction(rank: int) -> None:
    comm = current()
    if rank == comm.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.start_all_reduce(torch.ones(3), tuple(range(comm.size)), "sum", "norm.merge").wait()


def dawdle(rank: int) -> None:
    """The last rank computes for longer than the others wait."""
    if rank == current().size - 1:
        time.sleep(20)
    await_last(rank)


def launch_within(rank: int) -> None:
    from halofx.runtime.launch import launch

    launch(run_values, 2)


def sum_for_ever(rank: int) -> None:
    comm = current()
    while True:
        comm.start_all_reduce(torch.ones(3), tuple(range(comm.size)), "sum", "norm.merge").wait()


def main() -> None:
    comm = init(timeout=float(os.environ.get("TEST_TIMEOUT", "60")))
    assert init() is comm is current()
    result = globals()[sys.argv[1]](comm.rank)
    print(f"rank {comm.rank}: {result}", flush=True)
    finalize()


if __name__ == "__main__":
    main()
