"""Write-ahead: decisions are on disk before they are announced, or they are not made."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from megatron_recycle.membership import job_end
from megatron_recycle.membership.decisions import Decision, Note, Record, Step
from megatron_recycle.membership.inputs import Input
from megatron_recycle.membership.machine import step
from megatron_recycle.membership.resume import RESTART
from megatron_recycle.membership.state import State

log = logging.getLogger(__name__)


class Records(Protocol):
    """A place for records: `journal.Journal`, or something in memory."""

    path: Path

    def append(self, record: Mapping[str, Any]) -> None: ...
    def note(self, record: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class WriteAhead:
    """The machine's steps, recorded in a journal. A failing disk costs as little as possible: expendable records are
    omitted, then expendable work is not begun; if neither helps, the job ends."""

    def __init__(self, journal: Records) -> None:
        self._journal = journal
        self._forgets = False

    def step(self, before: State, happened: Input, now: float) -> Step:
        """As `machine.step`; the records among the decisions are on disk."""
        for offers in (True, False):
            after, decisions = step(before, happened, now, offers)
            try:
                self._write(decisions)
                return after, decisions
            except OSError as error:
                failed = error
        log.error("recycle: %s", text := _unwritable(self._journal.path, failed))
        return self.end(before, text, now)

    def end(self, before: State, why: str, now: float) -> Step:
        """The job is over, for reasons outside the machine."""
        after, decisions = job_end.end(before, 1, why, now)
        self._write(decisions)
        return after, decisions

    def note(self, note: Note) -> None:
        """Keep the note if the disk takes it."""
        try:
            self._journal.note(note.record.to_json())
        except OSError as error:
            self._forgotten(error)

    def close(self) -> None:
        self._journal.close()

    def _write(self, decisions: Iterable[Decision]) -> None:
        """Write the records. Raises OSError if a needed one cannot be written."""
        for decision in decisions:
            if isinstance(decision, Record):
                try:
                    self._journal.append(decision.record.to_json())
                except OSError as error:
                    if decision.needed:
                        raise
                    self._forgotten(error)

    def _forgotten(self, error: OSError) -> None:
        if not self._forgets:
            self._forgets = True
            log.warning("recycle: the journal %s cannot be written (%s): if this coordinator dies, the next one will "
                        "know less; make room on its disk", self._journal.path, error)


def _unwritable(journal: Path, error: OSError) -> str:
    """Why a job without a journal ends."""
    return (f"the journal {journal} cannot be written ({error.strerror or error}), and a failure that is not written "
            f"down cannot be recovered: make room on, or mend, the disk of {journal.parent}, or choose another "
            f"--run-dir. {RESTART}")
