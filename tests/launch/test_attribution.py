"""A host shows why its workers have failed: out of memory, a broken GPU, a link that is down, a full disk."""

from __future__ import annotations

import os
import queue
from pathlib import Path
from typing import Any

import pytest

from megatron_recycle.launch.attribution import Attribution, Explanation, Host

UUIDS = ("GPU-aaaa", "GPU-bbbb")


class Machine:
    """A file system as Linux shows itself, and a kernel's log as a pipe."""

    def __init__(self, root: Path, **environ: str) -> None:
        self.root = root
        self.put("proc/self/cgroup", "0::/slurm/job_7/step_0")
        for group in ("slurm/job_7/step_0", "slurm/job_7"):
            self.kills(group, 0)
        for number, uuid in enumerate(UUIDS):
            self.put(f"proc/driver/nvidia/gpus/0000:{number}b:00.0/information",
                     f"Model: \t\t H100\nGPU UUID: \t {uuid}\nBus Location: \t 0000:{number}b:00.0\n")
        self.link("up", 0)
        self.put("sys/class/net/lo/operstate", "unknown")
        (root / "dev").mkdir()
        os.mkfifo(root / "dev" / "kmsg")
        self.host = Host(environ, (root / "nowhere",), root)
        self._log = os.open(root / "dev" / "kmsg", os.O_WRONLY | os.O_NONBLOCK)

    def put(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def kills(self, group: str, count: int) -> None:
        self.put(f"sys/fs/cgroup/{group}/memory.events", f"low 0\noom 9\noom_kill {count}\noom_group_kill 0\n")

    def link(self, state: str, downs: int) -> None:
        self.put("sys/class/net/eth0/device/vendor", "0x15b3")
        self.put("sys/class/net/eth0/operstate", state)
        self.put("sys/class/net/eth0/carrier_down_count", str(downs))

    def say(self, line: str) -> None:
        os.write(self._log, f"4,1234,99,-;{line}\n".encode())

    def explain(self, local_rank: int = 0, killed: bool = True) -> Explanation:
        return self.host.explain(self.host.look(), local_rank, 4711, killed)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path, SLURM_JOB_ID="7", SLURMD_NODENAME="n3")


def test_a_host_on_which_nothing_has_happened_explains_nothing(machine):
    machine.kills("slurm/job_7", 0)
    assert machine.explain() == Explanation((), "GPU-aaaa (PCI 0000:0b:00)")


def test_a_process_that_the_out_of_memory_killer_took_is_told_with_its_cgroup_and_the_node_is_not_broken(machine):
    machine.kills("slurm/job_7", 1)
    found = machine.explain()
    assert found.causes == ("the kernel's out-of-memory killer has killed 1 process in the cgroup /slurm/job_7 "
                            "(memory.events)",)
    assert found.repair == ""
    assert machine.explain().causes == (), "it is told of one failure"


def test_one_that_has_ended_by_itself_was_not_out_of_memory(machine):
    machine.kills("slurm/job_7", 1)
    assert machine.explain(killed=False).causes == ()


def test_the_kernels_log_names_the_process(machine):
    machine.say("Memory cgroup out of memory: Killed process 4711 (python) total-vm:1kB")
    assert machine.explain().causes == ("the kernel's out-of-memory killer has killed pid 4711 (kernel log)",)


def test_a_gpu_that_has_fallen_off_the_bus_is_named_and_its_node_is_to_be_drained(machine):
    machine.say("NVRM: Xid (PCI:0000:1b:00): 79, pid=4711, name=python, GPU has fallen off the bus.")
    found = machine.explain(local_rank=1, killed=False)
    assert found.causes == ("GPU GPU-bbbb: Xid 79, it has fallen off the bus",)
    assert found.gpu == "GPU-bbbb (PCI 0000:1b:00)"
    assert found.repair == ("scontrol update nodename=n3 state=drain "
                            "reason='GPU GPU-bbbb: Xid 79, it has fallen off the bus'")


def test_the_error_of_another_gpu_or_of_the_program_is_no_cause(machine):
    machine.say("NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.")
    machine.say("NVRM: Xid (PCI:0000:0b:00): 31, pid=4711, MMU Fault")
    assert machine.explain(local_rank=0).causes == ()


@pytest.mark.parametrize(("visible", "local_rank", "gpu"), [
    ("1,0", 0, "GPU-bbbb"), ("GPU-bbbb", 0, "GPU-bbbb"), ("0", 1, ""), ("", 0, "")])
def test_the_gpu_is_the_one_that_the_process_sees(tmp_path, visible, local_rank, gpu):
    found = Machine(tmp_path, CUDA_VISIBLE_DEVICES=visible).host.gpu(local_rank)
    assert (found.uuid if found else "") == gpu


def test_a_link_that_is_down_and_one_that_came_back(machine):
    machine.link("down", 1)
    assert machine.explain().causes == ("the link of eth0 is down",)
    machine.link("up", 3)
    found = machine.explain()
    assert found.causes == ("the link of eth0 went down 2 times and is up again",)
    assert "nodename=n3" in found.repair


def test_outside_of_slurm_there_is_no_command_for_it(tmp_path):
    machine = Machine(tmp_path)
    machine.link("down", 1)
    assert machine.explain().repair == ""


def test_a_full_disk(machine, monkeypatch):
    full = os.statvfs_result((4096, 4096, 1 << 30, 10, 10, 1000, 10, 10, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda folder: full)
    assert f"the disk of {machine.root / 'nowhere'} is full (0 MiB left)" in machine.explain(killed=False).causes


def test_failures_at_the_same_time_have_the_same_look(machine):
    told: queue.Queue[Any] = queue.Queue()
    attribution = Attribution(machine.host, lambda *found: told.put(found), settle=0.2)
    machine.kills("slurm/job_7", 2)
    for rank in (4, 5):
        attribution.failed(rank, 0, 4000 + rank, True)
    found = [told.get(timeout=10) for _ in range(2)]
    assert [rank for rank, _, _ in found] == [4, 5]
    assert all("killed 2 processes" in one.causes[0] for _, _, one in found)


def test_a_failure_that_cannot_be_explained_does_not_keep_the_next_one_from_it(machine, monkeypatch, caplog):
    told: queue.Queue[Any] = queue.Queue()
    attribution = Attribution(machine.host, lambda *found: told.put(found), settle=0.0)
    looks, look = iter([None]), machine.host.look

    def first_fails() -> Any:
        told.put("looks")
        if next(looks, 1) is None:
            raise ZeroDivisionError
        return look()

    monkeypatch.setattr(machine.host, "look", first_fails)
    attribution.failed(3, 0, 4003, True)
    assert told.get(timeout=10) == "looks"
    machine.kills("slurm/job_7", 1)
    attribution.failed(4, 0, 4004, True)
    assert [told.get(timeout=10) for _ in range(2)][1][0] == 4
    assert "the failure of rank 3 cannot be explained" in caplog.text and "ZeroDivisionError" in caplog.text
