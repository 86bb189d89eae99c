"""A checkpoint that is written with workers missing is the undisturbed job's, to the bit; half a one is never named."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_recycle.backends.tries import Try
from tests.backends import gpt_job
from tests.harness import Hold, Job
from tests.references import run

ITERATIONS, EVERY = 4, 2


def files(folder: Path) -> dict[str, Any]:
    return {path.name: torch.load(path, weights_only=False) for path in sorted(folder.iterdir())}


def alike(one: Any, other: Any) -> bool:
    """Whether all that two checkpoints hold is the same, to the bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


def test_a_checkpoint_that_is_whole_and_not_yet_named_is_found(tmp_path: Path):
    """Whatever has its name."""
    place = tmp_path / "best"
    for folder in (place, tmp_path / ".best.g3", tmp_path / ".best.g2"):
        folder.mkdir()
    assert Try(place, "g3").found == tmp_path / ".best.g3"
    assert Try(place, "g4").found == place
    assert Try(tmp_path / "gone", "g3").found == tmp_path / "gone"


@pytest.mark.processes
@pytest.mark.timeout(150)
def test_checkpoints_and_evaluations_without_a_whole_pipeline_and_a_kill_in_the_midst_of_a_save(tmp_path: Path):
    """Before the last iteration the script goes back to the checkpoint, which is of two steps."""
    calm, folder = tmp_path / "calm", tmp_path / "killed"
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 20}}
    arguments: dict[str, Any] = {
        "pipelines": 3, "iterations": ITERATIONS, "evaluate": (0, 1, 2, 3), "logits": True, "go_back": 3,
        "engine_settings": {"scheduler": schedule}, "settings": {"reduction": "exact"}}
    undisturbed = run(gpt_job.train, 6, {**arguments, "save_every": (str(calm), EVERY)})
    first, second = Hold("1:0", "backward", 1, 1), Hold("1:1", "forward", 2, 1)  # then nobody has that iterator
    third, named = Hold("0:1", "save", 3), Hold("0:0", "saved", 3)
    with Job(gpt_job.train, 6, {**arguments, "save_every": (str(folder), EVERY)}, [first, second, third, named]) as job:
        for hold in (first, second, third):  # the last one writes all of its stage, and has not yet
            job.wait_held(hold)
            job.kill(hold)
        job.wait_held(named)  # by now others have written it all again
        assert (folder / "latest").read_text() == "global_step2" and not (folder / "global_step3").exists()
        job.release(named)
        results, left = job.wait(), (0, 2, 5)
        assert [rank for rank, result in results.items() if result.status == 0] == [*left], job.where()
        assert all(results[rank].value["evaluated"] == undisturbed[rank].value["evaluated"] for rank in left)
        assert [event["iteration"] for event in job.events if event["event"] == "checkpoint"] == [1, 3]
    assert (folder / "latest").read_text() == "global_step3"
    assert sorted(path.name for path in folder.iterdir()) == ["global_step2", "global_step3", "latest"]
    for tag in ("global_step2", "global_step3"):
        one, other = files(folder / tag), files(calm / tag)
        assert one.keys() == other.keys()
        assert not [name for name in one if not alike(one[name], other[name])]


@pytest.mark.processes
def test_on_a_full_disk_training_goes_on_without_a_checkpoint_and_the_next_one_is_written(
    tmp_path: Path, disk: Callable[[int], Path]
):
    """Of the one that there was no room for nothing is left, and `latest` names the one before."""
    place = disk(3000)
    folder, filler = place / "checkpoints", place / "filler"
    full, free = Hold("0:0", "save", 1), Hold("0:1", "save", 2)
    arguments = {"pipelines": 1, "iterations": 3, "save_every": (str(folder), 1)}
    with Job(gpt_job.train, 2, arguments, [full, free]) as job:
        job.wait_held(full)
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass
        job.release(full)
        job.wait_held(free)
        assert sorted(path.name for path in folder.iterdir()) == ["global_step1", "latest"]
        assert (folder / "latest").read_text() == "global_step1"
        filler.unlink()
        job.release(free)
        results = job.wait()
        assert [result.value["saves"] for result in results.values()] == [[True, False, True]] * 2, job.where()
        (failed,) = [event for event in job.events if event["event"] == "save_failed"]
        assert failed["error"] == (f"no space left on {place} (0 of 2.93 MiB free) while writing checkpoint "
                                   f"{folder}/global_step2")
        assert [event["iteration"] for event in job.events if event["event"] == "checkpoint"] == [0, 2]
    assert (folder / "latest").read_text() == "global_step3"
