"""What one run of the suite shares between its processes, and which tests are for the night."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest

from tests.labels import MAY_START

SHARED = "SUITE_FOLDER"
"""Variable that names a folder of this run of the suite, the same in all of its processes (`tests.references`)."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--night", action="store_true", help="run the tests that are marked night too")


def pytest_configure(config: pytest.Config) -> None:
    if SHARED not in os.environ:
        os.environ[SHARED] = tempfile.mkdtemp(prefix="recycle-suite-")
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(SHARED)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Whoever starts workers is marked so (`tests.labels`)."""
    os.environ[MAY_START] = "yes" if item.get_closest_marker("processes") else "no"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--night"):
        return
    night = [item for item in items if item.get_closest_marker("night")]
    if night:
        config.hook.pytest_deselected(items=night)
        items[:] = [item for item in items if item not in night]
