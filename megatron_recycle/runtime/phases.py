"""The training thread's phases: the one place that receives every phase, and passes it to all listeners."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Any, NamedTuple, Protocol

from megatron_recycle.control import Agent
from megatron_recycle.errors import LendingError, SaveError
from megatron_recycle.membership import Fault, Standing
from megatron_recycle.plan import Action
from megatron_recycle.runtime.activity import COPY, WAITING, WORKING, Activity


class Phase(str, Enum):
    """A phase begins; ``reduced`` and ``stepped``: something is done. Phases of actions come with the action."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"
    REDUCE = "reduce"
    REDUCED = "reduced"
    """The complete gradient is held."""
    STEP = "step"
    """The coefficient is chosen, the optimizer has not run."""
    STEPPED = "stepped"
    EVALUATE = "evaluate"
    """A forward of an evaluation; comes with the action."""
    SAVE = "save"
    """A checkpoint is about to be written."""
    SAVED = "saved"
    """All parts of a checkpoint are there; its name is not."""
    COLLECTIVE = "collective"
    """The script makes a collective of its own."""
    COLLECTED = "collected"
    """The worker has all the data that the collective takes, and waits for the others to have it."""
    BOUNDARY = "boundary"
    """The worker stands between two iterations and waits for workers that come in or leave."""
    RECOVERING = "recovering"
    JOINING = "joining"


OF_ACTION = {"F": Phase.FORWARD, "B": Phase.BACKWARD, "W": Phase.WEIGHT, "FB": Phase.BACKWARD, "S": Phase.REDUCE}
"""The phase that an action of a kind begins. A full backward is a backward, and has no weight phase."""

_STEP = (Phase.REDUCE, Phase.REDUCED, Phase.STEP)  # phases in which an error is the step's
_NO_WORK = (Phase.RECOVERING, Phase.JOINING, Phase.BOUNDARY, Phase.STEP, Phase.STEPPED, Phase.SAVE, Phase.SAVED,
            Phase.COLLECTIVE, Phase.COLLECTED)
"""Phases that are no work, or whose work has a block of its own."""


def _full(error: BaseException) -> bool:
    """Whether memory ran out, on the host or on a device."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


class Observer(Protocol):
    """Called at every `Phase`, with its text."""

    def on(self, phase: str, iteration: int, action: Action | None) -> None: ...


class Observed(NamedTuple):
    """A phase that has been entered."""

    iteration: int
    attempt: int
    phase: Phase
    action: Action | None


class Phases:
    """The phases of one worker's training thread.

    Args:
        standing: where the worker stands.
        agent: notified once the first action of a generation begins; asks `where` the thread is.
        activity: follows the work of each phase.
        observer: called at everything; None: no observer.

    Attributes:
        running: the F, B, W or FB under way; kept after it has raised, until the worker stands still.
        writes: whether the stage's state is being written to; kept after that has raised.
    """

    def __init__(self, standing: Standing, agent: Agent, activity: Activity, observer: Observer | None) -> None:
        self.activity = activity
        self.running: Action | None = None
        self.writes = False
        self._standing = standing
        self._agent = agent
        self._observer = observer
        self._last: Observed | None = None
        self._resumes = False

    def enter(self, phase: Phase, iteration: int, action: Action | None = None, work: str | None = None) -> None:
        """``phase`` begins. ``work``: the work in it, where that takes other times than the phase usually does."""
        self.activity.at(iteration, action)
        if phase not in _NO_WORK:
            self.activity.work(work or phase.value)
        if phase is Phase.RECOVERING:
            self.running = None
        if phase in (Phase.RECOVERING, Phase.JOINING):
            self.activity.spans.failed()
        self._last = Observed(iteration, self._standing.attempt, phase, action)
        if action is not None:
            self.tell_resumed()
        if self._observer is not None:
            self._observer.on(phase.value, iteration, action)

    def where(self) -> dict[str, Any]:
        """The last phase, for the agent."""
        if self._last is None:
            return {}
        iteration, attempt, phase, action = self._last
        return {"iteration": iteration, "attempt": attempt, "phase": phase.value,
                "action": str(action) if action else None}

    def fault(self, error: BaseException, outside: bool = False) -> Fault:
        """``error`` in words for the coordinator, with the work under way; ``outside``: the script's own code has
        raised it."""
        if outside:
            return Fault.of(error, self._behind(), whole=True)
        if self.running is not None:
            return Fault.of(error, self._standing.iteration, str(self.running), whole=True,
                            recovery=_full(error) and self.running.pipeline != self._standing.me.worker.pipeline)
        if isinstance(error, (LendingError, SaveError)):  # before the attempt's first action, or between two
            return Fault.of(error, self._standing.iteration, whole=True)
        if self._last is not None and self._last.phase in _STEP:
            return Fault.of(error, self._last.iteration, "S")
        return Fault.of(error, self._behind())

    def _behind(self) -> int | None:
        """The last iteration that both the script and this worker have completed; None before any."""
        last = min(self._standing.asked, self._standing.stepped)
        return None if self._last is None or last < 0 else last

    def failed(self, error: BaseException) -> Fault:
        """As `fault`, for an ``error`` in a recovery."""
        return Fault.of(error, self._standing.iteration, None, whole=not self.writes, recovery=True)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A block that writes to the stage's state: if it raises, the state is unknown."""
        self.writes = True
        yield
        self.writes = False

    def resumes(self) -> None:
        """The next action, or its absence, is the first of a new generation."""
        self._resumes = True

    def tell_resumed(self) -> None:
        """The next action begins, or there is none left to begin."""
        if self._resumes:
            self._resumes = False
            self._agent.resumed(self._standing.epoch.generation)

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """A block in which the training thread waits for other workers or the coordinator."""
        return self.activity.during(WAITING, what)

    def working(self, what: str) -> AbstractContextManager[None]:
        """A block of work; the thread's previous activity goes on afterwards."""
        return self.activity.during(WORKING, what)

    def copying(self) -> AbstractContextManager[None]:
        """A block that copies a stage's state, which may take minutes: that training stands still meanwhile is no sign
        of a lost message."""
        return self.working(COPY)

    @contextmanager
    def doing(self, action: Action) -> Iterator[None]:
        """A block that runs this F, B, W or FB: its errors are that action's fault."""
        self.running = action
        yield
        self.running = None
