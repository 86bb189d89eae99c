"""Closing an iteration: when a worker may leave it, since its stage has all it needs of it and owes nothing.

A stage is *closed* for an iteration once all its live workers, and all parts of each, hold the reduced gradient, and
all their messages have been used by the readers. Then no action of the iteration is repeated at that stage when a
worker dies, and a script that has left the iteration is not asked for it once more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megatron_recycle.plan import Action, Worker
from megatron_recycle.runtime.comm.comm import Pending, wait_all
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.reduction import count
from megatron_recycle.runtime.comm.tags import USED

_ATTEMPTS = 256  # attempts at an iteration that have tags of their own


class Acknowledgements:
    """One worker's part in closing its stage for one attempt at an iteration.

    A reader reports once to each sender that it has used all of that sender's messages; the stage's workers then count
    that all of them have heard so. gloo's completion of a send is no proof that the message has arrived. Where workers
    have parts, equal parts do so, and then all parts of each worker meet. Stages that share parameters make their
    gradients together, and are closed together.

    Args:
        groups: the generation's handles.
        readers, last_reads: of the attempt's plan (`plan.readers`, `plan.last_reads`).
        iteration, attempt: name the messages.
        tied: the other stages that are closed together with this one.
    """

    def __init__(self, groups: Groups, readers: Sequence[Worker], last_reads: Mapping[Action, Sequence[Worker]],
                 iteration: int, attempt: int, tied: Sequence[int] = ()) -> None:
        self._groups, self._readers, self._owed = groups, readers, dict(last_reads)
        self._tied = tied
        number = iteration * _ATTEMPTS + attempt % _ATTEMPTS
        self._tag, self._tag_of_ties, self._tag_of_parts = (USED[3 * number + each] for each in range(3))
        self._sends: list[Pending] = []

    def did(self, action: Action) -> None:
        """``action`` is done, and its message used. Raises GenerationOver."""
        for sender in self._owed.pop(action, ()):
            self._send(self._groups.control_ranks[sender], self._tag)

    def close(self) -> None:
        """Wait until the stage is closed; all its workers hold the gradient. Raises GenerationOver."""
        self._hear()
        count(self._groups.stage_control, True)
        if self._groups.siblings is not None:
            self._meet_siblings()
        if self._tied:
            self._meet_tied()
            count(self._groups.stage_control, True)

    def end(self) -> None:
        """The attempt is void, and all have begun it: complete pending messages. Raises GenerationOver."""
        for action in [*self._owed]:
            self.did(action)
        self._hear()

    def _meet_siblings(self) -> None:
        """Wait until all parts of this worker are here, and by their counts those of its peers."""
        ranks = self._groups.control_siblings
        self._meet([rank for number, rank in enumerate(ranks) if number != self._groups.part], self._tag_of_parts)

    def _meet_tied(self) -> None:
        """The first worker of each stage reports to those of the tied stages that its own stage is here."""
        first = [self._groups.peers(stage)[0] for stage in (self._groups.me.stage, *self._tied)]
        if first[0] == self._groups.me:
            self._meet([self._groups.control_ranks[other] for other in first[1:]], self._tag_of_ties)

    def _meet(self, others: Sequence[int], tag: int) -> None:
        for rank in others:
            self._send(rank, tag)
        self._receive(others, tag)

    def _hear(self) -> None:
        self._receive([self._groups.control_ranks[reader] for reader in self._readers], self._tag)

    def _send(self, to: int, tag: int) -> None:
        self._sends.append(self._groups.control.send(torch.ones(1), to, tag))

    def _receive(self, senders: Sequence[int], tag: int) -> None:
        wait_all([self._groups.control.receive(torch.zeros(1), sender, tag) for sender in senders])
