"""The variables that a launcher hands to its workers."""

from __future__ import annotations

import pytest

from megatron_recycle.environment import COORDINATOR, HANDED_OVER, JOINING, RUN_DIR, Launched, not_handed_over
from megatron_recycle.errors import ConfigError
from megatron_recycle.runtime.comm.standalone import set_up


@pytest.mark.parametrize("start", [
    Launched(),
    Launched(control="host:29500", token="0123456789abcdef", run_dir="/runs/1", host="n0/0"),
    Launched(control="host:29500", token="0123456789abcdef", run_dir="/runs/1", host="n0/0", joining=True, chaos=True),
])
def test_a_worker_reads_what_its_launcher_has_written(start: Launched):
    assert Launched.read(start.variables()) == start
    assert set(start.variables()) <= HANDED_OVER | {RUN_DIR}


def test_a_worker_of_another_launcher_knows_its_rank_and_no_coordinator():
    torchrun = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"}
    assert Launched.read(torchrun) == Launched(rank=3, size=8, local_rank=1, store=("n0", 29500))
    assert not Launched.read(torchrun).by_recycle_run


def test_a_job_that_a_worker_starts_takes_nothing_of_the_workers_own_start():
    worker = Launched(control="host:29500", token="0123456789abcdef", host="n0/0", joining=True, chaos=True)
    environ = {"PATH": "/bin", "RECYCLE_SEED": "7", **worker.variables()}
    assert not_handed_over(environ) == {"PATH": "/bin", "RECYCLE_SEED": "7"}


def test_the_token_is_not_printed():
    assert "0123456789abcdef" not in repr(Launched(control="host:1", token="0123456789abcdef"))


def test_a_process_that_nobody_has_started_to_join_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(COORDINATOR, raising=False)
    monkeypatch.setenv(JOINING, "1")
    with pytest.raises(ConfigError, match=f"{JOINING} is set.*unset it"):
        set_up()
