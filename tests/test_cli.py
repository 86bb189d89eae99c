"""The `recycle` command: finds subcommands, turns errors into one line and a status."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megatron_recycle import __version__, cli
from megatron_recycle.errors import ConfigError, JobEnded
from megatron_recycle.plan import PlanError


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A subcommand `try` whose `run` a test can replace."""
    module = ModuleType("a_subcommand")
    module.add_arguments = lambda parser: parser.add_argument("--value", type=int, default=0)  # type: ignore
    module.run = lambda args: args.value  # type: ignore
    monkeypatch.setitem(sys.modules, "a_subcommand", module)
    monkeypatch.setitem(cli.COMMANDS, "try", ("a_subcommand", "only for this test"))
    return module


def test_the_doctors_help_fits_on_a_screen_and_takes_settings_all_the_same(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--help"])
    out = capsys.readouterr().out
    assert len(out.splitlines()) < 30 and "every setting of a job is a flag, too" in out and "example: " in out
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--recycle-reductoin", "exact"])
    assert "did you mean --recycle-reduction?" in capsys.readouterr().err


def test_a_subcommand_gets_its_arguments_and_its_result_is_the_exit_status(command: ModuleType):
    assert cli.main(["try"]) == 0
    assert cli.main(["try", "--value", "3"]) == 3


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("no such key"), 2),
        (PlanError("stage 1 has no worker"), 2),
        (JobEnded("stage 1 is lost", 7), 7),
    ],
)
def test_an_expected_error_is_one_line_and_a_status(
    command: ModuleType, capsys: pytest.CaptureFixture[str], error: Exception, status: int
):
    def run(args: argparse.Namespace) -> int:
        raise error

    command.run = run  # type: ignore
    assert cli.main(["try"]) == status
    assert capsys.readouterr().err == f"recycle try: {error}\n"


def test_ctrl_c_leaves_no_trace(command: ModuleType, capsys: pytest.CaptureFixture[str]):
    def run(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    command.run = run  # type: ignore
    assert cli.main(["try"]) == 130
    assert capsys.readouterr().err == ""


def test_a_reader_that_has_enough_gets_no_complaint():
    plan = "plan --pipelines 4 --stages 4 --microbatches 64 --budget 0 --json"
    command = f"{sys.executable} -m megatron_recycle.cli {plan} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 141 and done.stderr == ""


def test_an_unexpected_error_keeps_its_trace(command: ModuleType):
    command.run = lambda args: 1 // 0  # type: ignore
    with pytest.raises(ZeroDivisionError):
        cli.main(["try"])


def test_help_lists_every_subcommand_without_importing_any(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in cli.COMMANDS)
    assert cli.main([]) == 2


def test_version_and_unknown_subcommands(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"megatron-recycle {__version__}\n"
    assert cli.main(["trian"]) == 2 and "trian" in capsys.readouterr().err


def test_with_closed_standard_streams_nothing_of_ours_lands_there(tmp_path: Path):
    """As under some daemonizers, or `recycle run ... <&-`."""
    program = (
        "import os, socket, sys; from megatron_recycle import cli; status = cli.main([]); made = socket.socket(); "
        "places = [os.readlink(f'/proc/self/fd/{number}') for number in range(3)]; "
        "open(sys.argv[1], 'w').write(f'{status} {made.fileno() > 2} {places}')"
    )
    shell = 'exec "$0" -c "$1" "$2" <&- >&- 2>&-'
    done = subprocess.run(["sh", "-c", shell, sys.executable, program, str(tmp_path / "told")], timeout=110)
    assert done.returncode == 0
    assert (tmp_path / "told").read_text() == f"2 True {['/dev/null'] * 3}"


def test_a_missing_package_is_named_with_the_command_that_installs_it(command: ModuleType, capsys):
    def run(args: argparse.Namespace) -> int:
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib.figure")

    command.run = run  # type: ignore
    assert cli.main(["try"]) == 2
    assert capsys.readouterr().err.endswith("which is not installed: pip install matplotlib\n")


def test_a_missing_module_of_ours_is_a_bug(command: ModuleType):
    def run(args: argparse.Namespace) -> int:
        raise ModuleNotFoundError("No module named 'megatron_recycle.nothing'", name="megatron_recycle.nothing")

    command.run = run  # type: ignore
    with pytest.raises(ModuleNotFoundError):
        cli.main(["try"])
