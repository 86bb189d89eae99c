"""Interface of a policy: it gets changes, and says how training goes on. The clock and all counting are `run`'s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from megatron_recycle.tools.simulate.cluster import Change, Cluster, Unit
from megatron_recycle.tools.simulate.job import Job
from megatron_recycle.tools.simulate.plans import Figures, Plans

NEVER = float("inf")


class Cause:
    """Names of the causes that time is spent on."""

    USEFUL, REDONE, ROLLED_BACK, STOPPED, UNFINISHED = "useful", "redone", "rolled back", "stopped", "unfinished"
    CHECKPOINT, RECOVERY, REJOIN, RESTART, RECONFIGURE = "checkpoint", "recovery", "rejoin", "restart", "reconfigure"


@dataclass(frozen=True)
class Course:
    """Iterations take ``period`` seconds, the first one ``first``, and have ``samples`` samples. ``period`` infinite:
    training stands, since too few workers are left."""

    period: float
    first: float
    samples: int

    @classmethod
    def of(cls, figures: Figures, samples: int) -> Course:
        return cls(figures.period, figures.makespan, samples)


STANDS = Course(NEVER, NEVER, 0)


@dataclass(frozen=True)
class Answer:
    """How training goes on from now.

    Attributes:
        course: None: as before.
        pauses: causes and seconds without computation, one after the other.
        again: the share of the done part of the iteration in flight that is redone; 1: it is begun anew.
        back: training goes back to the last `saved` point.
        saved: a later `back` leads to the present point.
        fatal: the job could not go on in its processes.
        survived: losses that were got over without going back.
        wakes: (seconds from now, token): the policy is woken then. All earlier wakes are kept.
        boundary: the policy is woken at the end of the iteration in flight, with the token "boundary"; so it is after
            a checkpoint.
        said: for people, of now; it goes on after the policy's name.
    """

    course: Course | None = None
    pauses: tuple[tuple[str, float], ...] = ()
    again: float = 0.0
    back: bool = False
    saved: bool = False
    fatal: bool = False
    survived: int = 0
    wakes: tuple[tuple[float, object], ...] = ()
    boundary: bool = False
    said: str = ""


@dataclass(frozen=True)
class Setting:
    """A policy's knowledge at the start, the same as an operator's. ``mtbf``: mean seconds between failures. ``whole``:
    whether the cluster will have workers for the whole grid, now or later."""

    job: Job
    cluster: Cluster
    plans: Plans
    units: Sequence[Unit]
    """The live units at the start."""
    mtbf: float
    whole: bool = True


class Policy:
    """One way to deal with failures; a policy without answers trains on as it began. It is made anew for every run.

    Attributes:
        save_takes, save_every: seconds that a checkpoint takes, and between two of them. They are written between two
            iterations (`run`).
    """

    name: ClassVar[str]
    setting: Setting
    save_takes: float = 0.0
    save_every: float = NEVER

    def begin(self, setting: Setting) -> Answer:
        """Training begins with the setting's units."""
        raise NotImplementedError

    def changed(self, change: Change, iteration: int) -> Answer:
        """Units are lost or gained; so many iterations are committed."""
        return Answer()

    def woken(self, now: float, token: object, iteration: int) -> Answer:
        """A requested wake, or all stand between two iterations (token "boundary")."""
        return Answer()
