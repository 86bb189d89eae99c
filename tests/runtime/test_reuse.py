"""Communicators that a generation takes over from the one before it, which ended at a boundary."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_recycle.plan import Grid, Worker
from megatron_recycle.runtime.comm.handles import Groups, Limits
from megatron_recycle.runtime.comm.memory import Fabric, MemoryNetwork
from megatron_recycle.runtime.comm.rendezvous import all_said, meet
from megatron_recycle.runtime.place import Place

GRID = Grid(2, (1, 1, 1))
WORKERS = [Worker(pipeline, stage) for pipeline in range(3) for stage in range(2)]
RANKS = {worker: (rank,) for rank, worker in enumerate(WORKERS)}


class Job:
    """Its processes, and the generations that they build."""

    def __init__(self, ordered: bool) -> None:
        self.fabric = Fabric(ordered=ordered)
        self.networks = {worker: MemoryNetwork(self.fabric, rank) for worker, (rank,) in RANKS.items()}
        self.groups: dict[Worker, Groups] = {}
        self.generation = 0

    def begin(self, members: Collection[Worker], rested: Collection[Worker] = ()) -> dict[Worker, Groups]:
        """The next generation; those of ``rested`` bring what they had."""
        self.generation += 1

        def connect(me: Worker) -> Groups:
            return self.networks[me].connect(
                generation=self.generation, prefix=f"g{self.generation}", place=Place(me, GRID, RANKS, "gloo"),
                members=list(members), limits=Limits(60.0, 60.0, 60.0), interrupted=lambda: False,
                before=self.groups.get(me) if me in rested else None)

        self.groups = dict(zip(members, self.fabric.run(*[lambda me=me: connect(me) for me in members]), strict=True))
        return self.groups

    def rest(self) -> None:
        """All stand at a boundary, and are told that the generation is over."""
        for groups in self.groups.values():
            groups.rest()
            groups.abort()

    def check(self) -> None:
        """Every communicator adds up, among its members."""
        def add(groups: Groups) -> None:
            for comm in groups.all():
                total = torch.ones(1)
                comm.sum(total).wait()
                assert total.item() == comm.size

        assert self.fabric.run(*[lambda one=one: add(one) for one in self.groups.values()]) == [None] * len(self.groups)


@pytest.mark.parametrize("ordered", [False, True], ids=["gloo's rules", "NCCL's rules"])
def test_stages_that_stay_keep_theirs_when_one_comes_in_and_when_one_leaves(ordered: bool) -> None:
    job, late = Job(ordered), Worker(1, 1)
    five = [worker for worker in WORKERS if worker != late]
    first = dict(job.begin(five))
    job.rest()
    second = dict(job.begin(WORKERS, five))
    for worker, groups in second.items():
        assert all(comm.of == "generation 2" and not comm.aborted for comm in groups.all())
        assert (worker.stage == 0) == (worker in first and groups.stage is first[worker].stage)
        assert (worker.pipeline != 1) == (worker in first and groups.pipeline is first[worker].pipeline)
        assert worker not in first or first[worker].world.aborted
    job.check()
    job.rest()
    gone = second[late]
    third = job.begin(five, five)
    gone.retire()
    for worker, groups in third.items():
        assert (worker.stage == 0) == (groups.stage is second[worker].stage)
        assert groups.world.identity == ("g2-3/world.0" if ordered else "g3/world.0"), "NCCL can leave a member out"
        assert groups.world.rank == five.index(worker) and groups.world.names == tuple(map(str, five))
    job.check()


@pytest.mark.parametrize("ordered", [False, True], ids=["gloo's rules", "NCCL's rules"])
def test_what_one_member_has_aborted_nobody_keeps(ordered: bool) -> None:
    """It was not at the boundary yet when another one failed."""
    job, late, dead = Job(ordered), Worker(1, 0), Worker(2, 1)
    first = dict(job.begin(WORKERS))
    for worker, groups in first.items():
        if worker != late:
            groups.rest()
        groups.abort()
    job.networks[dead].die()
    live = [worker for worker in WORKERS if worker != dead]
    second = job.begin(live, [worker for worker in live if worker != late])
    for worker, groups in second.items():
        assert groups.stage is not first[worker].stage
        assert (groups.pipeline is first[worker].pipeline) == (worker.pipeline == 0)
    job.check()


def test_a_generation_that_does_not_come_about_leaves_nothing_to_keep() -> None:
    job = Job(ordered=True)
    first = dict(job.begin(WORKERS))
    job.rest()
    network, me = job.networks[WORKERS[0]], WORKERS[0]
    with pytest.raises(Exception, match="a newer generation"):
        network.connect(generation=2, prefix="g2", place=Place(me, GRID, RANKS, "gloo"), members=WORKERS,
                        limits=Limits(60.0, 60.0, 60.0), interrupted=lambda: True, before=first[me])
    assert all(comm.aborted for comm in first[me].all())


def test_what_processes_say_to_each_other_at_the_store() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=10))
    for rank, words in enumerate((["keeps:a", "keeps:b"], ["keeps:b"], [])):
        meet(store, rank, [rank], lambda: False, 10.0, words)
    assert all_said(store, [0, 1], "keeps:b")
    assert not all_said(store, [0, 1], "keeps:a") and not all_said(store, [0, 1, 2], "keeps:b")
    assert all_said(store, [0, 1, 2], "here")
