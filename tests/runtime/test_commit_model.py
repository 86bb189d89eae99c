"""The commit protocol as a model: random interleavings of work, steps, verdicts, deaths and recoveries.

The workers here are the rules of `runtime.stepper` without tensors; the decision is the real `resume.decide`.
A worker's parameters are the list of updates made to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megatron_recycle.membership.resume import Resume, decide

Update = tuple[int, str]


@dataclass
class Model:
    """One worker. ``kept`` is the iteration whose reduced gradient it keeps, ``snapshot`` what undo puts back."""

    updates: list[Update] = field(default_factory=list)
    committed: int = -1
    kept: int | None = None
    snapshot: list[Update] | None = None
    contributed: int = -1
    verdict: dict[str, Any] | None = None

    @property
    def stepped(self) -> int:
        return len(self.updates) - 1

    def step(self, coefficient: str) -> None:
        assert self.kept == len(self.updates), "a step is made of the iteration that is held, once"
        self.updates.append((self.kept, coefficient))

    def undo(self) -> None:
        assert self.snapshot is not None and self.committed < self.stepped, "only a step that is not final is undone"
        self.updates, self.snapshot = self.snapshot, None

    def settle(self, verdict: dict[str, Any]) -> None:
        iteration, right = verdict["iteration"], verdict["right"]
        if self.stepped == iteration and self.updates[-1][1] != right:
            self.undo()
        if self.stepped < iteration:
            self.step(right)
        assert self.updates[iteration] == (iteration, right)
        self.committed, self.verdict, self.kept, self.snapshot = iteration, verdict, None, None

    def report(self) -> dict[str, Any]:
        holds = self.kept if self.kept is not None else self.committed
        return {"iteration": self.stepped + 1, "attempt": 1, "holds": holds, "stepped": self.stepped,
                "committed": self.committed, "verdict": self.verdict, "actions": 0}


def some_of(live: Mapping[str, Model]) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(sorted(live)), min_size=1, max_size=len(live), unique=True)


class CommitProtocol(RuleBasedStateMachine):

    @initialize(pipelines=st.integers(2, 5), stages=st.integers(1, 3), early=st.booleans())
    def start(self, pipelines: int, stages: int, early: bool) -> None:
        self.stages, self.early = stages, early
        self.live = {f"{d}:{s}": Model() for d in range(pipelines) for s in range(stages)}
        self.broken = False
        self.final: list[Update] = []
        self.right: dict[int, str] = {}

    def peers(self, name: str) -> list[Model]:
        return [model for other, model in self.live.items() if other.split(":")[1] == name.split(":")[1]]

    def going(self) -> bool:
        return bool(getattr(self, "live", None)) and not self.broken

    @precondition(going)
    @rule(data=st.data())
    def contribute(self, data: st.DataObject) -> None:
        """A worker ends its part of an iteration: every worker had to step the one before to get that far, and it
        knows the verdict on that one before it reduces."""
        for name in data.draw(some_of(self.live)):
            model = self.live[name]
            following = model.stepped + 1
            if model.committed == model.stepped and all(m.stepped >= following - 1 for m in self.live.values()):
                model.contributed = following

    @precondition(going)
    @rule()
    def contribute_everywhere(self) -> None:
        """As above, on every worker that can: most of the time nothing is in the way."""
        for model in self.live.values():
            if model.committed == model.stepped and all(m.stepped >= model.stepped for m in self.live.values()):
                model.contributed = model.stepped + 1

    @precondition(going)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        """The reduction completes on some workers, maybe not yet on their peers."""
        for name in data.draw(some_of(self.live)):
            model = self.live[name]
            following = model.stepped + 1
            if model.kept is None and all(peer.contributed >= following for peer in self.peers(name)):
                model.kept = following
                self.right.setdefault(following, data.draw(st.sampled_from(["1", "1", "0.5"])))
                if self.early:
                    model.snapshot = list(model.updates)
                    model.step("1")

    @precondition(going)
    @rule(data=st.data())
    def learn(self, data: st.DataObject) -> None:
        """The commit completes on some workers: all hold the iteration, or are even further."""
        for name in data.draw(some_of(self.live)):
            model = self.live[name]
            if model.kept is not None and all(
                    other.kept == model.kept or other.committed >= model.kept for other in self.live.values()):
                model.settle({"iteration": model.kept, "right": self.right[model.kept]})

    @precondition(lambda self: any(model.kept is not None for model in getattr(self, "live", {}).values()))
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """While somebody keeps a gradient: at any other time nothing is at stake."""
        name = data.draw(st.sampled_from(sorted(self.live)))
        if len(self.peers(name)) > 1:
            del self.live[name]
            self.broken = True

    @precondition(lambda self: getattr(self, "broken", False))
    @rule()
    def recover(self) -> None:
        reports = {name: model.report() for name, model in self.live.items()}
        resume = decide(self.stages, dict.fromkeys(self.live, "incarnation"), reports)
        assert isinstance(resume, Resume), resume
        for name, model in self.live.items():
            if model.stepped > resume.target:
                model.undo()
            if model.kept is not None and model.kept > resume.target:
                model.kept = None
            if name in resume.copies:
                giver = self.live[resume.copies[name]]
                assert giver.kept == resume.target, "the giver still has what it gives"
                model.kept = resume.target
        verdict = resume.verdict or {"iteration": resume.target, "right": self.right.get(resume.target, "1")}
        for model in self.live.values():
            if model.committed < resume.target:
                model.settle(dict(verdict))
            assert model.stepped == model.committed == resume.target
            model.contributed = resume.target
        self.broken = False

    @invariant()
    def what_is_final_stays(self) -> None:
        for model in getattr(self, "live", {}).values():
            done = model.updates[:model.committed + 1]
            assert done == self.final[:len(done)] or self.final == done[:len(self.final)]
            self.final = max(self.final, done, key=len)

    @invariant()
    def nobody_is_more_than_a_step_ahead(self) -> None:
        stepped = [model.stepped for model in getattr(self, "live", {}).values()]
        assert not stepped or max(stepped) - min(stepped) <= 1

    @invariant()
    def no_update_is_made_twice(self) -> None:
        for model in getattr(self, "live", {}).values():
            assert [iteration for iteration, _ in model.updates] == list(range(len(model.updates)))


CommitProtocol.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestCommitProtocol = CommitProtocol.TestCase
