"""Sole holders: the stages, and shards of an optimizer's state, that the job would lose with some of its processes.
Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from megatron_recycle.membership.names import Process, siblings, workers_of
from megatron_recycle.membership.resume import by_stage
from megatron_recycle.membership.shards import Shard
from megatron_recycle.membership.state import State


class SoleHolders(NamedTuple):
    """A stage, or ``shard`` of its optimizer's state, and ``by`` its holders: all parts of these workers."""

    stage: int
    shard: int | None
    by: list[str]

    def __str__(self) -> str:
        stage = f"stage {self.stage}"
        return stage if self.shard is None else f"shard {self.shard} of {stage}'s optimizer state"


def held(state: State, sure: bool = False) -> list[SoleHolders]:
    """Stages, then shards. After a recovery, until an iteration is committed, the old or the new holders of a shard may
    have it whole: both count together, or with ``sure`` each for itself."""
    found = [SoleHolders(stage, None, names) for stage, names in enumerate(by_stage(state.stages, state.proven))]
    if state.resume is None:
        return found
    for table in state.resume.shards:
        for shard, (had, holders) in enumerate(zip(table.had, table.holders)):
            either = [holders] if _adopted(state, had) else [had, holders] if sure else [(*had, *holders)]
            for workers in map(workers_of, either):
                by = [name for name in state.proven if Process.parse(name).worker in workers]
                found.append(SoleHolders(table.stage, shard, by))
    return found


def last_known(state: State) -> dict[Shard, tuple[str, ...]]:
    """By shard the processes that were last known to have it whole."""
    return {Shard(table.stage, table.part, shard): holders if _adopted(state, had) else had
            for table in (() if state.resume is None else state.resume.shards)
            for shard, (had, holders) in enumerate(zip(table.had, table.holders))}


def _adopted(state: State, had: Sequence[str]) -> bool:
    """Whether the new holders of a shard have it, or nobody ``had`` it before."""
    return not had or state.resume is None or state.progress.committed >= state.resume.next


def lost_with(state: State, names: Collection[str], sure: bool = False) -> list[SoleHolders]:
    """Stages and shards without a holder but these and their workers' other parts; also those without any holder."""
    gone = {*names, *siblings(state.members, names)}
    return [one for one in held(state, sure) if gone.issuperset(one.by)]
