"""Hosts write down which GPU each rank has, and the status shows it."""

from __future__ import annotations

import io
from pathlib import Path

from megatron_recycle.launch import devices
from megatron_recycle.launch.worker_command import say_to
from megatron_recycle.tools.operate.job_history import JobHistory
from megatron_recycle.tools.operate.outlook import Facts
from megatron_recycle.tools.operate.status import workers
from tests.operate.test_status import began


def test_the_status_has_the_gpu_of_each_rank_of_all_hosts(tmp_path: Path) -> None:
    devices.write(tmp_path, "0", {0: "GPU-a (PCI 0000:0b:00)"})
    devices.write(tmp_path, "1", {1: "GPU-b (PCI 0000:0b:00)"})
    (tmp_path / "devices" / "2.json").write_text("{")  # of a full disk
    rows = workers(Facts(JobHistory(began()), 1001.0, "run", gpus=devices.read(tmp_path)))
    assert [row["gpu"] for row in rows[:3]] == ["GPU-a (PCI 0000:0b:00)", "GPU-b (PCI 0000:0b:00)", None]


def test_a_host_without_gpus_writes_nothing(tmp_path: Path) -> None:
    devices.write(tmp_path, "0", {})
    assert not [*tmp_path.iterdir()] and devices.read(tmp_path) == {}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_lines_about_iterations_take_each_others_place() -> None:
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        say = say_to(stream)
        for line in ("12:00 recycle: started", "12:01 recycle: committed iteration=1",
                     "12:02 recycle: committed iteration=2", "12:03 recycle: finished"):
            say(line)
    assert terminal.getvalue() == ("12:00 recycle: started\n12:01 recycle: committed iteration=1"
                                   "\r\x1b[K12:02 recycle: committed iteration=2\r\x1b[K12:03 recycle: finished\n")
    assert file.getvalue().count("\n") == 4 and "\r" not in file.getvalue()
