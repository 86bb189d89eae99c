"""The script's calls that a joiner has missed: which they were, and their results."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from megatron_recycle.runtime.comm.comm import Pending
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.tags import CONTROL
from megatron_recycle.runtime.comm.user_collectives.calls import Call
from megatron_recycle.runtime.comm.user_collectives.exchange import Group
from megatron_recycle.runtime.comm.user_collectives.packing import rows_of_all
from megatron_recycle.runtime.comm.user_collectives.results import Results, as_row, recall
from megatron_recycle.runtime.place import Place

_BROUGHT = CONTROL.take("what the script's calls have brought", 2)
"""Tags of the results: of their length, and of themselves."""


class Missed:
    """Small results of calls, kept on all workers that have made them, for joiners.

    Args:
        place: position, grid, ranks.

    Attributes:
        passed: by a group's key, the last call that all had made before this worker came in at their place.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._results = Results()
        self.passed: dict[float, float] = {}

    def note(self, group: Group, number: int, call: Call) -> None:
        """``call`` has ended."""
        self._results.note(group.name, number, as_row(call))

    def recall(self, group: Group, number: int, call: Call) -> str:
        """Give ``call`` the others' results, or return why these are not known."""
        row = self._results.of(group.name, number)
        if row is None:
            return "no result is kept for others: each member has its own, or it is larger than 1 MiB, or too long ago"
        return "" if recall(call, row) else "others of its group have called something else there"

    def tell_passed(self, groups: Groups, begun: Mapping[float, float], comes: bool) -> None:
        """Send joiners the numbers of the calls made so far, here ``begun``. ``comes``: this worker is a joiner. Raises
        GenerationOver."""
        made = {key: max(begun.get(key, 0.0), self.passed.get(key, 0.0)) for key in {*begun, *self.passed}}
        rows = rows_of_all(groups.control, [*made.items()])
        for key, number in rows if comes else ():
            self.passed[key] = max(self.passed.get(key, 0.0), number)

    def tell(self, groups: Groups, joined: Collection[int]) -> None:
        """Give the processes ``joined``, which come in, the results of their groups' calls. Raises GenerationOver."""
        comm = groups.control
        place = self._place
        mine = place.ranks[place.me][place.part]
        live_ranks = sorted(rank for worker in groups.members for rank in place.ranks[worker])
        stay = {live_ranks[process]: process for process in range(comm.size) if process not in joined}
        if comm.rank in joined:
            self._take(groups, [*stay.values()])
            return
        sent: list[Pending] = []
        for process in joined:
            names = {name: to.name for name in self._results.groups
                     if (to := Group.named(name, mine).told_to(live_ranks[process], stay, place)) is not None}
            results = self._results.told(names)
            sent.append(comm.send(torch.tensor([len(results)]), process, _BROUGHT[0]))
            if results:
                data = torch.frombuffer(bytearray(results), dtype=torch.uint8)
                sent.append(comm.send(data, process, _BROUGHT[1]))
        for pending in sent:
            pending.wait()

    def _take(self, groups: Groups, others: Collection[int]) -> None:
        comm = groups.control
        lengths = {process: torch.zeros(1, dtype=torch.int64) for process in others}
        for pending in [comm.receive(length, process, _BROUGHT[0]) for process, length in lengths.items()]:
            pending.wait()
        for pending in [comm.receive(torch.empty(int(length), dtype=torch.uint8), process, _BROUGHT[1])
                        for process, length in lengths.items() if int(length)]:
            pending.wait()
            self._results.take(pending.tensor.numpy().tobytes())
