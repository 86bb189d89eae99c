"""Whether the peers of a stage hold the same parameters and optimizer state, bit for bit (`verify: peers`).

Compared after every recovery and, with `verify_every`, between two iterations. Where most peers agree, those that do
not are brought back from them before anything is computed with what they hold; where no majority tells who is right,
the job stops and says so.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from megatron_recycle.errors import VerificationError
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.plan import Worker
from megatron_recycle.runtime.activity import COPY, WORKING
from megatron_recycle.runtime.compute.data import digest
from megatron_recycle.runtime.state_copy import give, stage_tensors, take

if TYPE_CHECKING:
    from megatron_recycle.runtime.worker import StageWorker


def verify_recovery(worker: StageWorker) -> None:
    """After a recovery, and at the start. Raises VerificationError and GenerationOver."""
    if worker.config.verify == "peers" or worker.config.verify_every:
        _verify(worker, heal=worker.generation > 1)
        worker.standing.verified = worker.standing.committed + 1


def verify_boundary(worker: StageWorker, iteration: int) -> None:
    """Before ``iteration`` begins, if it is one of every `verify_every`; all peers do so at the same one.

    Raises VerificationError, GenerationOver, WrongGuess.
    """
    if not worker.standing.due(iteration, worker.config.verify_every):
        return
    worker.stepper.wait()
    with worker.waiting("a check"):
        _verify(worker, heal=True)
    worker.standing.verified = iteration


def _verify(worker: StageWorker, heal: bool) -> None:
    digests = _exchange(worker)
    if len(set(digests.values())) == 1:
        return
    (usual, count), *_ = Counter(digests.values()).most_common()
    odd = [peer for peer, value in digests.items() if value != usual]
    if heal and 2 * count > len(digests):
        _heal(worker, odd, digests)
        digests = _exchange(worker)
        if len(set(digests.values())) == 1:
            return
    found = ", ".join(f"{peer}: {value:08x}" for peer, value in digests.items())
    text = (
        f"the workers of stage {worker.place.me.stage} differ in parameters or optimizer state ({found}) after "
        f"iteration {worker.standing.committed}. Before the first iteration: build the model from the same seed or "
        "checkpoint on all of them. Later: restart from the last checkpoint that was written before the last "
        "comparison in which they were equal, and check the memory of these hosts")
    raise VerificationError(text)


def _exchange(worker: StageWorker) -> dict[Worker, int]:
    """Digest of every peer of this stage."""
    groups = worker.current_groups()
    peers = groups.peers(groups.me.stage)
    digests = torch.zeros(len(peers), dtype=torch.float64)
    with worker.activity.during(WORKING, "check"):
        digests[peers.index(groups.me)] = digest(worker.stage.state())
    groups.stage_control.sum(digests).wait()
    return dict(zip(peers, map(int, digests.tolist())))


def _heal(worker: StageWorker, odd: Sequence[Worker], digests: dict[Worker, int]) -> None:
    """Those of ``odd`` take the whole state from the others. That may take minutes, for which everybody else waits."""
    with worker.activity.during(WORKING, COPY):
        if worker.place.me in odd:
            _take_over(worker, odd, digests)
        else:
            give(worker.current_groups(), odd, stage_tensors(worker.stage), worker.stepper.facts())


def _take_over(worker: StageWorker, odd: Sequence[Worker], digests: dict[Worker, int]) -> None:
    groups, iteration = worker.current_groups(), worker.standing.committed
    began = time.monotonic()
    worker.agent.event("suspected", kind=FailureKind.CORRUPT, removed=False, iteration=iteration + 1, pid=os.getpid(),
                       digests={str(peer): f"{value:08x}" for peer, value in digests.items()})
    tensors, facts, received = take(groups, odd, worker.stage.device)
    worker.stepper.enter(tensors, facts)
    worker.agent.event("healed", kind=FailureKind.CORRUPT, iteration=iteration + 1, bytes=received.bytes,
                       ms=round(1000 * (time.monotonic() - began), 1))
