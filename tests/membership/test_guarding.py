"""The last copy of a stage, on paper: who keeps a copy of it, where all go back to, and which process comes for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from megatron_recycle.control.searches import Plans, find_moves
from megatron_recycle.membership import decisions as do
from megatron_recycle.membership import guarding, inputs, records
from megatron_recycle.membership.description import Job, Model
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.guarding import Source, source
from megatron_recycle.membership.resume import Checkpoint
from megatron_recycle.membership.state import Member, State
from megatron_recycle.plan import Grid
from megatron_recycle.plan.plan_file import PlanFile
from tests.membership.cluster import Cluster, endings, events, report, told, verdict


def state_of(hosts: dict[str, str], stages: int) -> State:
    members = {name: Member(name, rank, f"{name}/0", 1000 + rank, host)
               for rank, (name, host) in enumerate(hosts.items())}
    return State(size=len(members), members=members, description=Job(grid=Grid(stages, (2,) * 4), guard="memory"))


@given(st.dictionaries(st.tuples(st.integers(0, 3), st.integers(0, 3)), st.sampled_from("abc"), min_size=1))
def test_each_last_copy_is_kept_by_another_stage_on_another_host_if_there_is_one(places):
    hosts = {f"{d}:{s}": host for (d, s), host in sorted(places.items())}
    found = guarding.keepers(state_of(hosts, 4))
    stages = [int(name[-1]) for name in hosts]
    alone = [name for name in hosts if stages.count(int(name[-1])) == 1]
    assert found.keys() == {name[-1] for name in alone if len(set(stages)) > 1}
    for name in alone:
        if (keeper := found.get(name[-1])) is not None:
            others = [other for other in hosts if other[-1] != name[-1]]
            assert keeper in others
            assert hosts[keeper] != hosts[name] or all(hosts[other] == hosts[name] for other in others)


@given(st.lists(st.tuples(st.sets(st.integers(0, 5), max_size=2), st.sets(st.integers(0, 5), max_size=2)), min_size=1,
                max_size=4))
def test_all_go_back_to_the_newest_iteration_that_all_have(copies):
    """Survivors of stage 0, and what each keeps of itself and of the lost stage 1."""
    reports = {f"{d}:0": report(6, 5, asked=6, guard={"own": sorted(own), "of": {"1": sorted(of)}})
               for d, (own, of) in enumerate(copies)}
    able = [k for k in range(6) if all(k in own for own, _ in copies) and any(k in of for _, of in copies)]
    found = source(reports, [1])
    if not able:
        assert isinstance(found, str)
        return
    assert isinstance(found, Source) and found.iteration == max(able) and found.regained == 5
    assert max(able) in copies[int(found.keepers[1][0])][1]


CHECKPOINT = Checkpoint(3, "/checkpoints/step4", {})


@given(st.lists(st.tuples(st.integers(0, 5), st.none() | st.integers(-1, 5)), min_size=1, max_size=4),
       st.none() | st.integers(0, 5))
def test_all_go_back_to_the_checkpoint_where_no_copy_is_as_new_and_nothing_would_be_lost(survivors, saved):
    """Each survivor has a copy of one iteration, and of the lost stage's; and can go back so far at most."""
    reports = {f"{d}:0": report(6, 5, asked=6, guard={"own": [own], "of": {"1": [own]}, "back": back})
               for d, (own, back) in enumerate(survivors)}
    checkpoint = None if saved is None else replace(CHECKPOINT, iteration=saved)
    copies = {own for own, _ in survivors}
    copy = next(iter(copies)) if len(copies) == 1 else -1
    able = saved is not None and all(back is not None and back <= saved for _, back in survivors)
    found = source(reports, [1], checkpoint)
    if copy < 0 and not able:
        assert isinstance(found, str) and found
        return
    assert isinstance(found, Source)
    loaded = able and saved > copy
    assert (found.iteration, found.checkpoint) == ((saved, checkpoint) if loaded else (copy, None))
    assert bool(found.keepers) != loaded and found.regained == 5


def guarded() -> Cluster:
    """2 x 2 workers that have committed 5, with copies of 3."""
    cluster = Cluster(2)
    for name in cluster.names:
        cluster.hello(name)
    for name in cluster.names:
        cluster.ready(name, guard="memory")
    cluster.plan(), cluster.resume_all(), cluster.commit_all(5)
    return cluster


def reports(cluster: Cluster) -> list[do.Decision]:
    return cluster.reports(iteration=6, holds=5, asked=6, guard={"own": [3], "of": {"1": [3]}})


def test_a_stage_that_comes_down_to_one_worker_is_told_with_who_keeps_a_copy():
    cluster = guarded()
    cluster.exit("0:1")
    cluster.plan()
    (event,) = events(cluster.reports(iteration=6, holds=5), "last_copy")
    assert (event["stages"], event["kept_by"]) == ({"1": "1:1"}, {"1": "0:0"})
    ((_, go),) = told(cluster.log[-20:], "go")
    assert go.keepers == {"1": "0:0"}


def test_where_moves_are_allowed_a_worker_moves_in_for_a_last_copy_though_it_pays_nothing():
    cluster = Cluster(4)
    for name in cluster.names:
        cluster.hello(name)
    for name in cluster.names:
        cluster.ready(name, moves=True)
    cluster.plan(), cluster.resume_all(), cluster.commit_all(5)
    for name in ("0:1", "1:1"):
        cluster.exit(name), cluster.plan(), cluster.reports(iteration=6, holds=5)
        (search,) = [one for one in cluster.resume_all() if isinstance(one, do.FindMoves)]
        assert search.wanted == ()
    cluster.exit("2:1"), cluster.plan(), cluster.reports(iteration=6, holds=5)
    (search,) = [one for one in cluster.resume_all() if isinstance(one, do.FindMoves)]
    assert search.wanted == (("3:0", "0:1"),)
    assert find_moves(Plans(lambda *_: {}, moves=lambda *_: {}), {}, search) == inputs.MovesFound(
        cluster.state.generation, {"3:0": "0:1"})
    assert find_moves(Plans(lambda *_: {}, moves=lambda *_: {"2:0": "2:1"}), {}, search).moves == {"2:0": "2:1"}


def lost() -> Cluster:
    cluster = guarded()
    cluster.exit("0:1"), cluster.plan(), cluster.reports(iteration=6, holds=5)
    return cluster


def test_a_lost_stage_is_not_the_end_a_process_is_started_where_the_last_one_died_and_all_go_back():
    cluster = lost()
    decisions = cluster.exit("1:1")
    assert not endings(decisions) and not [one for one in decisions if isinstance(one, do.MakePlan)]
    decisions = reports(cluster)
    (start,) = [one.message for one in decisions if isinstance(one, do.Command)]
    assert (start.type, start.rank, start.beside, start.pid) == ("start", 3, 3, 1003)
    cluster.hello("1:1", life=1)
    ready = inputs.Ready("1:1/1", cluster.state.job.told(Model()), report(attempt=0))
    (decided,) = events(cluster.feed(ready), "decided")
    assert decided["reason"] == "stage 1 comes back"
    cluster.plan()
    decisions = cluster.reports("0:0", "1:0", iteration=6, holds=5, asked=6,
                                guard={"own": [3], "of": {"1": [3]}})
    ((_, go),) = told(decisions, "go")
    assert (go.resume.target, go.resume.regained, go.resume.restored) == (3, 5, {"1": "0:0"})
    assert go.resume.joined == ("1:1",) and cluster.state.progress.committed == 3
    assert events(decisions, "restored")[0]["lost"] == 2


@pytest.mark.parametrize("first, rank, beside", [(FailureKind.EXIT, 1, {1}), (FailureKind.UNREACHABLE, 3, {0, 2})])
def test_where_the_host_is_gone_the_process_is_started_where_another_one_has_died_or_beside_a_survivor(
        first, rank, beside):
    cluster = guarded()
    cluster.declare(first, "0:1/0"), cluster.plan(), cluster.reports(iteration=6, holds=5)
    cluster.declare(FailureKind.UNREACHABLE, "1:1/0")
    (start,) = [one.message for one in reports(cluster) if isinstance(one, do.Command)]
    assert start.rank == rank and start.beside in beside


def test_processes_that_do_not_come_up_end_the_job_in_the_end():
    cluster = lost()
    cluster.exit("1:1")
    reports(cluster)
    for _ in range(3):
        start = next(one.message for one in reversed(cluster.log) if isinstance(one, do.Command))
        decisions = cluster.feed(inputs.Exited(start.rank, 4711, 1, cluster.now, "log", start.move))
    (end,) = endings(decisions)
    assert end.again and "It could not be brought back: 3 processes for it have failed" in end.message


def test_without_a_copy_the_job_ends_and_says_so():
    cluster = lost()
    cluster.exit("1:1")
    (end,) = endings(cluster.reports(iteration=6, holds=5))
    assert end.again and "nobody who is left keeps a copy of stage 1" in end.message


def test_with_tensor_parallelism_the_part_that_died_comes_back_and_the_idle_one_is_there():
    cluster = Cluster(2)
    cluster.names = [f"{worker}.{part}" for worker in cluster.names for part in range(2)]
    cluster.state = State(size=8)
    for name in cluster.names:
        cluster.hello(name)
    for name in cluster.names:
        cluster.ready(name, guard="memory", parts=2)
    cluster.plan(), cluster.resume_all(), cluster.commit_all(5)
    cluster.exit("0:1.0"), cluster.plan(), cluster.reports(iteration=6, holds=5)
    cluster.exit("1:1.1")
    left = ("0:0.0", "0:0.1", "1:0.0", "1:0.1")
    guard = {"guard": {"own": [3], "of": {"1": [3]}}, "asked": 6}
    decisions = cluster.reports(*left, iteration=6, holds=5, **guard)
    starts = [one.message for one in decisions if isinstance(one, do.Command)]
    assert [(start.rank, start.beside) for start in starts] == [(7, 7)], "1:1.1, where it was; 1:1.0 idles"
    description = cluster.state.job.told(Model())
    cluster.feed(inputs.Ready("1:1.0/0", description, report(attempt=0)))
    cluster.hello("1:1.1", life=1)
    (decided,) = events(cluster.feed(inputs.Ready("1:1.1/1", description, report(attempt=0))), "decided")
    assert decided["reason"] == "stage 1 comes back"
    cluster.plan()
    ((_, go),) = told(cluster.reports(*left, iteration=6, holds=5, **guard), "go")
    assert go.resume.joined == ("1:1.0", "1:1.1") and go.resume.restored == {"1": "0:0"}
    half = {**guard, "guard": {**guard["guard"], "of": {}}}
    assert source({name: report(6, 5, **(half if name.endswith("1") else guard)) for name in left}, [1]) == (
        "nobody who is left keeps a copy of stage 1 that all others can go back to"), "half a copy is none"


def back_from(facts: dict[str, int] | None, **description: object) -> tuple[Cluster, list[do.Decision]]:
    """2 x 2 workers that have noted a checkpoint of 3, committed 5, and lost stage 1."""
    cluster = Cluster(2)
    for name in cluster.names:
        cluster.hello(name)
    for name in cluster.names:
        cluster.ready(name, guard="checkpoint", **description)
    cluster.plan(), cluster.resume_all(), cluster.commit_all(3)
    cluster.feed(inputs.Written("0:0/0", cluster.state.generation, 3, "/checkpoints/step4", facts))
    cluster.commit_all(5)
    cluster.exit("0:1"), cluster.plan(), cluster.reports(iteration=6, holds=5)
    return cluster, cluster.exit("1:1")


def test_a_lost_stage_comes_back_from_the_checkpoint_and_the_log_says_how_many_iterations_are_lost():
    cluster, decisions = back_from({"verdict": 1})
    assert not endings(decisions)
    kept = {"iteration": 6, "holds": 5, "asked": 6, "guard": {"own": [], "of": {}, "back": -1}}
    (start,) = [one.message for one in cluster.reports(**kept) if isinstance(one, do.Command)]
    assert (start.type, start.rank) == ("start", 3)
    cluster.hello("1:1", life=1)
    cluster.feed(inputs.Ready("1:1/1", cluster.state.job.told(Model()), report(attempt=0)))
    cluster.plan()
    decisions = cluster.reports("0:0", "1:0", **kept)
    ((_, go),) = told(decisions, "go")
    assert go.resume.checkpoint == Checkpoint(3, "/checkpoints/step4", {"verdict": 1})
    assert (go.resume.target, go.resume.regained, go.resume.joined) == (3, 5, ("1:1",))
    (event,) = events(decisions, "restored")
    assert (event["iteration"], event["lost"], event["from"]) == (3, 2, {"1": "checkpoint"})
    again = records.restore(4, cluster.journal)
    assert again.checkpoints == cluster.state.checkpoints and again.progress.committed == 3


def test_commits_that_all_have_gone_back_on_do_not_count_when_they_are_said_again():
    cluster, _ = back_from({"verdict": 1})
    kept = {"iteration": 6, "holds": 5, "asked": 6, "guard": {"own": [], "of": {}, "back": -1}}
    cluster.reports(**kept)
    cluster.hello("1:1", life=1)
    cluster.feed(inputs.Ready("1:1/1", cluster.state.job.told(Model()), report(attempt=0)))
    cluster.plan(), cluster.reports("0:0", "1:0", **kept)
    generation = cluster.state.generation
    again = [inputs.Committed(f"{name}/0", 2, 5, 1.0) for name in ("0:0", "1:0")]
    own = [inputs.Committed(one, generation, 4, 1.0) for one in ("1:1/1", "1:0/0", "0:0/0")]
    decisions = [cluster.feed(happened) for happened in (*again, *own)]
    assert [len(events(each, "committed")) for each in decisions] == [0, 0, 0, 0, 1]
    assert cluster.state.progress.committed == records.restore(4, cluster.journal).progress.committed == 4


def test_survivors_save_at_the_newest_iteration_that_somebody_has_committed():
    cluster, decisions = back_from(None, survivors=True)
    assert not endings(decisions) and told(decisions, "stop")
    cluster.reports("0:0", iteration=6, holds=6, stepped=6, committed=5, verdict=verdict(5))
    decisions = cluster.reports("1:0", iteration=5, holds=5, stepped=5, committed=4)
    ((_, go),) = told(decisions, "go")
    assert (go.resume.target, go.resume.verdict, go.writers) == (5, verdict(5), ("0:0",))
    assert (go.missing, go.plan) == ((1,), PlanFile())
    cluster.feed(inputs.Saved("1:0/0", cluster.state.generation, "", ""))
    (end,) = endings(cluster.feed(inputs.Saved("0:0/0", cluster.state.generation, "/run/survivors/stage-0.pt", "")))
    assert end.again and "of iteration 5 (stage 0; stage 1 is missing) is in /run/survivors" in end.message
    assert "stage 1 has lost its last worker" in end.message


@pytest.mark.parametrize("facts", [None, {"verdict": 1}])
@pytest.mark.parametrize("before_the_go", [True, False])
def test_survivors_save_although_the_coordinator_is_lost_meanwhile(before_the_go: bool, facts: dict[str, int] | None):
    """Also where there is a checkpoint, which the script does not let them go back to."""
    cluster, _ = back_from(facts, survivors=True)
    kept = {"iteration": 6, "holds": 5, "asked": 6, "guard": {"back": 5}}
    cluster.reports("0:0", **kept)
    if not before_the_go:
        cluster.reports("1:0", **kept)
        cluster.feed(inputs.Saved("0:0/0", 3, "/run/survivors/stage-0.pt", ""))
    cluster.state = records.restore(4, cluster.journal)
    assert not endings(cluster.feed(inputs.Restarted()))
    for name in ("0:0", "1:0"):
        cluster.feed(inputs.Hello(cluster.member(name), 2 if before_the_go else 3))
    if before_the_go:
        cluster.reports("0:0", "1:0", **kept)
    generation = cluster.state.generation
    assert not endings(cluster.feed(inputs.Saved("0:0/0", generation, "/run/survivors/stage-0.pt", "")))
    (end,) = endings(cluster.feed(inputs.Saved("1:0/0", generation, "", "")))
    assert end.again and "(stage 0; stage 1 is missing) is in /run/survivors" in end.message


def test_a_job_that_was_told_not_to_bring_stages_back_says_that_this_is_why():
    cluster = Cluster(2)
    for name in cluster.names:
        cluster.hello(name)
    for name in cluster.names:
        cluster.ready(name, guard="none")
    cluster.plan(), cluster.resume_all(), cluster.commit_all(5)
    cluster.exit("0:1"), cluster.plan(), cluster.reports(iteration=6, holds=5)
    (end,) = endings(cluster.exit("1:1"))
    assert "stage 1 has lost its last worker" in end.message and "since guard is none" in end.message


def test_a_survivor_that_was_on_its_way_back_to_a_checkpoint_does_not_save_what_is_half_loaded():
    cluster, _ = back_from(None, survivors=True)
    cluster.reports("0:0", iteration=6, holds=5, guard={"midway": True})
    ((_, go),) = told(cluster.reports("1:0", iteration=6, holds=5), "go")
    assert go.writers == ("1:0",)
    cluster, _ = back_from(None, survivors=True)
    (end,) = endings(cluster.reports(iteration=6, holds=5, guard={"midway": True}))
    assert "none of those that are left holds a whole iteration" in end.message


def test_a_survivor_that_is_lost_meanwhile_does_not_keep_the_job_from_its_end():
    cluster, _ = back_from(None, survivors=True)
    (end,) = endings(cluster.exit("1:0"))
    assert end.again and "No checkpoint was written" in end.message
    assert "stage 1 has lost its last worker" in end.message
