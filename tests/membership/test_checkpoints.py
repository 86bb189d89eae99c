"""The manifest of checkpoints, on paper: noted is what the members of the generation in force have written."""

from __future__ import annotations

from megatron_recycle.membership import decisions as do
from megatron_recycle.membership import inputs
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.inputs import Loss
from megatron_recycle.membership.protocol import Noted
from megatron_recycle.membership.resume import Checkpoint
from tests.membership.cluster import Cluster, events, told

PLACE = "/runs/global_step6"


def written(cluster: Cluster, name: str = "0:0", generation: int = 1, iteration: int = 5) -> list[do.Decision]:
    return cluster.feed(inputs.Written(f"{name}/0", generation, iteration, PLACE))


def training() -> Cluster:
    cluster = Cluster(2)
    for name in cluster.names:
        cluster.hello(name)
    for name in cluster.names:
        cluster.ready(name)
    cluster.plan(), cluster.resume_all(), cluster.commit_all(5)
    return cluster


def test_it_is_recorded_before_its_writer_hears_of_it_and_once_however_often_it_is_told():
    cluster = training()
    decisions = written(cluster)
    record, emit, tell = decisions
    assert isinstance(record, do.Record) and not record.needed and isinstance(emit, do.Emit)
    assert told([tell], "noted") == [({"0:0"}, Noted(1, PLACE))]
    assert cluster.state.checkpoints == (Checkpoint(5, PLACE, None),)
    assert written(cluster) == [tell], "after a reconnect"
    assert events(decisions, "checkpoint")[0]["iteration"] == 5


def test_who_was_declared_out_and_who_is_a_generation_behind_is_not_heard():
    cluster = training()
    cluster.feed(inputs.Lost((Loss("0:0/0", FailureKind.FROZEN),), cluster.now))
    assert not written(cluster) and not written(cluster, generation=2), "it woke up in the midst of a checkpoint"
    assert not written(cluster, "1:0"), "the others write it again, with another name"
    assert not cluster.state.checkpoints
    assert written(cluster, "1:0", generation=2)


def test_a_member_that_cannot_write_its_part_frees_those_that_wait_for_it_once():
    cluster = training()
    cluster.feed(inputs.Unwritten("1:0/0", 1, "no space left"))
    assert cluster.state.generation == 2 and not cluster.state.absent.out
    assert not cluster.feed(inputs.Unwritten("1:1/0", 1, "no space left")), "its own is over as well"
    assert not cluster.feed(inputs.Unwritten("9:9/0", 2, "no space left"))
