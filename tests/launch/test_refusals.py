"""What `recycle run` refuses at once, before anything is started: one line that says why, and status 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_recycle import cli
from megatron_recycle.control.ports import listen
from megatron_recycle.launch import coordinator_process as service

SCRIPT = str(Path(__file__).with_name("fake_worker.py"))
TAKEN = "a port in use"
TOKEN = "0123456789abcdef"
TASK = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("arguments", "environ", "why"),
    [
        (["nowhere/train.py"], {}, "there is no script nowhere/train.py"),
        (["--join", "127.0.0.1:1", "nowhere/train.py"], {"RECYCLE_TOKEN": TOKEN}, "there is no script"),
        (["-m", "nowhere.train"], {}, "there is no module nowhere.train"),
        (["-m", SCRIPT], {}, "fake_worker.py is a file: leave -m out"),
        (["--module", ".train"], {}, "-m takes a module's whole name, as package.module, and not .train"),
        (["--run-dir", "/proc/foo", SCRIPT], {}, "/proc/foo cannot be made"),
        (["--run-dir", SCRIPT, SCRIPT], {}, "fake_worker.py cannot be made (File exists)"),
        (["--join-timeout", "-1", SCRIPT], {}, "--join-timeout is -1; give a number of seconds, 0 or more"),
        (["--join-timeout", "5", SCRIPT], {}, "--join-timeout is how long --join waits for a place: give --join"),
        (["--join", "nonsense", SCRIPT], {"RECYCLE_TOKEN": TOKEN}, "--join nonsense: there is no such folder"),
        (["--join", "host:99999", SCRIPT], {"RECYCLE_TOKEN": TOKEN}, "--join is 'host:99999'"),
        ([SCRIPT], {"RECYCLE_INTERFACE": "1.2.3.4"}, "cannot listen on 1.2.3.4"),
        (["--master-addr", "1.2.3.4", SCRIPT], {}, "cannot listen on 1.2.3.4"),
        (["--master-port", "99999", SCRIPT], {}, "--master-port is 99999"),
        (["--master-port", "-5", SCRIPT], {}, "--master-port is -5"),
        (["--job-restarts", "-1", SCRIPT], {}, "--job-restarts is -1; give how often the script may be started again"),
        (["--job-restarts", "1", "--join", "127.0.0.1:1", SCRIPT], {"RECYCLE_TOKEN": TOKEN},
         "--job-restarts is the job's"),
        (["--nnodes", "0", SCRIPT], {}, "--nnodes is 0; give 1 or more"),
        ([SCRIPT], {"RECYCLE_INTERFACE": ""}, "every address"),
        (["--master-addr", "no.such.host.invalid", SCRIPT], {}, "cannot listen on no.such.host.invalid"),
        (["--master-port", TAKEN, SCRIPT], {}, "in use"),
        ([SCRIPT], {"RECYCLE_TOKEN": "secret"}, "RECYCLE_TOKEN has 6 characters; a token has 16 or more"),
        (["--token-file", "/nowhere", SCRIPT], {"RECYCLE_TOKEN": TOKEN}, "/nowhere cannot be read (No such file"),
        (["--token-file", "/dev/null", SCRIPT], {}, "--token-file /dev/null has 0 characters"),
        (["--nnodes", "2", "--master-addr", "h", "--master-port", "9", SCRIPT], {}, "openssl rand -hex 16"),
        (["--join", "127.0.0.1:1", SCRIPT], {}, "--join needs the job's token"),
        (["--join", "/", SCRIPT], {}, "--join /: no job of `recycle run` runs in that folder"),
        (["--master-addr", "fe80::1", SCRIPT], {}, "fe80::1 is an address of one link"),
        ([SCRIPT], {"SLURM_JOB_ID": "7", "SLURM_NNODES": "3"}, "Slurm has given this job 3 nodes"),
        (["--nproc", "2", SCRIPT], {**TASK, "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "8"},
         "--ntasks-per-node=1"),
        ([SCRIPT], {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "8"}, "in the place of torchrun"),
        (["--requeue", SCRIPT], {}, "--requeue asks Slurm to start the job again, and this is no job of Slurm"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    arguments: list[str],
    environ: dict[str, str],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def start(*_: object) -> service.Service:
        raise AssertionError("a coordinator was started")

    monkeypatch.setattr(service, "start", start)
    monkeypatch.delenv("RECYCLE_TOKEN", raising=False)
    for name, value in {"RECYCLE_RUN_DIR": str(tmp_path / "run"), **environ}.items():
        monkeypatch.setenv(name, value)
    with listen("127.0.0.1", 0) as listener:
        port = str(listener.getsockname()[1])
        status = cli.main(["run", "--nproc", "1", *(port if text == TAKEN else text for text in arguments)])
    told = capsys.readouterr().err
    assert status == 2 and why in told and len(told.splitlines()) == 1
