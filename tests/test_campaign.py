"""scripts/campaign.py: what a seed stands for, and one campaign."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.slow
@pytest.mark.processes
def test_a_campaign_says_what_it_did_and_that_nothing_differs(tmp_path: Path):
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "campaign.py"), "1", "8", "--output", str(tmp_path)],
                          capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    line, summary = done.stdout.splitlines()[-2:]
    assert line.startswith("seed 8 ") and "equal" in line
    assert summary.startswith("1 campaigns: 1 equal, 0 differs, 0 hung")
