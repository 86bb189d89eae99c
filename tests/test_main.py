"""`python -m megatron_recycle SCRIPT`: the script must not notice, and its end must be what it was."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megatron_recycle import __main__ as entry
from megatron_recycle.errors import ConfigError, JobEnded


@pytest.fixture
def enabled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands in for `enable`; what a script does to `sys` is put back."""
    calls: list[str] = []
    monkeypatch.setattr(entry, "enable", lambda: calls.append("on"))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", ["somewhere", *sys.path])
    for name in ("last_type", "last_value"):
        monkeypatch.delattr(sys, name, raising=False)
    return calls


def script(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(text)
    return str(path)


def test_the_script_sees_what_it_would_see_under_python(tmp_path: Path, enabled: list[str]):
    (tmp_path / "beside.py").write_text("NAME = 'found'\n")
    path = script(
        tmp_path,
        "import beside, json, sys\n"
        "from pathlib import Path\n"
        "seen = [sys.argv, sys.path[0], __name__, __file__, beside.NAME]\n"
        "Path(__file__).with_suffix('.json').write_text(json.dumps(seen))\n",
    )
    assert entry.main([path, "--lr", "1"]) == 0
    seen = json.loads((tmp_path / "train.json").read_text())
    assert seen == [[path, "--lr", "1"], str(tmp_path.resolve()), "__main__", path, "found"]
    assert enabled == ["on"]


@pytest.mark.parametrize(("code", "failed"), [("0", False), ("", False), ("3", True), ("'no data'", True)])
def test_a_script_that_exits_with_an_error_does_not_stand_by_for_the_others(
    tmp_path: Path, enabled: list[str], code: str, failed: bool
):
    with pytest.raises(SystemExit) as end:
        entry.main([script(tmp_path, f"import sys\nsys.exit({code})\n")])
    assert repr(end.value.code) == (code or "None")
    assert (getattr(sys, "last_type", None) is not None) == failed


def test_a_job_that_ended_gives_its_own_status(tmp_path: Path, enabled: list[str], capsys: pytest.CaptureFixture[str]):
    path = script(tmp_path, "from megatron_recycle.errors import JobEnded\nraise JobEnded('stage 1 is gone', 7)\n")
    assert entry.main([path]) == 7
    assert capsys.readouterr().err == "megatron-recycle: stage 1 is gone\n"
    assert sys.last_type is JobEnded


def test_a_setting_that_is_refused_late_is_one_line(tmp_path: Path, enabled: list[str], capsys):
    path = script(tmp_path, "from megatron_recycle.errors import ConfigError\nraise ConfigError('no such key')\n")
    assert entry.main([path]) == 2
    assert capsys.readouterr().err == "megatron-recycle: no such key\n"
    assert sys.last_type is ConfigError


def test_a_missing_script_and_a_missing_framework_are_told_in_one_line(
    tmp_path: Path, enabled: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert entry.main([]) == 2
    assert "usage:" in capsys.readouterr().err
    assert entry.main([str(tmp_path / "none.py")]) == 2
    assert capsys.readouterr().err.endswith("there is no script " + str(tmp_path / "none.py") + "\n")
    assert not enabled

    def no_framework() -> None:
        raise ImportError("found no framework to plug into")

    monkeypatch.setattr(entry, "enable", no_framework)
    assert entry.main([script(tmp_path, "")]) == 2
    assert capsys.readouterr().err == "python -m megatron_recycle: found no framework to plug into\n"


@pytest.fixture
def package(tmp_path: Path, enabled: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """A package in the working directory, by a name that no other test has: modules stay loaded."""
    name = f"jobs{abs(hash(tmp_path))}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    (tmp_path / name / "beside.py").write_text("NAME = 'found'\n")
    (tmp_path / name / "train.py").write_text(
        "import json, sys\n"
        "from pathlib import Path\n"
        "from .beside import NAME\n"
        "seen = [sys.argv, sys.path[0], __name__, __spec__.name, NAME, sys.modules['__main__'].NAME]\n"
        "Path(__file__).with_suffix('.json').write_text(json.dumps(seen))\n")
    (tmp_path / name / "broken.py").write_text("import no_such_dependency\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return name


@pytest.mark.parametrize("flag", ["-m", "--module"])
def test_a_module_sees_what_it_would_see_under_python_m(flag: str, tmp_path: Path, package: str, enabled: list[str]):
    assert entry.main([flag, f"{package}.train", "-m", "1"]) == 0
    seen = json.loads((tmp_path / package / "train.json").read_text())
    path = str(tmp_path / package / "train.py")
    assert seen == [[path, "-m", "1"], str(tmp_path), "__main__", f"{package}.train", "found", "found"]
    assert enabled == ["on"]


@pytest.mark.parametrize(("name", "said"), [
    ("{}.evaluate", "No module named {}.evaluate"), ("{}", "cannot be directly executed"), (".train", "Relative"),
    ("{}.beside.py", "Try using '{}.beside' instead")])
def test_a_missing_module_is_told_in_one_line(name: str, said: str, package: str,
                                              capsys: pytest.CaptureFixture[str]):
    assert entry.main(["-m", name.format(package)]) == 2
    told = capsys.readouterr().err
    assert said.format(package) in told and told.count("\n") == 1
    assert sys.last_type is not None


def test_an_import_of_a_module_that_fails_is_its_own(package: str):
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        entry.main(["-m", f"{package}.broken"])
