"""Takes extensions away: of the coordinator's half, and of the workers'."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import pytest

from megatron_recycle.membership.extension import IN_FORCE, Extension
from megatron_recycle.membership.extensions import EXTENSIONS
from megatron_recycle.runtime import worker_extensions
from megatron_recycle.runtime.worker_extension import WorkerExtension

EACH_GONE = [*(pytest.param([other for other in EXTENSIONS if other is not gone], id=type(gone).__name__)
               for gone in EXTENSIONS), pytest.param([], id="all")]
"""What is left of the coordinator's without each extension in turn, and nothing."""
EACH_GONE_OF_WORKERS = [*(pytest.param([other for other in worker_extensions.ALL if other is not gone],
                                       id=type(gone).__name__) for gone in worker_extensions.ALL),
                        pytest.param([], id="all")]
"""Likewise of the workers'."""


@contextmanager
def only(left: Collection[Extension] = EXTENSIONS,
         of_workers: Collection[WorkerExtension] = worker_extensions.ALL) -> Iterator[None]:
    """These alone are in force."""
    before, workers = IN_FORCE[:], worker_extensions.ALL
    IN_FORCE[:], worker_extensions.ALL = left, tuple(of_workers)
    try:
        yield
    finally:
        IN_FORCE[:], worker_extensions.ALL = before, workers
