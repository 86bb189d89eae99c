"""The commit protocol as a model: random interleavings of work, steps, verdicts, deaths and recoveries.

The workers here do what `Standing` says, without tensors; the decision is the real `resume.decide`. A worker's
parameters are the list of updates made to them.
"""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megatron_recycle.membership.resume import Resume, decide
from tests.membership.paper import GUESS, Paper, Update, verdict
from tests.seeds import examples


class Model(Paper):
    """One worker, in the middle of an attempt at the iteration after the last that it has stepped."""

    def __init__(self, name: str, early: bool) -> None:
        super().__init__(name, early)
        self.contributed = -1
        self.generation = 0
        self.join()

    def join(self) -> None:
        self.generation += 1
        self.standing.join(self.generation)

    @property
    def stepped(self) -> int:
        return self.standing.stepped

    @property
    def kept(self) -> int | None:
        return self.standing.held

    def contribute(self) -> None:
        if not self.standing.under_way:
            self.standing.begin(self.stepped + 1)
        self.contributed = self.standing.iteration


def some_of(live: Mapping[str, Model]) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(sorted(live)), min_size=1, max_size=len(live), unique=True)


class CommitProtocol(RuleBasedStateMachine):

    @initialize(pipelines=st.integers(2, 5), stages=st.integers(1, 3), early=st.booleans())
    def start(self, pipelines: int, stages: int, early: bool) -> None:
        self.stages, self.early = stages, early
        self.live = {f"{d}:{s}": Model(f"{d}:{s}", early) for d in range(pipelines) for s in range(stages)}
        self.broken = False
        self.final: list[Update] = []
        self.right: dict[int, float] = {}

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
            if self.can_contribute(model):
                model.contribute()

    @precondition(going)
    @rule()
    def contribute_everywhere(self) -> None:
        """As above, on every worker that can: most of the time nothing is in the way."""
        for model in self.live.values():
            if self.can_contribute(model):
                model.contribute()

    def can_contribute(self, model: Model) -> bool:
        return model.standing.committed == model.stepped > model.contributed - 1 and model.kept is None and all(
            other.stepped >= model.stepped for other in self.live.values())

    @precondition(going)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        """The reduction completes on some workers, maybe not yet on their peers."""
        for name in data.draw(some_of(self.live)):
            model = self.live[name]
            following = model.stepped + 1
            if model.contributed == following and model.kept is None and all(
                    peer.contributed >= following for peer in self.peers(name)):
                self.right.setdefault(following, data.draw(st.sampled_from([GUESS, GUESS, 0.5])))
                model.hold(following)

    @precondition(going)
    @rule(data=st.data())
    def learn(self, data: st.DataObject) -> None:
        """The commit completes on some workers: all hold the iteration, or are even further."""
        for name in data.draw(some_of(self.live)):
            model = self.live[name]
            kept = model.kept
            if kept is None or any(other.standing.holds < kept for other in self.live.values()):
                continue
            if model.settle(verdict(kept, self.right[kept])):
                model.standing.roll_back()
                model.standing.renew()

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
        reports = {name: model.standing.report() for name, model in self.live.items()}
        resume = decide(self.stages, dict.fromkeys(self.live, "incarnation"), reports)
        assert isinstance(resume, Resume), resume
        for model in self.live.values():
            model.standing.give_up()
            model.join()
        todo = {name: model.go_back(resume) for name, model in self.live.items()}
        for name, source in resume.copies.items():
            assert self.live[source].kept == resume.target, "the giver still has what it gives"
            self.live[name].standing.receive(resume.target)
        known = verdict(resume.target, self.right.get(resume.target, GUESS))
        assert resume.verdict in (None, known)
        assert len({each.anew for each in todo.values()}) == 1, "a commit takes all"
        for name, model in self.live.items():
            if todo[name].anew or todo[name].verdict is not None:
                model.settle(known)
            model.standing.go_on(resume)
            model.contributed = resume.target
        self.broken = False

    @invariant()
    def what_is_final_stays(self) -> None:
        for model in getattr(self, "live", {}).values():
            done = model.updates[:model.standing.committed + 1]
            assert done == self.final[:len(done)] or self.final == done[:len(self.final)]
            self.final = max(self.final, done, key=len)

    @invariant()
    def nobody_is_more_than_a_step_ahead(self) -> None:
        stepped = [model.stepped for model in getattr(self, "live", {}).values()]
        assert not stepped or max(stepped) - min(stepped) <= 1

    @invariant()
    def no_update_is_made_twice(self) -> None:
        for model in getattr(self, "live", {}).values():
            assert [iteration for iteration, _ in model.updates] == list(range(model.stepped + 1))


CommitProtocol.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=60, deadline=None)
TestCommitProtocol = CommitProtocol.TestCase
