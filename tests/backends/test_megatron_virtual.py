"""Virtual pipelines: stock's interleaved chunks, in the order of a plan. Other moments: tests/memory/test_chunks.py;
Megatron-LM's own flags: tests/backends/test_megatron_lm.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.backends import megatron_job
from tests.backends.comparing import differences
from tests.backends.test_megatron_distributed import EXACT
from tests.backends.test_megatron_distributed import check as check_shards
from tests.harness import Hold, Job
from tests.references import run

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

PIPELINES, STAGES, WORKERS = 2, 3, 6
"""Stock exchanges with both neighbours at once, which between two stages comes in no sure order."""


def job_of(*options: str, interleave: int = 2, microbatches: int = STAGES) -> Mapping[str, Any]:
    """Two addends have one sum, and nothing is clipped, whose norm stock adds up in another order."""
    return {"pipelines": PIPELINES, "stages": STAGES, "options": (
        "--interleave", str(interleave), "--blocks", str(STAGES * interleave), "--microbatches", str(microbatches),
        "--dropout", "0", "--clip", "0", *options)}


@pytest.mark.parametrize("options", [
    ("--distributed-optimizer",), *[pytest.param(case, marks=pytest.mark.night) for case in [
        (), ("--untied", "--bf16"), ("--recompute", "full", "--eval-every", "2"),
        ("--bf16", "--distributed-optimizer", "--eval-every", "2", "--per-token-loss")]]], ids=" ".join)
def test_a_job_that_has_lost_a_worker_ends_with_the_bits_of_stocks_own_interleaving(options):
    stock = run(megatron_job.train, WORKERS, {**job_of(*options), "plugin": False})
    hold = Hold("1:0", "backward", 1, 1)
    with Job(megatron_job.train, WORKERS, {**job_of(*options), "settings": EXACT}, [hold]) as job:
        job.wait_held()
        job.kill(hold)
        results = job.wait()
    assert sum(result.status == 0 for result in results.values()) == WORKERS - 1, job.where()
    check_shards(results, stock)  # and parameters
    for rank in (rank for rank, result in results.items() if result.status == 0):
        if "--distributed-optimizer" not in options:
            assert set(differences(stock[rank], results[rank])) <= {"losses"}
        for key in ("losses", "validations"):  # sums over the global batch, for the log
            ours, theirs = ([value for value in of[rank].value[key] if value is not None] for of in (results, stock))
            assert ours == pytest.approx(theirs, rel=1e-6)
