"""What survivors have kept of an interrupted iteration, on paper."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_recycle.membership import Process, Standing, StepMode, inputs
from megatron_recycle.membership import decisions as do
from megatron_recycle.membership.fault import Fault
from megatron_recycle.membership.protocol import Carry
from megatron_recycle.membership.redo import closes, levelled
from megatron_recycle.membership.report import Report
from megatron_recycle.membership.resume import Checkpoint
from megatron_recycle.membership.standing import Epoch
from megatron_recycle.plan.plan_file import PlanFile
from tests.membership.cluster import Cluster, endings, events, report, told

ITERATION = 5


def kept(*actions: str, iteration: int = ITERATION, provisional: bool = False) -> dict[str, Any]:
    return {"iteration": iteration, "chain": 1, "actions": list(actions), "provisional": provisional,
            "microbatches": 4, "block": 2}


def stopped(stages: int = 2, **settings: Any) -> Cluster:
    """Three pipelines have committed iteration 4 when a worker dies in the next one."""
    cluster = Cluster(stages=stages)
    for name in cluster.names:
        cluster.hello(name)
    for name in cluster.names:
        cluster.ready(name, **settings)
    cluster.plan()
    cluster.resume_all()
    cluster.commit_all(ITERATION - 1)
    cluster.exit("1:0")
    return cluster


def says(cluster: Cluster, name: str, *attempts: dict[str, Any], **where: Any) -> list[do.Decision]:
    done = sum(len(each["actions"]) for each in attempts)
    standing = {"iteration": ITERATION, "holds": ITERATION - 1, "actions": done, "committed": ITERATION - 1}
    told_ = report(**{**standing, **where}, kept=attempts)
    return cluster.feed(inputs.Reported(f"{name}/0", cluster.state.generation, told_))


def all_say(cluster: Cluster, **of: Any) -> list[do.Decision]:
    """All report, the named ones (``w0_1``) with these actions; plan and reports come in either order."""
    decisions = cluster.plan()
    for name in cluster.state.members:
        actions = of.get("w" + name.replace(":", "_"), ())
        decisions += says(cluster, name, *([kept(*actions)] if actions else []))
    return decisions


def orders(decisions: list[do.Decision]) -> list[do.MakeRedo]:
    return [one for one in decisions if isinstance(one, do.MakeRedo)]


def test_the_rest_is_planned_from_all_that_is_kept_before_anybody_goes_on():
    cluster = stopped()
    decisions = all_say(cluster, w0_0=("F0.0", "F0.1"), w2_1=("F2.0",))
    (order,) = orders(decisions)
    assert order.done == {"0:0": ("F0.0", "F0.1"), "2:1": ("F2.0",)} and order.size == (4, 2)
    assert not told(decisions, "go")
    done = {"0:0": 2, "2:1": 1}
    plan = PlanFile(source="greedy", digest="sha256:1", done=done)
    decisions = cluster.feed(inputs.Redone(cluster.state.generation, plan))
    ((_, go),) = told(decisions, "go")
    assert go.carried == Carry(ITERATION, 2, plan, done, provisional=False)
    assert events(decisions, "reconciled")[0]["redone"] == 0


CLOSED = {"closed": {"iteration": ITERATION, "loss": 0.5, "weight": 7.0, "stages": [1]}}


def test_who_reports_an_earlier_closed_iteration_has_nothing_to_say_of_this_one():
    """0:0 has not heard the verdict of the iteration before."""
    cluster = stopped()
    cluster.plan()
    before = {"closed": {"iteration": ITERATION - 1, "loss": 9.0, "weight": 9.0, "stages": [1]}}
    for name in cluster.state.members:
        where = {"holds": ITERATION, "stepped": ITERATION} if name.endswith(":1") else {}
        more = {"0:0": before, "2:1": CLOSED}.get(name, {})
        says(cluster, name, kept("F0.0"), **where, **more)
    decisions = cluster.feed(inputs.Redone(cluster.state.generation, PlanFile(digest="sha256:1", done={"0:0": 1})))
    ((_, go),) = told(decisions, "go")
    assert go.resume.closed == (1,) and go.carried.loss == (0.5, 7.0)


def test_an_undone_step_is_not_closed_any_more():
    standing = Standing(Process.parse("0:0"), StepMode.of(True), epoch=Epoch(1))
    standing.begin(0)
    standing.hold(0)
    standing.save()
    standing.step(1.0)
    standing.close()
    assert standing.closed == 0
    standing.undo()
    assert standing.closed == -1


def one_stage_is_closed(**settings: Any) -> tuple[Cluster, list[do.Decision]]:
    """The second stage has closed the iteration, and a script of it may have left."""
    cluster = stopped(**settings)
    cluster.plan()
    for name in cluster.state.members:
        where = {"holds": ITERATION, "stepped": ITERATION} if name.endswith(":1") else {}
        decisions = says(cluster, name, kept("F0.0"), **where, **(CLOSED if name == "2:1" else {}))
    return cluster, decisions


def test_a_stage_that_is_closed_stays_where_it_is_and_the_loss_that_a_script_has_stays():
    cluster, decisions = one_stage_is_closed()
    assert orders(decisions)[0].closed == (1,)
    plan = PlanFile(digest="sha256:1", done={"0:0": 1, "0:1": 3})
    decisions = cluster.feed(inputs.Redone(cluster.state.generation, plan))
    ((_, go),) = told(decisions, "go")
    assert go.resume.closed == (1,) and go.resume.target == ITERATION - 1
    assert go.carried.loss == (0.5, 7.0) and go.carried.done == plan.done
    assert not events(decisions, "repeated")


@pytest.mark.parametrize(("reduction", "closed", "placement", "counts"), [
    ("exact", [1], [], ["0:1", "1:1", "2:1"]),
    ("fast", [0, 1], [], ["0:0", "0:1", "1:1", "2:0", "2:1"]),
    ("fast", [1], [], []),
    ("fast", [0], [], ["0:0", "2:0"]),
    ("fast", [0], [0, 1, 2, 2, 1, 0], ["0:0"]),
], ids=str)
def test_of_the_next_iteration_counts_what_was_computed_with_parameters_that_stay(
        reduction: str, closed: list[int], placement: list[int], counts: list[str]):
    """A stage that is not known to be closed any more may reduce again, with `fast` in another order. With two chunks
    2:0 has run the last one, too."""
    cluster = stopped(3, reduction=reduction, placement=placement)
    cluster.plan()
    says_closed = {"closed": {"iteration": ITERATION, "loss": 0.5, "weight": 7.0, "stages": closed}}
    for name in cluster.state.members:
        begun = ("F0.0", "F0.0/1") if placement and name == "2:0" else ("F0.0",)
        attempts, where = [kept("F0.0")], {}
        if not name.endswith(":2"):
            attempts += [kept(*begun, iteration=ITERATION + 1)]
            where = {"iteration": ITERATION + 1, "holds": ITERATION, "stepped": ITERATION}
        decisions = says(cluster, name, *attempts, **where, **(says_closed if name == "2:1" else {}))
    (order,) = orders(decisions)
    assert sorted(order.ahead.done if order.ahead else {}) == counts


def test_where_the_rest_needs_a_closed_stage_all_run_the_iteration_again_and_say_so():
    cluster, _ = one_stage_is_closed(reduction="fast")
    decisions = cluster.feed(inputs.Redone(cluster.state.generation, None))
    ((_, go),) = told(decisions, "go")
    assert go.resume.closed == () and go.carried is None
    (event,) = events(decisions, "repeated")
    assert event["iteration"] == ITERATION and event["workers"] == ["2:1"]


def test_with_exact_the_job_ends_then_after_a_last_checkpoint_of_the_iteration_before():
    cluster, _ = one_stage_is_closed(reduction="exact", emergency=True)
    decisions = cluster.feed(inputs.Redone(cluster.state.generation, None))
    assert not events(decisions, "repeated") and not told(decisions, "go")
    cluster.plan()
    for name in cluster.state.members:
        decisions = says(cluster, name, kept("F0.0"), **(CLOSED if name == "2:1" else {}))
    ((_, go),) = told(decisions, "go")
    assert f"iteration {ITERATION} cannot be made to its end" in go.closing and go.carried is None
    assert go.resume.target == ITERATION - 1 and go.resume.closed == ()


def test_with_exact_the_job_ends_then_if_it_cannot_save():
    cluster, _ = one_stage_is_closed(reduction="exact")
    (end,) = endings(cluster.feed(inputs.Redone(cluster.state.generation, None)))
    assert "reduction exact does not run it again; there is no checkpoint of this run" in end.message and end.again
    assert f"Last committed iteration: {ITERATION - 1}." in end.message


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_a_micro_batch_of_an_iteration_that_scripts_have_left_is_not_left_out(reduction: str):
    """Its backward fails on a second worker of the first stage, as the last stage has closed the iteration."""
    cluster, _ = one_stage_is_closed(reduction=reduction, poison="skip")
    cluster.state = cluster.state.with_(checkpoints=(Checkpoint(ITERATION - 2, "/checkpoints/step4", {}),))
    cluster.feed(inputs.Redone(cluster.state.generation, PlanFile(digest="sha256:1", done={"0:0": 1, "0:1": 3})))
    fault = Fault("ValueError", "sample 31 is corrupt", ITERATION, "B1.3", whole=True)
    for number, name in enumerate(("2:0", "0:0"), 1):
        cluster.feed(inputs.Raised(f"{name}/0", fault, cluster.now, number))
    decisions = closed_meanwhile(cluster, guard={"back": -1})
    (end,) = endings(decisions)
    assert not events(decisions, "repeated") and not end.again, "it would fail there again"
    assert end.message.startswith(f"micro-batch 1.3 of iteration {ITERATION} fails on every worker: ValueError: ")
    assert "It is not left out, since scripts have left that iteration. Last committed iteration: 4." in end.message


def test_an_iteration_whose_rest_cannot_be_planned_begins_anew():
    cluster = stopped()
    all_say(cluster, w0_0=("F0.0", "F0.1"), w2_1=("F2.0",))
    decisions = cluster.feed(inputs.Redone(cluster.state.generation, None))
    ((_, go),) = told(decisions, "go")
    assert go.carried is None and go.resume.redone == 3


def test_an_answer_for_a_generation_that_is_over_is_not_listened_to():
    cluster = stopped()
    all_say(cluster, w0_0=("F0.0",))
    cluster.exit("2:0")
    assert not cluster.feed(inputs.Redone(2, PlanFile(digest="sha256:1")))
    decisions = all_say(cluster, w0_1=("F0.0",))
    assert [order.done for order in orders(decisions)] == [{"0:1": ("F0.0",)}]


def test_what_was_done_on_a_guess_is_said_to_be_provisional():
    cluster = stopped()
    cluster.plan()
    for name in cluster.state.members:
        says(cluster, name, kept("F0.0", provisional=name == "2:1"))
    decisions = cluster.feed(inputs.Redone(cluster.state.generation, PlanFile(digest="sha256:1")))
    assert told(decisions, "go")[0][1].carried.provisional


def test_only_the_iteration_that_all_go_on_with_counts():
    """A stage that had reduced already, and begun the next iteration, reduces again from what it has kept."""
    cluster = stopped()
    cluster.plan()
    for name in cluster.state.members:
        if name.endswith(":1"):
            where = {"iteration": ITERATION + 1, "holds": ITERATION, "stepped": ITERATION, "earlier": 3}
            decisions = says(cluster, name, kept("F0.0", "B0.0", "W0.0"),
                             kept("F0.0", iteration=ITERATION + 1, provisional=True), actions=1, **where)
        else:
            decisions = says(cluster, name)
    (order,) = orders(decisions)
    assert order.done == dict.fromkeys(("0:1", "1:1", "2:1"), ("F0.0", "B0.0", "W0.0"))
    decisions = cluster.feed(inputs.Redone(cluster.state.generation, PlanFile(digest="sha256:1")))
    assert told(decisions, "go")[0][1].resume.redone == 3, "one action of the next iteration each"


@pytest.mark.parametrize("settings", [{"policy": "drop"}, {"policy": "rollback"}])
def test_other_policies_begin_the_iteration_anew(settings: dict[str, str]):
    cluster = stopped(**settings)
    decisions = all_say(cluster, w0_0=("F0.0",))
    assert not orders(decisions) and told(decisions, "go")[0][1].carried is None


@pytest.mark.parametrize("strange", [
    "F0.0", {"iteration": 5}, kept("S"), kept("F0"), kept("X0.1"), {**kept(), "actions": [3]},
    {**kept(), "provisional": 1}, {**kept(), "chain": "1"}, {**kept(), "microbatches": None}, {**kept(), "block": 1.5}])
def test_a_report_that_names_no_attempts_is_refused(strange: Any):
    with pytest.raises(ValueError):
        Report.from_json({**report().to_json(), "kept": [strange]})


@pytest.mark.parametrize("strange", [{}, {"iteration": "5", "loss": 1.0, "weight": 1.0}, {"iteration": 5, "loss": 1.0},
                                     {"iteration": 5, "loss": [], "weight": 1.0}, 5])
def test_a_report_that_names_no_closed_iteration_is_refused(strange: Any):
    with pytest.raises(ValueError):
        Report.from_json({**report().to_json(), "closed": strange})


def test_an_attempt_that_ends_before_it_has_taken_up_what_is_kept_has_lost_nothing():
    cluster = stopped()
    cluster.plan()
    for name in cluster.state.members:
        says(cluster, name, kept("F0.0", "F0.1"), actions=0)
    decisions = cluster.feed(inputs.Redone(cluster.state.generation, PlanFile(digest="sha256:1")))
    assert events(decisions, "reconciled")[0]["redone"] == 0


@pytest.mark.parametrize(("parts", "counted"), [
    (["F0.0 F0.1", "F0.0 F0.1"], "F0.0 F0.1"),
    (["F0.0 F0.1", "F0.0"], "F0.0"),  # the first part drops it
    (["F0.0 F0.1 B0.0 W0.0", "F0.0 F0.1 B0.0"], "F0.0 F0.1 B0.0 W0.0"),  # the second part runs it
    (["F0.0 B0.0 F0.1 W0.0", "F0.0 B0.0"], "F0.0 B0.0 W0.0"),  # each does something of that
    (["F0.1", "F0.0 F0.1"], "F0.1"),  # a backward that was begun has used up the first forward
    (["F0.1 W0.2 F0.3", "F0.1 W0.2 F0.3"], "F0.1 W0.2 F0.3"),
    (["F0.1/1 F0.0", "F0.0"], "F0.0"),
    (["F0.0 FB0.0", "F0.0 FB0.0"], "F0.0 FB0.0"),
], ids=str)
def test_what_counts_of_what_the_parts_of_a_worker_have_done(parts: list[str], counted: str):
    assert levelled([each.split() for each in parts]) == tuple(counted.split())
    assert levelled([each.split() for each in reversed(parts)]) == tuple(counted.split())


@pytest.mark.parametrize("parts", [
    ["F0.0 B0.0", "F0.0"],  # what a backward has added cannot be taken back
    ["F0.0 FB0.0", "F0.0"],
    ["F0.0 B0.0 W0.0", "F0.0"],
    ["F0.0 B0.0", ""],
], ids=str)
def test_nothing_counts_where_a_part_would_have_to_undo_a_sum(parts: list[str]):
    assert levelled([each.split() for each in parts]) == levelled([each.split() for each in reversed(parts)]) == ()


def test_nothing_counts_where_a_part_would_need_the_others_for_a_w_that_they_have_done():
    """With sequence parallelism W gathers its inputs from all parts."""
    parts = [("F0.0", "B0.0", "W0.0"), ("F0.0", "B0.0")]
    assert levelled(parts, joint=True) == levelled(parts[::-1], joint=True) == ()
    assert levelled([parts[1], parts[1]], joint=True) == ("F0.0", "B0.0")


def test_scripts_leave_no_iteration_early_while_plans_are_made_by_another_policy_for_recoveries_that_failed():
    """Its rest is not planned then, and `exact` would not run again what they have left."""
    cluster = stopped(reduction="exact")
    assert closes(cluster.state)
    assert not closes(cluster.state.with_(fallback="drop"))



def failed_recoveries(**settings: Any) -> Cluster:
    """Two workers' recoveries have failed, one after the other: plans leave hit pipelines out from now on."""
    cluster = stopped(**settings)
    fault = Fault("ValueError", "a bug", ITERATION, whole=True, recovery=True)
    for number, name in enumerate(("2:1", "0:0"), 1):
        all_say(cluster, w0_0=("F0.0",))
        cluster.feed(inputs.Redone(cluster.state.generation, PlanFile(digest="sha256:1", done={"0:0": 1})))
        cluster.feed(inputs.Raised(f"{name}/0", fault, cluster.now, number))
    return cluster


def closed_meanwhile(cluster: Cluster, **more: Any) -> list[do.Decision]:
    """The second stage has closed the iteration before the last recovery failed, which its workers report only now."""
    decisions = cluster.plan()
    for name in cluster.state.members:
        where = {"holds": ITERATION, "stepped": ITERATION} if name.endswith(":1") else {}
        decisions += says(cluster, name, kept("F0.0"), **where, **(CLOSED if name == "2:1" else {}), **more)
    return decisions


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_a_stage_that_closes_before_another_recovery_fails_stays_closed_where_its_iteration_is_not_run_again(
        reduction: str):
    """The coordinator learns of it after it has chosen a plan that begins the iteration anew."""
    cluster = failed_recoveries(reduction=reduction)
    assert cluster.state.tries.fallback == "drop"
    decisions = closed_meanwhile(cluster)
    assert not endings(decisions)
    if reduction == "fast":
        ((_, go),) = told(decisions, "go")
        assert go.carried is None and events(decisions, "repeated")
        return
    assert [one.policy for one in decisions if isinstance(one, do.MakePlan)] == [None] and not told(decisions, "go")
    assert orders(cluster.plan())[0].closed == (1,)
    decisions = cluster.feed(inputs.Redone(cluster.state.generation, PlanFile(digest="sha256:1", done={"0:1": 3})))
    ((_, go),) = told(decisions, "go")
    assert go.resume.closed == (1,) and go.closes and not events(decisions, "repeated")


@pytest.mark.parametrize("checkpoint", [True, False])
def test_where_no_plan_can_be_made_for_what_is_closed_all_go_back_to_a_checkpoint(checkpoint: bool):
    cluster = failed_recoveries(reduction="exact")
    if checkpoint:
        noted = Checkpoint(ITERATION - 2, "/checkpoints/step4", {})
        cluster.state = cluster.state.with_(checkpoints=(noted,))
    closed_meanwhile(cluster, guard={"back": -1})
    (order,) = cluster.feed(inputs.PlanFailed(cluster.state.generation, "no order fits"))
    assert order == do.MakePlan(cluster.state.generation, cluster.state.failed, "drop")
    decisions = cluster.plan()
    if checkpoint:
        ((_, go),) = told(decisions, "go")
        assert go.resume.checkpoint == noted and go.resume.restored == {"1": "checkpoint"} and not go.resume.closed
    else:
        (end,) = endings(decisions)
        assert end.again and "its rest has no plan" in end.message and "there is no checkpoint" in end.message


def test_a_job_for_which_no_other_plan_can_be_made_either_ends():
    cluster = failed_recoveries(reduction="exact")
    closed_meanwhile(cluster)
    for _ in range(2):
        decisions = cluster.feed(inputs.PlanFailed(cluster.state.generation, "no order fits"))
    (end,) = endings(decisions)
    assert end.again and "no order fits" in end.message
