"""Pairs of workers are connected before anything depends on it, and who waits for one that is gone can leave."""

from __future__ import annotations

import threading
from itertools import combinations

import pytest
import torch

from megatron_recycle.errors import GenerationOver
from megatron_recycle.membership import Resume
from megatron_recycle.plan import Grid, Worker
from megatron_recycle.runtime.comm import comm
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.p2p_warmup import _given, make_first_transfers
from tests.fakes.network.ends import Host
from tests.in_memory_job.wires import Wires
from tests.runtime.comms import connected

GRID = Grid(2, (1, 1, 1))
WORKERS = [Worker(pipeline, stage) for pipeline in range(3) for stage in range(2)]
OWN = [(Worker(pipeline, 0), Worker(pipeline, 1)) for pipeline in range(3)]
GUEST = (Worker(0, 0), Worker(1, 1))
CPU = torch.device("cpu")


class Job:
    """Its generation, and what has been asked of the network since that stands."""

    def __init__(self, ordered: bool = True) -> None:
        self.asked: list[str] = []
        self.fabric = Wires(1, self.at, ordered=ordered)
        self.groups = connected(self.fabric, GRID, WORKERS)
        self.asked.clear()

    def at(self, process: Host, what: str) -> None:
        self.asked.append(f"{process.rank}: {what}")

    def meet(self, world: list[tuple[Worker, Worker]], exact: bool = False) -> None:
        def of(groups: Groups) -> None:
            stage = combinations(groups.peers(groups.me.stage), 2) if exact else ()
            make_first_transfers(groups, world, list(stage), CPU, lambda: False, 60.0)

        outcomes = self.fabric.run(*[lambda groups=groups: of(groups) for groups in self.groups.values()])
        assert outcomes == [None] * len(WORKERS)


def test_only_pairs_that_are_new_are_connected():
    job = Job()
    job.meet(OWN)
    assert job.asked.count("0: batch world.0") == 1 and not any("stage" in asked for asked in job.asked)
    job.asked.clear()
    job.meet([*OWN, GUEST])
    assert sorted(asked for asked in job.asked if "batch" in asked) == ["0: batch world.0", "3: batch world.0"]
    job.asked.clear()
    job.meet([GUEST], exact=True)
    assert sorted(asked for asked in job.asked if "batch" in asked) == sorted(
        f"{rank}: batch stage{rank % 2}.0" for rank in range(6) for _ in range(2))


def test_where_pairs_are_connected_with_their_communicator_nothing_is_asked_of_it():
    job = Job(ordered=False)
    job.meet([*OWN, GUEST], exact=True)
    assert not job.asked


@pytest.mark.parametrize("why", ["a newer generation", "a limit"])
def test_who_waits_for_one_that_never_comes_leaves(why, monkeypatch):
    monkeypatch.setattr(comm, "_ABORT_WAITS", 0.05)
    job, newer = Job(), threading.Event()
    groups = job.groups[OWN[0][0]]
    if why == "a newer generation":
        job.at = lambda process, what: newer.set()  # type: ignore[method-assign]
        job.fabric._at = job.at
    with pytest.raises(GenerationOver, match="given up" if why == "a newer generation" else "within 0 s"):
        make_first_transfers(groups, OWN, [], CPU, newer.is_set, 60.0 if why == "a newer generation" else 0.3)
    assert not groups.world.ledger.met
    groups.abort()
    groups.teardown.threads.close()


def test_who_comes_in_or_lacks_a_gradient_meets_those_that_give():
    peers = tuple(Worker(pipeline, 1) for pipeline in range(4))
    resume = Resume(3, 4, 1, copies={"1:1": "0:1", "2:0": "0:0"}, joined=("3:1", "1:0"))
    assert _given(resume, peers) == {
        (Worker(0, 1), Worker(1, 1)), *((Worker(pipeline, 1), Worker(3, 1)) for pipeline in range(3))}
    assert not _given(Resume(3, 4, 1), peers)
