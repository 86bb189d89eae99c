"""Jobs under NCCL's rules of order: no deadlock with or without failures, nothing that an abort left counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.backends import gpt_job
from tests.backends.comparing import check_survivors
from tests.harness import Hold, Job, Result
from tests.ordered.rules import Rules
from tests.references import calm_run

pytestmark = pytest.mark.processes

EXACT: Mapping[str, Any] = {"pipelines": 3, "stages": 2, "iterations": 5, "tied": True,
                            "settings": {"reduction": "exact"}}


@pytest.fixture(scope="module")
def on_gloo() -> dict[int, Result]:
    return calm_run(gpt_job.train, 6, EXACT)


@pytest.mark.parametrize("hold", [
    Hold("1:1", "backward", 2, 1), pytest.param(Hold("0:0", "reduce", 2), marks=pytest.mark.night)], ids=str)
def test_a_worker_killed_under_the_rules_leaves_gloos_bits(hold: Hold, on_gloo: Mapping[int, Result]):
    with Job(gpt_job.train, 6, EXACT, [hold], rules=Rules()) as job:
        job.wait_held()
        job.kill(hold)
        check_survivors(job, {hold.worker}, on_gloo)
