"""A third backend: what docs/backends.md asks for is enough to survive a failure and to have the worker back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_recycle.runtime.stage import Stage
from tests import toy
from tests.backends.comparing import differences
from tests.harness import Hold, Job
from tests.references import calm_run

SIZE, ITERATIONS = 4, 6


@pytest.mark.processes
@pytest.mark.timeout(150)
def test_plain_modules_train_through_a_kill_and_a_return():
    calm = calm_run(toy.train, SIZE, {})
    dies, late = Hold("1:0", "backward", 1, 1), Hold("0:0", "forward", 3)
    with Job(toy.train, SIZE, {}, [dies, late]) as job:
        job.wait_held(dies)
        job.kill(dies)
        job.wait_ended(2)
        job.wait_held(late)
        job.rejoin(2)
        job.wait_event("waiting", worker="1:0")
        job.release(late)
        results = job.wait()
        for rank, result in results.items():
            assert result.status == 0, job.where()
            assert len(result.value["members"]) == SIZE
            found = differences(result, calm[rank])
            assert not found, (rank, found)
        told = [(name, workers) for name, workers in results[0].value["told"] if name in ("lost", "joined", "whole")]
        everybody = ["0:0", "0:1", "1:0", "1:1"]
        assert told == [("lost", ["1:0"]), ("joined", ["1:0"]), ("whole", everybody)], "what a script asked to be told"
        assert results[0].value["status"].live == tuple(everybody) and results[0].value["status"].is_logging_rank
        assert results[0].value["saved"][1:3] == [True, False], "it waits for nobody who is gone"
        assert results[0].value["saved"][-1] and calm[0].value["saved"] == [True] * (ITERATIONS + 1)


def test_the_page_for_a_third_backend_lists_what_a_stage_has():
    page = (Path(__file__).parents[2] / "docs" / "backends.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.split("## Splitter")[0].splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    members = {name for name in (*vars(Stage), *Stage.__annotations__) if not name.startswith("_")}
    known = members | {"partial"}  # this one only where parts have shares of gradients
    assert listed == known, listed ^ known
    assert all(hasattr(toy.ToyStage, name) or name in ("module", "chunks", "parameters", "model", "references")
               for name in members)
