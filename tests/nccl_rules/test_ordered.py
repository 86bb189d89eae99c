"""The ordered backend does what NCCL does: what must hang hangs, and garbage looks like a result."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_recycle.runtime.comm.rendezvous import CONNECTING
from tests.nccl_rules.group import OrderedGroup, pending
from tests.nccl_rules.rules import Rules

_QUIET = 0.7  # seconds without any progress after which a program hangs that is expected to
_LIMIT = 60.0
Program = Callable[[int, OrderedGroup], None]


def outcome(program: Program, rules: Rules, quiet: float) -> str:
    """ "runs" or "hangs", of two workers that are threads here. ``quiet``: seconds without any progress, and with
    something pending, after which it hangs."""
    store, groups, failures = dist.HashStore(), dict[int, OrderedGroup](), list[BaseException]()

    def run(rank: int) -> None:
        try:
            groups[rank] = OrderedGroup(store, rank, 2, timedelta(seconds=60), rules)
            program(rank, groups[rank])
        except dist.DistBackendError:
            if not groups[rank].aborted:
                raise
        except BaseException as error:  # noqa: BLE001  (raised again below)
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    limit, since = time.monotonic() + _LIMIT, time.monotonic()
    while any(thread.is_alive() for thread in threads) and time.monotonic() < min(limit, since + quiet):
        for thread in threads:
            thread.join(0.02)
        since = max([since, *(queue.last for group in groups.values() for queue in group.queues.values())])
        if not pending():
            since = time.monotonic()
    hangs = any(thread.is_alive() for thread in threads)
    assert not hangs or pending(), "a program that hangs says in what"
    for group in groups.values():
        group.abort()
        group.shutdown()  # frees also what an abort does not
    for thread in threads:
        thread.join(_LIMIT)
    assert not failures, failures
    return "hangs" if hangs else "runs"


def one_f_one_b(rank: int, group: OrderedGroup) -> None:
    """1F1B of two stages with two receives posted ahead."""
    number, kept = 4, []
    tensors = [torch.full((1000,), float(each)) for each in range(number)]
    buffers = [torch.zeros(1000) for _ in range(number)]
    posted: list[object] = []

    def post(upto: int) -> None:
        while len(posted) < min(upto, number):
            posted.append(group.recv([buffers[len(posted)]], 1 - rank))

    def read(each: int) -> None:
        post(each + 1)
        posted[each].wait()  # type: ignore[attr-defined]
        post(each + 3)

    if rank == 0:
        for forward, backward in ((0, None), (1, 0), (2, 1), (3, 2), (None, 3)):
            if forward is not None:
                kept.append(group.send([tensors[forward]], 1))
                post((backward or 0) + 2)
            if backward is not None:
                read(backward)
    else:
        post(2)
        for each in range(number):
            read(each)
            kept.append(group.send([tensors[each]], 0))
    for work in kept:
        work.wait()
    assert all(bool((buffer == each).all()) for each, buffer in enumerate(buffers))


def in_order(rank: int, group: OrderedGroup) -> None:
    """The same, posted in one order."""
    tensor = torch.zeros(1000)
    for each in range(4):
        for sender in (0, 1):
            if rank == sender:
                group.send([torch.full((1000,), float(each))], 1 - rank).wait()
            else:
                group.recv([tensor], sender).wait()
                assert bool((tensor == each).all())


def both_send_first(rank: int, group: OrderedGroup) -> None:
    mine, theirs = torch.ones(1000), torch.zeros(1000)
    for work in [group.send([mine], 1 - rank), group.recv([theirs], 1 - rank)]:
        work.wait()


def a_batch(rank: int, group: OrderedGroup) -> None:
    mine, theirs = torch.full((1000,), float(rank)), torch.zeros(1000)
    for _ in range(3):
        group._start_coalescing()
        group.send([mine], 1 - rank)
        group.recv([theirs], 1 - rank)
        group._end_coalescing().wait()
    assert bool((theirs == 1 - rank).all())


def collectives_cross(rank: int, group: OrderedGroup) -> None:
    one, other = torch.ones(10), torch.ones(20)
    for tensor in (one, other) if rank == 0 else (other, one):
        group.allreduce([tensor]).wait()


def an_abort(rank: int, group: OrderedGroup) -> None:
    """A receive that nobody answers: `wait` returns as if all were well, and its tensor is garbage."""
    total = torch.ones(1)
    group.allreduce([total]).wait()
    assert total.item() == 2
    in_order(rank, group)
    if rank == 1:
        tensor = torch.zeros(10)
        work = group.recv([tensor], 0)
        group.abort()
        assert work.wait() and work.is_completed() and bool(tensor.isnan().all())
        with pytest.raises(dist.DistBackendError):
            group.recv([tensor], 0)


def connected_apart(rank: int, group: OrderedGroup) -> None:
    """First transfers in a thread that can be left behind, then others in this one."""
    thread = threading.Thread(target=in_order, args=(rank, group), name=CONNECTING, daemon=True)
    thread.start()
    thread.join(_LIMIT)
    in_order(rank, group)


def one_never_comes(rank: int, group: OrderedGroup) -> None:
    """The other one's first transfer, which no abort frees."""
    if rank == 0:
        threading.Timer(0.1, group.abort).start()
        group.send([torch.ones(10)], 1)
    else:
        group._whole()


@pytest.mark.parametrize(("program", "rules", "expected"), [
    (one_f_one_b, Rules(), "hangs"),
    (one_f_one_b, Rules(eager=False), "hangs"),
    (in_order, Rules(), "runs"),
    (in_order, Rules(eager=False), "runs"),
    (both_send_first, Rules(), "hangs"),
    (both_send_first, Rules(connecting=False), "hangs"),
    (both_send_first, Rules(connecting=False, buffer=1 << 20), "runs"),
    (a_batch, Rules(), "runs"),
    (collectives_cross, Rules(), "hangs"),
    (an_abort, Rules(), "runs"),
    (connected_apart, Rules(apart=True), "runs"),
    (one_never_comes, Rules(), "hangs"),
], ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", None))
def test_two_workers(program: Program, rules: Rules, expected: str):
    assert outcome(program, rules, _QUIET if expected == "hangs" else _LIMIT) == expected


def test_a_first_transfer_where_nobody_can_leave_it_is_an_error():
    with pytest.raises(AssertionError, match="is the first of its pair"):
        outcome(in_order, Rules(apart=True), _QUIET)
