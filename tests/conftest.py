"""What one run of the suite shares between its processes, and which tests are for the night."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.backends.stories import Recorder, commit
from tests.labels import MAY_START
from tests.nccl_rules.rules import JOBS

SHARED = "SUITE_FOLDER"
"""Variable that names a folder of this run of the suite, the same in all of its processes (`tests.references`)."""

_PATIENT = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
"""No example fails for being slow."""
hypothesis.settings.register_profile("day", _PATIENT, derandomize=True, max_examples=40)  # the same wherever it runs
hypothesis.settings.register_profile("night", _PATIENT)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nccl-rules", action="store_true", help="all jobs under NCCL's rules of order")
    parser.addoption("--night", action="store_true", help="run the tests that are marked night too")
    parser.addoption("--stories", type=Path, help="write what came of the stories of versions into this file")


def pytest_configure(config: pytest.Config) -> None:
    other = config.getoption("--night") or config.getoption("--hypothesis-seed", None) is not None
    hypothesis.settings.load_profile("night" if other else "day")
    if config.getoption("--nccl-rules"):
        os.environ.update(JOBS.environment())
    stories = config.getoption("--stories")
    if stories is not None and not hasattr(config, "workerinput"):  # once, and not in xdist's processes
        config.pluginmanager.register(Recorder(stories, commit()))
    if SHARED not in os.environ:
        os.environ[SHARED] = tempfile.mkdtemp(prefix="recycle-suite-")
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(SHARED)))


_OWNERS = ("torch.distributed", "torch.distributed.distributed_c10d", "torch.distributed:ProcessGroup",
           "deepspeed", "deepspeed.comm", "megatron_recycle.runtime.setup_record:Alone")
"""Modules, and classes in them, whose functions the product replaces."""
_LAUNCHED = ("RECYCLE_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "TORCHELASTIC_")
"""What variables begin with that tell a process which worker it is."""


def _process_wide() -> dict[tuple[str, str], Any]:
    """What all tests of this process share, by owner and name."""
    found: dict[tuple[str, str], Any] = {}
    for path in _OWNERS:
        module, _, kind = path.partition(":")
        if (owner := sys.modules.get(module)) is not None:
            for name, value in vars(getattr(owner, kind) if kind else owner).items():
                if callable(value):
                    found[path, name] = value
    return found | {("the environment", name): value
                    for name, value in os.environ.items() if name.startswith(_LAUNCHED)}


def _is_ours(key: tuple[str, str], value: Any) -> bool:
    """Whether the product or a test has put it there. A library that a test is the first to import may do as it likes:
    torch._dynamo wraps torch.manual_seed, and sets variables."""
    if key[0] == "the environment":
        return key[1].startswith(("RECYCLE_", "SLURM_", "LOCAL_", "MASTER_")) or key[1] in ("RANK", "WORLD_SIZE")
    function = value.func if isinstance(value, functools.partial) else value
    wraps = getattr(function, "__globals__", {})  # functools.wraps copies all names but these
    module = wraps.get("__name__") or (function if isinstance(function, type) else type(function)).__module__
    return str(module).split(".")[0] in ("megatron_recycle", "tests", "conftest")


@pytest.fixture(autouse=True)
def _leaves_the_process_as_it_was() -> Iterator[None]:
    """Tests of one process meet what another one has left, in an order that nobody knows: so it is the one that leaves
    it which fails."""
    before = _process_wide()
    yield
    known = {"the environment", *(owner for owner, _ in before)}  # others the test is the first to import
    after = {key: value for key, value in _process_wide().items() if key[0] in known}
    changed = [key for key in {**before, **after} if before.get(key) is not after.get(key) and
               before.get(key) != after.get(key)]
    left = [": ".join(key) for key in changed if _is_ours(key, after.get(key))]
    assert not left, f"the test leaves these changed, for all that come after it in this process: {', '.join(left)}"


_CHOSEN_FROM = "tests/in_memory_job/"


def _night_cases(items: list[pytest.Item]) -> list[pytest.Item]:
    """The cases of jobs in memory that run by night or by name only: all but `_day_cases` of each kind. A kind in which
    each case is a thing of its own (mark ``every``) has none."""
    kinds: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.nodeid.startswith(_CHOSEN_FROM) and not item.get_closest_marker("every"):
            kinds.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return [case for cases in kinds.values() for by_day in [_day_cases(cases)] for case in cases if case not in by_day]


def _day_cases(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Of one kind: few that meet each value of each parameter. Of one parameter half of the values are met, from four
    on, and two seeds."""
    if len(cases) <= 2:
        return cases
    names = _parameters(cases)
    if len(names) == 1:
        half = [case for number, case in enumerate(cases) if number.bit_count() % 2 == 0]  # no period
        return cases[:2] if names == ["seed"] else half if len(cases) >= 4 else cases
    values = [{(name, repr(_values(case)[name])) for name in names} for case in cases]
    chosen, missing = [], set().union(*values)
    while missing:
        chosen.append(max(range(len(cases)), key=lambda number: len(values[number] & missing)))  # the first of the best
        missing -= values[chosen[-1]]
    return [cases[number] for number in chosen]


def _parameters(cases: list[pytest.Item]) -> list[str]:
    """Names of the parameters that these cases differ in; of those that change together one."""
    by_change = {tuple(repr(_values(case)[name]) for case in cases): name for name in _values(cases[0])}
    alike = {}
    for texts, name in by_change.items():
        alike.setdefault(tuple(texts.index(text) for text in texts), name)
    return [name for places, name in alike.items() if any(places)]


def _values(case: pytest.Item) -> dict[str, Any]:
    return case.callspec.params  # type: ignore[attr-defined, no-any-return]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Whoever starts workers is marked so (`tests.labels`)."""
    os.environ[MAY_START] = "yes" if item.get_closest_marker("processes") else "no"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = {mark for mark, wanted in (("night", config.getoption("--night")),
                                          ("gloo", not config.getoption("--nccl-rules"))) if not wanted}
    without = [item for item in items if any(item.get_closest_marker(mark) for mark in left_out)]
    by_name = config.getoption("-k") or any("::" in argument for argument in config.invocation_params.args)
    if "night" in left_out and not by_name and "CAMPAIGN_SEEDS" not in os.environ:
        without += _night_cases([item for item in items if item not in without])
    if without:
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if item not in without]


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """The libraries' objects, a million, live as long as the process: no collection of garbage looks at them."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a disk of so many KiB."""
    with ExitStack() as stack:
        def mount(size: int) -> Path:
            folder = tmp_path / "disk"
            folder.mkdir()
            made = ["mount", "-t", "tmpfs", "-o", f"size={size}k,mode=0700", "none", str(folder)]
            if os.geteuid() or subprocess.run(made, capture_output=True).returncode:
                pytest.skip("nothing can be mounted here")
            stack.callback(subprocess.run, ["umount", "-l", str(folder)], check=True)
            return folder

        yield mount
