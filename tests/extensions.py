"""Takes extensions of the coordinator's half away."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from megatron_recycle.membership.extension import IN_FORCE, Extension
from megatron_recycle.membership.extensions import EXTENSIONS

EACH_GONE = [*(pytest.param([other for other in EXTENSIONS if other is not gone], id=type(gone).__name__)
               for gone in EXTENSIONS), pytest.param([], id="all")]
"""What is left without each extension in turn, and nothing."""


@contextmanager
def only(left: Iterable[Extension]) -> Iterator[None]:
    """These alone are in force."""
    before = IN_FORCE[:]
    IN_FORCE[:] = left
    try:
        yield
    finally:
        IN_FORCE[:] = before
