"""The rules of a backend that keeps to NCCL's order, and what they do to a job."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass

VARIABLE = "RECYCLE_TEST_ORDERED"
"""Environment variable that carries the rules to the processes of a job, as JSON."""


@dataclass(frozen=True)
class Rules:
    """What NCCL does with the calls, one switch per rule.

    Attributes:
        eager: one communicator, and one queue, for all transfers and collectives of a group, made when the group is
            (torch: a group with a ``device_id``). Else one per pair, made at its first transfer, and one for
            collectives and batches.
        buffer: bytes per direction that a send may be ahead of its receive; 0: a send ends when its receive runs.
        connecting: first transfers of each direction block the calling thread until the peer comes to its own
            (ncclTransportP2pSetup).
        garbage: what an abort ends looks like a success, with NaN as its result.
        watchdog: an operation that is pending for longer than the group's limit ends the process, as torch's default
            does.
        stuck: seconds without any progress after which every process writes its queues and stacks to stderr; 0: never.
    """

    eager: bool = True
    buffer: int = 0
    connecting: bool = True
    garbage: bool = True
    watchdog: bool = False
    stuck: float = 20.0

    def environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(dataclasses.asdict(self))}

    @classmethod
    def from_environment(cls) -> Rules:
        return cls(**json.loads(os.environ.get(VARIABLE, "{}")))
