"""Checkpoints: the live workers write one together between two iterations, through failures.

All content of a checkpoint lives on every peer of a stage, so it is complete however many peers are gone. It is made in
three moves: all parts are written, beside the newest named checkpoint; the coordinator notes it; one worker names it.
Until the last move the previous checkpoint is the newest, whole, whatever happens. A failure on the way costs the files
written: the survivors write them again. A worker that has seen the end of a checkpoint is at most one ahead of others,
and reports that in the recovery, as after an evaluation.

A worker that cannot write a file (a full disk) has not failed: all agree that there is no such checkpoint, its files
are removed, and training goes on without (`on_failed_save`). In the framework's own code a worker that cannot write
leaves the others waiting in the midst of theirs: then a new generation frees them, and all agree at its first try.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from msgspec.structs import asdict

from megatron_recycle.errors import GenerationOver, JobEnded, RecycleError, SaveError
from megatron_recycle.membership import Standing
from megatron_recycle.membership.resume import Checkpoint
from megatron_recycle.membership.worker_events import SaveFailed
from megatron_recycle.observe.disk import unwritten
from megatron_recycle.observe.log import get_logger
from megatron_recycle.runtime.activity import COPY
from megatron_recycle.runtime.comm.comm import Comm, failing_ends, is_broken
from megatron_recycle.runtime.comm.reduction import count
from megatron_recycle.runtime.evaluation import LOSS_WIDTH
from megatron_recycle.runtime.facts import Facts, Past, Saved
from megatron_recycle.runtime.generation import Generation
from megatron_recycle.runtime.phases import Phase
from megatron_recycle.runtime.shard_moves import adopt
from megatron_recycle.runtime.site import Site
from megatron_recycle.runtime.state_copy import stage_tensors
from megatron_recycle.runtime.stepper import Stepper

_LONGEST = 1024
"""Bytes of a reason that is sent to all workers."""


class Whole(Protocol):
    """See `Save`."""

    def __call__(self, place: str, of: Written | None = None) -> None: ...


class Written(NamedTuple):
    """A checkpoint that was written earlier: its iteration, and its `Save.facts`."""

    iteration: int
    facts: Mapping[str, Any] | None


class NotWritten(SaveError):
    """The checkpoint cannot be written, as all members know, and why. ``first``: rank of the first of `many` members
    that cannot; ``noted``: its iteration, if the coordinator has noted it as whole all the same, or -1."""

    def __init__(self, reason: str, first: int, many: int, noted: int) -> None:
        super().__init__(reason)
        self.first, self.many, self.noted = first, many, noted


@dataclass
class Tries:
    """One worker's tries to write one checkpoint: ``why`` it could not, if the others may not know that; the iteration
    of the checkpoint that the coordinator has `noted` for it, or -1."""

    why: str | None = None
    noted: int = -1

    def agree(self, comm: Comm) -> None:
        """Return if all members of ``comm`` could write. Raises NotWritten, on all of them, and GenerationOver."""
        flags = torch.zeros(2, comm.size, dtype=torch.float64)
        flags[:, comm.rank] = torch.tensor([self.why is not None, self.noted + 1], dtype=torch.float64)
        comm.sum(flags).wait()
        failed = flags[0].nonzero().flatten().tolist()
        if not failed:
            return
        text = (self.why or "").encode()[:_LONGEST] if comm.rank == failed[0] else b""
        encoded = torch.tensor([*text, *bytes(_LONGEST - len(text))], dtype=torch.float64)
        comm.sum(encoded).wait()
        reason = bytes(map(int, encoded.tolist())).rstrip(b"\0").decode(errors="ignore")
        raise NotWritten(reason, failed[0], len(failed), int(flags[1].max()) - 1)


class Save(NamedTuple):
    """One try to write a checkpoint, in one generation.

    Attributes:
        generation: its members write.
        number: of the checkpoint (`Standing.passes`), the same on all members.
        whole: called by the worker that names the checkpoint, with its place, once all parts are written and before it
            is named; ``of``: the checkpoint, if another try has written it. Raises GenerationOver: then it must not be
            named.
        check: called between files. Raises GenerationOver if the files are of no use any more.
        alone: called with the reason why this worker cannot write its part, where others wait for it in the midst of
            theirs. Raises GenerationOver.
        tries: this one, and those before it.
        facts: needed by a job that goes back to it; None: no job can.
    """

    generation: Generation
    number: int
    whole: Whole
    check: Callable[[], None]
    alone: Callable[[str], None]
    tries: Tries
    facts: Mapping[str, Any] | None = None

    @contextmanager
    def all_write(self, place: str) -> Iterator[None]:
        """A block in which each member writes its own files, without waiting for others. Afterwards all members know
        whether all could. Raises NotWritten, on all of them, and GenerationOver."""
        try:
            yield
        except RecycleError:
            raise
        except Exception as error:
            self.tries.why = unwritten(error, place)
            if self.tries.why is None:
                raise
        self.tries.agree(self.generation.groups.control)

    @contextmanager
    def each_writes(self, place: str) -> Iterator[None]:
        """A block of the framework's code, in which members write files and wait for each other. Raises GenerationOver,
        also if a file cannot be written."""
        try:
            yield
        except RecycleError:
            raise
        except Exception as error:
            reason = unwritten(error, place)
            if reason is None:
                raise
            self.check()  # the end of the generation may be the cause
            self.alone(reason)

    @property
    def name(self) -> str:
        """A name that no other try has."""
        return _name(self.generation, self.number)


Write = Callable[[Save], bool]
"""Writes this worker's part, at the same time as all other members, and the checkpoint's name on one of them. Returns
whether a checkpoint of the current state was written, or begun. Raises GenerationOver, NotWritten, and the framework's
errors."""


def _name(generation: Generation, number: int) -> str:
    return f"{generation.store_prefix}.{number}"


def _facts(site: Site, standing: Standing, name: str) -> Mapping[str, Any] | None:
    if site.framework.restore is None or site.config.guard == "none" or standing.verdict is None:
        return None
    return Saved(standing.verdict, standing.mode, site.grids.told(), name).to_json()


def load(site: Site, generation: int,
         checkpoint: Checkpoint) -> tuple[dict[str, torch.Tensor], Callable[[Past], Facts]]:
    """Load this worker's part of a whole checkpoint of this run, at the same time as all others. Returns the stage's
    tensors and a function that makes the facts for `Stepper.enter`. Raises GenerationOver, also if the checkpoint
    cannot be read. That is reported to the coordinator: then all go back to an older one."""
    assert site.framework.restore is not None, "this job notes no checkpoint to go back to"
    stage, place = site.stage, checkpoint.place
    try:
        saved = Saved.from_json(checkpoint.facts)
        site.framework.restore(place, saved.name)
    except (GenerationOver, JobEnded):
        raise
    except Exception as error:  # any type: it is the framework's error about a damaged file
        if site.agent.stop_generation > generation or site.agent.ended is not None:
            raise GenerationOver("the generation ended before the checkpoint was loaded") from error
        own_error = isinstance(error, RecycleError)
        reason = str(error) if own_error else f"{type(error).__name__}: {error}"
        get_logger().error("megatron-recycle: the checkpoint in %s cannot be read here: %s", place, reason,
                           exc_info=None if own_error else error)
        site.agent.unreadable(generation, place, reason)
        raise GenerationOver(f"the checkpoint in {place} cannot be read") from error
    total = site.grids.of(checkpoint.iteration).total
    reports = torch.full((total, stage.report_width or LOSS_WIDTH), torch.nan)
    return stage_tensors(stage), lambda past: Facts(
        **asdict(past), counters=stage.counters(), verdict=saved.verdict, reports=reports, pace=saved.pace,
        grids=saved.grids, read={})


def save(site: Site, stepper: Stepper, write: Write, clear: Callable[[], None], tries: Tries) -> None:
    """One try. Returns when all parts are written and the checkpoint is named, or when all know that it cannot be
    written, and ``clear`` has removed this worker's files. Raises GenerationOver, ``write``'s errors, and SaveError if
    the job is to end for it."""
    began, standing, generation = time.monotonic(), stepper.standing, stepper.current.get()
    epoch, now, number = generation.epoch.generation, standing.committed, standing.passes
    facts = _facts(site, standing, _name(generation, number))

    def check() -> None:
        if site.interrupted(standing):
            raise GenerationOver("the generation ended before the checkpoint was written")

    def whole(place: str, of: Written | None = None) -> None:
        site.phases.enter(Phase.SAVED, standing.iteration)
        iteration, noted_facts = of or (now, facts)
        with site.phases.waiting("the manifest"):
            if not site.agent.written(epoch, iteration, place, noted_facts):
                raise GenerationOver("the generation ended before the checkpoint was noted")
        tries.noted = iteration

    def alone(reason: str) -> None:
        tries.why = reason
        site.agent.unwritten(epoch, reason)
        raise GenerationOver(f"the checkpoint cannot be written here: {reason}")

    attempt = Save(generation, number, whole, check, alone, tries, facts)
    site.phases.enter(Phase.SAVE, standing.iteration)
    check()
    adopt(site, stepper)
    try:
        with site.phases.working(COPY), failing_ends("a checkpoint", means=is_broken):
            tries.agree(generation.groups.control)
            written = write(attempt)
        with site.phases.waiting("the checkpoint's end"):
            count(generation.groups.control, True)
    except NotWritten as error:
        with site.phases.working(COPY):
            clear()
        _give_up(site, standing, generation, facts, error)
        return
    if written and facts is not None:
        site.trainable.guard.save(now)
    text = site.meters.checkpoints.wrote(began, now) if written else None
    if text is not None and generation.groups.me == generation.groups.members[0] and not generation.groups.part:
        get_logger().info("megatron-recycle: %s", text)
    standing.evaluate()


def _give_up(site: Site, standing: Standing, generation: Generation, facts: Mapping[str, Any] | None,
             error: NotWritten) -> None:
    """Record that there is no such checkpoint, as all workers know. Raises SaveError if that ends the job."""
    if error.noted >= 0 and facts is not None:  # whole, but without a name: all may go back to it
        site.trainable.guard.save(error.noted)
    ends, committed = site.config.on_failed_save == "end", standing.committed

    def record() -> None:
        more = f" ({error.many} workers could not write)" if error.many > 1 else ""
        get_logger().error("megatron-recycle: NO CHECKPOINT after iteration %d: %s%s. The one before stays the newest; "
                           "%s", committed, error, more,
                           "the job ends (on_failed_save)" if ends else "training goes on")
        site.agent.event(SaveFailed(committed, str(error), error.many))

    first = generation.groups.control.rank == error.first
    if ends:
        if first:
            record()
        raise SaveError(f"{error} (on_failed_save: end)")
    site.asked.evaluations.fail(str(error), record, first)
