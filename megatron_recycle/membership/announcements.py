"""Announcements of the coordinator to a worker, as values: a generation is over, another goes on, the job has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_recycle.membership.resume import Resume


@dataclass(frozen=True)
class Stop:
    """Generations below `generation` are over; `role` is "member" for those that go on in it, else "outside".
    `missing` positions have nobody."""

    generation: int
    role: str
    missing: int

    @classmethod
    def read(cls, message: Mapping[str, Any]) -> Stop:
        """From a checked message."""
        return cls(message["generation"], message["role"], message["missing"])


@dataclass(frozen=True)
class Go:
    """The go of `generation`. `plan` is a plan file's content, `prefix` the store prefix of its groups. With
    `closing` it does not train: the job ends with these words, once its members have said `saved`."""

    generation: int
    attempt: int
    members: Mapping[str, str]
    plan: Mapping[str, Any]
    resume: Resume
    prefix: str
    closing: str | None = None
    left_out: Sequence[tuple[int, str]] = ()
    """Iterations and their micro-batches (``1.3``) that the job goes on without."""
    keepers: Mapping[str, str] = field(default_factory=dict)
    """By stage with one worker, the worker of another stage that keeps a copy of it."""
    without: Sequence[int] = ()
    """Pipelines whose micro-batches are not run."""
    carried: Mapping[str, Any] | None = None
    """What of the iteration that is begun goes on where it stood; see `policies.carried`."""
    tries: int = 0
    """Generations with the same members in a row before this one, without progress."""
    writers: Sequence[str] = ()
    """The job ends without the stages ``missing``: these processes save what they hold, and nobody connects."""
    missing: Sequence[int] = ()

    @classmethod
    def read(cls, message: Mapping[str, Any]) -> Go:
        """From a checked message."""
        alone = {name: message[name] for name in ("writers", "missing") if name in message}
        names = ("generation", "attempt", "members", "plan", "prefix", "tries", "closing", "left_out", "keepers",
                 "without", "carried")
        return cls(resume=Resume.from_json(message["resume"]), **{name: message[name] for name in names}, **alone)


@dataclass(frozen=True)
class Ended:
    """The job is over, or goes on without this process."""

    status: int
    message: str
