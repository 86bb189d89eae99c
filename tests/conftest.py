"""What one run of the suite shares between its processes, and which tests are for the night."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from types import FunctionType

import hypothesis
import pytest

from tests.labels import MAY_START
from tests.ordered.rules import Rules

SHARED = "SUITE_FOLDER"
"""Variable that names a folder of this run of the suite, the same in all of its processes (`tests.references`)."""

hypothesis.settings.register_profile("patient", deadline=None,
                                     suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("patient")  # no example fails for being slow


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ordered", action="store_true", help="all jobs under NCCL's rules of order (tests/ordered)")
    parser.addoption("--night", action="store_true", help="run the tests that are marked night too")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--ordered"):
        os.environ.update(Rules().environment())
    if SHARED not in os.environ:
        os.environ[SHARED] = tempfile.mkdtemp(prefix="recycle-suite-")
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(SHARED)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Whoever starts workers is marked so (`tests.labels`)."""
    os.environ[MAY_START] = "yes" if item.get_closest_marker("processes") else "no"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Nobody leaves the methods of torch's groups replaced, in which later tests of the same process would fail."""
    yield
    if (torch := sys.modules.get("torch.distributed")) is not None:
        left = [name for name, value in vars(torch.ProcessGroup).items() if isinstance(value, FunctionType)]
        assert not left, f"{item.nodeid} leaves torch's groups with methods that are not torch's: {', '.join(left)}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = {mark for mark, wanted in (("night", config.getoption("--night")),
                                          ("gloo", not config.getoption("--ordered"))) if not wanted}
    without = [item for item in items if any(item.get_closest_marker(mark) for mark in left_out)]
    if without:
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if item not in without]
