"""What newcomers typed, and the one line that each wrong call is answered with; status 2 unless the table says so."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megatron_recycle import cli

SCRIPT = "SCRIPT"
"""Stands for a file that is there."""
TOKEN = {"RECYCLE_TOKEN": "0123456789abcdef"}
SETTINGS = "SETTINGS"
"""Stands for a file of settings."""

CALLS: list[tuple[str, dict[str, str], str]] = [
    # the command itself
    ("stauts", {}, "there is no subcommand stauts"),
    ("quikstart", {}, "there is no subcommand quikstart; did you mean quickstart?"),
    ("help simulat", {}, "there is no subcommand simulat; did you mean simulate?"),
    ("--versoin", {}, "there is no option --versoin; did you mean --version?"),
    # recycle run: the script
    ("run", {}, "the following arguments are required: script;"),
    ("run nosuch.py", {}, "there is no script nosuch.py"),
    ("run -m nosuch.train", {}, "there is no module nosuch.train"),
    (f"run -m {SCRIPT}", {}, "is a file: leave -m out"),
    ("run --no-python nosuch", {}, "there is no program nosuch"),
    (f"run -m --no-python {SCRIPT}", {}, "--no-python/--no_python: not allowed with argument -m/--module"),
    # recycle run: numbers
    (f"run --nproc 0 {SCRIPT}", {}, "--nproc is 0; give 1 or more"),
    (f"run --nproc two {SCRIPT}", {}, "--nproc: it is 'two'; give a number, or gpu"),
    (f"run --nproc-per-node 0 {SCRIPT}", {}, "--nproc is 0; give 1 or more"),
    (f"run --nproc_per_node=0 {SCRIPT}", {}, "--nproc is 0; give 1 or more"),
    (f"run --num_gpus 0 {SCRIPT}", {}, "--nproc is 0; give 1 or more"),
    (f"run --nnodes 0 {SCRIPT}", {}, "--nnodes is 0; give 1 or more"),
    (f"run --nnodes 1:4 {SCRIPT}", {}, "give one number, and later hosts come by --join"),
    (f"run --nnodes 2 --node_rank 5 {SCRIPT}", TOKEN, "--node-rank is 5; with --nnodes 2 give 0 to 1"),
    (f"run --job-restarts -1 {SCRIPT}", {}, "--job-restarts is -1"),
    (f"run --max-restarts -1 {SCRIPT}", {}, "--job-restarts is -1"),
    (f"run --worker-restarts -1 {SCRIPT}", {}, "--worker-restarts is -1; give 0 or more"),
    (f"run --master_port 99999 {SCRIPT}", {}, "--master-port is 99999"),
    # recycle run: names that it does not have
    (f"run --nprocs 2 {SCRIPT}", {}, "there is no option --nprocs; did you mean --nproc?"),
    (f"run --reqeue {SCRIPT}", {}, "there is no option --reqeue; did you mean --requeue?"),
    (f"run --log-dir logs {SCRIPT}", {}, "logs go to the run folder: --run-dir"),
    (f"run --tee 3 {SCRIPT}", {}, "--show all shows it"),
    (f"run --hostfile hosts {SCRIPT}", {}, "start `recycle run` once on each host"),
    (f"run --show some {SCRIPT}", {}, "--show is 'some'; give first, all, none"),
    # recycle run: several hosts
    (f"run --rdzv-backend etcd-v2 {SCRIPT}", {}, "give --store etcd://HOST:PORT"),
    (f"run --rdzv-endpoint here {SCRIPT}", {}, "--rdzv-endpoint is 'here'; give HOST:PORT"),
    (f"run --rdzv-endpoint a:1 --master-addr b {SCRIPT}", {}, "give one of them"),
    (f"run --nnodes 2 {SCRIPT}", {}, "they need a token, too"),
    (f"run --nnodes 2 --rdzv-endpoint h:9 {SCRIPT}", {}, "openssl rand -hex 16"),
    (f"run --join nosuchdir {SCRIPT}", {}, "--join nosuchdir: there is no such folder"),
    (f"run --master-addr 1.2.3.4 {SCRIPT}", {}, "cannot listen on 1.2.3.4"),
    (f"run {SCRIPT}", {"RECYCLE_TOKEN": "abc"}, "RECYCLE_TOKEN has 3 characters; a token has 16 or more"),
    (f"run --requeue {SCRIPT}", {}, "this is no job of Slurm"),
    (f"run --chaos nofile {SCRIPT}", {}, "nofile"),
    (f"run --coordinator nohost {SCRIPT}", TOKEN, "--coordinator is 'nohost'"),
    (f"run --store foo:// {SCRIPT}", TOKEN, "foo://"),
    # settings
    (f"run --set reductoin=exact {SCRIPT}", {}, "there is no setting reductoin; the nearest is reduction"),
    (f"run --set reduction=exakt {SCRIPT}", {}, "did you mean 'exact'?"),
    (f"run --set reduction {SCRIPT}", {}, "give KEY=VALUE"),
    (f"run --config nosuch.json {SCRIPT}", {}, "--config nosuch.json cannot be read"),
    (f"run --config {SCRIPT} {SCRIPT}", {}, "is no JSON"),
    (f"run --config {SETTINGS} {SCRIPT}", {}, "there is no setting reductoin; the nearest is reduction"),
    (f"run {SCRIPT}", {"RECYCLE_REDUCTOIN": "exact"}, "the nearest known one is RECYCLE_REDUCTION"),
    (f"run {SCRIPT}", {"RECYCLE_HEARTBEAT_TIMEOUT": "0.5"}, "give heartbeat_timeout at least 1"),
    # other subcommands
    ("plan --stagse 3", {}, "--stagse"),
    ("plan --pipelines 2 --stages 0 --microbatches 4", {}, "stages"),
    ("plan --pipelines 2 --stages 2 --microbatches 4 --failed 9:9", {}, "9:9"),
    ("plan --pipelines 2 --stages 2 --microbatches 4 --failed 1.1", {}, "1.1"),
    ("plan --pipelines 2 --stages 2 --microbatches 4 --costs 1,2", {}, "1,2"),
    ("timeline nosuch.json", {}, "nosuch.json"),
    ("profile .", {}, "is no run's"),
    ("simulate", {}, "the following arguments are required: --grid"),
    ("simulate --grid 3x4 --gpu-mtbf 1", {}, "--grid '3x4' is not"),
    ("simulate --grid 3x4x6 --model nosuch --gpu-mtbf 100", {}, "nosuch"),
    ("simulate --grid 2x1x2 --quick --write-trace nosuch/x", {}, "nosuch/x cannot be written"),
    ("simulate --grid 2x1x2 --save-every 0", {}, "--save-every: it is '0'; give seconds, more than 0"),
    ("simulate --grid 2x1x2 --wait -1", {}, "--wait: it is '-1'; give seconds, 0 or more"),
    ("report --restart -1", {}, "--restart: it is '-1'; give seconds, 0 or more"),
    ("logs -n -1", {}, "-n/--lines: it is '-1'; give a whole number, 0 or more"),
    ("logs --since '5 years'", {}, "--since: it is '5 years'; give a span of time: 30s, 10m, 2h"),
    ("stacks --timeout 0", {}, "--timeout: it is '0'; give seconds, more than 0"),
    ("chaos random --rate nan", {}, "--rate: it is 'nan'; give more than 0 acts in a minute"),
    ("chaos random --count 0", {}, "--count: it is '0'; give 1 or more"),
    ("example deepspede", {}, "did you mean deepspeed?"),
    ("slurm scrpt deepspeed", {}, "did you mean script?"),
    ("slurm heal", {}, "give the number of the job"),
    ("slurm script", {}, "the following arguments are required: name"),
    ("quickstart --pipelines 1", {}, "--pipelines is 1"),
]


@pytest.mark.parametrize(("line", "environ", "said"), CALLS, ids=[line for line, _, _ in CALLS])
def test_a_wrong_call_is_answered_in_one_line(line: str, environ: dict[str, str], said: str, tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    for name, text in (("train.py", "print('never')\n"), ("settings.json", '{"recycle": {"reductoin": "exact"}}')):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    words = [{SCRIPT: "train.py", SETTINGS: "settings.json"}.get(word, word) for word in shlex.split(line)]
    try:
        status = cli.main(words)
    except SystemExit as end:
        status = end.code
    told = capsys.readouterr()
    assert status == 2, told
    assert said in told.err and told.err.count("\n") == 1 and told.err.startswith("recycle"), told.err
    assert not told.out


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_help_has_an_example_that_names_its_command(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        cli.main(["help", name])
    text = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0 and f"example: recycle {name} " in text


def test_help_lists_exit_statuses(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert all(status in text for status in cli.STATUSES)
