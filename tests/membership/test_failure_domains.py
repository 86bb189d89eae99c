"""What a job says at its start of the hosts that it can lose."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from megatron_recycle.launch.summary import Summary
from megatron_recycle.membership import inputs
from megatron_recycle.membership.failure_domains import FailureDomains, exposed, exposed_shards, judge
from megatron_recycle.membership.resume import parts_of
from megatron_recycle.membership.shards import ShardTable, tables
from tests.membership.cluster import Cluster, described, events, report


def hosts(pipelines: int, stages: int, per_host: int, parts: int = 1) -> dict[str, str]:
    """As DeepSpeed and Megatron number workers: stage by stage, and the launchers count on."""
    ranks = [f"{d}:{s}" + (f".{part}" if parts > 1 else "")
             for s in range(stages) for d in range(pipelines) for part in range(parts)]
    return {name: f"n{rank // per_host}/{rank // per_host}" for rank, name in enumerate(ranks)}


def test_a_host_that_holds_all_copies_of_a_stage_is_named_with_what_to_do() -> None:
    found = judge(hosts(4, 2, 4), "n0/0")
    assert found.fatal == {"n0/0": [0], "n1/1": [1]}
    assert found.text == (
        "warning: losing one host can end the job: n0 has all 4 copies of stage 0; n1 has all 4 copies of stage 1. "
        "Count the ranks through a pipeline first (--recycle-placement spread; in a topology of your own: the axes "
        "data, pipe), or start at most 3 workers on each host (--nproc), on more hosts")


@pytest.mark.parametrize(("pipelines", "stages", "parts"), [(3, 2, 1), (4, 3, 1), (2, 4, 1), (3, 3, 2), (5, 2, 2)])
def test_what_is_advised_helps(pipelines: int, stages: int, parts: int) -> None:
    size = pipelines * stages * parts
    bad = judge(hosts(pipelines, stages, pipelines * parts, parts))
    assert bad.fatal and f"at most {(pipelines - 1) * parts} workers" in bad.text
    for per_host in range(1, (pipelines - 1) * parts + 1):
        good = judge(hosts(pipelines, stages, per_host, parts), "n0/0")
        assert good == FailureDomains("survives the loss of any one host but n0, where the coordinator is"), per_host
    assert "whose loss ends the job" in judge(hosts(pipelines, stages, size, parts)).text


def test_a_worker_is_lost_with_one_of_its_parts() -> None:
    """Tensor parallelism over hosts: the one host has a part of every copy of the stage."""
    spread = {"0:0.0": "a", "0:0.1": "b", "1:0.0": "a", "1:0.1": "c", "2:0.0": "d", "2:0.1": "a"}
    assert judge(spread).fatal == {"a": [0]}


def test_hosts_of_one_name_are_told_apart_and_a_crowd_is_counted() -> None:
    same = {f"0:{s}": f"vm/{s}" for s in range(6)} | {f"1:{s}": f"vm/{s}" for s in range(6)}
    assert "vm/0 has all 2 copies of stage 0; vm/1" in (text := judge(same).text)
    assert "; and 3 hosts more. Count the ranks" in text and "or start at most 1 workers" in text


def test_one_pipeline_survives_nothing() -> None:
    for job in ({"0:0": "a", "0:1": "b"}, {"0:0": "a"}):
        assert "no failure can be survived" in judge(job).text


def test_one_pipeline_with_copies_elsewhere_loses_iterations_only() -> None:
    assert "costs the iterations since the last copy" in judge({"0:0": "a", "0:1": "b"}, guarded=True).text


def _tables(hosts: dict[str, str], copies: int) -> tuple[ShardTable, ...]:
    """As `resume.decide` makes them, where each worker begins with a shard of its own."""
    pipelines = len({name.split(":")[0] for name in hosts})
    reports = {name: report(shards={"of": pipelines, "copies": copies, "held": {name.split(":")[0]: -1}})
               for name in hosts}
    return tables(parts_of(1, hosts), reports, (), hosts)


def test_a_host_that_no_twin_of_a_shard_can_do_without_is_named() -> None:
    """Parts of workers all over three hosts: each host's loss takes two workers along, and with them both twins."""
    ring = {"0:0.0": "a", "0:0.1": "b", "1:0.0": "b", "1:0.1": "c", "2:0.0": "a", "2:0.1": "c"}
    found = judge(ring, tables=_tables(ring, 2))
    assert found.fatal == {host: [0] for host in "abc"}
    assert "a has a part of each worker that holds shard 0 of stage 0's optimizer state; b has" in found.text
    assert found.text.endswith("Give a larger state_copies, or start all parts of a worker on one host")
    assert judge(ring, tables=_tables(ring, 3)).text == "survives the loss of any one host" == judge(ring).text


def test_twins_lie_where_no_host_takes_both_workers_along() -> None:
    """Though the parts that hold them are on different hosts: the first and the second worker have one in common."""
    parts = {"0:0.0": "a", "0:0.1": "b", "1:0.0": "b", "1:0.1": "a", "2:0.0": "c", "2:0.1": "c"}
    assert judge(parts, tables=_tables(parts, 2)).fatal == {}
    assert all("2:0" in " ".join(of) for table in _tables(parts, 2) for of in table.holders)


def test_with_one_copy_of_each_shard_no_failure_is_survived() -> None:
    found = judge(each := {"0:0": "a", "1:0": "b"}, tables=_tables(each, 1))
    assert "one holder (state_copies 1): any failure costs the iterations since the last checkpoint" in found.text
    assert found.fatal == {"a": [0], "b": [0]} and not judge(each, tables=_tables(each, 2)).fatal


def test_the_event_of_the_start_knows_of_shards() -> None:
    cluster = Cluster()
    for name in cluster.names:
        cluster.feed(inputs.Hello(replace(cluster.member(name), host=f"n{name[0]}")))
    decisions = [decision for name in cluster.names for decision in cluster.feed(inputs.Ready(
        f"{name}/0", described({"grid": cluster.grid, "block": 2, "reduction": "exact"}),
        report(attempt=0, shards={"of": 3, "copies": 1, "held": {name[0]: -1}})))]
    (started,) = events(decisions, "started")
    assert "(state_copies 1)" in started["survival"] and started["fatal_hosts"] == {f"n{d}": [0, 1] for d in range(3)}


def test_the_event_of_the_start_says_it() -> None:
    cluster = Cluster()
    for name in cluster.names:
        cluster.hello(name)
    decisions = [decision for name in cluster.names for decision in cluster.ready(name)]
    (started,) = events(decisions, "started")
    assert started["survival"] == "all workers are on host host, whose loss ends the job"
    assert started["fatal_hosts"] == {}


def test_hosts_that_come_to_hold_all_that_is_left_are_told_once() -> None:
    """Four pipelines on two hosts, through a pipeline first: either host may go, and then no other."""
    both = {f"{d}:{s}": "n0" if d < 2 else "n1" for d in range(4) for s in range(2)}
    left = {name: host for name, host in both.items() if host == "n0"}
    assert exposed(both, left) == {"n0": [0, 1]}
    one_less = {name: host for name, host in both.items() if name not in ("2:1", "3:1")}
    assert exposed(both, one_less) == {"n0": [1]} and exposed(one_less, left) == {"n0": [0]}
    assert exposed(left, left) == {} == exposed(both, both)
    single = {name: host for name, host in left.items() if name != "1:1"}
    assert exposed(left, single) == {}, "the last copy of stage 1 has a warning of its own"


def test_hosts_that_come_to_have_a_part_of_each_that_holds_a_shard_are_told_once() -> None:
    """Tensor-parallel workers across hosts: when the third worker is gone, so is the only pair without a host in
    common."""
    both = {"0:0.0": "a", "0:0.1": "b", "1:0.0": "b", "1:0.1": "c", "2:0.0": "d", "2:0.1": "d"}
    left = {name: host for name, host in both.items() if name[0] != "2"}
    assert exposed_shards(both, _tables(both, 2), left, _tables(left, 2)) == {}, "stage 0 itself hangs on b"
    more = {**left, "3:0.0": "c", "3:0.1": "a"}
    found = exposed_shards({**both, **more}, _tables({**both, **more}, 2), more, _tables(more, 2))
    assert found and all(host in "abc" and set(of) == {"0"} for host, of in found.items())
    assert exposed_shards(more, _tables(more, 2), more, _tables(more, 2)) == {}
    line = Summary().add({"event": "last_host", "t": 0.0, "generation": 2, "hosts": {}, "shards": found})
    assert line is not None and "has a part of each worker that holds shard" in line


def test_the_event_of_a_failure_says_which_host_has_become_the_last() -> None:
    cluster = Cluster(3)
    hosts = {name: f"n{name[0]}" if name != "2:1" else "n1" for name in cluster.names}
    for name in cluster.names:
        cluster.feed(inputs.Hello(replace(cluster.member(name), host=hosts[name])))
    for name in cluster.names:
        cluster.ready(name)
    cluster.plan(), cluster.resume_all(), cluster.commit_all(5)
    cluster.exit("0:1"), cluster.plan()
    (event,) = events(cluster.reports(iteration=6, holds=5), "last_host")
    assert event["hosts"] == {"n1": [1]}
    line = Summary().add(event)
    assert line is not None and line.startswith("recycle: warning: n1 has all workers that are left of stage 1: ")
