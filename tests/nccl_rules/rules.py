"""The rules of a backend that keeps to NCCL's order, and what they do to a job."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass

VARIABLE = "RECYCLE_TEST_ORDERED"
"""Environment variable with the rules, as JSON, that all jobs are to keep."""


@dataclass(frozen=True)
class Rules:
    """What NCCL does with the calls, one switch per rule.

    Attributes:
        eager: one communicator, and one queue, for all transfers and collectives of a group (torch: once
            ``eager_connect_single_device`` has been called). Else one per pair, made at its first transfer, and one for
            collectives and batches; who waits for a dead peer there can be freed by nobody.
        buffer: bytes per direction that a send may be ahead of its receive; 0: a send ends when its receive runs.
        connecting: first transfers of each direction block the calling thread until the peer comes to its own
            (ncclTransportP2pSetup). Not even an abort frees it.
        apart: such a transfer is an error in a thread that cannot be left behind; in one that can, an abort frees it.
        garbage: what an abort ends looks like a success, with NaN as its result.
        watchdog: an operation that is pending for longer than the group's limit ends the process, as torch's default
            does.
        stuck: seconds without any progress after which every process writes its queues and stacks to stderr; 0: never.
    """

    eager: bool = True
    buffer: int = 0
    connecting: bool = True
    apart: bool = False
    garbage: bool = True
    watchdog: bool = False
    stuck: float = 20.0

    def environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(dataclasses.asdict(self))}

    @classmethod
    def of_all(cls) -> Rules | None:
        """Those that all jobs of this run of the suite are to keep (``pytest --nccl-rules``), if any."""
        told = os.environ.get(VARIABLE)
        return None if told is None else cls(**json.loads(told))


JOBS = Rules(apart=True)
"""Those of jobs."""
