"""Collectives of the script's own between two iterations, through failures.

A worker makes one at a time, in its training thread. Calls of a group are numbered by the iteration that they follow
and their order after it: so joiners agree with the others without a message. After a failure all workers report which
call they are in, and whether they have all the data to end it: see
:mod:`megatron_recycle.runtime.comm.user_collectives.exchange`. Small results are kept, and given to joiners, whose
scripts make the same calls on their way: see :mod:`megatron_recycle.runtime.missed_calls`.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Collection

import torch

from megatron_recycle.errors import UnsupportedError
from megatron_recycle.observe.log import get_logger
from megatron_recycle.runtime.comm.comm import Pending
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.user_collectives.calls import Call, Given
from megatron_recycle.runtime.comm.user_collectives.exchange import Exchange, Group, Roll, pass_over
from megatron_recycle.runtime.missed_calls import Missed
from megatron_recycle.runtime.phases import Phase
from megatron_recycle.runtime.place import Place

_CALLS = 2**20
"""Limit to the calls of a group after one iteration."""


class _Made:
    """A call that is being made.

    ``number``: of it, in its group. ``exchange``: has all the data to end the call; None: yet to be made.
    ``refused``: why the call cannot have its right values.
    """

    def __init__(self, group: Group, call: Call, number: int) -> None:
        self.group, self.call, self.number = group, call, number
        self.exchange: Exchange | None = None
        self.refused: UnsupportedError | None = None
        self.done = self.logged = False

    @property
    def key(self) -> tuple[float, float]:
        """The call's identity, the same on all members."""
        return _key(self.group.name), float(self.number)


class Collectives:
    """The script's calls on one worker.

    Args:
        place: position, grid, ranks.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._after = -1
        self._counts: dict[str, int] = {}
        self._ready: dict[float, int] = {}
        """By a group's key: the last call whose data this worker has had in full."""
        self._now: _Made | None = None
        self._log: list[_Made] = []
        """Calls since the last iteration, in groups of one pipeline, as they were: for members of other pipelines'
        groups that may come to them later."""
        self._answers: list[Pending] = []
        self._tries: Counter[tuple[int, str]] = Counter()
        """Number of calls that are given up with the generation: by its number, and the group."""
        self._logged: set[str] = set()
        self._missed = Missed(place)

    def begin(self, group: Group, call: Call, after: int) -> None:
        """The script makes ``call``; ``after``: the last iteration that it has trained."""
        if after != self._after:
            self._after = after
            self._counts.clear()
            self._log.clear()
        count = self._counts[group.name] = self._counts.get(group.name, 0) + 1
        if count >= _CALLS:
            raise OverflowError(f"the script calls more than {_CALLS} collectives of a group between two iterations")
        self._now = _Made(group, call, (after + 1) * _CALLS + count)

    def attempt(self, groups: Groups, enter: Callable[[Phase], None]) -> None:
        """Make the call, or the rest of it, among the live members; ``enter`` is called with its phases.

        Raises GenerationOver.
        """
        now = self._now
        assert now is not None
        if now.done:
            return
        if now.number <= self._missed.passed.get(now.key[0], 0.0):
            self._note(now, groups)
            self.pass_over()
            return
        if now.exchange is None:
            roll = Roll.of(now.group, self._place, groups.members)
            try:
                roll.check(now.call)
            except UnsupportedError as error:
                now.refused, now.done = error, True
                return
            self._say(roll.stands_in(now.call, groups.control.rank))
            enter(Phase.COLLECTIVE)
            self._note(now, groups)
            exchange = _exchange(now.call, roll, groups, now.number)
            exchange.collect()
            now.exchange = exchange
            self._ready[now.key[0]] = now.number
            enter(Phase.COLLECTED)
            exchange.confirm()
        self._finish(now)

    def _finish(self, now: _Made) -> None:
        """End the call, and keep its results for workers that come in later."""
        assert now.exchange is not None
        now.exchange.finish()
        now.done = True
        self._missed.note(now.group, now.number, now.call)

    def _note(self, now: _Made, groups: Groups) -> None:
        """Log the data that ``now`` gives, and give it to other pipelines' groups that this worker answers for."""
        if not now.logged and now.group.pipeline(self._place) is not None:
            now.logged = True
            self._log.append(_Made(now.group, Given(now.call, len(now.group.ranks)), now.number))
            self._answer(self._log[-1], groups)

    def _say(self, text: str | None, kind: str = "") -> None:
        """Log a warning once; of a ``kind``, only the first."""
        if text is not None and (kind or text) not in self._logged:
            self._logged.add(kind or text)
            get_logger().warning("megatron-recycle: %s", text)

    def pass_over(self) -> None:
        """The others made the call long ago, while this worker was out: it gets their results, as far as these are
        known."""
        now = self._now
        assert now is not None
        now.done = True
        if reason := self._missed.recall(now.group, now.number, now.call):
            pass_over(now.call, now.group)
            if now.call.results() != ():
                self._say(f"the script's {now.call.what}() after iteration {self._after} was over when this worker "
                          f"came in, and {reason}. It brings what it would if all ranks had given the same as this "
                          "one, if anything",
                          now.call.what + reason)

    def once(self, group: Group, call: Call, groups: Groups, generation: int) -> None:
        """Make ``call``, or give it up with the ``generation``. Raises GenerationOver, and UnsupportedError."""
        tries = self._tries[generation, group.name] + 1
        self._tries = Counter({key: count for key, count in self._tries.items() if key[0] == generation})
        self._tries[generation, group.name] = tries
        roll = Roll.of(group, self._place, groups.members)
        roll.check(call)
        # Below all numbers of `begin`.
        exchange = _exchange(call, roll, groups, -generation * _CALLS - tries)
        exchange.collect()
        exchange.confirm()
        exchange.finish()

    def end(self) -> None:
        """The script gets its results. Raises UnsupportedError if there are none."""
        now, self._now = self._now, None
        if now is not None and now.refused is not None:
            raise now.refused

    def _answer(self, made: _Made, groups: Groups) -> None:
        """Give the data of ``made`` to other pipelines' groups, too, where this worker answers for a lost one."""
        for pipeline in range(self._place.grid.pipelines):
            group = made.group.of_pipeline(pipeline, self._place)
            roll = Roll.of(group, self._place, groups.members)
            if roll.is_empty(group.me) and roll.answers[group.me] == groups.control.rank:
                self._answers += _exchange(made.call, roll, groups, made.number).answer()

    def reconcile(self, groups: Groups, joined: Collection[int] = (), back: Collection[int] = ()) -> None:
        """After a failure: find out which calls under way can be ended, and answer for lost members. ``joined``:
        processes that come in; ``back``: those of them that come in where others are already, and go on from there.
        Raises GenerationOver."""
        self._find_out(groups, back)
        if self._now is not None and not self._now.done and self._now.exchange is not None:
            self._finish(self._now)  # all have the data to end it
        if back:
            self._missed.tell_passed(groups, self._begun(), groups.control.rank in back)
        if joined:
            self._missed.tell(groups, joined)
        self._answers.clear()
        for made in self._log:
            self._answer(made, groups)

    def _begun(self) -> dict[float, float]:
        """By a group's key, the last call made since the last iteration."""
        now = self._now
        begun = {_key(name): float((self._after + 1) * _CALLS + count) for name, count in self._counts.items()}
        if now is not None and not now.done:
            begun[now.key[0]] = float(now.number - 1)
        return begun

    def _find_out(self, groups: Groups, back: Collection[int]) -> None:
        comm, now = groups.control, self._now
        mine = now.key if now is not None and not now.done else (0.0, 0.0)
        table = torch.zeros(comm.size, 2, dtype=torch.float64)
        table[comm.rank] = torch.tensor(mine, dtype=torch.float64)
        comm.sum(table).wait()
        under_way = sorted({(key, number) for key, number in table.tolist() if key})
        if not under_way:
            return
        have = torch.zeros(comm.size, len(under_way), dtype=torch.float64)
        have[comm.rank] = torch.tensor([float(self._ready.get(key, 0) >= number) for key, number in under_way],
                                       dtype=torch.float64)
        comm.sum(have).wait()
        if now is None or now.done:
            return
        living = Roll.of(now.group, self._place, groups.members).living
        if not all(bool(have[process, under_way.index(now.key)]) for process in living if process not in back):
            now.exchange = None
            self._ready[now.key[0]] = min(self._ready.get(now.key[0], 0), now.number - 1)


def _exchange(call: Call, roll: Roll, groups: Groups, number: int) -> Exchange:
    return Exchange(call, roll, groups.control, zlib.crc32(f"{roll.group.name}/{number}".encode()))


def _key(name: str) -> float:
    return float(zlib.crc32(name.encode()) + 1)
