"""Coming in, on paper: who counts as a copy of its stage, and from when on."""

from __future__ import annotations

from megatron_recycle.membership import decisions as do
from megatron_recycle.membership import inputs, messages
from megatron_recycle.membership.machine import step
from megatron_recycle.membership.records import restore
from tests.membership.cluster import Cluster, described, endings, events, report

RECEIVED = inputs.Received(4000, 2.0)


def ready_to_join(cluster: Cluster, name: str) -> None:
    """The second life of ``name`` has built its model."""
    cluster.hello(name, life=1)
    description = {"grid": cluster.grid, "block": 2, "reduction": "exact"}
    cluster.feed(inputs.Ready(f"{name}/1", described(description), report(attempt=0)))


def test_who_comes_in_must_run_its_backwards_as_its_stage_does() -> None:
    for told, taken in ((True, False), (False, True)):
        cluster = Cluster()
        for name in cluster.names:
            cluster.hello(name)
        for name in cluster.names:
            cluster.ready(name, full_backward=name.endswith(":0"))
        cluster.plan()
        cluster.resume_all()
        cluster.exit("1:1")
        recover(cluster, 1)
        cluster.hello("1:1", life=1)
        description = {"grid": cluster.grid, "block": 2, "reduction": "exact", "full_backward": told}
        decisions = cluster.feed(inputs.Ready("1:1/1", described(description), report(attempt=0)))
        assert bool(events(decisions, "waiting")) == taken, decisions


def recover(cluster: Cluster, iteration: int) -> None:
    """From a decision to the first actions after it."""
    for member in list(cluster.state.proven.values()):
        told = report(iteration=iteration, holds=iteration - 1)
        cluster.feed(inputs.Reported(member.incarnation, cluster.state.generation, told))
    cluster.plan()
    begin(cluster)


def begin(cluster: Cluster) -> None:
    for name, member in list(cluster.state.members.items()):
        if name not in cluster.state.arrivals.unproven:
            cluster.feed(inputs.Resumed(member.incarnation, cluster.state.generation, cluster.now))


def stand(cluster: Cluster, *names: str) -> None:
    """These (default: all) wait at the boundary."""
    for name in names or tuple(cluster.state.members):
        member = cluster.state.members[name]
        cluster.feed(inputs.Boundary(member.incarnation, cluster.state.generation, 3, cluster.now))


def without_second_pipelines_last_stage(cluster: Cluster) -> Cluster:
    cluster.train()
    cluster.exit("1:1")
    recover(cluster, 1)
    return cluster


def taken_in(cluster: Cluster) -> Cluster:
    """1:1 has died and a new process of it is a member, with no state yet."""
    without_second_pipelines_last_stage(cluster)
    ready_to_join(cluster, "1:1")
    stand(cluster)
    recover(cluster, 3)
    assert set(cluster.state.arrivals.unproven) == {"1:1"}
    return cluster


def acknowledge(cluster: Cluster) -> list[do.Decision]:
    return cluster.feed(inputs.Holds("1:1/1", cluster.state.generation, RECEIVED))


def test_one_that_holds_its_state_is_a_copy_before_its_first_action() -> None:
    cluster = taken_in(Cluster(2, 2))
    joined, = events(acknowledge(cluster), "joined")
    assert joined["worker"] == "1:1" and joined["mb_per_s"] == 2.0
    cluster.exit("0:1")
    assert not endings(cluster.log) and set(cluster.state.members) == {"0:0", "1:0", "1:1"}


def test_one_that_does_not_is_none() -> None:
    cluster = taken_in(Cluster(2, 2))
    assert "stage 1 has lost its last worker" in endings(cluster.exit("0:1"))[0].message


def test_what_was_acknowledged_is_known_to_a_coordinator_that_comes_back() -> None:
    cluster = taken_in(Cluster(2, 2))
    acknowledge(cluster)
    state = restore(4, cluster.journal)
    assert not state.arrivals.unproven
    dead = cluster.state.members["0:1"]
    state, _ = step(state, inputs.Restarted(), 999.0)
    state, decisions = step(state, inputs.Exited(dead.rank, dead.pid, -9, 999.0), 999.0)
    assert not endings(list(decisions)) and state.member("1:1/1") is not None


def test_an_acknowledgement_of_an_earlier_generation_counts_for_nothing() -> None:
    cluster = taken_in(Cluster(3, 2))
    generation = cluster.state.generation
    cluster.exit("0:1")
    assert cluster.state.arrivals.joiners.keys() == {"1:1"}
    cluster.feed(inputs.Holds("1:1/1", generation, RECEIVED))
    assert cluster.state.arrivals.joiners.keys() == {"1:1"} and "1:1" not in cluster.state.members
    assert not restore(6, cluster.journal).arrivals.unproven


def test_each_switch_waits_for_everybody() -> None:
    cluster = taken_in(Cluster(3, 2))
    acknowledge(cluster)
    cluster.feed(inputs.Resumed("1:1/1", cluster.state.generation, cluster.now))
    cluster.exit("2:1")
    recover(cluster, 4)
    ready_to_join(cluster, "2:1")
    generation = cluster.state.generation
    assert cluster.state.round.switch
    stand(cluster, "1:1")
    assert cluster.state.generation == generation
    stand(cluster)
    assert cluster.state.generation == generation + 1 and "2:1" in cluster.state.members


def test_two_that_come_in_one_after_the_other() -> None:
    cluster = without_second_pipelines_last_stage(Cluster(3, 2))
    cluster.exit("2:1")
    recover(cluster, 1)
    for name in ("1:1", "2:1"):
        ready_to_join(cluster, name)
        generation = cluster.state.generation
        stand(cluster, "0:0")
        assert cluster.state.generation == generation
        stand(cluster)
        assert cluster.state.generation == generation + 1
        recover(cluster, 3)
        cluster.feed(inputs.Holds(f"{name}/1", cluster.state.generation, RECEIVED))
        cluster.feed(inputs.Resumed(f"{name}/1", cluster.state.generation, cluster.now))
    assert len(cluster.state.members) == 6 and not cluster.state.arrivals.unproven




def test_what_each_rank_was_told_at_the_start_is_there_for_its_next_process() -> None:
    """Also once the coordinator has been started again."""
    cluster = Cluster(2, 2)
    for name in cluster.names:
        cluster.hello(name)
    for name in cluster.names:
        description = {"grid": cluster.grid, "block": 2, "reduction": "exact"}
        learnt = ({"what": "broadcast", "value": name},)
        cluster.feed(inputs.Ready(f"{name}/0", described(description), report(attempt=0), learnt))
    cluster.plan()
    for state in (cluster.state, restore(4, cluster.journal)):
        assert messages.learnt(state, 2).record == ({"what": "broadcast", "value": "1:0"},)
    assert messages.learnt(Cluster(2, 2).train().state, 2).record == ()
