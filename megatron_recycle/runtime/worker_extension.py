"""The extension point of a worker: its features' shares of a recovery and of the work between iterations.

The core (`loop`, `recovery`, `attempt`, `stepper`) trains, and survives a killed worker, without any extension. All of
them are in `worker_extensions`. The coordinator's half is :mod:`megatron_recycle.membership.extension`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_recycle.control import Go
from megatron_recycle.membership import Reconciliation, Resume, Standing, workers_of
from megatron_recycle.membership.inputs import Received
from megatron_recycle.plan import Worker
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.reduction import count
from megatron_recycle.runtime.facts import Facts
from megatron_recycle.runtime.generation import Generation
from megatron_recycle.runtime.site import Site
from megatron_recycle.runtime.state_copy import give, stage_tensors, take
from megatron_recycle.runtime.stepper import Stepper


@dataclass(frozen=True)
class Meeting:
    """All members of a new generation, as one of them: they are to stand at the same place before training goes on.

    Attributes:
        site: the worker's surroundings.
        stepper: makes its steps.
        generation: in force.
        go: the coordinator's decision.
        todo: the work that brings this worker to where all go on.
    """

    site: Site
    stepper: Stepper
    generation: Generation
    go: Go
    todo: Reconciliation

    @property
    def groups(self) -> Groups:
        """The communicators of the generation."""
        return self.generation.groups

    @property
    def resume(self) -> Resume:
        """Where training goes on."""
        return self.go.resume

    @property
    def standing(self) -> Standing:
        """Where this worker stands."""
        return self.stepper.standing

    @property
    def joined(self) -> tuple[Worker, ...]:
        """The workers that come in."""
        return tuple(workers_of(self.go.resume.joined))

    def some_are_between(self, with_joined: bool = True) -> bool:
        """Whether some peer's script may still make edits before the next iteration; all peers take part.
        ``with_joined``: also a joiner's, though a joiner gets everything in any case. Raises GenerationOver.

        A worker that has asked for the next iteration has made all of its script's edits before it. A worker that is
        met in another call (a collective, an evaluation, a checkpoint) may still make edits that its peers have made
        already. Then a difference between peers is no fault, and a replica copied mid-edit would get the user's edit
        twice or not at all. Both comparisons and copies have to wait until all have asked.
        """
        standing, counts = self.standing, with_joined or not self.todo.enter
        (between,) = count(self.groups.stage_control, counts and standing.asked <= standing.stepped)
        return between > 0


class Source:
    """The source of joiners' state: the peers of their stage. Raises GenerationOver."""

    def take(self, meeting: Meeting) -> tuple[dict[str, torch.Tensor], Facts, Received]:
        """On a joiner: tensors in buffers of their own, facts, and the cost of the transfer. Raises TransferError."""
        tensors, raw_facts, received = take(meeting.groups, meeting.joined, meeting.site.stage.device)
        return tensors, Facts.from_json(raw_facts), received

    def taken(self, meeting: Meeting) -> None:
        """A joiner has loaded this state. It counts as a holder of the state when this returns."""

    def give(self, meeting: Meeting) -> None:
        """On a worker that was in: send the state."""
        give(meeting.groups, meeting.joined, stage_tensors(meeting.site.stage), meeting.stepper.facts())


PEERS = Source()


class WorkerExtension:
    """One feature's share of a worker. Each method may be left out.

    In `source`, `level`, `settle` and `renew` all members of a generation are at the same point, and may communicate
    over any of its groups. In `catch_up` and `due` only the peers of a stage, and the parts of a worker, are: after a
    failure a closed stage begins its next iteration while others still make the last one. Any but `reports` may raise
    GenerationOver.
    """

    def reports(self, site: Site, standing: Standing) -> Mapping[str, Any]:
        """Its fields of the report to the coordinator, by name."""
        return {}

    def decided(self, site: Site, stepper: Stepper, go: Go) -> None:
        """The coordinator has decided, and no member has connected to another yet. Raises JobEnded."""

    def source(self, meeting: Meeting) -> Source | None:
        """The source of the state; None: the peers of a stage."""
        return None

    def level(self, meeting: Meeting) -> None:
        """Before state is copied: complete on all members whatever only some have seen complete."""

    def settle(self, meeting: Meeting) -> None:
        """All members hold the state that training goes on from. Raises JobEnded where none does, VerificationError,
        TransferError."""

    def renew(self, site: Site, standing: Standing, groups: Groups) -> None:
        """The members of a generation go on with new groups, after a wrong guess."""

    def catch_up(self, site: Site, stepper: Stepper, generation: Generation) -> None:
        """The scripts of all peers have asked for the next iteration: do what a recovery could not do before that.
        Raises WrongGuess, DataError, VerificationError, TransferError, JobEnded."""

    def due(self, site: Site, stepper: Stepper, generation: Generation, iteration: int) -> None:
        """``iteration`` begins. Raises WrongGuess, DataError, VerificationError."""
