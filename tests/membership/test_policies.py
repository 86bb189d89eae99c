"""Policies on paper: which pipelines an update goes without, and by what the next plan is made."""

from __future__ import annotations

import pytest

from megatron_recycle.checkpoint_period import young_daly
from megatron_recycle.membership import decisions as do
from megatron_recycle.membership import inputs, policies
from megatron_recycle.membership.fault import Fault
from tests.membership.cluster import Cluster, endings, events, report, told


def job(policy: str) -> Cluster:
    """Three pipelines of two stages that train with this policy."""
    cluster = Cluster()
    for name in cluster.names:
        cluster.hello(name)
    for name in cluster.names:
        cluster.ready(name, policy=policy)
    cluster.plan()
    cluster.resume_all()
    return cluster


def fail(cluster: Cluster, *names: str) -> list[do.Decision]:
    """These die one after the other, and training goes on."""
    decisions: list[do.Decision] = []
    for name in names:
        decisions += cluster.exit(name)
    decisions += cluster.reports() + cluster.plan()
    return decisions + cluster.resume_all()


def planned_by(decisions: list[do.Decision]) -> str | None:
    return [one.policy for one in decisions if isinstance(one, do.MakePlan)][-1]


@pytest.mark.parametrize(("policy", "by", "without"), [("reroute", None, []), ("drop", "drop", []),
                                                       ("rollback", "drop", [1]), ("lossy_forward", "drop", [1])])
def test_a_hit_pipeline_is_used_as_the_policy_says(policy: str, by: str | None, without: list[int]):
    cluster = job(policy)
    decisions = fail(cluster, "1:0")
    assert planned_by(decisions) == by
    (_, go), = told(decisions, "go")
    assert go["without"] == without
    assert [(event["pipelines"], event["microbatches"], event["iteration"]) for event in events(decisions, "left_out")
            ] == ([(without, 4, 0)] if without else [])


@pytest.mark.parametrize("policy", ["drop", "rollback"])
def test_where_no_pipeline_is_whole_micro_batches_are_re_routed_and_the_job_goes_on(policy: str):
    cluster = job(policy)
    decisions = fail(cluster, "1:0", "0:1", "2:1")
    assert planned_by(decisions) == "reroute"
    assert told(decisions, "go")[-1][1]["without"] == [] and not events(decisions, "left_out")


def test_guests_on_whom_recoveries_have_failed_are_tried_again_where_no_pipeline_is_whole_any_more():
    cluster = job("reroute")
    cluster.exit("1:0")
    fault = Fault("ValueError", "a bug", 0, whole=True, recovery=True)
    for number, by in enumerate((None, "drop"), 1):
        cluster.reports()
        cluster.plan()
        assert planned_by(cluster.feed(inputs.Raised("0:0/0", fault, cluster.now, number))) == by
    assert planned_by(cluster.exit("0:1")) == "drop", "2 is whole"
    assert planned_by(cluster.exit("2:1")) is None


def test_a_replacement_brings_its_pipeline_back():
    cluster = job("rollback")
    fail(cluster, "1:0")
    cluster.hello("1:0", life=1)
    cluster.feed(inputs.Ready("1:0/1", dict(cluster.state.description or {}), {}))
    for name in cluster.state.members:
        decisions = cluster.feed(inputs.Boundary(f"{name}/0", cluster.state.generation, 3, cluster.now))
    assert policies.left_out(cluster.state) == () and planned_by(decisions) is None
    decisions = cluster.reports(*[name for name in cluster.names if name != "1:0"]) + cluster.plan()
    assert told(decisions, "go")[-1][1]["without"] == []
    assert [event["pipelines"] for event in events(decisions, "left_out")] == [[]], "all take part again"


def dropped(cluster: Cluster) -> None:
    """All have whole pipelines' plans, and have committed iteration 4."""
    assert cluster.state.go is not None
    cluster.state.go["plan"]["source"] = "drop"
    cluster.commit_all(4)


def kept_attempt(done: int, chain: int = 1) -> dict[str, object]:
    actions = [f"F0.{microbatch}" for microbatch in range(done)]
    return {"iteration": 5, "chain": chain, "actions": actions, "provisional": False, "microbatches": 4,
            "block": 2}


def report_kept(cluster: Cluster, name: str, done: int, chain: int = 1) -> list[do.Decision]:
    where = report(5, 4, actions=done, committed=4)
    kept = {"kept": [kept_attempt(done, chain)] if done else []}
    return cluster.feed(inputs.Reported(f"{name}/0", cluster.state.generation, {**where, **kept}))


def test_what_whole_pipelines_have_done_is_carried_on_and_only_the_rest_counts_as_lost():
    cluster = job("lossy_forward")
    dropped(cluster)
    cluster.exit("1:0")
    cluster.plan()
    for name, done in {"0:0": 7, "0:1": 5, "2:0": 0, "2:1": 3}.items():
        report_kept(cluster, name, done)
    decisions = report_kept(cluster, "1:1", 6)
    (_, go), = told(decisions, "go")
    assert go["carried"]["done"] == {"0:0": 7, "0:1": 5, "2:0": 0, "2:1": 3}
    assert (go["carried"]["iteration"], go["resume"]["next"], go["resume"]["redone"]) == (5, 5, 6)


@pytest.mark.parametrize("torn", [{"holds": 5}, {"chain": 3}, {"actions": 0, "torn": True}])
def test_an_iteration_that_somebody_has_not_kept_is_begun_anew_by_all(torn: dict[str, int]):
    """One that has its stage's sum, but no addends any more; one that has kept another attempt; one that was in the
    midst of its first action, whose message its neighbour may have read."""
    cluster = job("lossy_forward")
    dropped(cluster)
    cluster.exit("1:0")
    cluster.plan()
    for name in ("0:0", "0:1", "2:0", "1:1"):
        report_kept(cluster, name, 5)
    happened = report(5, 4, actions=5, committed=4) | torn
    if "chain" in torn:
        happened["kept"] = [kept_attempt(5, torn["chain"])]
    decisions = cluster.feed(inputs.Reported("2:1/0", cluster.state.generation, happened))
    assert [go["carried"] for _, go in told(decisions, "go")] == [None]


def test_with_restart_a_failure_ends_this_life_and_another_may_begin():
    cluster = job("restart")
    (end,) = endings(cluster.exit("1:0"))
    assert end.again and end.status == 1 and "1:0 exit" in end.message and "checkpoint" in end.message


def test_the_period_of_checkpoints_is_young_and_dalys():
    assert young_daly(1.0, 3600.0) == pytest.approx((2 * 3600) ** 0.5 - 1 + 1 / 3, abs=0.01)
    assert young_daly(60.0, 3600.0) == pytest.approx(617.6, abs=0.5), "at a mean time of an hour, every ten minutes"
    assert young_daly(5.0, 1.0) == 1.0, "where a checkpoint takes longer than all lives"
    with pytest.raises(ValueError, match="above 0"):
        young_daly(0.0, 3600.0)
