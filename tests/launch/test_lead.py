"""Between two lives of a job its ports may be anybody's for a moment."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from megatron_recycle import RecycleConfig
from megatron_recycle.control.ports import listen
from megatron_recycle.errors import ConfigError
from megatron_recycle.launch import command, meeting
from megatron_recycle.launch.life import Life
from megatron_recycle.launch.slurm import Hosts


def test_a_job_that_starts_again_waits_for_its_ports_and_one_that_begins_does_not(monkeypatch):
    monkeypatch.setattr(command, "_PAUSE", 0.0)
    tries: list[bool] = []

    def lead(last: bool) -> str:
        tries.append(last)
        if len(tries) < 3:
            raise ConfigError("nobody can listen there")
        return "led"

    with pytest.raises(ConfigError):
        command._lead_in_time(lead, 0.0)
    assert tries == [True] and command._lead_in_time(lead, 60.0) == "led" and tries[1:] == [False, False]


def test_other_hosts_do_not_leave_while_the_first_one_waits_for_its_port(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        args = argparse.Namespace(master_addr="127.0.0.1", master_port=taken.getsockname()[1])
        run = command.Run(args, [], RecycleConfig(), Hosts(2, 0, "slurm-7.0.0"), tmp_path, "t" * 16, 1, print, "")
        life = Life(2, range(1), nodes=2, number=1, most=1)
        for last in (False, True):
            with pytest.raises(ConfigError, match="cannot listen"):
                run._lead(life, last)
            found = meeting.read(tmp_path)
            assert found is None or last
    assert found is not None and found.name == "slurm-7.0.0.life1" and "cannot listen" in found.refusal
