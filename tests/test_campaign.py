"""scripts/campaign.py: what a seed stands for, and one campaign."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest

from tests.harness import Result

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import campaign

ROOT = Path(__file__).resolve().parent.parent


def test_a_seed_always_stands_for_the_same_campaign_and_seeds_for_different_ones():
    texts = [[campaign.Scenes(random.Random(seed), 3, 2).any().text for seed in range(50)] for _ in range(2)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 40


@pytest.mark.parametrize(("pipelines", "stages"), [(2, 3), (3, 2), (4, 2)])
def test_every_stage_keeps_a_worker_and_the_last_iteration_is_hit_too(pipelines: int, stages: int):
    scenes = [campaign.Scenes(random.Random(seed), pipelines, stages).any() for seed in range(500)]
    for scene in scenes:
        for stage in range(stages):
            assert sum(worker.endswith(f":{stage}") for worker in scene.victims) < pipelines, scene.text
    assert sum(hold.iteration == campaign.ITERATIONS - 1 for scene in scenes for hold in scene.holds[:1]) > 25
    assert len({scene.play.__qualname__ for scene in scenes}) == 8


def test_a_worker_that_wakes_up_in_its_last_step_may_end_well_with_the_jobs_bits_only():
    def result(weight: float, status: int = 0) -> Result:
        value = {"losses": [0.5], "parameters": {"weight": numpy.array([weight])}, "state": []}
        return Result(value if status == 0 else None, None, status)

    def faults(*results: Result) -> list[str]:
        committed = [{"event": "committed", "iteration": iteration} for iteration in range(campaign.ITERATIONS)]
        job = SimpleNamespace(wait=lambda: dict(enumerate(results)), events=committed)
        scene = campaign.Scene("freeze and wake 1:0", (), lambda job: 0.0, {"1:0"})
        return campaign.faults(job, scene, {rank: result(1.0) for rank in range(2)}, 2)  # type: ignore

    assert faults(result(1.0), result(1.0)) == faults(result(1.0), result(1.0, 3)) == []
    assert faults(result(1.0), result(2.0)) == ["rank 1 differs in weight"]
    assert faults(result(1.0, 3), result(1.0)) == ["rank 0 ended with status 3: None"]


@pytest.mark.night
@pytest.mark.processes
@pytest.mark.parametrize("seed", [8, pytest.param(91001, id="the coordinator is killed")])
def test_a_campaign_says_what_it_did_and_that_nothing_differs(tmp_path: Path, seed: int):
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "campaign.py"), "1", str(seed), "--output",
                           str(tmp_path)], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    line, summary = done.stdout.splitlines()[-2:]
    assert line.startswith("seed 8 ") and "equal" in line
    assert summary.startswith("1 campaigns: 1 equal, 0 differs, 0 hung")
