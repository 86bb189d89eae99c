"""A call among the living members of a group, over the handle that all workers of a generation share.

All members send each other their inputs at once (of large reductions a part: `shares`); then each confirms that it has
all its inputs. None is done before all have confirmed. So if a failure cuts a call short, either all survivors have the
inputs to complete it, with the same values, or none has completed it, and all repeat it.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_recycle.errors import UnsupportedError
from megatron_recycle.membership import Process
from megatron_recycle.plan import Worker
from megatron_recycle.runtime.comm.comm import Comm, Pending, wait_all
from megatron_recycle.runtime.comm.tags import CONTROL
from megatron_recycle.runtime.comm.user_collectives.calls import AllReduce, AllToAll, Call, Tensors
from megatron_recycle.runtime.comm.user_collectives.packing import buffer, packed, token, unpacked
from megatron_recycle.runtime.comm.user_collectives.shares import Members, Shares
from megatron_recycle.runtime.place import Place

SCRIPT = CONTROL.take("what the script exchanges", 2**27, again=True)
"""Two for each call: one for inputs, one for confirmations."""


@dataclass(frozen=True)
class Group:
    """A group of the script's, as all its members know it.

    Attributes:
        ranks: global ranks, by position.
        me: this process' position.
        number: among groups of the same ranks, in the order of creation.
    """

    ranks: tuple[int, ...]
    me: int
    number: int = 0

    @property
    def name(self) -> str:
        """The same on all members."""
        return f"{[*self.ranks]} {self.number}"

    @classmethod
    def named(cls, name: str, rank: int) -> Group:
        """The group of this `name`, of which ``rank`` is a member, as that member knows it."""
        listed, _, number = name.rpartition(" ")
        ranks = tuple(json.loads(listed))
        return cls(ranks, ranks.index(rank), int(number))

    def pipeline(self, place: Place) -> int | None:
        """The pipeline that all members belong to; None if they belong to several."""
        homes = _homes(place)
        pipelines = {homes[rank].worker.pipeline for rank in self.ranks}
        return pipelines.pop() if len(pipelines) == 1 else None

    def of_pipeline(self, pipeline: int, place: Place) -> Group:
        """The same group of another pipeline: scripts make one for each."""
        homes = _homes(place)
        ranks = tuple(place.ranks[Worker(pipeline, homes[rank].worker.stage)][homes[rank].part or 0]
                      for rank in self.ranks)
        return Group(ranks, self.me, self.number)

    def told_to(self, rank: int, stay: Collection[int], place: Place) -> Group | None:
        """The group of ``rank``, a joiner, about whose past calls this process reports; None: another process does, or
        there is nothing to report. The reporter is the group's first member that is in ``stay``. If there is none and
        the group lies in one pipeline, it is the lowest peer, from its own pipeline's group."""
        me, own = self.ranks[self.me], self
        if rank not in own.ranks:
            home, mine = _homes(place)[rank], self.pipeline(place)
            if mine is None or mine == home.worker.pipeline:
                return None
            own = self.of_pipeline(home.worker.pipeline, place)
            if rank not in own.ranks or own.ranks.index(rank) != self.me or any(one in stay for one in own.ranks):
                return None
            peers = _peers(home, place, place.ranks)
            return own if me == next((peer for peer in peers if peer in stay), None) else None
        return own if me == next((one for one in sorted(own.ranks) if one in stay), None) else None


@dataclass(frozen=True)
class Roll:
    """The membership of a group in a generation.

    Attributes:
        group: the group.
        answers: by position, the process that answers for it, as a rank among all living ones: itself, or the lowest
            peer of its stage in the group. A group that lies in one pipeline has no such peer: then the lowest of all
            peers, which makes the same call in its own pipeline's group. None: no process can answer.
        living: positions of the living members, by the same rank.
        names: of positions, for messages.
    """

    group: Group
    answers: tuple[int | None, ...]
    living: Mapping[int, int]
    names: Sequence[str]

    @classmethod
    def of(cls, group: Group, place: Place, members: Collection[Worker]) -> Roll:
        """The roll of ``group`` while ``members`` are alive."""
        homes, in_one = _homes(place), group.pipeline(place) is not None
        processes = {rank: index for index, rank in enumerate(
            sorted(rank for worker in members for rank in place.ranks[worker]))}

        def answering(rank: int) -> int | None:
            if rank in processes:
                return processes[rank]
            return next((processes[peer] for peer in _peers(homes[rank], place, members)
                         if in_one or peer in group.ranks), None)

        living = {processes[rank]: position for position, rank in enumerate(group.ranks) if rank in processes}
        return cls(group, tuple(map(answering, group.ranks)), living, [place.names[rank] for rank in group.ranks])

    def is_empty(self, position: int) -> bool:
        """Whether ``position`` has no process."""
        return position not in self.living.values()

    def stands_in(self, call: Call, process: int) -> str | None:
        """A warning for the user if ``process`` sends its own values in place of a lost source, or is the source of
        values for lost members alone; None otherwise."""
        root = call.source
        if root is None or self.answers[root] != process:
            return None
        if not self.is_empty(root):
            gone = [f"{rank} (worker {self.names[position]})" for position, rank in enumerate(self.group.ranks)
                    if self.is_empty(position)]
            return (f"the script calls {call.what}() while rank {', '.join(gone)} is gone: nobody gets what is for "
                    "that rank" if call.by_itself and gone else None)
        sender = self.names[self.living[process]] if process in self.living else "another worker"
        return (f"the script calls {call.what}() from rank {self.group.ranks[root]} (worker {self.names[root]}), which "
                f"is gone: {sender} tells what it has itself. Let all ranks compute what one of them tells: what "
                "only that one knew is lost")

    def check(self, call: Call) -> None:
        """Raises UnsupportedError, on all members alike, if ``call`` cannot have its right values."""
        wanted = range(len(self.answers)) if call.source is None else [call.source]
        if type(call) is Call or (call.sink is not None and self.is_empty(call.sink)):
            return
        for position in wanted:
            if not self.is_empty(position) or (self.answers[position] is not None and not call.by_itself):
                continue
            reason = ("what it would have given has gone with it" if call.by_itself else
                      "no other worker of its stage is in this group to answer for it")
            raise UnsupportedError(
                f"the script calls {call.what}() in its group of ranks {list(self.group.ranks)}, but worker "
                f"{self.names[position]} (rank {self.group.ranks[position]}) is gone, and {reason}. Call it over a "
                "group in which the stage has another worker (the default group, say), or let the worker be started "
                "again (max_restarts)")


class Exchange:
    """One attempt at a call. `collect`, then `confirm`, then `finish`.

    Args:
        call: this member's.
        roll: the group's membership.
        comm: of all living workers.
        number: of the call, the same on all members.
    """

    def __init__(self, call: Call, roll: Roll, comm: Comm, number: int) -> None:
        self._call, self._roll, self._comm = call, roll, comm
        self._given, self._confirmed = SCRIPT[2 * number], SCRIPT[2 * number + 1]
        self._got: dict[int, Tensors] = {}
        self._sums: Tensors | None = None

    def collect(self) -> None:
        """Exchange inputs with the others. Raises GenerationOver."""
        if isinstance(self._call, AllReduce) and self._call.by_shares:
            self._sums = self._shares().add(self._call.add)
            return
        given = self._packed(self._others())
        like = {process: list(self._expected(process, position)) for process, position in self._givers()}
        if self._call.measured:
            lengths = self._swap({process: _length(data) for process, data in given.items()},
                                 {process: torch.zeros(1, dtype=torch.int64) for process in like})
            like = {process: [torch.empty(int(length), dtype=torch.uint8)] for process, length in lengths.items()}
        got = self._swap(given, {process: buffer(tensors) for process, tensors in like.items()})
        self._got = {process: unpacked(got[process], tensors) if self._goes(process, self._roll.group.me) else ()
                     for process, tensors in like.items()}

    def answer(self) -> list[Pending]:
        """Send this process's inputs for a position that is not its own, for which it answers. Does not wait: keep the
        returned handles. Raises GenerationOver."""
        if self._call.by_shares:
            return self._shares().give()
        sends = []
        for process, data in self._packed(self._others()).items():
            for each in [_length(data), data] if self._call.measured else [data]:
                sends.append(self._comm.send(each, process, self._given))
        return sends

    def _swap(self, given: Mapping[int, torch.Tensor], into: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Send each process its tensor, and fill ``into`` with the received ones; returns it."""
        pending = [self._comm.receive(buffer, process, self._given) for process, buffer in into.items()]
        pending += [self._comm.send(data, process, self._given) for process, data in given.items()]
        wait_all(pending)
        return into

    def confirm(self) -> None:
        """Wait until all members have their inputs. Raises GenerationOver."""
        pending = [self._comm.receive(token(), process, self._confirmed) for process, _ in self._others()]
        pending += [self._comm.send(token(), process, self._confirmed) for process, _ in self._others()]
        wait_all(pending)

    def finish(self) -> None:
        """Write the results."""
        call, roll = self._call, self._roll
        if call.sink is not None and call.sink != roll.group.me:
            return
        if isinstance(call, AllReduce) and self._sums is not None:
            call.put(self._sums)
            return
        own = call.gives(roll.group.me)
        with torch.no_grad():
            call.take([self._got.get(process, own) if process is not None else () for process in roll.answers])

    def _shares(self) -> Shares:
        roll, sink = self._roll, self._call.sink
        answers = [process for process in roll.answers if process is not None]
        owners = sorted(roll.living)
        wanted = [process for process in owners if sink in (None, roll.living[process])]
        outside = sorted(set(answers) - set(owners))
        return Shares(self._call.gives(roll.group.me), Members(owners, outside, answers, wanted), self._comm,
                      self._given)

    def _others(self) -> list[tuple[int, int]]:
        """The other living members: their ranks among all living workers, and their positions."""
        return [(process, position) for process, position in self._roll.living.items()
                if process != self._comm.rank]

    def _givers(self) -> list[tuple[int, int]]:
        """All senders: those of `_others`, and answering peers outside of the group."""
        outside = {process: position for position, process in enumerate(self._roll.answers)
                   if process is not None and process not in self._roll.living}
        return [*self._others(), *outside.items()]

    def _packed(self, to: Sequence[tuple[int, int]]) -> dict[int, torch.Tensor]:
        """This process's data for each of these processes at their positions. Equal inputs share one object."""
        made: list[tuple[Tensors, torch.Tensor]] = []

        def of(tensors: Tensors) -> torch.Tensor:
            for known, data in made:
                if len(known) == len(tensors) and all(map(operator.is_, known, tensors)):
                    return data
            made.append((tensors, packed(tensors)))
            return made[-1][1]

        return {process: of(self._call.gives(position)) if self._goes(self._comm.rank, position) else token()
                for process, position in to}

    def _expected(self, process: int, position: int) -> Tensors:
        """Tensors of the size of those that ``process``, at ``position``, sends to this one."""
        return self._call.expects(position) if self._goes(process, self._roll.group.me) else ()

    def _goes(self, process: int, position: int) -> bool:
        source, sink = self._call.source, self._call.sink
        return (source is None or self._roll.answers[source] == process) and sink in (None, position)


def pass_over(call: Call, group: Group) -> None:
    """Results of a call that the others have made long ago, as if all had given this process's inputs; none where that
    is no answer."""
    of_one = (call.source, call.sink) != (None, None)
    if isinstance(call, AllToAll) or (of_one and group.me not in (call.source, call.sink)):
        return
    own = call.gives(group.me)
    with torch.no_grad():
        call.take([own] * len(group.ranks))


def _length(data: torch.Tensor) -> torch.Tensor:
    return torch.tensor([data.numel()])


def _peers(home: Process, place: Place, among: Collection[Worker]) -> list[int]:
    """The ranks of the processes of ``among`` that are, or were, peers of ``home``."""
    return [place.ranks[worker][home.part or 0] for worker in sorted(among) if worker.stage == home.worker.stage]


def _homes(place: Place) -> Mapping[int, Process]:
    """Each rank's worker and part."""
    return {rank: Process(worker, part) for worker, ranks in place.ranks.items() for part, rank in enumerate(ranks)}
