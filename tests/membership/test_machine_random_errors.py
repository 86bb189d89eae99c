"""Random interleavings on paper with errors of scripts and data among what goes wrong.

A worker that has met an error waits in it, and says nothing else, until it is answered or told the end. Errors of a
micro-batch come up again wherever that is run; the job leaves it out, or ends after a last checkpoint.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as some
from hypothesis.stateful import invariant, precondition, rule

from megatron_recycle.membership import inputs
from megatron_recycle.membership.fault import Fault
from megatron_recycle.membership.protocol import Go
from tests.membership.cluster import described
from tests.membership.test_machine_random import ACTS, GRID, PIPELINES, Act, Process, Protocol, _pick, campaign

OWN_WORDS = ("fails on every worker: ValueError: corrupt", "have failed alike", "the last worker of stage")


class Errors(Protocol):
    policy = "stop"

    def __init__(self) -> None:
        self.waits: dict[str, inputs.Raised] = {}
        self.saved: dict[str, inputs.Saved] = {}
        self.poison: set[tuple[int, str]] = set()
        self.numbers = 0
        super().__init__()

    def _say_ready(self, process: Process) -> None:
        description = {"grid": GRID, "emergency": True, "poison": self.policy}
        process.outbox.append(inputs.Ready(process.member.incarnation, described(description), process.report()))

    def _connect(self, process: Process) -> None:
        super()._connect(process)
        if process.name in self.waits:
            kept = [one for one in process.outbox if not isinstance(one, inputs.Reported)]
            process.outbox.clear()
            process.outbox.extend([*kept, self.waits[process.name]])
        if process.name in self.saved:
            process.outbox.append(self.saved[process.name])

    def _able(self) -> list[Process]:
        """Those that are about to work on an iteration."""
        return self._those(lambda p: p.running and p.computed == p.stepped and not self._closes(p))

    @precondition(lambda self: self.troubles and self._able())
    @rule(data=some.data(), pipeline=some.integers(0, PIPELINES - 1), inside=some.booleans())
    def script_raises(self, data: Any, pipeline: int, inside: bool) -> None:
        """In an action, or in its own code between two iterations."""
        process = self._some(data, self._able())
        self.troubles -= 1
        self._raise(process, f"F{pipeline}.0" if inside else None)

    @precondition(lambda self: self._meets_again())
    @rule(data=some.data())
    def another_worker_meets_the_same(self, data: Any) -> None:
        name, action = _pick(data, self._meets_again())
        self._raise(self.processes[name], action)

    def _meets_again(self) -> list[tuple[str, str]]:
        return [(process.name, action) for process in self._able() for iteration, action in sorted(self.poison)
                if process.stepped + 1 == iteration]

    def _raise(self, process: Process, action: str | None) -> None:
        iteration = process.stepped + (action is not None)
        fault = Fault("ValueError", "corrupt", iteration, action, whole=True)
        assert process.go is not None
        if (iteration, fault.microbatch) in process.go.left_out:
            self.poison.discard((iteration, action or ""))
            return  # nobody runs it
        if action is not None:
            self.poison.add((iteration, action))
        self.numbers += 1
        process.running = False
        self.waits[process.name] = inputs.Raised(process.member.incarnation, fault, self.now, self.numbers)
        process.outbox.append(self.waits[process.name])

    def _hear(self, process: Process) -> None:
        if process.name not in self.waits:
            super()._hear(process)
            self._may_save(process)
            return
        message = process.inbox.popleft()
        if message.type == "end":
            process.ended = True
            del self.waits[process.name]
        elif message.type == "stop":
            process.stop = max(process.stop, message.generation)
        elif message.type == "answer" and message.number == self.waits[process.name].number:
            del self.waits[process.name]
            assert process.stop > process.generation, "it goes on in a generation that it has heard of"
            self._stand_still(process)
            process.outbox.append(inputs.Reported(process.member.incarnation, process.stop, process.report()))

    def _closes(self, process: Process) -> bool:
        return process.go is not None and process.go.closing is not None

    def _act(self, process: Process) -> None:
        super()._act(process)
        self._may_save(process)

    def _may_save(self, process: Process) -> None:
        if process.running and self._closes(process):
            process.running = False
            self.saved[process.name] = inputs.Saved(process.member.incarnation, process.generation, "here", "")
            process.outbox.append(self.saved[process.name])

    def _check_go(self, go: Go) -> None:
        again = go.generation in self.announced
        super()._check_go(go)
        assert again or not set(self.waits) & set(go.members), "told to go while it waits for an answer"

    @invariant()
    def a_job_ends_only_for_want_of_a_stage_or_of_a_network(self) -> None:
        if self.end is None:
            return
        if any(words in self.end.message for words in OWN_WORDS):
            assert "is saved in here" in self.end.message or "Last committed iteration" in self.end.message
        else:
            super().a_job_ends_only_for_want_of_a_stage_or_of_a_network()


class Skipping(Errors):
    policy = "skip"


RAISES: tuple[Act, ...] = (
    (4, lambda p: p.troubles and p._able(),
     lambda p, dice: p.script_raises(dice, dice.randrange(2), dice.random() < 0.8)),
    (5, lambda p: p._meets_again(), lambda p, dice: p.another_worker_meets_the_same(dice)),
)


@pytest.mark.parametrize(("kind", "event"), [(Errors, "saved"), (Skipping, "skipped")])
def test_seeded_campaigns_with_errors(kind: type[Errors], event: str) -> None:
    told = 0
    for seed in range(20, 45):
        job = campaign(kind, seed, (*ACTS, *RAISES))
        told += any(each["event"] == event for each in job.told)
    assert told, "this campaign does not get there"
