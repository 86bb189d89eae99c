"""Jobs under NCCL's rules of order: no deadlock with or without failures, nothing that an abort left counts.

One story; ``scripts/test.sh --night --nccl-rules tests/backends`` runs all others of both frameworks under these rules,
and compares them with gloo's: two deaths at once, comebacks, moves, ties, tensor parallelism, evaluations, checkpoints.
tests/in_memory_job has the moments: every other seed there is of a network with such rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.backends import gpt_job, megatron_job
from tests.backends.comparing import check_survivors
from tests.harness import Hold, Job
from tests.nccl_rules.rules import JOBS
from tests.references import calm_run

pytestmark = pytest.mark.processes

DEEPSPEED: Mapping[str, Any] = {"pipelines": 3, "stages": 2, "iterations": 5, "tied": True,
                                "settings": {"reduction": "exact"}}
MEGATRON: Mapping[str, Any] = {"pipelines": 3, "stages": 2, "iterations": 4, "settings": {"reduction": "exact"}}
"""That of test_megatron_recovery, whose job without failures it shares; its embeddings are tied."""


@pytest.mark.parametrize(("body", "arguments", "hold"), [
    pytest.param(gpt_job.train, DEEPSPEED, Hold("1:1", "backward", 2, 1), marks=pytest.mark.night),
    (megatron_job.train, MEGATRON, Hold("0:0", "reduce", 1)),
    pytest.param(gpt_job.train, DEEPSPEED, Hold("0:0", "reduce", 2), marks=pytest.mark.night)],
    ids=["DeepSpeed", "Megatron", "DeepSpeed in the reduction"])
def test_a_worker_killed_under_the_rules_leaves_gloos_bits(body: Callable[..., Any], arguments: Mapping[str, Any],
                                                           hold: Hold):
    on_gloo = calm_run(body, 6, arguments)
    with Job(body, 6, arguments, [hold], rules=JOBS) as job:
        job.wait_held()
        job.kill(hold)
        check_survivors(job, {hold.worker}, on_gloo)
