"""Extensions: additions of a feature to the path of a failure. Pure, like `machine`.

The core is the paper's case: a worker dies, its peers take over, and processes come in at a boundary. It names no
feature. At the places left for features it asks the extensions in force, in order; `extensions` lists them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from megatron_recycle.membership.decisions import Decision, Step
from megatron_recycle.membership.description import Description, Job
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.inputs import Exited, Raised
from megatron_recycle.membership.protocol import Carry
from megatron_recycle.membership.resume import DeadEnd, Resume
from megatron_recycle.membership.state import Event, Member, State
from megatron_recycle.plan.plan_file import PlanFile

Handler = Callable[[State, Any, float], Step]
Answer = TypeVar("Answer")


class Extension:
    """A feature of the coordinator's half. Each method has a neutral answer: the job trains without the feature.

    All methods are functions of their arguments alone. A feature's memory is in fields of `State`.
    """

    handlers: ClassVar[Mapping[type, Handler]] = MappingProxyType({})
    """Input -> its handler. It may replace the core's; an input without a handler changes nothing."""

    # When the job begins

    def described(self, job: Job, descriptions: Mapping[str, Description]) -> Job:
        """``job`` with this feature's conclusions from all descriptions."""
        return job

    # A process fails

    def not_started(self, state: State, happened: Exited, now: float) -> Step:
        """An unknown process has ended."""
        return state, ()

    def raised(self, state: State, member: Member, happened: Raised, now: float) -> Step | None:
        """The answer to a member's error, in place of the core's."""
        return None

    # The next generation

    def ends(self, state: State, lost: Mapping[str, FailureKind]) -> str | None:
        """Why the loss of these members ends this life of the job, without a full stop."""
        return None

    def of_generation(self, state: State, lost: Mapping[str, FailureKind],
                      joined: Mapping[str, Member]) -> Mapping[str, Any]:
        """Fields of the state in the generation after ``state``'s, without ``lost`` and with ``joined``."""
        return {}

    def plan_by(self, state: State) -> str | None:
        """The policy of the next plan. None: the job's."""
        return None

    def fallback(self, state: State) -> str | None:
        """The policy to plan by after failed recoveries. None: there is no other."""
        return None

    def may_return(self, state: State) -> bool:
        """Whether a stage without a holder may come back."""
        return False

    def waits(self, state: State) -> bool:
        """Whether the survivors wait for a process of such a stage, without a plan."""
        return False

    def about_loss(self, state: State) -> str:
        """Sentences on why such a stage does not come back, each behind a space."""
        return ""

    def instead_of_end(self, state: State, text: str, now: float) -> Step | None:
        """The step before the job ends with ``text`` for lack of a stage."""
        return None

    # The go

    def resume(self, state: State, closed: Sequence[int] = ()) -> Resume | DeadEnd | None:
        """The resume point, in place of `resume.decide`'s. With ``closed`` stages, whose scripts have left the
        iteration that all would have to repeat: the way back of all."""
        return None

    def leaving(self, state: State) -> Sequence[str]:
        """Members that will leave without having asked to."""
        return ()

    def carried(self, state: State, resume: Resume) -> tuple[Resume, Carry] | None:
        """The kept part of the iteration that ``resume`` begins, and ``resume`` with its number of lost actions."""
        return None

    def of_go(self, state: State) -> Mapping[str, Any]:
        """Fields of the `Go`."""
        return {}

    def went(self, state: State, resume: Resume, now: float) -> tuple[State, Sequence[Event]]:
        """The state with the go, and the events to emit with it. ``state.go`` and ``state.resume`` are still the last
        ones."""
        return state, ()

    # Training

    def takes(self, state: State, plan: PlanFile) -> bool:
        """Whether the members can adopt this better plan."""
        return True

    def seek(self, state: State) -> Sequence[Decision]:
        """Searches to begin once all members train."""
        return ()

    def going(self, state: State) -> Mapping[str, FailureKind]:
        """Members that may leave at the next boundary without having asked to."""
        return {}

    def of_joined(self, state: State, name: str) -> Mapping[str, Any]:
        """Fields of the event that the member ``name`` holds its stage's state."""
        return {}

    # Each step

    def after(self, before: State, state: State, decisions: tuple[Decision, ...], now: float) -> Step:
        """A postprocessing of the step from ``before`` to ``state``, with its decisions."""
        return state, decisions


IN_FORCE: list[Extension] = []
"""The extensions that the core asks, in this order: those of `extensions`, put here by `machine`. Tests remove some."""


def first(answers: Iterable[Answer | None]) -> Answer | None:
    """The first answer that is not None."""
    return next((answer for answer in answers if answer is not None), None)


def merged(fields: Iterable[Mapping[str, Answer]]) -> dict[str, Answer]:
    """All extensions' fields; for a repeated name the later extension's."""
    return {name: value for each in fields for name, value in each.items()}
