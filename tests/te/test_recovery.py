"""Jobs on Transformer Engine's layers: as core's own schedule trains them, and through a SIGKILL and a return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.backends.comparing import check_survivors, differences
from tests.harness import Hold
from tests.te.job import TEJob, calm, stock
from tests.te.versions import engines

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.processes

PIPELINES, STAGES, ITERATIONS, KILLED_IN = 2, 2, 4, 1
FUSED = {"fused": True}
"""Weight gradients are added to `main_grad` in the kernel that forms them, as is Megatron's default."""


def job_of(*options: str, reduction: str = "exact", **more: Any) -> dict[str, Any]:
    """Tied embeddings, Adam, clipping and dropout are the script's defaults."""
    return {"pipelines": PIPELINES, "stages": STAGES, "iterations": ITERATIONS, "options": options,
            "settings": {"reduction": reduction}, **more}


@engines
@pytest.mark.parametrize(("options", "more"), [
    (("--bf16",), FUSED), *[pytest.param(*case, marks=pytest.mark.night) for case in [
        ((), {}), (("--bf16",), {}), ((), FUSED), (("--bf16", "--recompute", "full"), FUSED),
        (("--bf16", "--clip", "0", "--untied"), {"tensor": 2, **FUSED})]]], ids=str)
def test_without_failures_parameters_have_the_bits_of_core_s_own_schedule(
        engine: Path, options: tuple[str, ...], more: dict[str, Any]):
    size = PIPELINES * STAGES * more.get("tensor", 1)
    arguments = job_of("--dropout", "0", *options, **more)
    theirs, ours = stock(engine, size, arguments), calm(engine, size, {**arguments, "settings": {}})
    for rank in theirs:
        found = differences(theirs[rank], ours[rank])
        assert found.pop("losses", 0.0) < 1e-5  # of the sums over the global batch, for the log
        assert not found


@engines
def test_a_worker_killed_in_mid_iteration_leaves_the_same_bits(engine: Path):
    arguments = job_of("--bf16", **FUSED)
    undisturbed = calm(engine, PIPELINES * STAGES, arguments)
    hold = Hold("1:1", "backward", KILLED_IN, 1)
    with TEJob(engine, PIPELINES * STAGES, arguments, [hold]) as job:
        job.wait_held()
        job.kill(hold)
        check_survivors(job, {"1:1"}, undisturbed)
