"""Megatron-Bridge's own loop: as stock trains, through a SIGKILL and a return, with its checkpoints and evaluations."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.backends.megatron_names import BRIDGE
from tests.backends.private_names import missing
from tests.bridge.job import BridgeJob, ended
from tests.bridge.stand_in import FOLDER
from tests.harness import Hold
from tests.te.versions import newest

megatron_core = pytest.importorskip("megatron.core")
pytestmark = [
    pytest.mark.skipif(FOLDER not in os.environ, reason=f"{FOLDER} names no folder with megatron/bridge"),
    pytest.mark.skipif(find_spec("megatron.training") is None,
                       reason="this core has no megatron.training, which Bridge needs: scripts/test.sh --core 0.19.2"),
]
SIZE = 4


def job_of(folder: Path, **more: Any) -> dict[str, Any]:
    return {"folder": str(folder), "settings": {"reduction": "exact"}, **more}


def run(engine: Path, arguments: dict[str, Any], **more: Any) -> dict[int, Any]:
    with BridgeJob(engine, SIZE, arguments, **more) as job:
        return ended(job)


def stock(engine: Path, folder: Path, **more: Any) -> dict[int, Any]:
    return run(engine, {"folder": str(folder), "plugin": False, **more}, coordinated=False)


def compare(ours: Any, theirs: Any, within: float, state: bool = True) -> None:
    """The same counters, and numbers that agree so far: told ones, parameters, the optimizer's ``state``."""
    assert ours.value["counters"] == theirs.value["counters"]
    for told in ("losses", "norms", "validations"):
        for iteration in ours.value[told].keys() & theirs.value[told].keys():
            assert ours.value[told][iteration] == pytest.approx(theirs.value[told][iteration], rel=max(within, 1e-6))
    pairs = [(ours.value["parameters"], theirs.value["parameters"])]
    if state:
        pairs += zip(ours.value["state"], theirs.value["state"], strict=True)
    for one, other in pairs:
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert numpy.allclose(value, other[name], rtol=within, atol=within), name


def test_each_private_name_is_where_the_list_says():
    assert missing(BRIDGE, (0, 6, 2), Path(os.environ[FOLDER])) == []


@newest
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_worker_is_killed_and_comes_back_with_the_numbers_and_checkpoints_of_stock(engine, tmp_path):
    """In one job: a kill in mid-iteration, a checkpoint and an evaluation without the worker, its return. Stock goes on
    from that checkpoint with the same numbers."""
    more = {"iterations": 8, "checkpoint__save_interval": 4}
    theirs = stock(engine, tmp_path, checkpoint__save=str(tmp_path / "stock"), **more)
    dies, late = Hold("1:1", "backward", 1, 1), Hold("0:0", "forward", 5)
    arguments = job_of(tmp_path, checkpoint__save=str(tmp_path / "ours"), **more)
    with BridgeJob(engine, SIZE, arguments, [dies, late]) as job:
        job.comes_back(dies, late, 3)
        ours = ended(job)
        printed = "".join(log.read_text() for log in job.folder.glob("worker-*.log"))
    assert [line for line in printed.splitlines() if " iteration " in line and "| live: 3/4 |" in line]
    for rank in theirs:
        compare(ours[rank], theirs[rank], 1e-3)  # the sums of bf16 gradients are in another order
        assert len(ours[rank].value["members"]) == SIZE
    assert (tmp_path / "ours" / "latest_checkpointed_iteration.txt").read_text() == "8"
    names = {path.name for path in (tmp_path / "ours").iterdir()}
    assert names == {path.name for path in (tmp_path / "stock").iterdir()}
    gone_on = stock(engine, tmp_path, iterations=8, checkpoint__load=str(tmp_path / "ours"), checkpoint__ckpt_step=4)
    for rank in theirs:
        compare(gone_on[rank], theirs[rank], 1e-3)


@newest
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.night
@pytest.mark.timeout(600)
def test_a_distributed_optimizers_job_goes_on_from_its_checkpoint_through_a_kill(engine, tmp_path):
    arguments = job_of(tmp_path, sharded=True, iterations=6, checkpoint__save=str(tmp_path / "saved"),
                       checkpoint__save_interval=2)
    whole = run(engine, arguments)
    again = {**arguments, "checkpoint__load": str(tmp_path / "saved"), "checkpoint__ckpt_step": 2,
             "checkpoint__save": None}
    hold = Hold("0:1", "forward", 1, 2)
    with BridgeJob(engine, SIZE, again, [hold]) as job:
        job.wait_held()
        job.kill(hold)
        results = job.wait()
    for rank, result in results.items():
        if result.value is not None:
            compare(result, whole[rank], 0.0, state=False)  # its shards are cut otherwise
    assert sum(result.value is not None for result in results.values()) == SIZE - 1
