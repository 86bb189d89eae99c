"""Building a generation's communicators with all its members, and ending them."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_recycle.errors import GenerationOver, JobEnded, UnsupportedError
from megatron_recycle.plan import Grid, Worker
from megatron_recycle.runtime.comm import abort as aborts
from megatron_recycle.runtime.comm import rendezvous
from megatron_recycle.runtime.comm.abort import Teardown, abort
from megatron_recycle.runtime.comm.comm import Comm
from megatron_recycle.runtime.comm.handles import Groups, Limits
from megatron_recycle.runtime.comm.standalone import backend_for
from megatron_recycle.runtime.comm.tags import ACTIVATIONS, CONTROL
from megatron_recycle.runtime.comm.threads import Threads
from megatron_recycle.runtime.place import Place
from tests.fakes.network import Fabric, MemoryNetwork
from tests.runtime.comms import connected
from tests.runtime.test_comm import Liar, Lying

GRID = Grid(2, (1, 1))
RANKS = {Worker(pipeline, stage): (2 * pipeline + stage,) for pipeline in range(2) for stage in range(2)}
PARTS = {worker: (2 * rank, 2 * rank + 1) for worker, (rank,) in RANKS.items()}


def connect(network: MemoryNetwork, me: Worker, members: Any, generation: int = 1, part: int = 0,
            interrupted: Any = lambda: False, meet: float = 60.0) -> Groups:
    ranks = PARTS if network.rank not in RANKS[me] or part else RANKS
    return network.connect(generation=generation, prefix=f"g{generation}", place=Place(me, GRID, ranks, "gloo", part),
                           members=members, limits=Limits(60.0, 60.0, meet), interrupted=interrupted)


def test_a_default_group_that_was_made_without_a_name_has_a_library_for_each_kind_of_device():
    """As by init_process_group() or init_process_group("cpu:gloo,cuda:nccl")."""
    for name in (None, "cpu:gloo", "gloo"):
        dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
        try:
            assert backend_for(torch.device("cpu")) == "gloo"
            if name != "gloo":
                with pytest.raises(UnsupportedError, match=r"no library for tensors on a cuda device .* gloo and nccl"):
                    backend_for(torch.device("cuda"))
        finally:
            dist.destroy_process_group()


def test_a_group_is_not_split_off_a_default_group_that_is_bound_to_a_device(monkeypatch):
    """torch would split it, which takes all ranks that the job began with."""
    default, found = SimpleNamespace(bound_device_id="cuda:0"), []
    made = SimpleNamespace(set_timeout=lambda limit: None)

    def helper(*arguments: Any, **options: Any) -> Any:
        found.append(default.bound_device_id)
        return made, None

    monkeypatch.setattr(rendezvous.dist, "group", SimpleNamespace(WORLD=default))
    monkeypatch.setattr(rendezvous.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(rendezvous.c10d, "_new_process_group_helper", helper)
    monkeypatch.setattr(rendezvous.c10d, "_world", SimpleNamespace(pg_group_ranks=Ranks()))
    assert rendezvous.new_group("g", [0], dist.HashStore(), backend="gloo", timeout=1, connect_timeout=1) is made
    assert found == [None] and default.bound_device_id == "cuda:0"


class Ranks:
    def __setitem__(self, group: Any, ranks: Any) -> None:
        pass


def test_each_member_has_its_communicators():
    left = [worker for worker in RANKS if worker != Worker(0, 1)]
    groups = connected(Fabric(), GRID, left, generation=3)[Worker(1, 0)]
    assert groups.members == tuple(left) and groups.peers(0) == (Worker(0, 0), Worker(1, 0))
    assert [(comm.rank, comm.size) for comm in (groups.world, groups.stage, groups.control)] == [
        (1, 3), (1, 2), (1, 3)]
    assert groups.world.names == ("0:0", "1:0", "1:1") and groups.world.of == "generation 3"
    assert groups.siblings is None and groups.stage_control is groups.stage
    on_gpus = connected(Fabric(ordered=True), GRID, left)[Worker(1, 0)]
    assert on_gpus.stage_control is not on_gpus.stage and not on_gpus.stage_control.backend.ordered


def test_parts_of_a_worker_meet_in_two_communicators_only():
    fabric = Fabric()
    everyone = [(worker, part, rank) for worker, ranks in PARTS.items() for part, rank in enumerate(ranks)]

    def build(worker: Worker, part: int, rank: int) -> Groups:
        return MemoryNetwork(fabric, rank).connect(
            generation=1, prefix="g1", place=Place(worker, GRID, PARTS, "gloo", part), members=list(RANKS),
            limits=Limits(60.0, 60.0, 60.0), interrupted=lambda: False)

    found = fabric.run(*[lambda one=one: build(*one) for one in everyone])
    groups = found[everyone.index((Worker(1, 0), 1, 5))]
    assert groups.siblings is not None and groups.siblings.names == ("1:0.0", "1:0.1")
    assert groups.world.names == ("0:0.1", "0:1.1", "1:0.1", "1:1.1") and groups.control.size == 8
    assert groups.control_ranks[Worker(1, 1)] == 7


@pytest.mark.parametrize("why", ["a member is dead", "a member has not come", "too late"])
def test_a_generation_whose_members_do_not_come_is_given_up(why):
    fabric, over = Fabric(), threading.Event()
    one, other = MemoryNetwork(fabric, 0), MemoryNetwork(fabric, 1)
    if why == "a member is dead":
        with pytest.raises(GenerationOver):
            connect(other, Worker(0, 1), list(RANKS)[:2], interrupted=lambda: True)
        other.die()
    found: list[str] = []

    def wait() -> None:
        with pytest.raises(GenerationOver) as error:
            connect(one, Worker(0, 0), list(RANKS)[:2], interrupted=over.is_set, meet=0.02 if why == "too late" else 60)
        found.append(str(error.value))

    thread = threading.Thread(target=wait)
    thread.start()
    if why != "too late":
        over.set()
    thread.join(60)
    assert ("did not come" if why == "too late" else "a newer generation was announced") in found[0]


def test_a_process_that_takes_a_dead_ones_place_is_in_the_next_generation_and_hears_nothing_of_the_last():
    fabric = Fabric()
    first, dead, next_one = MemoryNetwork(fabric, 0), MemoryNetwork(fabric, 1), MemoryNetwork(fabric, 1)
    pair = list(RANKS)[:2]
    old, _ = fabric.run(lambda: connect(first, pair[0], pair), lambda: connect(dead, pair[1], pair))
    late = old.world.send(torch.tensor([1.0]), 1, ACTIVATIONS[0])
    dead.die()
    old.retire()
    assert all(comm.aborted for comm in old.all())
    new, its = fabric.run(lambda: connect(first, pair[0], pair, 2), lambda: connect(next_one, pair[1], pair, 2))
    into = torch.zeros(1)
    fabric.run(new.world.send(torch.tensor([2.0]), 1, ACTIVATIONS[0]).wait,
               its.world.receive(into, 0, ACTIVATIONS[0]).wait)
    assert into.item() == 2.0
    with pytest.raises(GenerationOver):
        late.wait()
    first.close()


class Hanging(Lying):
    """A library whose abort does not return, as NCCL's may not."""

    quick = False

    def __init__(self) -> None:
        self.free = threading.Event()

    def abort(self, group: Liar) -> None:
        self.free.wait(60)


def test_a_library_that_hangs_in_its_abort_holds_up_nobody():
    hanging, threads = Hanging(), Threads()
    flags: list[bool] = []

    class Looking(Lying):
        def abort(self, group: Liar) -> None:
            flags.extend((stuck.aborted, well.aborted))

    stuck, well = Comm(Liar(), hanging, CONTROL), Comm(Liar(), Looking(), CONTROL)
    pending = stuck.sum(torch.zeros(1))
    (aborting,) = abort([stuck, well], threads)
    assert flags == [True, True], "what is pending is void before any of it is freed"
    assert well.life.closed and not stuck.life.closed and aborting.is_alive()
    with pytest.raises(GenerationOver):
        pending.wait()
    hanging.free.set()
    threads.close()
    assert not aborting.is_alive() and stuck.life.closed


def test_an_abort_waits_for_who_is_posting_an_operation_but_not_for_ever():
    """NCCL must not be inside an operation of a communicator that is aborted."""
    posting, aborted = threading.Event(), threading.Event()

    class Slow(Liar):
        def recv(self, *what: Any) -> Any:
            posting.set()
            assert not aborted.wait(0.1)
            return self

    class Telling(Lying):
        def abort(self, group: Liar) -> None:
            aborted.set()

    comm = Comm(Slow(), Telling(), CONTROL)
    abort_it = threading.Thread(target=lambda: posting.wait(60) and comm.abort())
    abort_it.start()
    with pytest.raises(GenerationOver):
        comm.receive(torch.zeros(1), 1, 0)
    abort_it.join(60)
    assert aborted.is_set()


def test_a_process_whose_abort_hangs_ends_itself_and_one_that_only_tears_down_does_not(monkeypatch):
    """Nobody frees what waits in it; another process can take its place."""
    monkeypatch.setattr(aborts, "_LONGEST_ABORT", 0.05)
    hanging, said = Hanging(), SimpleQueue[str]()
    Teardown(Threads(), said.put).abort([Comm(Liar(), hanging, CONTROL)])
    text = said.get(timeout=60)
    assert "has not aborted a communicator within" in text and "--worker-restarts" in text
    for end, library in (("retire", hanging), ("abort", Lying())):
        threads = Threads()
        getattr(Teardown(threads, said.put), end)([Comm(Liar(), library, CONTROL)])
        threads.close()
        assert said.empty()
    hanging.free.set()


def test_the_end_of_such_a_process_says_why(monkeypatch):
    ends: list[Any] = []
    monkeypatch.setattr(aborts.os, "_exit", ends.append)
    monkeypatch.setattr(aborts, "get_logger", lambda: SimpleNamespace(critical=lambda text, why: ends.append(why)))
    aborts.end_process("it hangs")
    assert ends == ["it hangs", 1]


def test_what_is_computed_while_an_abort_comes_does_not_count_whatever_it_raises():
    """An abort leaves anything in a tensor: a framework's check may find it, or an index be out of range."""
    (groups,) = connected(Fabric(ordered=True), Grid(1, (1,)), [Worker(0, 0)]).values()
    with groups.counting("F0.0"):
        pass
    with pytest.raises(ValueError, match="the script's own"), groups.counting("F0.0"):
        raise ValueError("the script's own")
    with pytest.raises(GenerationOver, match=r"F0.0 does not count"), groups.counting("F0.0"):
        groups.abort()
    with pytest.raises(GenerationOver, match=r"F0.0 failed after the generation had been ended: found NaN"):  # noqa: SIM117
        with groups.counting("F0.0"):
            raise ValueError("found NaN")
    with pytest.raises(JobEnded), groups.counting("F0.0"):
        raise JobEnded("over")
