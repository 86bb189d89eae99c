"""What somebody gets who installs the wheel and has no checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

from megatron_recycle import __version__, cli
from megatron_recycle.tools import examples

ROOT = Path(__file__).parent.parent
_LIMIT = 120


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is left in the checkout."""
    source = tmp_path_factory.mktemp("source")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for name in ("megatron_recycle", "scripts", "docs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "out", "."]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=_LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    return next((source / "out").glob("*.whl"))


def unpacked(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def recycle(site: Path, arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """The command of the package in ``site``, run in ``folder``."""
    environ = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run([sys.executable, "-m", "megatron_recycle.cli", *arguments], cwd=folder, env=environ,
                          capture_output=True, text=True, timeout=_LIMIT)


@pytest.mark.slow
def test_a_wheel_has_all_that_its_commands_need(wheel: Path, tmp_path: Path):
    site, empty = unpacked(wheel, tmp_path / "site"), tmp_path / "empty"
    empty.mkdir()
    about = message_from_string(next(site.glob("*.dist-info/METADATA")).read_text())
    assert (about["Version"], about["License-Expression"]) == (__version__, "Apache-2.0")
    assert {"deepspeed", "megatron", "pictures", "docs", "dev"} <= set(about.get_all("Provides-Extra", []))

    done = recycle(site, ["slurm", "script", "deepspeed"], empty)
    assert done.stdout == (ROOT / "scripts/slurm/deepspeed.sbatch").read_text(), done.stderr
    done = recycle(site, ["example", "megatron", "job"], empty)
    assert done.stdout.startswith("recycle run --nproc 4 job/pretrain_gpt_megatron.py"), done.stderr
    assert (empty / "job/megatron_cpu.py").read_text() == (ROOT / "scripts/megatron_cpu.py").read_text()
    done = recycle(site, ["runbook", "last-copy"], empty)
    assert done.stdout.startswith("## Last copy"), done.stderr
    done = recycle(site, ["quickstart", "--help"], empty)
    assert "--pipelines" in done.stdout, done.stderr


@pytest.mark.night
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_the_quickstart_of_an_installed_wheel_runs_in_an_empty_folder(wheel: Path, tmp_path: Path):
    """In an environment of its own, which has the dependencies of this one."""
    home, empty = tmp_path / "venv", tmp_path / "empty"
    empty.mkdir()
    venv.create(home)
    site = next(home.glob("lib/python3*/site-packages"))
    outer = sysconfig.get_path("purelib")
    (site / "outer.pth").write_text(outer + "\n")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*command, str(wheel)], check=True, timeout=_LIMIT)
    environ = {**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
               "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    start = [str(home / "bin/python"), "-m", "megatron_recycle.cli"]
    found = subprocess.run([*start[:1], "-c", "import megatron_recycle; print(megatron_recycle.__file__)"], cwd=empty,
                           env=environ, capture_output=True, text=True, check=True, timeout=_LIMIT)
    assert found.stdout.startswith(str(site))
    done = subprocess.run([*start, "quickstart", "--pipelines", "2", "--iterations", "9"], cwd=empty, env=environ,
                          capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (empty / "runs/quickstart/report.json").exists()


def test_an_example_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["example", "deepspeed", str(tmp_path / "job")]) == 0
    told = capsys.readouterr()
    assert told.out == f"recycle run --nproc 4 {tmp_path}/job/gpt_deepspeed.py --stages 2 --iterations 20\n"
    assert f"wrote {tmp_path}/job/gpt_deepspeed.py" in told.err
    assert cli.main(["example", "deepspeed", str(tmp_path / "job")]) == 2
    assert "is there already: give another folder" in capsys.readouterr().err


def test_an_installation_without_examples_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(examples, "_PACKAGE", tmp_path / "megatron_recycle")
    assert cli.main(["slurm", "script", "megatron"]) == 2
    assert "no examples" in capsys.readouterr().err


def test_all_examples_of_a_checkout_come_with_the_wheel():
    build = (ROOT / "setup.py").read_text()
    names = {f"scripts/{name}" for files, _ in examples.EXAMPLES.values() for name in files}
    assert [name for name in sorted(names) if f'"{name}"' not in build] == []


def test_messages_name_installs_that_are_there():
    """This package is on no index: its name would bring a stranger's. Ranges are those of pyproject.toml."""
    declared = (ROOT / "pyproject.toml").read_text()
    for path in sorted((ROOT / "megatron_recycle").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"pip install [^\n]{0,40}megatron[-_]recycle", text), path
        for name, wanted in re.findall(r"['\"](deepspeed|megatron-core)([<>=][^'\"]+)['\"]", text):
            assert f'"{name}{wanted}"' in declared, f"{path}: {name}{wanted}"
