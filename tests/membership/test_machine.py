"""Stories of the pure membership machine: nobody is started, nobody is killed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from megatron_recycle.membership import decisions as do
from megatron_recycle.membership import inputs
from megatron_recycle.membership import state as st
from megatron_recycle.membership.description import Lending
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.lines import Decided
from megatron_recycle.membership.messages import group_prefix
from megatron_recycle.membership.records import restore, taken_up
from megatron_recycle.membership.resume import Resume
from megatron_recycle.plan.plan_file import PlanFile
from tests.membership.cluster import PLAN, Cluster, described, endings, events, report, told


def test_generation_one_forms_when_the_last_worker_is_ready() -> None:
    cluster = Cluster()
    for name in cluster.names:
        cluster.hello(name)
    for name in cluster.names[:-1]:
        assert cluster.ready(name) == []
    decisions = cluster.ready(cluster.names[-1])
    assert isinstance(decisions[0], do.Record)
    assert do.MakePlan(1, frozenset()) in decisions
    ((to, go),) = told(cluster.plan(), "go")
    assert to == set(cluster.names)
    assert go.generation == 1
    assert go.resume == Resume(target=-1, next=0, attempt=1)


def test_workers_that_disagree_on_the_job_end_it_and_the_key_is_named() -> None:
    cluster = Cluster()
    for name in cluster.names:
        cluster.hello(name)
    cluster.ready("0:0")
    (end,) = endings(cluster.ready("1:1", block=3))
    assert end.status == 1
    assert "block = 2" in end.message and "3" in end.message and "1:1" in end.message


@pytest.mark.parametrize(("frozen", "stage"), [(1, 1), (None, None)])
def test_copies_of_a_tied_parameter_are_trained_on_all_of_their_stages_or_the_job_does_not_begin(frozen, stage) -> None:
    """Else the stage that trains its own waits for ever for the gradients of the other."""
    cluster, decisions = Cluster(), []
    for name in cluster.names:
        cluster.hello(name)
    for name in cluster.names:
        trains = int(name.split(":")[1]) in (0, 1) and int(name.split(":")[1]) != frozen
        decisions = cluster.ready(name, ties=[[0, [0, 1]]] if trains else [])
    assert [f"stage {stage} does not" in end.message and "Freeze" in end.message for end in endings(decisions)] == (
        [] if stage is None else [True])


def test_stages_of_which_all_workers_can_run_full_backwards_are_the_planners() -> None:
    """Workers of one stage must agree, as on the model; those of others need not."""
    cluster = Cluster(pipelines=2)
    for name in cluster.names:
        cluster.hello(name)
        cluster.ready(name, model=f"of stage {name[-1]}", full_backward=name.endswith(":0"))
    assert cluster.state.description is not None and cluster.state.description.full_backward == (0,)
    other = Cluster(pipelines=2)
    for name in other.names:
        other.hello(name)
    other.ready("0:0", full_backward=True)
    (end,) = endings(other.ready("1:0", full_backward=False))
    assert "full_backward = true but worker 1:0 has false" in end.message


def test_a_wrong_number_of_processes_is_told() -> None:
    cluster = Cluster()
    cluster.grid = {"stages": 2, "microbatches": [4, 4]}
    for name in cluster.names:
        cluster.hello(name)
    for name in cluster.names[:-1]:
        cluster.ready(name)
    (end,) = endings(cluster.ready(cluster.names[-1]))
    assert "start 4 processes" in end.message


def test_an_exit_stops_all_survivors_at_once_and_planning_starts_before_the_reports() -> None:
    cluster = Cluster().train()
    decisions = cluster.exit("1:1")
    kinds = [type(decision) for decision in decisions]
    assert kinds.index(do.Record) < kinds.index(do.Tell) < kinds.index(do.MakePlan)
    ((to, stop),) = told(decisions, "stop")
    assert to == set(cluster.names) - {"1:1"} == set(stop.members)
    assert stop.generation == 2 and stop.out == {"1:1": "exit"}
    (suspected,) = events(decisions, "suspected")
    assert (suspected["worker"], suspected["kind"], suspected["ms"]) == ("1:1", "exit", pytest.approx(10))
    ((to, _),) = told(decisions, "end")
    assert to == {"1:1"}


def test_go_needs_both_the_plan_and_all_reports_in_any_order() -> None:
    for plan_first in (True, False):
        cluster = Cluster().train()
        cluster.exit("1:1")
        if plan_first:
            assert not told(cluster.plan(), "go")
            decisions = cluster.reports(iteration=0, actions=3)
        else:
            decisions = cluster.reports(iteration=0, actions=3)
            assert len(events(decisions, "stopped")) == 1 and not told(decisions, "go")
            decisions = cluster.plan()
        ((to, go),) = told(decisions, "go")
        assert len(to) == 5 and go.resume.redone == 15 and go.attempt == 2
        assert go.prefix == group_prefix(2, go.members)
        (reconciled,) = events(decisions, "reconciled")
        assert (reconciled["target"], reconciled["iteration"]) == (-1, 0)


def test_resumed_counts_when_the_last_survivor_begins_and_only_then_a_better_plan_is_sought() -> None:
    cluster = Cluster().train()
    failed_at = cluster.now
    cluster.exit("1:1", since=failed_at)
    cluster.plan()
    cluster.reports()
    members = list(cluster.state.members)
    for index, name in enumerate(members):
        decisions = cluster.feed(inputs.Resumed(f"{name}/0", 2, failed_at + 0.1 * (index + 1)))
        if name != members[-1]:
            assert decisions == []
    (resumed,) = events(decisions, "resumed")
    assert resumed["ms"] == pytest.approx(500)
    assert any(isinstance(d, do.Improve) and d.failed == {"1:1"} for d in decisions)


def test_a_second_kill_while_reports_come_in_starts_again_with_fresh_reports() -> None:
    cluster = Cluster().train()
    first = cluster.now
    cluster.exit("1:1", since=first)
    cluster.reports("0:0", "0:1")
    decisions = cluster.exit("2:0")
    ((to, stop),) = told(decisions, "stop")
    assert stop.generation == 3 and to == {"0:0", "0:1", "1:0", "2:1"}
    assert stop.out == {"1:1": "exit", "2:0": "exit"}
    for name in ("1:0", "2:1"):  # their reports for generation 2 are still on the way
        assert cluster.feed(inputs.Reported(f"{name}/0", 2, report())) == []
    assert cluster.plan(generation=2) == []  # and so is its plan
    cluster.plan()
    ((_, go),) = told(cluster.reports(), "go")
    assert go.generation == 3
    (resumed,) = events(cluster.resume_all(), "resumed")
    assert resumed["ms"] > (cluster.now - first - 1) * 1000


def test_two_exits_in_one_verdict_are_one_decision() -> None:
    cluster = Cluster().train()
    losses = (inputs.Loss("0:1/0", FailureKind.UNREACHABLE), inputs.Loss("1:0/0", FailureKind.UNREACHABLE))
    decisions = cluster.feed(inputs.Lost(losses, cluster.now - 10))
    assert cluster.state.generation == 2
    assert len(events(decisions, "suspected")) == 2 and len(told(decisions, "stop")) == 1


def test_the_last_worker_of_a_stage_ends_the_job_and_the_stage_is_named() -> None:
    cluster = Cluster().train()
    cluster.commit_all(7)
    cluster.exit("0:1")
    cluster.exit("1:1")
    decisions = cluster.exit("2:1")
    (end,) = endings(decisions)
    assert end.status != 0
    assert "stage 1" in end.message and "0:1 exit" in end.message and "checkpoint" in end.message
    assert "7" in end.message
    assert not told(decisions, "stop")
    assert cluster.exit("0:0") == []


def test_who_does_not_report_in_time_is_out() -> None:
    cluster = Cluster().train()
    cluster.exit("1:1")
    cluster.reports("0:0", "0:1", "1:0", "2:0")
    decisions = cluster.feed(inputs.ReportsLate(2))
    ((to, stop),) = told(decisions, "stop")
    assert stop.generation == 3 and "2:1" not in to and stop.out["2:1"] == "stalled"
    assert cluster.feed(inputs.ReportsLate(2)) == []


def test_the_limit_for_reports_does_nothing_once_all_are_in() -> None:
    cluster = Cluster().train()
    cluster.exit("1:1")
    cluster.reports()
    assert cluster.feed(inputs.ReportsLate(2)) == []
    cluster.plan()
    assert cluster.feed(inputs.ReportsLate(2)) == []
    assert cluster.state.phase is st.Phase.TRAINING


def test_nothing_that_a_fenced_worker_says_has_an_effect() -> None:
    cluster = Cluster().train()
    cluster.feed(inputs.Lost((inputs.Loss("1:1/0", FailureKind.FROZEN),), cluster.now - 2))
    before = cluster.state
    for happened in (
        inputs.Reported("1:1/0", 2, report(holds=40)),
        inputs.Resumed("1:1/0", 2, cluster.now),
        inputs.Committed("1:1/0", 2, 40, 0.0),
        inputs.Adopted("1:1/0", 2, 3, "sha256:1"),
        inputs.Finished("1:1/0", 2),
        inputs.Ready("1:1/0", described({"grid": cluster.grid}), report()),
    ):
        assert cluster.feed(happened) == []
    assert cluster.state == before
    ((to, end),) = told(cluster.hello("1:1"), "end")
    assert to == {"1:1"} and end.status == 3 and "declared out" in end.message
    assert cluster.exit("1:1") == []


def test_a_late_resumed_of_the_last_generation_does_not_count() -> None:
    cluster = Cluster().train()
    cluster.exit("1:1")
    cluster.plan()
    cluster.reports()
    cluster.feed(inputs.Resumed("0:0/0", 2, cluster.now))
    cluster.exit("2:0")
    for name in cluster.state.members:
        assert cluster.feed(inputs.Resumed(f"{name}/0", 2, cluster.now)) == []
    assert cluster.state.round.resumed == {}


def test_an_attempt_that_was_announced_is_never_announced_again() -> None:
    """A second failure before anybody has begun: reports still name the attempt before."""
    cluster = Cluster().train()
    cluster.exit("1:1")
    cluster.plan()
    ((_, first),) = told(cluster.reports(iteration=0, attempt=1), "go")
    cluster.exit("2:0")
    cluster.plan()
    ((_, second),) = told(cluster.reports(iteration=0, attempt=1), "go")
    assert (first.attempt, second.attempt) == (2, 3)


def test_an_iteration_is_committed_once_when_all_live_members_say_so() -> None:
    cluster = Cluster().train()
    assert cluster.state.progress.committed == -1
    for name in cluster.names[:-1]:
        assert cluster.feed(inputs.Committed(f"{name}/0", 1, 0, 2.0)) == []
    decisions = cluster.exit("2:1")  # the only one that had not
    (committed,) = events(decisions, "committed")
    assert committed["iteration"] == 0 and committed["loss"] == 2.0
    cluster.plan()
    cluster.reports(iteration=1, holds=0)
    assert events(cluster.resume_all(), "committed") == []


def test_an_iteration_finished_by_the_recovery_is_committed_too() -> None:
    cluster = Cluster().train()
    cluster.feed(inputs.Committed("0:0/0", 1, 0, 1.5))
    cluster.exit("1:1")
    cluster.plan()
    cluster.reports(holds=0, stepped=-1)
    (committed,) = events(cluster.resume_all(), "committed")
    assert committed["iteration"] == 0 and committed["loss"] == 1.5


def test_losses_that_differ_between_workers_are_shown() -> None:
    cluster = Cluster(pipelines=2, stages=1).train()
    cluster.feed(inputs.Committed("0:0/0", 1, 0, 1.5))
    (committed,) = events(cluster.feed(inputs.Committed("1:0/0", 1, 0, 1.25)), "committed")
    assert committed["loss"] == 1.5 and committed["losses"] == {"0:0": 1.5, "1:0": 1.25}


def test_a_better_plan_is_offered_once_and_adopted_by_all() -> None:
    cluster = Cluster().train()
    better = PlanFile(source="cpsat", digest="sha256:2")
    ((to, offer),) = told(cluster.feed(inputs.Improved(1, better, 900.0)), "offer")
    assert to == set(cluster.names) and offer.number == 1
    found = []
    for name in cluster.names:
        found += events(cluster.feed(inputs.Adopted(f"{name}/0", 1, 5, "sha256:2")), "adopted")
    assert [event["iteration"] for event in found] == [5]
    cluster.exit("0:0")
    assert cluster.feed(inputs.Improved(1, better, 900.0)) == []


def test_the_next_better_plan_waits_until_all_have_adopted_the_last_one() -> None:
    cluster = Cluster().train()
    first, second, third = (PlanFile(source="cpsat", digest=f"sha256:{number}") for number in (2, 3, 4))
    assert told(cluster.feed(inputs.Improved(1, first, 900.0)), "offer")
    *all_but_one, last = cluster.names
    for name in all_but_one:
        cluster.feed(inputs.Adopted(f"{name}/0", 1, 5, "sha256:2"))
    assert cluster.feed(inputs.Improved(1, second, 900.0)) == cluster.feed(inputs.Improved(1, third, 900.0)) == []
    # Who may have missed the offer hears it again.
    ((to, offer),) = told(cluster.feed(inputs.Hello(cluster.state.members[last], 1)), "offer")
    assert to == {last} and offer.number == 1
    ((to, offer),) = told(cluster.feed(inputs.Adopted(f"{last}/0", 1, 5, "sha256:2")), "offer")
    assert to == set(cluster.names) and (offer.number, offer.plan) == (2, third)
    cluster.feed(inputs.Improved(1, second, 900.0))
    cluster.exit("0:0")
    assert cluster.state.round.offered is None and cluster.state.round.better is None, "it was for other members"


def test_a_plan_of_a_search_that_had_begun_before_layers_were_unlent_is_not_offered() -> None:
    """Nobody would adopt it, and every later one would wait behind it."""
    cluster = Cluster().train()
    lent = Lending(((1, 1),), (2, 2), (0.5, 0.5), (8, 8))
    cluster.state = cluster.state.with_(description=replace(cluster.state.job, lending=lent))
    first, stale, late = (PlanFile(source="portfolio", digest=f"sha256:{number}", crossings={"0.1": [by]})
                          for number, by in ((2, 1), (3, 1), (4, -1)))
    assert told(cluster.feed(inputs.Improved(1, first, 900.0)), "offer")
    assert do.Improve(1, cluster.state.failed, cluster.state.round.plan) in cluster.feed(
        inputs.Unlent("0:0/0", 1, 1, "a hook"))
    assert cluster.feed(inputs.Improved(1, stale, 900.0)) == []
    assert told(cluster.feed(inputs.Improved(1, late, 900.0)), "offer"), "stage 0 lends as before"
    cluster.feed(inputs.Unlent("1:0/0", 1, 1, "a hook"))  # of the first offer
    assert cluster.state.round.offered is not None and cluster.state.round.offered.plan == late


def test_a_failed_planner_ends_the_job_with_its_message() -> None:
    cluster = Cluster().train()
    cluster.exit("1:1")
    assert cluster.feed(inputs.PlanFailed(2, "a bug")) == [do.MakePlan(2, frozenset({"1:1"}), "drop")]
    (end,) = endings(cluster.feed(inputs.PlanFailed(2, "no worker left for stage 1")))
    assert end.again
    assert "no worker left for stage 1" in end.message and "1:1" in end.message


@pytest.mark.parametrize("status", [1, -9, 0])
def test_an_exit_before_training_began_ends_the_job_and_names_the_log(status: int) -> None:
    cluster = Cluster()
    cluster.hello("0:0")
    cluster.hello("1:0")
    (end,) = endings(cluster.exit("1:0", status))
    assert end.status == 1 and "rank 2" in end.message and "worker.log" in end.message


def test_a_process_that_never_said_hello_and_failed_is_a_start_failure() -> None:
    cluster = Cluster()
    (end,) = endings(cluster.exit("0:1", 1))
    assert "rank 1" in end.message and "status 1" in end.message


def test_a_script_without_the_plugin_may_end_well() -> None:
    cluster = Cluster()
    for name in cluster.names[:-1]:
        assert cluster.exit(name, 0) == []
    (end,) = endings(cluster.exit(cluster.names[-1], 0))
    assert end.status == 0


def test_the_job_ends_well_when_all_have_finished() -> None:
    cluster = Cluster().train()
    for name in cluster.names[:-1]:
        decisions = cluster.feed(inputs.Finished(f"{name}/0", 1))
        assert len(events(decisions, "left")) == 1 and not endings(decisions)
    decisions = cluster.feed(inputs.Finished("2:1/0", 1))
    (end,) = endings(decisions)
    assert end.status == 0
    ((to, _),) = told(decisions, "end")
    assert to == set(cluster.names)


def test_a_worker_that_has_finished_still_serves_the_others_when_one_fails() -> None:
    cluster = Cluster().train()
    cluster.feed(inputs.Finished("0:0/0", 1))
    decisions = cluster.exit("2:1")
    ((to, _),) = told(decisions, "stop")
    assert "0:0" in to and cluster.state.round.finished == frozenset()


def test_an_exit_with_status_zero_while_others_train_is_a_failure_unless_it_has_finished() -> None:
    cluster = Cluster().train()
    assert events(cluster.exit("1:0", 0), "suspected")[0]["kind"] == "exit"
    cluster = Cluster().train()
    cluster.feed(inputs.Finished("1:0/0", 1))
    assert events(cluster.exit("1:0", 0), "suspected")[0]["kind"] == "leave"


def test_a_member_that_reconnects_hears_what_it_may_have_missed() -> None:
    cluster = Cluster().train()
    assert not told(cluster.hello("0:0"), "stop")
    cluster.exit("1:1")
    decisions = cluster.hello("0:0")
    assert told(decisions, "stop") and not told(decisions, "go")
    cluster.plan()
    cluster.reports()
    decisions = cluster.hello("0:0")
    assert told(decisions, "stop") and told(decisions, "go")


def test_a_stranger_cannot_take_a_position() -> None:
    cluster = Cluster()
    cluster.hello("0:0")
    assert "already" in told(cluster.hello("0:0", life=1), "end")[0][1].message
    stranger = st.Member("9:9", 77, "x/0", 1, "host")
    assert "not of this job" in told(cluster.feed(inputs.Hello(stranger)), "end")[0][1].message
    cluster = Cluster().train()
    assert not told(cluster.hello("1:1", life=1), "end")  # it may wait for the place to become empty
    assert "another process" in told(cluster.hello("1:1", life=2), "end")[0][1].message
    assert "no part of the job" in told(cluster.feed(inputs.Hello(stranger)), "end")[0][1].message


def test_an_interrupt_ends_the_job_with_its_status() -> None:
    cluster = Cluster().train()
    (end,) = endings(cluster.feed(inputs.Interrupted(130, "interrupted")))
    assert end.status == 130
    assert told(cluster.hello("0:0"), "end")


# Nobody is at fault


def _hint(cluster: Cluster, name: str, generation: int | None = None) -> list[do.Decision]:
    number = cluster.state.generation if generation is None else generation
    return cluster.feed(inputs.Hinted(f"{name}/0", number, "a transfer failed: reset by peer"))


def _no_loss(cluster: Cluster, hinted: list[do.Decision]) -> list[do.Decision]:
    (wait,) = [decision for decision in hinted if isinstance(decision, do.AwaitLoss)]
    return cluster.feed(inputs.NoLoss(wait.generation, wait.since), after=2.0)


def _go_on(cluster: Cluster) -> None:
    cluster.plan()
    cluster.reports()
    cluster.resume_all()


def test_a_communication_error_that_no_loss_follows_makes_a_generation_with_the_same_members() -> None:
    cluster = Cluster().train()
    hinted = _hint(cluster, "0:1")
    assert _hint(cluster, "1:1") == [], "the wait runs already"
    decisions = _no_loss(cluster, hinted)
    (decided,) = events(decisions, "decided")
    assert decided["generation"] == 2 and decided["out"] == {} and decided["ms"] == pytest.approx(2010)
    assert "0:1: a transfer failed" in decided["reason"] and "1:1: " in decided["reason"]
    ((to, _),) = told(decisions, "stop")
    assert to == set(cluster.names)
    assert not events(decisions, "suspected") and not cluster.state.absent.fenced
    _go_on(cluster)
    assert cluster.state.phase is st.Phase.TRAINING


def test_a_communication_error_that_a_loss_follows_is_forgotten() -> None:
    cluster = Cluster().train()
    hinted = _hint(cluster, "0:1")
    cluster.exit("1:1")
    assert _no_loss(cluster, hinted) == []
    _go_on(cluster)
    assert _hint(cluster, "0:0", generation=1) == []
    assert cluster.state.generation == 2 and not cluster.state.round.hints


def test_when_all_wait_a_generation_with_the_same_members_follows() -> None:
    cluster = Cluster().train()
    waiting = dict.fromkeys(cluster.names, "F0.1")
    (decided,) = events(cluster.feed(inputs.Stuck(1, waiting, cluster.now - 30)), "decided")
    assert decided["generation"] == 2 and "1:1 for F0.1" in decided["reason"]
    assert cluster.feed(inputs.Stuck(2, waiting, cluster.now)) == [], "a recovery is under way"
    assert cluster.feed(inputs.Stuck(1, waiting, cluster.now)) == []


@pytest.mark.parametrize("progress", [False, True])
def test_the_same_members_twice_in_a_row_without_progress_are_enough(progress: bool) -> None:
    cluster = Cluster().train()
    for generation in (2, 3):
        assert endings(_no_loss(cluster, _hint(cluster, "0:1"))) == []
        assert cluster.state.generation == generation
        _go_on(cluster)
    if progress:
        cluster.commit_all(0)
    decisions = _no_loss(cluster, _hint(cluster, "2:0"))
    if progress:
        assert cluster.state.generation == 4
        return
    (end,) = endings(decisions)
    assert end.status == 1
    assert "2:0: a transfer failed" in end.message and "network" in end.message and "checkpoint" in end.message


def test_who_has_left_its_loop_too_soon_leaves_the_job_if_its_stage_has_others() -> None:
    """Such a one has come back, perhaps, and its script has counted other losses than its peers'."""
    cluster = Cluster().train()
    waiting = {**dict.fromkeys(cluster.state.members, "reduce"), "2:0": inputs.THE_END}
    cluster.feed(inputs.Stuck(1, waiting, cluster.now))
    _go_on(cluster)
    decisions = cluster.feed(inputs.Stuck(2, waiting, cluster.now))
    (decided,), (left,) = events(decisions, "decided"), events(decisions, "left")
    assert "the script has ended on 2:0 while the others train on" in decided["reason"]
    assert left["worker"] == "2:0" and decided["out"] == {"2:0": "leave"} and not events(decisions, "suspected")
    ((to, end),) = told(decisions, "end")
    assert end.status == 0 and len(to) == 1


def test_who_has_left_its_loop_too_soon_is_named_in_the_end() -> None:
    cluster = Cluster().train()
    ended = [name for name in cluster.state.members if name.endswith(":0")]
    waiting = {**dict.fromkeys(cluster.state.members, "reduce"), **dict.fromkeys(ended, inputs.THE_END)}
    for _ in range(2):
        assert not endings(cluster.feed(inputs.Stuck(cluster.state.generation, waiting, cluster.now)))
        _go_on(cluster)
    (end,) = endings(cluster.feed(inputs.Stuck(cluster.state.generation, waiting, cluster.now)))
    assert "while the others train on" in end.message and "0:0" in end.message and "network" not in end.message


def test_groups_that_take_long_to_build_get_more_time_and_do_not_end_a_healthy_job() -> None:
    """Nobody has begun to train in these generations: a second one in a row is no sign of a broken network yet."""
    cluster = Cluster().train()
    cluster.exit("1:1")
    for tries in range(4):
        cluster.plan()
        ((_, go),) = told(cluster.reports(), "go")
        assert go.tries == tries
        assert bool(endings(_no_loss(cluster, _hint(cluster, "0:1")))) == (tries == 3)
    assert "3 new generations with the same members have not helped" in cluster.state.ended[1]


def test_a_loss_in_between_lets_the_count_begin_again() -> None:
    cluster = Cluster().train()
    for _ in range(2):
        _no_loss(cluster, _hint(cluster, "0:1"))
        _go_on(cluster)
    cluster.exit("1:1")
    _go_on(cluster)
    assert endings(_no_loss(cluster, _hint(cluster, "0:1"))) == []


def test_a_stalled_worker_without_peers_is_reported_and_not_removed() -> None:
    """Without it the stage is empty and the job over; it may come back to itself."""
    cluster = Cluster(pipelines=2).train()
    cluster.exit("0:1")
    _go_on(cluster)
    lost = inputs.Lost((inputs.Loss("1:1/0", FailureKind.STALLED),), cluster.now)
    decisions = cluster.feed(lost)
    (suspected,) = events(decisions, "suspected")
    assert suspected["removed"] is False and suspected["kind"] == "stalled"
    assert len(decisions) == 1 and cluster.feed(lost) == []
    cluster.declare(FailureKind.STALLED, "1:1/0", "1:0/0")
    assert dict(cluster.state.absent.out) == {"0:1": "exit", "1:0": "stalled"}
    (end,) = endings(cluster.exit("1:1"))
    assert "1:1 exit" in end.message


def test_a_coordinator_that_died_between_the_last_loss_of_a_stage_and_the_end_ends_the_job_when_it_is_back() -> None:
    cluster = Cluster(pipelines=1).train()
    (store, *_) = cluster.exit("0:1")
    assert isinstance(store, do.Record) and isinstance(store.record, Decided)
    cluster.state = restore(2, [store.record.to_json()])
    (end,) = endings(cluster.feed(inputs.Restarted()))
    assert end.status == 1 and "stage 1 has lost its last worker (0:1 exit)" in end.message


@pytest.mark.parametrize("told_before", [False, True])
def test_a_coordinator_that_comes_back_looks_for_better_plans_and_tells_of_a_recovery_once(told_before: bool) -> None:
    cluster = Cluster().train()
    cluster.exit("1:1")
    cluster.reports(holds=3)
    cluster.plan()
    if told_before:
        cluster.resume_all()
    read: list[str] = []
    cluster.state = taken_up(restore(6, cluster.journal), cluster.journal, lambda digest: read.append(digest) or PLAN)
    assert read == [PLAN.digest]
    cluster.feed(inputs.Restarted())
    for name in tuple(cluster.state.members):
        cluster.feed(inputs.Hello(cluster.member(name), 2))
    decisions = cluster.resume_all()  # each tells it again to the new coordinator
    assert [event["generation"] for event in events(decisions, "resumed")] == [] if told_before else [2]
    assert [one for one in decisions if isinstance(one, do.Improve)] == [do.Improve(2, frozenset({"1:1"}), PLAN)]
