"""Checkpoints: the workers that are left write one together between two iterations, through failures.

All that a checkpoint is made of lives on every peer of a stage, so it is complete however many are gone. It is made in
three moves: all parts are written, beside what is named so far; the coordinator notes it; one worker names it. Before
the last move the checkpoint before is the newest, whole, whatever happens. A failure on the way costs what was written:
those that are left write it again. A worker that has seen the end of a checkpoint is at most one ahead of others, and
tells them in the recovery, as after an evaluation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from megatron_recycle.errors import GenerationOver
from megatron_recycle.membership import Standing
from megatron_recycle.runtime.activity import COPY
from megatron_recycle.runtime.comm.comm import failing_ends, is_broken
from megatron_recycle.runtime.comm.reduction import count
from megatron_recycle.runtime.generation import Generation
from megatron_recycle.runtime.phases import Phase
from megatron_recycle.runtime.site import Site


class Whole(Protocol):
    """See `Save`."""

    def __call__(self, place: str, of: int | None = None) -> None: ...


class Save(NamedTuple):
    """One try to write a checkpoint, in one generation.

    Attributes:
        generation: its members write.
        whole: to be called by the one that names the checkpoint, with its place, once all parts are written and before
            it is named, and with the iteration it is of, if that is not the last one that has committed. Raises
            GenerationOver: then it is not to be named.
        check: to be called between files. Raises GenerationOver if what is written is of no use any more.
    """

    generation: Generation
    whole: Whole
    check: Callable[[], None]

    @property
    def name(self) -> str:
        """A text that no other try has."""
        return self.generation.store_prefix


Write = Callable[[Save], None]
"""Writes this worker's part, and the checkpoint's name where it is the one to write it; at the same time as all other
members. Raises GenerationOver, or whatever the script's framework does."""


def save(site: Site, standing: Standing, generation: Generation, write: Write) -> None:
    """One try. Returns when everybody's part is written and the checkpoint is named. Raises GenerationOver, and what
    ``write`` raises."""
    epoch = generation.epoch.generation

    def check() -> None:
        if site.interrupted(standing):
            raise GenerationOver("the generation ended before the checkpoint was written")

    def whole(place: str, of: int | None = None) -> None:
        site.phases.enter(Phase.SAVED, standing.iteration)
        with site.phases.waiting("the manifest"):
            if not site.agent.written(epoch, standing.committed if of is None else of, place):
                raise GenerationOver("the generation ended before the checkpoint was noted")

    site.phases.enter(Phase.SAVE, standing.iteration)
    check()
    with site.phases.working(COPY), failing_ends("a checkpoint", means=is_broken):
        write(Save(generation, whole, check))
    with site.phases.waiting("the checkpoint's end"):
        count(generation.groups.control, True)
    standing.evaluate()
