"""Checks of order: what runs, and what hangs, depending on the order in which operations are asked for."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta
from typing import Any

import torch
from nccl_rank import SMALL, Rank, since

from megatron_recycle.plan import Costs, Grid, Plan, Problem, Worker, postings, transfers
from megatron_recycle.planner import quick
from megatron_recycle.runtime.compute.device import Pace, device_of
from megatron_recycle.runtime.compute.stopwatch import Stopwatch

_MICROBATCHES = 4


def several_ranks(at: Rank) -> None:
    """Ranks share the GPU: transfers and sums are right; what communicators cost in seconds and memory."""
    group, peer = at.group(), at.rank ^ 1
    begun = time.monotonic()
    total = at.total(group)
    at.tell(first_all_reduce_s=since(begun), right=total == at.size)
    tensor = at.tensor(SMALL, 7.0 if at.rank < peer else 0.0)

    def transfer() -> None:
        (group.send if at.rank < peer else group.recv)([tensor], peer, 0).wait()
        at.sync()

    begun = time.monotonic()
    transfer()
    at.tell(first_of_a_pair_s=since(begun), right=total == at.size and float(tensor[0]) == 7.0)
    begun = time.monotonic()
    for _ in range(20):
        transfer()
    at.tell(later_ms=round(since(begun) * 50, 2))
    begun = time.monotonic()
    for _ in range(5):
        at.total(at.group())
    at.tell(five_more_groups_s=since(begun))
    if at.on_gpu:
        free, whole = torch.cuda.mem_get_info()
        at.tell(gpu_gib_in_use=round((whole - free) / 2**30, 2))


def _one_f_one_b(at: Rank, down: Any, up: Any, nbytes: int, ahead: int) -> None:
    """1F1B of two stages that post ``ahead`` receives before they need them, each in its own order."""
    kept: list[Any] = []
    posted: list[Any] = []
    outgoing, incoming = (down, up) if at.rank == 0 else (up, down)
    given = [at.tensor(nbytes, float(number)) for number in range(_MICROBATCHES)]
    taken = [at.tensor(nbytes, -1.0) for _ in range(_MICROBATCHES)]

    def post(upto: int) -> None:
        while len(posted) < min(upto, _MICROBATCHES):
            posted.append(incoming.recv([taken[len(posted)]], 1 - at.rank, 0))

    def send(number: int) -> None:
        kept.append(outgoing.send([given[number]], 1 - at.rank, 0))

    def receive(number: int) -> None:
        post(number + 1)
        posted[number].wait()
        post(number + 1 + ahead)

    if at.rank == 0:
        for forward, backward in ((0, None), (1, 0), (2, 1), (3, 2), (None, 3)):
            if forward is not None:
                send(forward)
                post((backward or 0) + ahead)
            if backward is not None:
                receive(backward)
    else:
        post(ahead)
        for number in range(_MICROBATCHES):
            receive(number)
            send(number)
    for work in kept:
        work.wait()
    at.tell(host_is_through=True)
    at.sync()
    at.tell(right=all(bool((tensor == number).all()) for number, tensor in enumerate(taken)))


def ahead_one_group(at: Rank) -> None:
    """1F1B, receives posted ahead, one group for both directions of a pair, small messages."""
    group = at.group()
    at.both_ways(group)
    _one_f_one_b(at, group, group, SMALL, ahead=2)


def not_ahead_one_group(at: Rank) -> None:
    """The same with receives posted only when they are needed."""
    group = at.group()
    at.both_ways(group)
    _one_f_one_b(at, group, group, SMALL, ahead=0)


def not_ahead_one_group_large(at: Rank) -> None:
    """The same with large messages."""
    group = at.group()
    at.both_ways(group)
    _one_f_one_b(at, group, group, at.library.large, ahead=0)


def ahead_group_per_direction(at: Rank) -> None:
    """1F1B, receives posted ahead, a group per direction, connected before, large messages."""
    down, up = at.group(), at.group()
    at.both_ways(down, up)
    _one_f_one_b(at, down, up, at.library.large, ahead=2)


def ahead_group_per_direction_unconnected(at: Rank) -> None:
    """The same, with first uses in the midst of the schedule, small messages."""
    _one_f_one_b(at, at.group(), at.group(), SMALL, ahead=2)


def _shrunken_plan() -> Plan:
    """2 pipelines of 2 stages without worker 1:1, whose micro-batches are guests of 0:1."""
    return quick(Problem(Grid(2, (_MICROBATCHES,) * 2), Costs.uniform(2, 1, 1, 1), (Worker(1, 1),)))


def _in_planned_order(at: Rank, group: Any) -> None:
    """All transfers of an iteration as the runtime posts them."""
    plan = _shrunken_plan()
    order, workers = transfers(plan), sorted(plan.workers)
    me, kept, right = workers[at.rank], [], True
    for transfer in postings(order, me):
        number = float(order.index(transfer))
        if transfer.source == me:
            kept.append(group.send([at.tensor(at.library.large, number)], workers.index(transfer.target), 0))
            continue
        tensor = at.tensor(at.library.large, -1.0)
        group.recv([tensor], workers.index(transfer.source), 0).wait()
        right = right and bool((tensor == number).all())
    for work in kept:
        work.wait()
    at.sync()
    at.tell(right=right, transfers=len(order))


def planned_order(at: Rank) -> None:
    """A plan with guests, posted in the planned order, on one communicator made before, large messages."""
    group = at.group()
    begun = time.monotonic()
    at.library.backend.connect(group)
    at.sync()
    at.tell(connecting_s=since(begun))
    _in_planned_order(at, group)


def planned_order_unconnected(at: Rank) -> None:
    """The same on communicators of pairs that are made at their first use."""
    _in_planned_order(at, at.group())


def first_operations_cross(at: Rank) -> None:
    """The first operation of both ranks of a pair is a send, small messages."""
    group = at.group()
    mine, theirs = at.tensor(SMALL, at.rank), at.tensor(SMALL, -1.0)
    for work in [group.send([mine], 1 - at.rank, 0), group.recv([theirs], 1 - at.rank, 0)]:
        work.wait()
    at.sync()
    at.tell(right=float(theirs[0]) == 1 - at.rank)


def batch(at: Rank) -> None:
    """Both directions in one batch, large messages, three times."""
    group = at.group()
    mine, theirs = at.tensor(at.library.large, at.rank), at.tensor(at.library.large, -1.0)
    for _ in range(3):
        at.library.backend.begin_batch(group)
        group.send([mine], 1 - at.rank, 0)
        group.recv([theirs], 1 - at.rank, 0)
        at.wait(at.library.backend.end_batch(group))
    at.sync()
    at.tell(right=float(theirs[0]) == 1 - at.rank)


def wait_returns_early(at: Rank) -> None:
    """`wait()` of an all-reduce returns although the other rank comes to it three seconds later."""
    group = at.group()
    at.total(group)
    at.meet("connected")
    if at.rank == 1:
        time.sleep(3)
    begun = time.monotonic()
    work = group.allreduce([at.tensor(SMALL, 1.0)])
    work.wait()
    waited, completed = since(begun), work.is_completed()
    at.sync()
    at.tell(wait_returned_s=waited, completed_then=completed, data_there_s=since(begun))
    if at.on_gpu and at.rank == 0:
        at.tell(right=waited < 1)


def receive_on_side_stream(at: Rank) -> None:
    """A receive that is posted under a side stream is not kept back by what the compute stream is busy with."""
    group = at.group()
    at.both_ways(group)
    at.meet("connected")
    backend = at.library.backend
    if at.rank == 0:
        group.send([at.tensor(SMALL, 1.0)], 1, 0).wait()
        at.sync()
        return
    begun = time.monotonic()
    torch.cuda._sleep(6_000_000_000)  # cycles: some seconds
    with backend.ahead():
        tensor = torch.empty(SMALL // 4, device=at.library.device)
        work = group.recv([tensor], 0, 0)
    at.wait(work)
    backend.arrived(tensor)
    received, whole = since(begun), tensor.clone()
    at.sync()
    right = received < 0.5 * since(begun) and bool((whole == 1.0).all())
    at.tell(received_s=received, busy_s=since(begun), right=right)


def bounded_transfers(at: Rank) -> None:
    """Transfers on a communicator that may take eight multiprocessors, as the runtime asks for, large messages."""
    group = at.group(bare=True, options=at.library.backend.options(True, timedelta(seconds=60)))
    at.library.backend.connect(group)
    tensor = at.tensor(at.library.large, 3.0 if at.rank == 0 else 0.0)
    begun = time.monotonic()
    at.transfer(group, tensor)
    at.tell(right=bool((tensor == 3.0).all()), transfer_s=since(begun))


def moments_of_the_device(at: Rank) -> None:
    """The device is busy for some seconds with each of two actions: when the thread may go on, and what is measured."""
    device = device_of(at.library.device)
    watch, pace, waited = Stopwatch(device), Pace(device), []
    for _ in range(2):
        begun = time.monotonic()
        with watch.measure("F"):
            torch.cuda._sleep(3_000_000_000)
        pace.keep()
        waited.append(since(begun))
    pace.catch_up()
    taken = watch.take()["F"]
    at.tell(waited_s=waited, taken_s=taken, outside_mib=device.outside() >> 20,
            right=waited[0] < 0.2 * taken[0] and waited[1] > 0.5 * taken[0])


def receive_blocks_device_calls(at: Rank) -> None:
    """A receive is pending for five seconds; how long memory that is given back to the device takes meanwhile."""
    group = at.group()
    at.both_ways(group)
    at.meet("connected")
    tensor = at.tensor(SMALL)
    if at.rank == 1:
        unused = at.tensor(64 << 20)
        group.recv([tensor], 0, 0)
        del unused
        begun = time.monotonic()
        torch.cuda.empty_cache()
        at.tell(empty_cache_s=since(begun))
    else:
        time.sleep(5)
        group.send([tensor], 1, 0)
    at.sync()


def bound_default_group(at: Rank) -> None:
    """The default group is bound to the device: torch splits a later group of two of three ranks off it, with all."""
    _two_of_three(at, bare=True)


def unbound_default_group(at: Rank) -> None:
    """The same with a group that the runtime makes, beside a default group that it makes torch take for unbound."""
    _two_of_three(at, bare=False)


def _two_of_three(at: Rank, bare: bool) -> None:
    if at.rank == 2:
        time.sleep(60)
        return
    begun = time.monotonic()
    at.tell(right=at.total(at.group([0, 1], limit=10.0, bare=bare)) == 2, all_reduce_s=since(begun))


def first_transfer_of_a_pair(at: Rank) -> None:
    """On a connected group rank 0 posts a send to rank 1, which comes to its receive five seconds later; then another
    one; then one to rank 2, which never comes, and aborts it from another thread."""
    group = at.group()
    at.library.backend.connect(group)
    at.meet("connected")
    if at.rank == 2:
        time.sleep(40)
        return
    tensor, posted, in_thread = at.tensor(SMALL), [], at.library.backend.in_thread()
    time.sleep(5 * at.rank)
    for _ in range(2):
        begun = time.monotonic()
        work = group.send([tensor], 1, 0) if at.rank == 0 else group.recv([tensor], 0, 0)
        posted.append(since(begun))
        at.wait(work)
    at.tell(first_posted_s=posted[0], next_posted_s=posted[1], right=at.rank == 1 or posted[0] > 3 > posted[1])
    if at.rank == 1:
        return

    def post() -> None:
        in_thread()
        with contextlib.suppress(RuntimeError):
            group.send([tensor], 2, 0)

    thread = threading.Thread(target=post, daemon=True)
    thread.start()
    time.sleep(2)
    at.tell(blocked_by_one_that_never_comes=thread.is_alive())
    at.abort_in(0.0, group)
    thread.join(8)
    at.tell(freed_by_an_abort=not thread.is_alive())
