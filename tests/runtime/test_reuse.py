"""Communicators that a generation takes over from those before it, which have ended at a boundary or by a failure."""

from __future__ import annotations

import random
import threading
import weakref
import zlib
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as some

from megatron_recycle.errors import GenerationOver
from megatron_recycle.plan import Grid, Worker
from megatron_recycle.runtime.comm.comm import Comm
from megatron_recycle.runtime.comm.handles import Groups, Limits
from megatron_recycle.runtime.comm.ledger import Ledger, agree
from megatron_recycle.runtime.comm.rendezvous import heard, meet
from megatron_recycle.runtime.comm.reuse import BuildAttempt, ReusableGroups, goes_on
from megatron_recycle.runtime.comm.tags import SLICES
from megatron_recycle.runtime.place import Place
from tests.fakes.network import Killed, MemoryNetwork
from tests.in_memory_job.wires import Asked, Deaths, Wires
from tests.runtime.comms import gloo
from tests.seeds import seeds

GRID = Grid(2, (1, 1, 1))
WORKERS = [Worker(pipeline, stage) for pipeline in range(3) for stage in range(2)]
RANKS = {worker: (rank,) for rank, worker in enumerate(WORKERS)}
KINDS = pytest.mark.parametrize("ordered", [False, True], ids=["gloo's rules", "NCCL's rules"])


class Job:
    """Its processes, and the generations that they build."""

    def __init__(self, ordered: bool, seed: int = 0, kills: Sequence[Asked] = ()) -> None:
        self.deaths = Deaths(kills, lambda process: str(WORKERS[process.rank]))
        self.fabric = Wires(seed, self.deaths.at, ordered=ordered, first_pairs="free")
        self.networks = {worker: MemoryNetwork(self.fabric, rank) for worker, (rank,) in RANKS.items()}
        self.groups: dict[Worker, Groups] = {}
        self.reusable: dict[Worker, ReusableGroups] = {}
        self.generation = 0

    @property
    def live(self) -> list[Worker]:
        return [worker for worker in WORKERS if not self.networks[worker].dead]

    def begin(self, members: Collection[Worker]) -> dict[Worker, Groups]:
        """The next generation; those that fail to build it are left out."""
        self.generation += 1
        generation = self.generation

        def connect(me: Worker) -> Groups:
            made = self.networks[me].connect(
                generation=generation, prefix=f"g{generation}", place=Place(me, GRID, RANKS, "gloo"),
                members=list(members), limits=Limits(60.0, 60.0, 60.0),
                interrupted=lambda: any(self.networks[one].dead for one in members), before=self.reusable.get(me))
            self.reusable.pop(me, None)
            return made

        found = self.fabric.run(*[lambda me=me: connect(me) for me in members])
        self.groups = {me: groups for me, groups in zip(members, found, strict=True) if isinstance(groups, Groups)}
        assert all(isinstance(one, (Groups, GenerationOver, Killed)) for one in found), found
        return self.groups

    def rest(self) -> None:
        """All stand at a boundary, and are told that the generation is over."""
        for groups in self.groups.values():
            groups.rest()
            groups.abort()
        self.park()

    def park(self, but: Collection[Worker] = ()) -> None:
        for worker, groups in self.groups.items():
            if worker not in but:
                self.reusable[worker] = groups.park()

    def check(self) -> None:
        """Every communicator adds up, among its members, and transfers what is sent now."""
        def use(groups: Groups) -> None:
            for comm in groups.all():
                total = torch.full((1,), float(self.generation))
                comm.sum(total).wait()
                assert total.item() == comm.size * self.generation
            assert swap(groups.stage, self.generation) == [self.generation] * (groups.stage.size - 1)

        assert self.fabric.run(*[lambda one=one: use(one) for one in self.groups.values()]) == [None] * len(self.groups)


def swap(comm: Comm, value: float, wait: bool = True) -> list[float]:
    """Each member sends ``value`` to each, in a batch."""
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    into = [torch.full((1,), -1.0) for _ in others]
    with comm.batch():
        moving = [comm.receive(tensor, rank, SLICES[0]) for tensor, rank in zip(into, others, strict=True)]
        moving += [comm.send(torch.full((1,), float(value)), rank, SLICES[0]) for rank in others]
    for pending in moving if wait else ():
        pending.wait()
    return [tensor.item() for tensor in into]


# ---- at a boundary


@KINDS
def test_stages_that_stay_keep_theirs_when_one_comes_in_and_when_one_leaves(ordered: bool) -> None:
    job, late = Job(ordered), Worker(1, 1)
    five = [worker for worker in WORKERS if worker != late]
    first = dict(job.begin(five))
    job.rest()
    second = dict(job.begin(WORKERS))
    for worker, groups in second.items():
        assert all(comm.of == "generation 2" and not comm.aborted for comm in groups.all())
        assert (worker.stage == 0) == (worker in first and groups.stage.ledger is first[worker].stage.ledger)
        assert worker not in first or first[worker].world.aborted
    job.check()
    job.rest()
    job.reusable.pop(late).retire()
    third = job.begin(five)
    for worker, groups in third.items():
        assert (worker.stage == 0) == (groups.stage.ledger is second[worker].stage.ledger)
        assert groups.world.identity == "g3/world.0"
        assert groups.world.rank == five.index(worker) and groups.world.names == tuple(map(str, five))
    job.check()


@KINDS
def test_what_one_member_has_aborted_nobody_keeps(ordered: bool) -> None:
    job, late, dead = Job(ordered), Worker(1, 0), Worker(2, 1)
    first = dict(job.begin(WORKERS))
    first[late].stage.abort()
    job.rest()
    job.networks[dead].die()
    second = job.begin(job.live)
    assert all(groups.stage.ledger is not first[worker].stage.ledger for worker, groups in second.items())
    job.check()


def test_a_generation_that_does_not_come_about_leaves_to_the_next_one_what_there_was() -> None:
    job = Job(ordered=True)
    first = dict(job.begin(WORKERS))
    job.rest()
    job.networks[WORKERS[5]].die()
    assert not job.begin(WORKERS), "the last of them is awaited"
    second = job.begin(job.live)
    assert all((groups.stage.ledger is first[me].stage.ledger) == (me.stage == 0) for me, groups in second.items())
    job.check()


# ---- after a failure


@KINDS
def test_one_that_somebody_else_was_given_is_made_again(ordered: bool) -> None:
    """A framework may have begun anything there."""
    job = Job(ordered)
    first = dict(job.begin(WORKERS))
    assert first[Worker(0, 0)].stage.group is not None
    for groups in first.values():
        groups.abort()
    job.park()
    job.networks[Worker(2, 1)].die()
    second = job.begin(job.live)
    assert all(groups.stage.ledger is not first[me].stage.ledger for me, groups in second.items())
    job.check()


@KINDS
def test_who_is_stuck_in_one_that_was_left_is_freed_by_an_abort(
        ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_recycle.runtime.comm.abort._LONGEST_LEAVE", 0.05)
    job = Job(ordered)
    one = job.begin(WORKERS)[Worker(0, 0)]
    framework = one.stage._group.allreduce([torch.zeros(1)])
    started: list[str] = []
    start = one.teardown.threads.start
    monkeypatch.setattr(one.teardown.threads, "start",
                        lambda name, *given: (started.append(name), start(name, *given))[1])
    for _ in range(3):  # by further failures before anybody has left
        one.abort()
    assert one.stage.aborted and started.count("recycle-leave-watch") == 1
    job.networks[one.me].threads.close()
    assert framework.over and one.stage.ledger.gone and list(one.park().said()) == []


@KINDS
@pytest.mark.parametrize("seed", seeds(15))
def test_whoever_dies_wherever_the_others_are_and_again_while_they_decide(
        seed: int, ordered: bool) -> None:
    """Nothing of one generation ever meets anything of another one's: every sum is right, and all come to them.

    Each has done a part of what all do in their stage, and waits, or does not; then it is told that it is over. One
    dies; by turns another one while the next generation is built, at anything that it asks of the network, or while
    that one is used.
    """
    draw = random.Random(seed)
    job = Job(ordered, seed)
    job.begin(WORKERS)
    for _ in range(draw.choice([1, 1, 2, 3])):
        if len(job.live) < 4:
            break
        dies, late = draw.sample(job.live, 2)
        work(job, draw)
        job.networks[dies].die()
        job.park(but=[dies])
        members = job.live
        if draw.random() < 0.6:  # in whichever of these it comes to
            again = draw.choice(["world.0", "control", *(f"stage{late.stage}.0{end}" for end in ("", "-control"))])
            seen = job.deaths.seen[str(late), f"connect {again}"]
            job.deaths.kills.add(Asked(str(late), f"connect {again}", seen))
        job.begin(members)
        while [*job.groups] != job.live or job.live != members:  # not all that it was made for have built it, or live
            work(job, draw)
            job.park(but=[worker for worker in job.groups if worker not in job.live])
            members = job.live
            job.begin(members)
        job.check()


def work(job: Job, draw: random.Random) -> None:
    """All do some of the same in their stage; the first who is through ends the generation for all."""
    script = [draw.choice(["sum", "swap"]) for _ in range(4)]
    parts = {me: (draw.randrange(5) if draw.random() < 0.5 else 4, draw.random() < 0.7) for me in job.groups}
    draws = {me: draw.random() for me in job.groups}

    def run(me: Worker) -> None:
        upto, waits = parts[me]
        stage, sums = job.groups[me].stage, []
        try:
            for kind in script[:upto]:
                if kind == "sum":
                    sums.append(stage.sum(torch.full((1,), -5.0)))
                    if waits:
                        sums[-1].wait()
                else:
                    swap(stage, -5.0, wait=waits or draws[me] < 0.5)
        except GenerationOver:
            pass
        end()

    def end() -> None:
        for groups in job.groups.values():
            groups.abort()

    missing = [] if all(len(groups.members) == len(job.groups) for groups in job.groups.values()) else [end]
    found = job.fabric.run(*[lambda me=me: run(me) for me in job.groups if not job.networks[me].dead], *missing)
    assert all(one is None or isinstance(one, Killed) for one in found), found


# ---- what is agreed upon


@given(some.lists(some.lists(some.sampled_from(["sum", "send", "receive"]), max_size=6), min_size=2, max_size=3),
       some.randoms(use_true_random=False))
def test_members_agree_only_if_nothing_of_one_waits_for_another(programs: list[list[str]], draw: random.Random) -> None:
    """Compared with what would be left over if all that was begun met its counterpart."""
    size = len(programs)
    ledgers = [Ledger() for _ in programs]
    sums, transfers = [0] * size, dict[tuple[int, int], int]()
    for me, program in enumerate(programs):
        for kind in program:
            peer = draw.choice([rank for rank in range(size) if rank != me])
            ledgers[me].begin(kind, peer)
            if kind == "sum":
                sums[me] += 1
            else:
                pair = (me, peer) if kind == "send" else (peer, me)
                transfers[pair] = transfers.get(pair, 0) + (1 if kind == "send" else -1)
                ledgers[me].over()
    begun = [ledger.begun(size, rests=False) for ledger in ledgers]
    assert all(begun) and agree([text or "" for text in begun]) == (
        len(set(sums)) == 1 and not any(transfers.values()))


def test_what_is_not_known_to_be_over_is_not_told() -> None:
    def begun(change: Callable[[Ledger], object]) -> str | None:
        ledger = Ledger()
        ledger.begin("sum", 0)
        change(ledger)
        return ledger.begun(2, rests=False)

    assert begun(lambda ledger: None) == f"1 {zlib.crc32(b'[]')}/0,0/0,0"
    assert begun(lambda ledger: ledger.begin("send", 1)) is None
    assert begun(lambda ledger: setattr(ledger, "lent", True)) is None
    assert begun(lambda ledger: setattr(ledger, "gone", True)) is None


def test_the_memory_of_what_is_under_way_is_given_to_nobody_else() -> None:
    """After a failure all have let go of it, and NCCL may still write to it."""
    ledger, over, tensor = Ledger(), list[bool](), torch.zeros(1)
    held = weakref.ref(tensor)
    ledger.watch(lambda: bool(over), [tensor])
    del tensor
    assert held() is not None and not ledger.idle
    over.append(True)
    assert ledger.idle
    ledger.watch(lambda: False, [])
    assert held() is None


def test_all_who_ask_hear_the_same() -> None:
    words = [["here", "keeps:g1/stage:2/0,1/0,0"], ["here", "keeps:g1/stage:2/0,0/1,0"]]
    two = ["0:0", "1:0"]
    assert goes_on("g1/stage", two, two, words)
    assert not goes_on("g1/stage", two, two, [words[0], words[0]]), "the one's transfer is under way"
    assert not goes_on("g1/stage", two, two, [words[0], ["here"]])
    assert not goes_on("g1/stage", two, [*two, "2:0"], [*words, words[0]]), "one comes in"
    assert not goes_on("g1/stage", [*two, "2:0"], two, words), "one has gone"
    assert not goes_on("g2/stage", two, two, words)


def test_a_try_that_was_left_behind_takes_nothing_any_more() -> None:
    """It may still be about it when the next generation is being built."""
    job = Job(ordered=True)
    one = job.begin(WORKERS)[Worker(0, 0)]
    one.rest()
    reusable = one.park()
    words = list(reusable.said())
    old, new = reusable.turn(), reusable.turn()
    with pytest.raises(GenerationOver, match="a newer generation"):
        reusable.take(old, "stage0.0", "generation 2", one.stage.names, lambda: [words] * 3)
    assert reusable.take(new, "stage0.0", "generation 3", one.stage.names, lambda: [words] * 3) is not None


def test_a_try_that_was_left_behind_gives_up_nothing_that_the_next_one_goes_on_with() -> None:
    """It has heard that one is to be made again, and then the next one comes."""
    one = Job(ordered=True).begin(WORKERS)[Worker(0, 0)]
    one.rest()
    reusable, hears, goes_on = one.park(), threading.Event(), threading.Event()
    words, wanted = list(reusable.said()), {"stage0.0": one.stage.names}
    ends: list[BaseException] = []

    def hear(name: str) -> list[list[str]]:
        hears.set()
        goes_on.wait(60)
        return [[]] * 3

    def left_behind(turn: BuildAttempt) -> None:
        try:
            reusable.clear(turn, "generation 2", wanted, hear)
        except GenerationOver as error:
            ends.append(error)

    old = threading.Thread(target=left_behind, args=[reusable.turn()])
    old.start()
    assert hears.wait(60)
    new = reusable.turn()
    reusable.clear(new, "generation 3", wanted, lambda name: [words] * 3)
    kept = reusable.take(new, "stage0.0", "generation 3", one.stage.names, lambda: [words] * 3)
    goes_on.set()
    old.join(60)
    assert kept is not None and not kept.ledger.gone and len(ends) == 1


def test_what_is_to_be_made_again_has_been_aborted_before_anything_is_made() -> None:
    """An abort of NCCL's waits for all that is under way on the device, and nobody can launch meanwhile."""
    one = Job(ordered=True).begin(WORKERS)[Worker(0, 0)]
    one.rest()
    reusable = one.park()
    turn = reusable.turn()
    words = list(reusable.said())
    reusable.clear(turn, "generation 2", {"stage0.0": one.stage.names}, lambda name: [words] * 3)
    assert one.world.ledger.gone and not one.stage.ledger.gone
    assert one.control.backend.quick and not one.control.ledger.gone, "others need not be waited for"


def test_gloo_goes_on_with_one_in_which_a_sum_was_left() -> None:
    """The real library: one waits for a sum that the others have not begun, and leaves; then they begin it."""
    one, other = gloo(2)
    left, late = torch.ones(1), torch.full((1,), 2.0)
    pending = one.sum(left)
    one.leave()
    with pytest.raises(GenerationOver, match="void"):
        pending.wait()
    other.sum(late)
    other.leave()
    told = [comm.ledger.begun(2, rests=False) for comm in (one, other)]
    assert agree([text or "" for text in told])
    again = [comm.again("generation 2") for comm in (one, other)]
    tensors = [torch.full((1,), 10.0), torch.full((1,), 20.0)]
    for sums in [comm.sum(tensor) for comm, tensor in zip(again, tensors, strict=True)]:
        sums.wait()
    assert [tensor.item() for tensor in tensors] == [30.0, 30.0]


def test_what_processes_say_to_each_other_at_the_store() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=10))
    for rank, words in enumerate((["keeps:a", "keeps:b"], ["keeps:b"], [])):
        meet(store, rank, [rank], lambda: False, 10.0, words)
    assert heard(store, [0, 2, 1]) == [["here", "keeps:a", "keeps:b"], ["here"], ["here", "keeps:b"]]
