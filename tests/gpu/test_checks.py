"""The checks that wait for a GPU stay alive without one: their programs run on the ordered backend, in threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist

from megatron_recycle import nccl_settings

GPU = Path(__file__).resolve().parents[2] / "scripts" / "gpu"
QUIET = 0.7  # seconds without any progress after which a program hangs
LIMIT = 60.0


@pytest.fixture(scope="module", autouse=True)
def scripts() -> Iterator[None]:
    sys.path.insert(0, str(GPU))
    yield
    sys.path.remove(str(GPU))


@pytest.fixture(scope="module")
def checks() -> ModuleType:
    import nccl_checks

    return nccl_checks


def found(check) -> str:
    """How a check comes out whose ranks are threads."""
    from nccl_rank import OnCpu, Rank

    store, told, ended = dist.HashStore(), [{} for _ in range(check.size)], dict[int, int]()
    ranks = [Rank(rank, check.size, OnCpu(), lambda limit: store, told[rank].update) for rank in range(check.size)]

    def run(at: Rank) -> None:
        at.tell(begun=True)
        try:
            check.program(at)
            ended[at.rank] = 0
        except Exception as error:  # noqa: BLE001  (a status, as of a process)
            at.tell(error=repr(error))
            ended[at.rank] = 1

    for rank in ranks:
        threading.Thread(target=run, args=(rank,), daemon=True).start()
    last, limit = time.monotonic(), time.monotonic() + LIMIT
    while len(ended) < check.size and time.monotonic() < min(limit, last + QUIET):
        time.sleep(0.02)
        last = max([last, *(queue.last for rank in ranks for group in rank.groups for queue in group.queues.values())])
    outcome = check.verdict([ended.get(rank) for rank in range(check.size)], told)
    for rank in ranks:
        for group in rank.groups:
            group.abort()
    return outcome


@pytest.mark.parametrize("name", [
    "planned_order", "planned_order_unconnected", "ahead_one_group", "not_ahead_one_group", "not_ahead_one_group_large",
    "batch", "abort_and_rebuild", "left_and_drained",
])
def test_a_check_comes_out_on_the_ordered_backend_as_it_should_on_nccl(checks: ModuleType, name: str):
    check, = (check for check in checks.CHECKS if check.name == name)
    assert found(check) == check.expected


@pytest.mark.parametrize(("statuses", "facts", "expected"), [
    ([0, 0], [{}, {"right": True}], "ends"),
    ([0, 0], [{}, {"right": False}], "wrong"),
    ([0, None], [{}, {"right": True}], "hangs"),
    ([0, -9], [{}, {}], "fails"),
    ([0, None], [{}, {"begun": False}], "does not begin"),
])
def test_the_verdict_looks_at_every_rank(checks: ModuleType, statuses, facts, expected):
    check, = (check for check in checks.CHECKS if check.name == "abort")
    told = [{"begun": True, **each} for each in facts]
    assert check.verdict(statuses, told) == expected


def test_only_the_ranks_that_are_looked_at_count(checks: ModuleType):
    check, = (check for check in checks.CHECKS if check.name == "dead_peer")
    assert check.verdict([-9, 0], [{}, {"begun": True}]) == "ends"
    assert check.verdict([-9, -6], [{}, {"begun": True}]) == "fails"


def test_a_rank_has_a_jobs_settings_or_torchs_own(checks: ModuleType):
    from nccl_runner import environment

    check, = (check for check in checks.CHECKS if check.name == "dead_peer")
    bare, = (check for check in checks.CHECKS if check.name == "dead_peer_torchs_settings")
    users = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "2,3"}
    one, other, left = environment(check, 0, users), environment(check, 1, users), environment(bare, 1, users)
    assert not nccl_settings.unsafe(one) and nccl_settings.SETTINGS.keys() <= one.keys()
    assert not nccl_settings.SETTINGS.keys() & left.keys()
    assert one["NCCL_HOSTID"] != other["NCCL_HOSTID"], "or NCCL refuses two ranks on one GPU"
    assert (one["NCCL_DEBUG"], one["CUDA_VISIBLE_DEVICES"], one["LOCAL_RANK"]) == ("INFO", "2", "0")


def test_workers_of_a_command_get_the_variables_as_they_start():
    """Only they: launcher and coordinator have no number."""
    from one_gpu import for_command

    said = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
    clean = {name: value for name, value in os.environ.items() if name != "RANK"}
    common = {**clean, "LOCAL_RANK": "5", **for_command({})}
    worker, launcher = (json.loads(subprocess.run(said, env=environ, capture_output=True, text=True).stdout)
                        for environ in ({**common, "RANK": "5"}, common))
    assert (worker["NCCL_HOSTID"], worker["LOCAL_RANK"], worker["NCCL_NET"]) == ("worker-5", "0", "Socket")
    assert "NCCL_HOSTID" not in launcher and launcher["LOCAL_RANK"] == "5"
    assert worker["DS_ACCELERATOR"] == "cuda"


def test_without_a_gpu_nothing_claims_to_have_been_seen(checks: ModuleType, tmp_path: Path, monkeypatch, capsys):
    import check_report
    import message_log
    import project_jobs

    monkeypatch.setattr(check_report, "machine", lambda: {"gpu": None})
    for script in (checks, project_jobs, message_log):
        assert script.main(["--out", str(tmp_path / "check.json")]) == 2
        assert "there is no GPU" in capsys.readouterr().err
    assert not (tmp_path / "check.json").exists()


def test_parts_are_written_beside_each_other(tmp_path: Path):
    import check_report

    for part, results in (("a: NCCL", [1]), ("b: jobs", [2]), ("a: NCCL", [3])):
        check_report.write(tmp_path / "check.json", part, results)
    written = json.loads((tmp_path / "check.json").read_text())
    assert {part: value["results"] for part, value in written.items()} == {"a: NCCL": [3], "b: jobs": [2]}
    assert written["a: NCCL"]["machine"]["torch"]


def test_the_cost_of_a_split_backward_is_taken_of_equal_gradients(tmp_path: Path, capsys):
    import split_cost

    arguments = ["--device", "cpu", "--hidden", "64", "--length", "16", "--repeats", "1"]
    rows = {row["way"]: row for row in split_cost.main([*arguments, "--out", str(tmp_path / "check.json")])}
    split = rows["split"]
    assert split["largest_difference"] == 0.0
    assert split["split_to_full"] == pytest.approx((split["B"] + split["W"]) / rows["stock"]["B"], abs=1e-3)
    assert split["counted_after_F_mib"] >= split["counted_after_B_mib"] > 0 == rows["stock"]["counted_after_B_mib"]
    assert all("GPU" in rows[way]["not_there"] for way in ("split+apex", "te", "te+delayed"))
    assert "split" in capsys.readouterr().out
    written = json.loads((tmp_path / "check.json").read_text())["c: split backward"]["results"]
    assert written["rows"] == list(rows.values())


def test_the_log_of_messages_is_checked_on_a_cpu_too(capsys):
    import message_log

    assert message_log.main(["--cpu"]) == 0
    assert capsys.readouterr().out.count("well {") == 4
