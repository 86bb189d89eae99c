"""The label ``processes`` is on every test that starts workers, real or fake: ``-m "not processes"`` starts none."""

from __future__ import annotations

import os

MAY_START = "TEST_MAY_START_WORKERS"


def check_label() -> None:
    """Raises AssertionError if the test that runs now is not marked."""
    assert os.environ.get(MAY_START, "yes") == "yes", "this test starts workers: mark it pytest.mark.processes"
