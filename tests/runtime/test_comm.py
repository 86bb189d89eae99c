"""Communicators: what goes over them arrives once, whole and in order; what an abort or a death has met does not count.

Over gloo, and over the network in memory with gloo's and with NCCL's rules.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from megatron_recycle.errors import GenerationOver
from megatron_recycle.runtime.comm import tags
from megatron_recycle.runtime.comm.abort import abort
from megatron_recycle.runtime.comm.comm import Comm
from megatron_recycle.runtime.comm.tags import COMMITS, CONTROL, LOSSES, Table
from megatron_recycle.runtime.comm.threads import Threads
from tests.fakes.network import Fabric, Killed, Stuck
from tests.runtime.comms import gloo, ordered
from tests.runtime.test_transport import Plain

NUMBERS = 20


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """As `Fabric.run`: what is not the end of a generation is raised, from where it was raised there."""
    outcomes: list[Any] = [None] * len(functions)

    def work(index: int) -> None:
        try:
            outcomes[index] = functions[index]()
        except BaseException as error:  # noqa: BLE001
            outcomes[index] = error

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, GenerationOver):
            raise outcome
    assert not any(thread.is_alive() for thread in threads)
    return outcomes


class Library:
    def __init__(self, kind: str, seed: int = 0) -> None:
        self.fabric = Fabric(seed, ordered=kind == "ordered in memory", limit=60.0)
        self.comms = {"gloo": gloo, "ordered": ordered}.get(kind, self.fabric.comms)
        self.run = self.fabric.run if "memory" in kind else in_threads


@pytest.fixture(params=["gloo", "memory", "ordered", "ordered in memory"])
def library(request) -> Library:
    return Library(request.param)


def number(value: float) -> torch.Tensor:
    return torch.tensor([float(value)])


# ---- what arrives


def test_messages_of_a_pair_and_tag_arrive_in_their_order(library):
    one, other = library.comms(2)
    into = [torch.zeros(1) for _ in range(NUMBERS)]

    def sends() -> None:
        for pending in [one.send(number(n), 1, LOSSES[7]) for n in range(NUMBERS)]:
            pending.wait()

    def receives() -> None:
        for pending in [other.receive(tensor, 0, LOSSES[7]) for tensor in into]:
            pending.wait()

    assert library.run(sends, receives) == [None, None]
    assert [tensor.item() for tensor in into] == list(range(NUMBERS))


@pytest.mark.parametrize("kind", ["gloo", "memory"])
def test_messages_with_other_tags_may_be_read_in_any_order(kind):
    library = Library(kind)
    one, other = library.comms(2)
    into = [torch.zeros(1) for _ in range(NUMBERS)]

    def sends() -> None:
        for pending in [one.send(number(n), 1, LOSSES[n]) for n in range(NUMBERS)]:
            pending.wait()

    def receives() -> None:
        for n in reversed(range(NUMBERS)):
            other.receive(into[n], 0, LOSSES[n]).wait()

    assert library.run(sends, receives) == [None, None]
    assert [tensor.item() for tensor in into] == list(range(NUMBERS))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_sums_have_the_same_bits_everywhere_and_come_in_their_order(library, size):
    comms = library.comms(size)
    found = [[torch.tensor([0.1 * rank + n, 1.0]) for n in range(4)] for rank in range(size)]

    def adds(rank: int) -> None:
        for pending in [comms[rank].sum(tensor) for tensor in found[rank]]:
            pending.wait()

    assert library.run(*[lambda rank=rank: adds(rank) for rank in range(size)]) == [None] * size
    assert all(torch.equal(mine, first) for row in found for mine, first in zip(row, found[0], strict=True))
    assert [tensor[1].item() for tensor in found[0]] == [size] * 4


def test_both_ends_may_send_first_in_a_batch(library):
    comms = library.comms(3)
    into = [torch.zeros(3) for _ in comms]

    def exchange(rank: int) -> None:
        others = [peer for peer in range(3) if peer != rank]
        with comms[rank].batch():
            moving = [comms[rank].send(number(rank), peer, LOSSES[0]) for peer in others]
            moving += [comms[rank].receive(into[rank][peer:peer + 1], peer, LOSSES[0]) for peer in others]
            assert not any(pending.done() for pending in moving)
            with pytest.raises(AssertionError, match="waited for after it"):
                moving[0].wait()
        for pending in moving:
            pending.wait()
        assert into[rank].tolist() == [float(peer) if peer != rank else 0.0 for peer in range(3)]
        with comms[rank].batch():
            pass  # of one worker alone, there is nothing in it
        comms[rank].sum(into[rank]).wait()

    assert library.run(*[lambda rank=rank: exchange(rank) for rank in range(3)]) == [None] * 3
    assert all(tensor.tolist() == [0.0, 2.0, 4.0] for tensor in into)


# ---- what does not


def test_an_abort_frees_who_waits_and_ends_the_communicator(library):
    one, other = library.comms(2)
    one.names = other.names = ("0:0", "1:0")
    one.of = "generation 4"
    waits, far = threading.Event(), torch.zeros(3)

    def receives() -> None:
        pending = one.receive(far, 1, COMMITS[3])
        waits.set()
        pending.wait()

    def aborts() -> None:
        waits.wait(60)
        one.abort()

    freed, _ = in_threads(receives, aborts)
    assert isinstance(freed, GenerationOver)
    assert str(freed).startswith("generation 4: receiving an iteration's commit from 1:0 ")
    for late in (lambda: one.send(far, 1, COMMITS[0]), lambda: one.sum(far), lambda: one.batch().__enter__()):
        with pytest.raises(GenerationOver):
            late()


class Liar:
    """A library that says that all has gone well, as NCCL does after an abort."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def recv(self, tensors: Sequence[torch.Tensor], *where: int) -> Liar:
        return self

    send = allreduce = recv

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def abort(self) -> None:
        pass


class Lying(Plain):
    def abort(self, group: Liar) -> None:
        pass


def test_what_was_pending_at_an_abort_does_not_count_though_the_library_says_that_it_went_well():
    comm = Comm(Liar(), Lying(), CONTROL)
    before = comm.receive(torch.zeros(1), 1, LOSSES[0])
    before.wait()
    pending = [before, comm.send(torch.zeros(1), 1, LOSSES[1]), comm.sum(torch.zeros(1))]
    abort([comm], Threads())
    assert all(each.done() for each in pending)
    for each in pending:
        with pytest.raises(GenerationOver, match="the generation has been ended"):
            each.wait()


class LeftOpen(Liar):
    """torch's NCCL: a transfer that raises leaves a group open in its thread, and what is posted inside of one is only
    noted, though its work says that it has gone well."""

    def __init__(self) -> None:
        self.opened = 0
        self.started = list[str]()

    def send(self, tensors: Sequence[torch.Tensor], *where: int) -> Liar:
        self.opened += 1
        raise RuntimeError("remote process exited")

    def recv(self, tensors: Sequence[torch.Tensor], *where: int) -> Liar:
        self.started += [] if self.opened else ["receive"]
        return self


class Unwinding(Plain):
    def __init__(self, library: LeftOpen) -> None:
        self._library = library

    def unwind(self) -> None:
        self._library.opened = 0

    def begin_batch(self, group: LeftOpen) -> None:
        group.opened += 1

    def end_batch(self, group: LeftOpen) -> None:
        if not group.opened:
            raise RuntimeError("no group is open")
        group.opened -= 1


@pytest.mark.parametrize("batch", [False, True])
def test_what_a_thread_posts_after_an_operation_that_has_raised_is_started(batch: bool) -> None:
    """On a GPU a survivor read a header that had never been received, in the generation after the failure."""
    library = LeftOpen()
    dead, living = (Comm(library, Unwinding(library), CONTROL) for _ in range(2))
    with pytest.raises(GenerationOver), dead.batch() if batch else nullcontext():
        dead.send(torch.zeros(1), 1, LOSSES[0])
    living.receive(torch.zeros(1), 1, LOSSES[0])
    assert library.started == ["receive"]


def test_with_nccls_rules_an_abort_leaves_garbage_that_nobody_takes():
    one, _ = Fabric(ordered=True).comms(2)
    gradient = torch.ones(3)
    pending = one.sum(gradient)
    one.abort()
    with pytest.raises(GenerationOver):
        pending.wait()
    assert gradient.isnan().all(), "the library's work itself says that it went well"
    assert pending._work.wait() is None


def test_partners_of_one_that_aborts_or_dies_notice():
    for end in ("abort", "die"):
        fabric = Fabric(limit=60.0)
        one, other, third = fabric.comms(3)

        def leaves(one=one, fabric=fabric, end=end) -> None:
            if end == "abort":
                one.abort()
            else:
                fabric.die(one.group.process)
                one.send(torch.zeros(1), 1, LOSSES[0])

        def waits(comm: Comm) -> None:
            comm.receive(torch.zeros(1), 0, LOSSES[0]).wait()

        left, *found = fabric.run(leaves, lambda other=other: waits(other), lambda third=third: waits(third))
        assert isinstance(left, Killed) == (end == "die")
        assert all(isinstance(each, GenerationOver) and "closed by peer" in str(each) for each in found)


def test_a_sum_that_a_member_died_in_completes_nowhere():
    """Those beside the dead one in the ring learn of it, the others wait until they are told."""
    for seed in range(20):
        fabric = Fabric(seed, limit=60.0)
        comms = fabric.comms(5)
        pending = [comm.sum(torch.ones(1)) for comm in comms[1:]]
        fabric.die(comms[0].group.process)
        beside, *_, also = fabric.run(pending[0].wait, lambda: None, pending[3].wait)
        assert isinstance(beside, GenerationOver) and isinstance(also, GenerationOver)
        assert not pending[1].done() and not pending[2].done()


def test_one_that_is_cut_off_is_silent_and_who_waits_for_it_is_named():
    fabric = Fabric(limit=60.0)
    one, other = fabric.comms(2)
    one.group.process.cut = True
    with pytest.raises(Stuck, match=r"rank 1 waits in thread function 1 for .*receive from its rank 0, the loss"):
        fabric.run(one.send(torch.zeros(1), 1, LOSSES[0]).wait, other.receive(torch.zeros(1), 0, LOSSES[0]).wait)


def test_a_send_that_is_let_go_of_is_lost():
    fabric = Fabric(limit=60.0)
    one, other = fabric.comms(2)
    one.send(torch.ones(1), 1, LOSSES[0])
    with pytest.raises(Stuck):
        fabric.run(other.receive(torch.zeros(1), 0, LOSSES[0]).wait)


def test_a_tensor_that_is_written_to_before_its_send_has_ended_goes_out_changed():
    fabric = Fabric()
    one, other = fabric.comms(2)
    value, into = number(1.0), torch.zeros(1)
    pending = one.send(value, 1, LOSSES[0])
    value.fill_(2.0)
    fabric.run(pending.wait, other.receive(into, 0, LOSSES[0]).wait)
    assert into.item() == 2.0


# ---- order


def test_messages_of_different_pairs_overtake_each_other_as_the_seed_says():
    def arrivals(seed: int) -> tuple[int, ...]:
        fabric = Fabric(seed)
        comms = fabric.comms(5)
        into = [torch.zeros(1) for _ in comms]
        pending = [comms[0].receive(into[rank], rank, LOSSES[0]) for rank in range(1, 5)]
        kept = [comm.send(number(1), 0, LOSSES[0]) for comm in comms[1:]]
        came: list[int] = []
        while len(came) < 4:
            came += [rank for rank in range(4) if pending[rank].done() and rank not in came]
        assert all(each.done() for each in kept)
        return tuple(came)

    assert len({arrivals(seed) for seed in range(40)}) > 3
    assert [arrivals(seed) for seed in range(10)] == [arrivals(seed) for seed in range(10)]


def test_with_nccls_rules_two_that_both_send_first_wait_for_ever():
    def exchange(comm: Comm) -> None:
        sent = comm.send(torch.zeros(1), 1 - comm.rank, LOSSES[0])
        comm.receive(torch.zeros(1), 1 - comm.rank, LOSSES[0]).wait()
        sent.wait()

    for nccls in (False, True):
        fabric = Fabric(ordered=nccls, limit=60.0)
        comms = fabric.comms(2)
        both = [lambda comm=comm: exchange(comm) for comm in comms]
        if not nccls:
            assert fabric.run(*both) == [None, None]
            continue
        with pytest.raises(Stuck, match="nobody can go on") as stuck:
            fabric.run(*both)
        assert str(stuck.value).count("exchange:") == 2, "where each of them stands"
        assert "rank 0 has communicator 0: a send to its rank 1, the loss" in str(stuck.value), "and its queue"


def test_with_nccls_rules_what_meets_by_its_place_in_the_queue_and_not_by_its_tag_is_found():
    fabric = Fabric(ordered=True, limit=60.0)
    one, other = fabric.comms(2)
    with pytest.raises(Stuck, match="what meets does not fit"):
        fabric.run(one.send(torch.zeros(1), 1, LOSSES[0]).wait, other.receive(torch.zeros(1), 0, LOSSES[1]).wait)


# ---- tags


def test_tags_of_different_purposes_never_meet():
    for table in (tags.WORLD, tags.CONTROL, tags.STAGE):
        ranges = sorted((each.first, each.first + each.count) for each in table)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ranges))
        assert ranges[0][0] >= 0 and ranges[-1][1] <= tags.ABORT
        for each in table:
            assert table.what(each[0]) == each.what == table.what(each[each.count - 1])


def test_a_taken_number_cannot_be_taken_again():
    table = Table()
    first, second = table.take("one thing", 5), table.take("another", 2**30)
    assert not any(tag in second for tag in (first[0], first[4])) and second[0] == 5
    with pytest.raises(OverflowError, match="no 1073741824 tags are left for a third"):
        table.take("a third", 2**30)
    with pytest.raises(OverflowError, match="one thing have 5 tags"):
        first[5]
    assert COMMITS[COMMITS.count + 3] == COMMITS[3], "a running number begins anew"


def test_nobody_sends_with_a_number_that_is_not_taken():
    one, _ = Fabric().comms(2, Table())
    with pytest.raises(AssertionError, match="take the tag from the table"):
        one.send(torch.zeros(1), 1, 3)
