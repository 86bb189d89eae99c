"""What becomes of a job whose grid cannot go on: the largest grid of whole pipelines, with the same batch."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_recycle.membership import inputs
from megatron_recycle.membership.next_life import NextLife, Shape, plan_life
from tests.membership.cluster import Cluster, endings
from tests.membership.test_job_end import raised, training


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 6), st.integers(1, 24))
def test_each_life_is_the_largest_grid_of_whole_pipelines_that_divides_the_batch(counts, unit, microbatches):
    places = {f"host/{number}": count for number, count in enumerate(counts)}
    found = plan_life(places, Shape(unit, microbatches), 1)
    fitting = [n for n in range(1, microbatches + 1) if microbatches % n == 0 and n * unit <= sum(counts)]
    if isinstance(found, str):
        assert not fitting
        return
    assert found == NextLife.from_json(json.loads(json.dumps(found.to_json())))
    assert found.size == max(fitting) * unit
    ranks = [rank for host, share in found.shares.items() for rank in range(share.first, share.first + share.count)]
    assert ranks == [*range(found.size)], "each rank once, hosts in a row"
    assert all(share.count <= places[host] for host, share in found.shares.items())
    assert sorted(share.node for share in found.shares.values()) == [*range(len(places))]
    used = [share.node for share in found.shares.values() if share.count]
    assert used == [*range(found.nodes)], "a host without ranks is a spare, behind all others"


def test_a_job_whose_grid_nobody_knows_starts_again_on_all_its_hosts_or_not_at_all():
    assert plan_life({"a/0": 2, "b/1": 2}, None, 4).size == 4
    assert plan_life({"a/0": 2}, None, 4) == (
        "the hosts that are left have 2 places, and a job whose grid is not known needs all 4")
    assert plan_life({"a/0": 2}, Shape(4, 8), 8) == "the hosts that are left have 2 places, and a pipeline takes 4"


@pytest.mark.parametrize("status, again", [(-9, True), (None, True), (1, False), (0, False)])
def test_a_worker_that_dies_before_training_may_do_better_and_one_whose_script_fails_will_not(status, again):
    cluster = Cluster(2)
    cluster.hello("0:0")
    (end,) = endings(cluster.feed(inputs.Exited(0, 1000, status, cluster.now)))
    assert end.again is again


def test_a_lost_stage_may_do_better_and_what_every_worker_would_meet_will_not():
    cluster = training(pipelines=2, emergency=False)
    cluster.feed(inputs.Exited(1, 1001, -9, cluster.now))
    (end,) = endings(cluster.feed(inputs.Exited(3, 1003, -9, cluster.now)))
    assert end.again and "has lost its last worker" in end.message
    cluster = training(emergency=False)
    raised(cluster, "1:0")
    (end,) = endings(raised(cluster, "2:0"))
    assert not end.again and end.message.startswith("micro-batch 1.3 of iteration 6 fails on every worker")


def test_a_script_that_has_not_followed_the_smaller_grid_does_not_train():
    cluster = Cluster(1)
    cluster.state = cluster.state.with_(shape=Shape(2, 12))
    for name in cluster.names:
        cluster.hello(name)
    (end,) = endings([one for name in cluster.names for one in cluster.ready(name)])
    assert not end.again and "and had 12 before" in end.message and "train_batch_size" in end.message
