"""Collectives among those that are left give the values of the full grid, whichever workers are gone: in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import distributed_c10d as c10d

from megatron_recycle.errors import UnsupportedError
from megatron_recycle.plan import Grid, Worker
from megatron_recycle.runtime.comm.user_collectives import calls as living_calls
from megatron_recycle.runtime.comm.user_collectives import shares
from megatron_recycle.runtime.comm.user_collectives.calls import AllGather, AllReduce, Broadcast, Call, Objects, Scatter
from megatron_recycle.runtime.comm.user_collectives.exchange import Exchange, Group, Roll, pass_over
from megatron_recycle.runtime.comm.user_collectives.results import Results, as_row, recall
from megatron_recycle.runtime.comm.user_collectives.script_groups import Groups
from megatron_recycle.runtime.comm.user_collectives.torch_calls import METHODS
from megatron_recycle.runtime.place import Place
from tests.fakes.network import Fabric

SUM, PIECE = dist.ReduceOp.SUM, 3


class Member:
    """One position of a group of ``size``: tensors that its peers have alike, and torch's arguments made of them."""

    def __init__(self, stage: int, position: int, size: int) -> None:
        draw = torch.Generator().manual_seed(stage)
        self.own = torch.randn(PIECE, generator=draw)
        self.whole = torch.randn(PIECE * size, generator=draw)
        self.into, self.all = torch.zeros(PIECE), torch.zeros(PIECE * size)
        self.position, self.size = position, size

    def arguments(self, name: str, root: int, operation: Any) -> tuple[Any, ...]:
        slots = list(self.all.view(self.size, PIECE))
        pieces = list(self.whole.view(self.size, PIECE))
        mine = self.position == root

        def options(kind: Any) -> Any:
            made = kind()
            for key, value in (("rootRank", root), ("reduceOp", operation)):
                if hasattr(made, key):
                    setattr(made, key, value)
            return made

        return {
            "barrier": lambda: (c10d.BarrierOptions(),),
            "allreduce": lambda: ([self.own], options(c10d.AllreduceOptions)),
            "allreduce_coalesced": lambda: ([self.own, self.whole], options(c10d.AllreduceCoalescedOptions)),
            "reduce": lambda: ([self.own], options(c10d.ReduceOptions)),
            "broadcast": lambda: ([self.own], options(c10d.BroadcastOptions)),
            "allgather": lambda: ([slots], [self.own], c10d.AllgatherOptions()),
            "_allgather_base": lambda: (self.all, self.own, c10d.AllgatherOptions()),
            "gather": lambda: ([slots] if mine else [], [self.own], options(c10d.GatherOptions)),
            "scatter": lambda: ([self.into], [pieces] if mine else [], options(c10d.ScatterOptions)),
            "reduce_scatter": lambda: ([self.into], [pieces], options(c10d.ReduceScatterOptions)),
            "_reduce_scatter_base": lambda: (self.into, self.whole, options(c10d.ReduceScatterOptions)),
            "alltoall": lambda: (slots, pieces, c10d.AllToAllOptions()),
            "alltoall_base": lambda: (self.all, self.whole, [], [], c10d.AllToAllOptions()),
        }[name]()

    def bits(self) -> tuple[bytes, ...]:
        return tuple(tensor.numpy().tobytes() for tensor in (self.own, self.whole, self.into, self.all))


NAMES = ("barrier", "allreduce", "allreduce_coalesced", "reduce", "broadcast", "allgather", "_allgather_base", "gather",
         "scatter", "reduce_scatter", "_reduce_scatter_base", "alltoall", "alltoall_base")
OPERATIONS = (SUM, dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT)


def place_of(me: Worker, grid: Grid) -> Place:
    ranks = {worker: (worker.stage * grid.pipelines + worker.pipeline,) for worker in grid.workers()}
    return Place(me, grid, ranks, "gloo")


def together(bodies: Sequence[Callable[[], Any]]) -> list[Any]:
    """What all have returned or raised, each in a thread."""
    results: list[Any] = [None] * len(bodies)

    def run(index: int) -> None:
        try:
            results[index] = bodies[index]()
        except Exception as error:  # noqa: BLE001 - it is looked at
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def calls(grid: Grid, members: Sequence[Worker], groups: Callable[[Worker], Group],
          call_of: Callable[[Worker, Group], Call], seed: int = 0) -> dict[Worker, Any]:
    """One call of each of ``members``; the workers, with what they raised or None."""
    place = place_of(members[0], grid)
    everyone = sorted(members, key=lambda worker: place.ranks[worker])
    comms = dict(zip(everyone, Fabric(seed, limit=60).comms(len(everyone)), strict=True))

    def body(worker: Worker) -> Callable[[], None]:
        def run() -> None:
            group = groups(worker)
            roll = Roll.of(group, place_of(worker, grid), members)
            call = call_of(worker, group)
            roll.check(call)
            exchange = Exchange(call, roll, comms[worker], 7)
            exchange.collect()
            exchange.confirm()
            exchange.finish()

        return run

    return dict(zip(everyone, together([body(worker) for worker in everyone]), strict=True))


@st.composite
def grids(draw: st.DrawFn) -> tuple[Grid, list[Worker]]:
    """A grid, and those that are left: some of every stage."""
    grid = Grid(draw(st.integers(1, 3)), (1,) * draw(st.integers(2, 4)))
    left: list[Worker] = []
    for stage in range(grid.stages):
        left += [Worker(pipeline, stage) for pipeline in sorted(
            draw(st.sets(st.integers(0, grid.pipelines - 1), min_size=1)))]
    return grid, left


@pytest.mark.parametrize("name", NAMES)
@given(given_grid=grids(), root=st.integers(0, 11), operation=st.sampled_from(OPERATIONS),
       over=st.booleans(), large=st.booleans())
@settings(max_examples=12, deadline=None)
def test_whoever_is_gone_the_others_have_the_values_of_the_full_grid(name, given_grid, root, operation, over, large):
    """Over all ranks and over a stage's; peers have equal tensors to give. A reduction has the same bits by shares, of
    a few rounds, as at once."""
    grid, left = given_grid

    def group(worker: Worker) -> Group:
        place = place_of(worker, grid)
        ranks = sorted(place.ranks[other][0] for other in grid.workers() if over or other.stage == worker.stage)
        return Group(tuple(ranks), ranks.index(place.ranks[worker][0]))

    def run(members: Sequence[Worker]) -> tuple[dict[Worker, Any], dict[Worker, tuple[bytes, ...]]]:
        state: dict[Worker, Member] = {}

        def call(worker: Worker, of: Group) -> Call:
            state[worker] = Member(worker.stage, of.me, len(of.ranks))
            arguments = state[worker].arguments(name, root % len(of.ranks), operation)
            return METHODS[name](len(of.ranks), arguments)

        return calls(grid, members, group, call), {worker: member.bits() for worker, member in state.items()}

    with patch.object(living_calls, "LARGE", -1 if large else 2**20), patch.object(shares, "_ROUND", 20):
        raised, found = run(left)
    _, full = run(list(grid.workers()))
    for worker in left:
        of = group(worker)
        gone = of.ranks[root % len(of.ranks)] not in {place_of(other, grid).ranks[other][0] for other in left}
        if name == "scatter" and gone:
            assert isinstance(raised[worker], UnsupportedError)
            assert "what it would have given has gone with it" in str(raised[worker])
        else:
            assert raised[worker] is None, raised[worker]
            assert found[worker] == full[worker]


def test_all_have_the_same_bits_in_the_order_of_ranks():
    """Also where no peers are equal: an addition in another order would differ somewhere."""
    grid = Grid(1, (1,) * 4)
    workers = list(grid.workers())
    draw = torch.Generator().manual_seed(3)
    given_tensors = [torch.randn(200, generator=draw) for _ in workers]
    kept = {worker: tensor.clone() for worker, tensor in zip(workers, given_tensors, strict=True)}
    add = METHODS["allreduce"](4, [[torch.zeros(1)]]).add  # type: ignore[attr-defined]
    raised = calls(grid, workers, lambda worker: Group((0, 1, 2, 3), worker.pipeline),
                   lambda worker, group: AllReduce([kept[worker]], add), seed=5)
    assert set(raised.values()) == {None}
    expected = ((given_tensors[0] + given_tensors[1]) + given_tensors[2]) + given_tensors[3]
    assert all(torch.equal(tensor, expected) for tensor in kept.values())


def test_a_reduction_is_cut_into_rounds_that_leave_out_nothing():
    tensors = [torch.zeros(5), torch.zeros(0), torch.zeros(3, dtype=torch.float64), torch.zeros(7, dtype=torch.int8)]
    for limit in range(1, 60):
        cut = list(shares.rounds(tensors, limit))
        for index, tensor in enumerate(tensors):
            spans = [span for spans in cut for span in spans if span.tensor == index]
            assert [number for span in spans for number in range(span.start, span.end)] == [*range(len(tensor))]
        sizes = [sum((end - start) * tensors[tensor].element_size() for tensor, start, end in spans) for spans in cut]
        assert all(sizes) and max(sizes) < limit + 8


def test_objects_of_any_length_are_gathered_and_told():
    grid = Grid(2, (1, 1))
    left = [Worker(1, 0), Worker(0, 1), Worker(1, 1)]
    made: dict[Worker, Objects] = {}

    def call(worker: Worker, group: Group) -> Call:
        made[worker] = Objects("all_gather_object", b"x" * (1 + 3 * worker.stage))
        return made[worker]

    raised = calls(grid, left, lambda worker: Group((0, 1, 2, 3), place_of(worker, grid).ranks[worker][0]), call)
    assert set(raised.values()) == {None}
    assert all(objects.found == [b"x", b"x", b"xxxx", b"xxxx"] for objects in made.values())


def test_objects_are_scattered_to_each_its_own():
    grid, made = Grid(1, (1, 1, 1)), {}

    def call(worker: Worker, group: Group) -> Call:
        given = [b"zero", b"one", b"two" * 100] if group.me == 1 else []
        made[worker] = Objects("scatter_object_list", given, source=1)
        return made[worker]

    ended = calls(grid, [*grid.workers()], lambda worker: Group((0, 1, 2), worker.pipeline), call)
    assert not any(ended.values()), ended
    assert [made[Worker(number, 0)].found[1] for number in range(3)] == [b"zero", b"one", b"two" * 100]
    assert not as_row(made[Worker(0, 0)]), "it is nobody else's"


def test_where_nobody_can_answer_the_error_names_who_is_gone_and_the_remedy():
    """A group of two stages of different pipelines: no other worker has a part in it like the one that is gone."""
    grid = Grid(2, (1, 1))
    place, group = place_of(Worker(0, 0), grid), Group((0, 3), 0)
    roll = Roll.of(group, place, [Worker(0, 0), Worker(1, 0), Worker(0, 1)])
    roll.check(Call())  # a barrier is of those that are there
    with pytest.raises(UnsupportedError, match=r"all_gather\(\) .* worker 1:1 \(rank 3\) is gone.*max_restarts"):
        roll.check(AllGather([[torch.zeros(1)] * 2], [torch.zeros(1)]))
    roll.check(AllGather([[torch.zeros(1)] * 2], [torch.zeros(1)], sink=1))  # nobody wants it any more
    roll.check(Broadcast([torch.zeros(1)], 0))
    with pytest.raises(UnsupportedError, match="broadcast"):
        roll.check(Broadcast([torch.zeros(1)], 1))


def test_who_tells_in_the_place_of_one_that_is_gone_says_that_it_may_know_less():
    """`flag = [decide() if rank == 0 else None]; broadcast_object_list(flag, src=0)` tells None from then on."""
    grid = Grid(2, (1, 1))
    place, group = place_of(Worker(1, 0), grid), Group((0, 1, 2, 3), 1)
    roll = Roll.of(group, place, [Worker(1, 0), Worker(0, 1), Worker(1, 1)])
    flag = Objects("broadcast_object_list", b"None", source=0)
    said = roll.stands_in(flag, 0) or ""
    assert "broadcast_object_list() from rank 0 (worker 0:0), which is gone: 1:0 tells" in said
    assert roll.stands_in(flag, 1) is None, "one that does not tell"
    assert roll.stands_in(Broadcast([torch.zeros(1)], 1), 0) is None, "one that is there"
    told = [roll.stands_in(Objects("scatter_object_list", [b""] * 4, source=1), process) for process in range(3)]
    assert told.count(None) == 2 and told[roll.answers[1]] == (
        "the script calls scatter_object_list() while rank 0 (worker 0:0) is gone: nobody gets what is for that rank")


def test_in_a_group_of_one_pipeline_the_lowest_peer_answers_from_its_own():
    grid = Grid(2, (1, 1, 1))
    place, group = place_of(Worker(1, 0), grid), Group((1, 4), 0)
    left = [worker for worker in grid.workers() if worker not in (Worker(1, 1), Worker(0, 1))]
    roll = Roll.of(group, place, left)
    assert roll.answers == (1, 3), "2:1 has rank 5, and is the fourth of those that are left"
    assert group.of_pipeline(2, place) == Group((2, 5), 0) and group.pipeline(place) == 1


def test_one_that_passes_over_a_call_has_what_it_would_have_had_if_all_had_given_the_same():
    group = Group((0, 1, 2), 1)
    add = METHODS["allreduce"](3, [[torch.zeros(1)]]).add  # type: ignore[attr-defined]
    total, told, piece = torch.ones(1), torch.ones(1), torch.full((1,), 5.0)
    pass_over(AllReduce([total], add), group)
    pass_over(Broadcast([told], 0), group)
    pass_over(Scatter(piece, [], 0), group)
    assert (total.item(), told.item(), piece.item()) == (3.0, 1.0, 5.0)


def summed(value: float, call: str = "allreduce", count: int = 1) -> Call:
    return METHODS[call](2, [[torch.full((count,), value)]])


def test_what_calls_brought_is_told_by_group_and_number_of_the_same_kind_only():
    kept, late = Results(), Results()
    kept.note("all", 3, as_row(summed(3.0)))
    kept.note("all", 5, as_row(summed(5.0, count=2000)))
    kept.note("others", 3, as_row(summed(7.0)))
    objects = Objects("all_gather_object", b"")
    objects.take([[torch.tensor([1, 2], dtype=torch.uint8)], []])
    kept.note("all", 6, as_row(objects))
    late.take(kept.told({"all": "ours"}))
    assert late.groups == ["ours"] and late.of("ours", 4) is None
    found, large, other = summed(0.0), summed(0.0, count=2000), summed(0.0, "broadcast")
    assert recall(found, late.of("ours", 3)) and found.results()[0].item() == 3.0
    assert recall(large, late.of("ours", 5)) and large.results()[0].sum().item() == 10000.0
    assert not recall(other, late.of("ours", 3)) and not recall(large, late.of("ours", 3))
    told = Objects("all_gather_object", b"own")
    assert recall(told, late.of("ours", 6)) and told.found == [b"\1\2", b""]


def test_of_too_many_results_the_oldest_of_whoever_has_most_go_and_large_ones_are_not_kept():
    kept = Results(most=100_000)
    kept.note("seldom", 1, as_row(summed(1.0)))
    kept.note("often", 1, as_row(summed(2.0)))
    for number in range(2, 4000):
        kept.note("often", number, as_row(summed(0.0)))
        kept.note("often", number + 5000, as_row(summed(0.0, count=5000)))
    assert kept.of("seldom", 1) and kept.of("often", 3999) and not kept.of("often", 1)
    assert not as_row(summed(0.0, count=living_calls.LARGE)) and not as_row(Scatter(torch.zeros(1), [], 0))


def test_a_script_that_begins_later_knows_the_groups_that_it_makes_as_the_others_do():
    """It has loaded a checkpoint, and skips iterations after which the others made groups, too."""
    def numbers(first: int) -> dict[int, list[int]]:
        now = [first - 1]
        groups = Groups(lambda: now[0])
        groups.add(dist.ProcessGroup(0, 2), (0, 1), -1)  # of the set-up
        found: dict[int, list[int]] = {}
        for now[0] in range(first, 6):
            made = [dist.ProcessGroup(0, 2) for _ in range(2)]
            for group in made:
                groups.add(group, (0, 1))
            found[now[0]] = [known.number for known in map(groups.known, made) if known is not None]
        return found

    early, late = numbers(0), numbers(4)
    assert late == {iteration: early[iteration] for iteration in (4, 5)}
    assert len({0, *(number for found in early.values() for number in found)}) == 13


def test_whoever_stays_first_in_a_group_tells_and_of_a_pipeline_that_is_gone_a_peer():
    grid = Grid(2, (2, 2, 2))  # rank: 3 * stage + pipeline
    place = place_of(Worker(0, 0), grid)
    everyone, line = Group(tuple(range(6)), 2), Group((2, 5), 0)
    assert everyone.told_to(1, [2, 3, 4, 5], place) == everyone and everyone.told_to(1, [0, 2], place) is None
    assert line.told_to(5, [2, 0], place) == line
    assert line.told_to(1, [2, 5, 4], place) is None, "4 tells"
    assert line.told_to(1, [2, 5], place) == Group((1, 4), 0) and line.told_to(1, [0, 3, 2, 5], place) is None
    assert line.told_to(4, [2, 5], place) is None, "5 tells"
