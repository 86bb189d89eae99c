"""Sequence parallelism, and norms of queries and keys: parts of a worker have shares of norms' gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_recycle.plan import Worker
from megatron_recycle.runtime.comm.partial_gradients import fold_parts
from megatron_recycle.runtime.compute.accumulate import Layout
from tests.backends import megatron_job
from tests.backends.comparing import differences
from tests.harness import Hold, Job
from tests.references import calm_run

pytest.importorskip("megatron.core")

PROCESSES = 8
CUT = ("--sequence-parallel",)
BOTH = (*CUT, "--qk-layernorm")


@pytest.mark.processes
@pytest.mark.gloo
@pytest.mark.parametrize("options", [
    *[pytest.param(options, marks=pytest.mark.night) for options in [
        (*BOTH, "--clip", "0"), (*CUT, "--bf16", "--clip", "0", "--recompute", "full"),
        ("--qk-layernorm", "--clip", "0"),
        (*CUT, "--untied", "--per-token-loss", "--clip", "0", "--count-zeros"),
        ("--optimizer", "sgd", "--lr", "0.1", *BOTH), (*BOTH, "--distributed-optimizer", "--clip", "0")]]],
    ids=" ".join)
def test_without_failures_parameters_have_the_bits_of_cores_own_schedule(options):
    arguments: dict[str, Any] = {"pipelines": 2, "tensor": 2, "iterations": 4, "options": ("--dropout", "0", *options)}
    with Job(megatron_job.train, PROCESSES, {**arguments, "plugin": False}, coordinated=False) as job:
        stock = job.wait()
    with Job(megatron_job.train, PROCESSES, arguments) as job:
        ours = job.wait()
    # With clipping core leaves the order of the norm's sum to the communication library.
    within = 0.0 if "--clip" in options else 1e-6
    for rank in stock:
        assert stock[rank].status == ours[rank].status == 0, (stock[rank].error, ours[rank].error)
        one, other = stock[rank].value, ours[rank].value
        assert other["norms"] == pytest.approx(one["norms"], rel=1e-6)
        for name, value in one["parameters"].items():
            assert abs(value - other["parameters"][name]).max() <= within, name
        assert one["zeros"] == other["zeros"]


@pytest.mark.processes
@pytest.mark.night
@pytest.mark.timeout(200)
@pytest.mark.parametrize("options", [
    BOTH, (*CUT, "--bf16"), (*BOTH, "--recompute", "full"), ("--qk-layernorm", "--untied")], ids=" ".join)
def test_a_killed_part_comes_back_and_the_bits_are_the_same(options):
    """Dropout and clipping are the script's defaults. Survivors go on with what all their parts have done; backwards
    are run in another group than their forwards."""
    arguments = {"pipelines": 2, "stages": 2, "tensor": 2, "iterations": 6, "options": options,
                 "settings": {"reduction": "exact", "verify": "peers"}}
    calm = calm_run(megatron_job.train, PROCESSES, arguments)
    dies, late = Hold("1:1.0", "backward", 1, 1), Hold("0:0.0", "forward", 3)
    with Job(megatron_job.train, PROCESSES, arguments, [dies, late], limit=150) as job:
        job.wait_held(dies)
        rank = job.wait_event("started")["ranks"][dies.worker]
        job.kill(dies)
        job.wait_ended(rank)
        job.wait_held(late)
        job.rejoin(rank)
        job.wait_event("waiting", worker=dies.worker)
        job.release(late)
        for own, result in job.wait().items():
            assert result.status == 0, job.where()
            assert not (found := differences(result, calm[own])), (own, found)
            assert result.value["rerouted"] == " live: 4/4 | rerouted: 0 |"
        assert [e["iteration"] for e in job.events if e["event"] == "committed"] == list(range(6))
        assert next(e["redone"] for e in job.events if e["event"] == "reconciled") <= 3


@pytest.mark.processes
@pytest.mark.night
def test_shards_of_norms_are_summed_over_parts_whoever_holds_them():
    arguments = {"pipelines": 2, "stages": 2, "tensor": 2, "iterations": 5,
                 "options": (*BOTH, "--distributed-optimizer"), "settings": {"reduction": "exact"}}
    calm = calm_run(megatron_job.train, PROCESSES, arguments)
    dies = Hold("1:0.1", "backward", 1, 1)
    with Job(megatron_job.train, PROCESSES, arguments, [dies]) as job:
        job.wait_held(dies)
        ranks = job.wait_event("started")["ranks"]
        job.kill(dies)
        results = job.wait()
    for name, rank in ranks.items():
        if not name.startswith("1:0"):
            found, wanted = results[rank].value["parameters"], calm[rank].value["parameters"]
            assert all((found[key] == wanted[key]).all() for key in wanted)


def test_of_packed_shards_that_part_is_summed_which_is_a_norms():
    """Two shards that are held have 3 of the norm's 5 numbers."""
    matrix, norm = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(5))
    layout, me = Layout([matrix, norm]), Worker(0, 0)
    spans = {0: [(0, 3)], 1: [(3, 6)], 2: [(6, 8)], 3: [(8, 9)]}

    def doubled(values: torch.Tensor) -> Any:
        return SimpleNamespace(wait=lambda: values.mul_(2.0))

    cuts: Any = SimpleNamespace(of=lambda worker: [1, 3], spans=lambda shard, layout: spans[shard])
    groups: Any = SimpleNamespace(me=me, siblings=SimpleNamespace(sum=doubled))
    packed, flat = torch.ones(4), torch.ones(9)
    fold_parts([norm], layout, packed, groups, cuts)
    assert packed.tolist() == [1, 2, 2, 2]
    fold_parts([norm], layout, flat, groups, None)
    assert flat.tolist() == [1, 1, 1, 1, 2, 2, 2, 2, 2]
    fold_parts([norm], layout, flat, SimpleNamespace(siblings=None), None)  # type: ignore[arg-type]
    assert flat.sum() == 14
