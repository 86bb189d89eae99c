"""What Slurm is asked, with answers as slurmctld 22.05 gives them: does it keep survivors, is the job to be started
again, and which hosts are missing."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from megatron_recycle.errors import ConfigError
from megatron_recycle.launch import slurm
from megatron_recycle.launch.flags import add_arguments
from megatron_recycle.launch.meeting import Meeting
from megatron_recycle.launch.other_launchers import refuse, variables_of_srun
from megatron_recycle.launch.worker_command import python_command, script_command
from megatron_recycle.tools import heal
from megatron_recycle.tools.operate.job_history import JobHistory

DEFAULTS = "KillOnBadExit           = 0\nWaitTime                = 0 sec\n"
STRICT = "KillOnBadExit           = 1\nWaitTime                = 30 sec\n"
ALL = ["--no-kill", "--kill-on-bad-exit=0", "--wait=0"]
ENVIRON = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURMD_NODENAME": "n1"}


@pytest.mark.parametrize(("words", "environ", "config", "missing"), [
    (ALL, {}, STRICT, []),
    (["-k", "-K0", "-W0"], {}, STRICT, []),
    (["-k", "-W", "0"], {}, STRICT, ["--kill-on-bad-exit=0"]),
    (["--no-kill"], {}, DEFAULTS, []),
    ([], {}, DEFAULTS, ["--no-kill"]),
    ([], {}, STRICT, ALL),
    ([], {"SLURM_NO_KILL": "", "SLURM_KILL_BAD_EXIT": "0", "SLURM_WAIT": "0"}, STRICT, []),
    (["--no-kill=off"], {"SLURM_NO_KILL": ""}, DEFAULTS, ["--no-kill"]),
    (["--no-kill", "--kill-on-bad-exit"], {}, DEFAULTS, ["--kill-on-bad-exit=0"]),
    (["--no-kill", "--wait", "60"], {}, DEFAULTS, ["--wait=0"]),
    (["--no-kill", "-K"], {}, DEFAULTS, ["--kill-on-bad-exit=0"]),
    ([], {}, "", ["--no-kill"]),
])
def test_what_would_end_the_step_is_named(
    words: list[str], environ: dict[str, str], config: str, missing: list[str]
) -> None:
    line = ["srun", "-N", "2", *words, "/opt/venv/bin/recycle", "run", "--no-kill", "train.py", "-k"]
    assert slurm.missing_flags(line, environ, config) == missing


def slurms(answers: Mapping[str, str]) -> slurm.Ask:
    """Slurm's commands: the answer to the first of these that stands in the command line."""

    def asked(command: Sequence[str]) -> str:
        line = " ".join(command)
        return next((answer for part, answer in answers.items() if part in line), "")

    return asked


def test_a_step_and_a_batch_script_without_the_options_are_told_so_in_a_line_each(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "_command_line", {"11": ["srun", "recycle"], "12": []}.__getitem__)
    here, gone, login = ({"show step": f"StepId=7.0 SrunHost:Pid={at}"} for at in ("n1:11", "n1:12", "login:11"))
    script = "#!/bin/bash\n#SBATCH --nodes=2\n# --no-kill\nsrun recycle run"
    for answers, told in [
        ({}, []),
        (here, ["srun was started without --no-kill"]),
        (gone, ["cannot be seen from here"]),
        (login, ["srun runs on login, where"]),
        ({**here, "batch_script": script}, ["srun was started without --no-kill", "no `#SBATCH --no-kill`"]),
        ({"batch_script": script.replace("# --no", "#SBATCH -J x --no")}, []),
        ({"batch_script": script.replace("# --no-kill", "#SBATCH -k")}, []),
    ]:
        lines = slurm.unkept(ENVIRON, slurms({**answers, "show config": DEFAULTS}))
        assert [part in line for part, line in zip(told, lines, strict=True)] == [True] * len(told)


def test_only_a_batch_job_can_be_started_again() -> None:
    batch = {"show job": "JobId=7 JobState=RUNNING BatchFlag=1"}
    slurm.check_requeue(ENVIRON, slurms(batch))
    for environ, answers, why in [({}, batch, "no job of Slurm's"), (ENVIRON, {}, "`scontrol`"),
                                  (ENVIRON, {"show job": "BatchFlag=0"}, "start it by sbatch")]:
        with pytest.raises(ConfigError, match=why):
            slurm.check_requeue(environ, slurms(answers))


@pytest.mark.parametrize(("told", "again"), [
    ("JobState=RUNNING Reason=None", "is requeued"),
    ("JobState=COMPLETING Reason=TimeLimit", "is requeued"),
    ("JobState=COMPLETING Reason=None", "is not requeued (--requeue): Slurm ends it as COMPLETING"),  # scancel
    ("JobState=CANCELLED Reason=None", "is not requeued"),
    ("", "Slurm does not say"),
])
def test_a_job_that_was_cancelled_is_not_started_again(
    told: str, again: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Sequence[str]] = []

    def run(command: Sequence[str], **rest: object) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert again in slurm.requeue(ENVIRON, slurms({"show job": told}))
    assert ran == ([["scontrol", "requeue", "7"]] if again == "is requeued" else [])


def test_a_job_that_slurm_does_not_start_again_is_not_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it does not say why."""
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", ""))
    told = slurm.requeue(ENVIRON, slurms({"show job": "JobState=RUNNING Reason=None"}))
    assert told == "recycle: job 7 cannot be requeued: status 1"


TASKS = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "8",
         "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_PROCID": "6", "SLURM_NODEID": "1", "SLURM_LOCALID": "2"}


def test_a_launcher_for_each_worker_is_taken_as_srun_has_started_it() -> None:
    step = slurm.Hosts(8, 6, "slurm-7.0.0", "runs/slurm-7", slurm.Task(nodes=2, node=1, local=2, count=4))
    assert slurm.step_of(TASKS) == slurm.step_of(TASKS, nproc=1) == step
    assert slurm.step_of({**TASKS, "SLURM_PROCID": "5"}) == step  # --distribution=cyclic
    one = {**TASKS, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0"}
    found = slurm.step_of(one)
    assert found is not None and found.count == 8 and found.task == slurm.Task(1, 0, 2, 8)


def test_local_rank_is_the_tasks_unless_it_sees_one_device_only() -> None:
    task = slurm.Task(2, 1, 2, 4)
    for visible, local in [("0,1,2,3", 2), ("2", 0), ("", 2), ("GPU-a", 0)]:
        assert slurm.local_rank({"CUDA_VISIBLE_DEVICES": visible}, task) == local
    assert slurm.local_rank({}, task) == 2


def test_a_script_that_srun_has_started_once_per_worker_has_torchs_variables() -> None:
    given = {**TASKS, "MASTER_ADDR": "n1"}
    assert variables_of_srun(given) == {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2"}
    assert variables_of_srun({**given, "LOCAL_RANK": "0"}) == {"RANK": "6", "WORLD_SIZE": "8"}
    for environ in (TASKS, {**given, "RANK": "3"}, {**given, "SLURM_STEP_NUM_TASKS": "1"}, {"MASTER_ADDR": "n1"}):
        assert variables_of_srun(environ) == {}


@pytest.mark.parametrize("environ", [
    {}, {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "1"}, {"RANK": "3", "WORLD_SIZE": "8"},
    {"TORCHELASTIC_RUN_ID": "recycle", "WORLD_SIZE": "8", "RECYCLE_COORDINATOR": "h:1"},  # a worker starts a job
    {"SLURM_JOB_ID": "7", "PMI_RANK": "0", "PMI_SIZE": "8"},
])
def test_other_launchers_are_refused_only_where_each_process_would_be_a_job(environ: Mapping[str, str]) -> None:
    refuse(environ)
    with pytest.raises(ConfigError, match="mpirun has started this 4 times"):
        refuse({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"})


@pytest.mark.parametrize(("environ", "nproc", "why"), [
    (TASKS, 4, "--nproc asks for 4 workers of each task: .*--ntasks-per-node=1 .*--nproc 4"),
    ({**TASKS, "SLURM_STEP_TASKS_PER_NODE": "5,3"}, None, "not as many on each .5,3.: .*--ntasks-per-node=1"),
    ({**TASKS, "SLURM_STEP_TASKS_PER_NODE": ""}, None, "not as many on each"),
])
def test_tasks_that_are_neither_launchers_nor_workers_are_refused(
    environ: Mapping[str, str], nproc: int | None, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        slurm.step_of(environ, nproc)


STARTED = {"event": "started", "ranks": {"0:0": 0, "0:1": 1, "1:0": 2, "1:1": 3, "2:0": 4, "2:1": 5},
           "members": dict.fromkeys(["0:0", "0:1", "1:0", "1:1", "2:0", "2:1"], "i"),
           "hosts": {"0:0": "n1/0", "0:1": "n1/0", "1:0": "n2/1", "1:1": "n2/1", "2:0": "n3/2", "2:1": "n3/2"}}


def decided(*members: str) -> dict[str, object]:
    return {"t": 1.0, "event": "decided", "members": dict.fromkeys(members, "i")}


def test_hosts_that_are_missing_as_a_whole_are_healed() -> None:
    some, few = decided("0:0", "0:1", "1:1"), decided("0:0", "0:1")
    assert heal.lost(JobHistory([STARTED])) == ({}, {})
    assert heal.lost(JobHistory([STARTED, some])) == ({"n3": [4, 5]}, {"n2": [2]})
    assert heal.lost(JobHistory([STARTED, few, decided(*STARTED["ranks"])])) == ({}, {})
    assert heal.lost(JobHistory([STARTED, few, {"event": "started_again"}])) == ({}, {})


JOB = "JobId=7 JobState=RUNNING NodeList=n[1-2] Partition=main OverSubscribe=NO WorkDir=/job BatchFlag=1"


@pytest.mark.parametrize(("state", "up"), [
    ("ALLOCATED", True), ("MIXED+CLOUD", True), ("IDLE", True), ("DOWN*", False), ("ALLOCATED*", False),
    ("DOWN+NOT_RESPONDING", False), ("ALLOCATED+DRAIN", False), ("", False),
])
def test_a_lost_node_that_is_up_gets_a_step_and_one_that_is_not_another_node(state: str, up: bool) -> None:
    there = heal.allocation("7", slurms({"show job": JOB, "hostnames": "n1\nn2\n", "node -o n1": "State=ALLOCATED",
                                         "node -o n2": f"NodeName=n2 State={state} X=1", "squeue": "1-02:03:04\n"}))
    assert there == heal.Allocation("7", "/job", "main", ["n1", "n2"], ["n1", "n2"] if up else ["n1"], "1-02:03:04",
                                    True)
    found = Meeting("x", command=("train.py", "--text", "a b"), folder="/job")
    command = heal.healing("n2", 4, there, Path("/job/runs/slurm-7"), found, ["--gres=gpu:4"])
    assert "--gres=gpu:4" in command and "--chdir=/job" in command
    if up:
        assert command[0] == "srun" and {"--jobid=7", "--overlap", "--nodelist=n2"} < set(command)
        assert command[-7:] == ["--join", "/job/runs/slurm-7", "--nproc", "4", "train.py", "--text", "a b"]
    else:
        assert command[0] == "sbatch" and {"--exclude=n1,n2", "--time=1-02:03:04", "--exclusive"} < set(command)
        assert command[-1].endswith("run --join /job/runs/slurm-7 --nproc 4 train.py --text 'a b'")


@pytest.mark.parametrize("line", ["-m jobs.train --lr 1", "train.py -m jobs.train"])
def test_a_host_joins_with_the_same_script_or_module(line: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(line.split())
    script = script_command(args.script, args.arguments, args.module)
    assert python_command(script)[1:3] == ["-m", "megatron_recycle"]
    there = heal.Allocation("7", "/job", "main", ["n1"], ["n1"], "", False)
    assert " ".join(heal.healing("n1", 4, there, Path("/run"), Meeting("x", command=script), [])).endswith(
        f" --nproc 4 {line}")


def test_a_job_that_does_not_run_cannot_be_healed() -> None:
    for told in ("", "JobState=COMPLETED"):
        with pytest.raises(ConfigError, match="job 7 does not run"):
            heal.allocation("7", slurms({"show job": told}))


@pytest.mark.parametrize("given", ["heal 7 --dry-run -- --gres=gpu:8", "heal -- --gres=gpu:8", "heal --run-dir r 7",
                                   "heal --dry-run --run-dir r -- --gres=gpu:8 --mem=1G"])
def test_options_of_slurms_stand_after_dashes_wherever_ours_are(given: str) -> None:
    parser = argparse.ArgumentParser()
    heal.add_arguments(parser)
    found = parser.parse_args(given.split())
    assert found.options == given.partition(" -- ")[2].split()
    assert found.job == ("7" if " 7" in given else None) and found.dry_run == ("--dry-run" in given)
