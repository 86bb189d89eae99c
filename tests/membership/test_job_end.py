"""The last generation of a job that cannot go on, on paper: what is committed is saved, nothing hides why it ends."""

from __future__ import annotations

import pytest

from megatron_recycle.errors import DataError, UnsupportedError
from megatron_recycle.membership import decisions as do
from megatron_recycle.membership import inputs
from megatron_recycle.membership import state as st
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.fault import Fault
from megatron_recycle.membership.protocol import Answer, Terminate
from megatron_recycle.membership.records import restore
from tests.membership.cluster import Cluster, described, endings, events, report, told

CORRUPT = Fault("ValueError", "sample 31 is corrupt", 6, "F1.3", whole=True)


def training(pipelines: int = 3, emergency: bool | None = True) -> Cluster:
    """A job whose framework can save, with iteration 5 committed."""
    cluster = Cluster(pipelines)
    for name in cluster.names:
        cluster.hello(name)
    for name in cluster.names:
        cluster.ready(name, emergency=emergency)
    cluster.plan(), cluster.resume_all(), cluster.commit_all(5)
    return cluster


def raised(cluster: Cluster, name: str, fault: Fault = CORRUPT, number: int = 1) -> list[do.Decision]:
    return cluster.feed(inputs.Raised(f"{name}/0", fault, cluster.now, number))


def closing() -> Cluster:
    """1:0 and then 2:0 have met the same error."""
    cluster = training()
    raised(cluster, "1:0")
    raised(cluster, "2:0")
    return cluster


def saves(cluster: Cluster, *names: str, place: str = "/runs/global_step6", error: str = "") -> list[do.Decision]:
    decisions: list[do.Decision] = []
    for name in names or tuple(cluster.state.members):
        decisions += cluster.feed(inputs.Saved(f"{name}/0", cluster.state.generation, place, error))
    return decisions


def gone(cluster: Cluster) -> Cluster:
    """All have come to the last committed iteration."""
    cluster.plan()
    cluster.reports(iteration=6, holds=5)
    return cluster


def test_the_second_worker_waits_in_its_error_and_is_a_member_of_the_last_generation():
    cluster = training()
    raised(cluster, "1:0")
    decisions = raised(cluster, "2:0", number=7)
    ((to, stop),) = told(decisions, "stop")
    assert to == {"0:0", "0:1", "1:1", "2:0", "2:1"} == set(stop.members)
    assert told(decisions, "answer") == [({"2:0"}, Answer(7))]
    assert not endings(decisions)
    assert events(decisions, "decided")[0]["reason"] == "the job ends after a last checkpoint"
    ((_, go),) = told(gone(cluster).log[-20:], "go")
    assert go.closing.startswith("micro-batch 1.3 of iteration 6 fails on every worker: ValueError")


def test_the_job_ends_with_its_error_and_where_the_state_is_once_all_have_saved():
    cluster = gone(closing())
    assert not endings(saves(cluster, "0:0", "0:1", "1:1", "2:0"))
    decisions = saves(cluster, "2:1")
    (end,) = endings(decisions)
    assert end.status == 1 and end.message.startswith("micro-batch 1.3 of iteration 6 fails on every worker")
    assert end.message.endswith("The state after iteration 5 is saved in /runs/global_step6.")
    assert events(decisions, "saved")[0]["iteration"] == 5


def test_what_may_be_half_loaded_is_no_last_checkpoint():
    cluster = closing()
    cluster.plan()
    cluster.reports("0:0", "0:1", "1:1", "2:0", iteration=6, holds=5)
    (end,) = endings(cluster.reports("2:1", iteration=6, holds=5, guard={"midway": True}))
    assert end.message.startswith("micro-batch 1.3 of iteration 6 fails on every worker")
    assert "No checkpoint was written: a failure has cut off the way back to a checkpoint, and" in end.message


def test_nobody_begins_to_look_for_plans_or_to_take_others_in():
    cluster = gone(closing())
    assert not [decision for decision in cluster.log if isinstance(decision, do.Improve) and decision.generation > 1]
    cluster.hello("1:0", 1)
    facts = {"grid": cluster.grid, "block": 2, "reduction": "exact", "emergency": True}
    cluster.feed(inputs.Ready("1:0/1", described(facts), report()))
    assert not told(cluster.log, "offer")


@pytest.mark.parametrize(("what", "why"), [
    (lambda cluster: saves(cluster, "0:1", error="OSError: No space left")
     + saves(cluster, "0:0", "1:1", "2:0", "2:1", place=""), "0:1: OSError: No space left."),
    (lambda cluster: saves(cluster, error="the script has not saved before"), "the script has not saved before."),
    (lambda cluster: cluster.declare(FailureKind.UNREACHABLE, "0:1/0", "1:1/0", "2:1/0"), "0:1 unreachable, 1:1"),
    (lambda cluster: cluster.feed(inputs.SavedLate(3)), "it took too long (0:0, 0:1, 1:1, 2:0, 2:1)"),
    (lambda cluster: cluster.feed(inputs.Interrupted(130, "interrupted by SIGINT")), "interrupted by SIGINT"),
    (lambda cluster: cluster.feed(inputs.Stuck(3, {"0:0": "a verdict"}, cluster.now)), "all workers wait"),
])
def test_whatever_goes_wrong_meanwhile_ends_the_job_with_its_error_first(what, why: str):
    cluster = gone(closing())
    (end,) = endings(what(cluster))
    assert end.message.startswith("micro-batch 1.3 of iteration 6 fails on every worker: ValueError: sample 31")
    assert f"No checkpoint was written: {why}" in end.message and end.message.endswith("iteration: 5.")


def test_one_that_does_not_come_from_its_script_s_own_code_is_not_waited_for():
    cluster = closing()
    cluster.plan()
    cluster.reports("0:0", "1:1", iteration=6, holds=5)
    cluster.feed(inputs.ReportsLate(3))
    assert set(cluster.state.members) == {"0:0", "1:1"} and cluster.state.closing
    cluster.reports("0:0", iteration=6, holds=5)
    (end,) = endings(cluster.feed(inputs.ReportsLate(4)))
    assert "No checkpoint was written: 1:1 stalled. Last" in end.message


def test_others_that_meet_the_error_meanwhile_stay_and_a_member_that_is_lost_is_left_out():
    cluster = closing()
    assert told(raised(cluster, "1:1"), "answer") == [({"1:1"}, Answer(1))]
    gone(cluster)
    saves(cluster, "0:0")
    ((to, _),) = told(cluster.exit("0:1"), "stop")
    assert to == {"0:0", "1:1", "2:0", "2:1"} and cluster.state.generation == 4
    assert told(gone(cluster).log, "go")[-1][1].closing
    assert not endings(saves(cluster, "1:1", "2:0", "2:1")), "0:0 has to say so again"
    assert "is saved in" in endings(saves(cluster, "0:0"))[0].message


def test_who_is_lost_when_the_last_generation_cannot_be_begun_again_is_told_like_any_other():
    cluster = closing()
    cluster.exit("0:1"), cluster.exit("1:1")
    decisions = cluster.exit("2:1")
    assert endings(decisions) and [event["worker"] for event in events(decisions, "suspected")] == ["2:1"]


def test_a_worker_that_cannot_wait_is_no_member_and_a_stage_that_is_empty_without_it_saves_nothing():
    ends = Fault("KeyError", "'x'", 5)
    cluster = training()
    raised(cluster, "1:0", ends, 0)
    ((to, _),) = told(raised(cluster, "2:0", ends, 0), "stop")
    assert to == {"0:0", "0:1", "1:1", "2:1"} and not told(cluster.log, "answer")
    last = training(2)
    raised(last, "1:0", ends, 0)
    (end,) = endings(raised(last, "0:0", ends, 0))
    assert end.message.endswith("Last committed iteration: 5.")


def test_the_last_worker_of_a_stage_can_still_save_what_it_holds():
    cluster = training(2)
    raised(cluster, "1:0", Fault("KeyError", "'x'", 5), 0)
    assert told(raised(cluster, "0:0"), "answer")
    (end,) = endings(saves(gone(cluster)))
    assert end.message.startswith("0:0, the last worker of stage 0, has failed") and "is saved in" in end.message


def test_a_refusal_in_an_action_saves_and_peers_that_differ_do_not():
    cluster = training()
    assert told(raised(cluster, "1:0", Fault.of(UnsupportedError("shapes"), 6, "F1.3", whole=True)), "answer")
    assert endings(raised(training(), "1:0", Fault.of(DataError("read different data"), 6, "S")))[0].message == (
        "read different data")


def test_a_job_that_cannot_or_does_not_want_to_save_ends_at_once():
    for emergency, says in ((False, "first. Last committed"), (None, "No checkpoint was written: the plugin has none")):
        cluster = training(emergency=emergency)
        raised(cluster, "1:0")
        assert says in endings(raised(cluster, "2:0"))[0].message


def test_a_restarted_coordinator_knows_what_the_generation_is_for():
    cluster = gone(closing())
    records = [decision.record.to_json() for decision in cluster.log if isinstance(decision, do.Record)]
    cluster.state = restore(6, records)
    assert do.AwaitSaved(3) in cluster.feed(inputs.Restarted())
    for name in tuple(cluster.state.members):
        cluster.feed(inputs.Hello(cluster.member(name), 3))
    assert told(raised(cluster, "2:0"), "answer"), "it may not have heard"
    (end,) = endings(saves(cluster))
    assert "sample 31 is corrupt" in end.message and "is saved in" in end.message


def test_a_last_generation_whose_coordinator_was_lost_before_all_had_its_go_is_begun_again():
    cluster = closing()
    cluster.state = restore(6, cluster.journal)
    cluster.feed(inputs.Restarted())
    assert not endings(cluster.feed(inputs.Hello(cluster.member("0:0"), 2)))
    assert cluster.state.generation == 4 and cluster.state.closing is not None
    (end,) = endings(saves(gone(cluster)))
    assert "sample 31 is corrupt" in end.message and "is saved in" in end.message


# ---- the whole job is told to go


def leaving(**other: object) -> Cluster:
    cluster = Cluster(3)
    for name in cluster.names:
        cluster.hello(name)
    for name in cluster.names:
        cluster.ready(name, **{"emergency": True, "on_leave": "checkpoint", "leave_timeout": 45.0, **other})
    cluster.plan(), cluster.resume_all(), cluster.commit_all(5)
    return cluster


def test_a_job_that_is_told_to_go_saves_first_within_a_limit_and_ends_with_the_signals_status():
    cluster = leaving()
    cluster.feed(inputs.Leave("1:0/0"))  # Slurm signals every process
    decisions = cluster.feed(inputs.Interrupted(143, "interrupted by SIGTERM"))
    assert do.AwaitSaved(2, 45.0) in decisions and not endings(decisions)
    assert cluster.feed(inputs.Interrupted(143, "interrupted by SIGTERM")) == [], "told by each host, and again"
    gone(cluster)
    (end,) = endings(saves(cluster))
    assert end == do.End(143, "interrupted by SIGTERM. The state after iteration 5 is saved in /runs/global_step6.")


@pytest.mark.parametrize("other", [{"on_leave": "end"}, {"emergency": False}])
def test_it_ends_at_once_where_it_does_not_ask_for_that_or_cannot(other: dict[str, object]):
    (end,) = endings(leaving(**other).feed(inputs.Interrupted(143, "interrupted by SIGTERM")))
    assert end == do.End(143, "interrupted by SIGTERM")


@pytest.mark.parametrize("ends", [True, False])
def test_scripts_that_handle_sigterm_themselves_have_half_a_minute_and_the_status_is_the_signals(ends: bool):
    cluster, asks = leaving(on_leave="end"), inputs.Interrupted(143, "interrupted by SIGTERM", handled=True)
    assert cluster.feed(asks) == [do.Command(Terminate(30.0)), do.AwaitEnd(30.0)]
    assert cluster.feed(asks) == cluster.feed(inputs.Interrupted(143, "interrupted by SIGTERM")) == [], "told again"
    if ends:
        decisions = [one for name in cluster.names for one in cluster.feed(inputs.Finished(f"{name}/0", 1))]
    else:
        decisions = cluster.feed(inputs.EndLate())
    (end,) = endings(decisions)
    how = "the job has finished" if ends else "it has not ended within 30 s. Last committed iteration: 5."
    assert end == do.End(143, f"interrupted by SIGTERM, which the script handles itself: {how}")
    assert cluster.feed(inputs.EndLate()) == []


def test_a_checkpoint_that_is_asked_for_comes_before_what_a_script_would_do_itself():
    decisions = leaving().feed(inputs.Interrupted(143, "interrupted by SIGTERM", handled=True))
    assert do.AwaitSaved(2, 45.0) in decisions


def test_a_coordinator_that_is_told_to_go_before_all_are_back_saves_too():
    cluster = leaving()
    cluster.state = restore(6, cluster.journal)
    cluster.feed(inputs.Restarted())
    assert not endings(cluster.feed(inputs.Interrupted(143, "interrupted by SIGTERM")))
    ((to, _),) = told(cluster.feed(inputs.Hello(cluster.member("0:0"), 1)), "stop")
    assert to == {"0:0"}
    (end,) = endings(saves(gone(cluster)))
    assert end.status == 143 and "is saved in" in end.message


def test_ctrl_c_ends_scripts_that_handle_sigterm_themselves():
    assert endings(leaving(on_leave="end").feed(inputs.Interrupted(130, "interrupted by SIGINT", handled=True)))


def test_a_terminal_that_goes_away_asks_the_job_to_leave_as_sigterm_does():
    assert do.AwaitSaved(2, 45.0) in leaving().feed(inputs.Interrupted(129, "interrupted by SIGHUP"))


def test_ctrl_c_does_not_save():
    assert endings(leaving().feed(inputs.Interrupted(130, "interrupted by SIGINT")))


def test_who_is_too_slow_to_save_is_named_and_the_status_is_the_signals():
    cluster = leaving()
    cluster.feed(inputs.Interrupted(143, "interrupted by SIGTERM"))
    gone(cluster)
    saves(cluster, "0:0", "0:1", "1:0", "1:1", "2:0")
    (end,) = endings(cluster.feed(inputs.SavedLate(2)))
    assert end.status == 143 and "No checkpoint was written: it took too long (2:1)" in end.message


def test_the_status_and_the_time_to_save_survive_the_coordinator_and_a_worker():
    cluster = leaving()
    cluster.feed(inputs.Interrupted(143, "interrupted by SIGTERM"))
    until = cluster.now + 45.0
    cluster.state = restore(6, cluster.journal)
    assert cluster.state.closing == st.Closing("interrupted by SIGTERM", 143, until=until)
    assert do.AwaitSaved(2, 35.0) in cluster.feed(inputs.Restarted(), after=10.0)
    assert do.AwaitSaved(3, 30.0) in cluster.feed(inputs.Hello(cluster.member("0:0"), 1), after=5.0)
    assert do.AwaitSaved(4, 10.0) in cluster.feed(inputs.Exited(3, 1003, -9, cluster.now), after=20.0)
    gone(cluster)
    (end,) = endings(saves(cluster))
    assert end.status == 143 and "The state after iteration 5 is saved" in end.message


def test_a_worker_that_is_lost_in_the_last_generation_does_not_cost_the_job_its_restart():
    cluster = training(2)
    raised(cluster, "1:0", Fault("KeyError", "'x'", 5), 0)
    raised(cluster, "0:0")
    cluster.exit("0:1")
    gone(cluster)
    (end,) = endings(saves(cluster))
    assert end.again and end.message.startswith("0:0, the last worker of stage 0, has failed")


def test_workers_that_are_all_told_to_leave_one_by_one_save_at_the_boundary():
    cluster = leaving()
    for name in cluster.names:
        cluster.feed(inputs.Leave(f"{name}/0"))
    for name in cluster.names:
        cluster.feed(inputs.Boundary(f"{name}/0", 1, 6, cluster.now))
    assert cluster.state.closing is not None
    gone(cluster)
    (end,) = endings(saves(cluster))
    assert end.status == 1 and "stage 0 would have no worker any more" in end.message and "saved in" in end.message
