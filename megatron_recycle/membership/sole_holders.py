"""What the job would lose with some of its processes: a stage that nobody else stands for, a shard of an optimizer's
state that nobody else has. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from megatron_recycle.membership.names import Process, siblings, workers_of
from megatron_recycle.membership.resume import by_stage
from megatron_recycle.membership.state import State


class SoleHolders(NamedTuple):
    """A stage, or ``shard`` of its optimizer's state, and ``by`` whom it is held: all parts of these workers."""

    stage: int
    shard: int | None
    by: list[str]

    def __str__(self) -> str:
        stage = f"stage {self.stage}"
        return stage if self.shard is None else f"shard {self.shard} of {stage}'s optimizer state"


def held(state: State, sure: bool = False) -> list[SoleHolders]:
    """Stages, then shards. Until an iteration is committed after a recovery, a shard may be whole with those that had
    it before it, or with those that are to have it: with both together, or if that is to be ``sure`` with each for
    itself."""
    found = [SoleHolders(stage, None, names) for stage, names in enumerate(by_stage(state.stages, state.proven))]
    if state.resume is None:
        return found
    adopted = state.progress.committed >= state.resume.next
    for table in state.resume.shards:
        for shard, (had, holders) in enumerate(zip(table.had, table.holders)):
            either = [holders] if adopted or not had else [had, holders] if sure else [(*had, *holders)]
            for workers in map(workers_of, either):
                by = [name for name in state.proven if Process.parse(name).worker in workers]
                found.append(SoleHolders(table.stage, shard, by))
    return found


def lost_with(state: State, names: Collection[str], sure: bool = False) -> list[SoleHolders]:
    """What nobody holds without these and their workers' other parts; also what nobody does as it is."""
    gone = {*names, *siblings(state.members, names)}
    return [one for one in held(state, sure) if gone.issuperset(one.by)]
