"""What a coordinator that comes back knows: every field of the state is kept by a record, or need not be."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from megatron_recycle.control import Journal, JournalError, process
from megatron_recycle.control.coordinator_spec import CoordinatorSpec
from megatron_recycle.membership import records
from megatron_recycle.membership.description import Job, Model
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.fault import Fault
from megatron_recycle.membership.protocol import Out
from megatron_recycle.membership.resume import Checkpoint, Resume
from megatron_recycle.membership.state import PART_OF, Closing, Member, Phase, Round, Said, State
from megatron_recycle.observe.events import KINDS
from megatron_recycle.plan import Grid
from megatron_recycle.plan.plan_file import PlanFile
from tests.membership.cluster import report

ONE_PLAN, OTHER_PLAN = PlanFile(digest="sha256:1"), PlanFile(digest="sha256:2")
ONE, OTHER = Member("0:0", 0, "a", 10, "host"), Member("0:1.1", 1, "b", 11, "host")
KEPT: dict[str, Any] = {
    "generation": 7,
    "members": {"0:0": ONE},
    "out": {"1:0": FailureKind.FROZEN, "0:1.0": FailureKind.EXIT, "0:1.1": FailureKind.STRANDED},
    "fenced": frozenset({"c", "d"}),
    "outs": {"2": Out(2, 12, FailureKind.FROZEN, "")},
    "stranded": {"0:1.1": OTHER},
    "unproven": {"0:0": FailureKind.UNREACHABLE},
    "models": {"0": Model(model="m")},
    "ranks": {"0:0": 0, "0:1": 1},
    "committed": 12,
    "description": Job(grid=Grid(2, (1, 1))),
    "left_out": ((3, "0.1"),),
    "closing": Closing("the disk is full", 3),
    "faults": (Said("0:0", "a", Fault("KeyError", "'x'", 3, "F0.1"), 2),),
    "moves": {"1:0": "a"},
    "move": 4,
    "moves_due": True,
    "fruitless": 2,
    "given_up": frozenset({"1:1"}),
    "dropped": {"3": 4},
}
"""A value for every field that a record keeps as it is, unlike the field's default."""


def test_every_field_is_kept_by_a_record_or_listed_with_the_reason_why_not() -> None:
    lists = [{*records.DECIDED}, {*records.MOVES}, {*records.OTHERWISE}, {*records.TRANSIENT}]
    named = [name for one in lists for name in one]
    own = {one.name for one in fields(State)} - {*PART_OF.values()}
    assert sorted(named) == sorted(own | {*PART_OF}), "a field of the state in none, or in two"
    assert all(records.TRANSIENT.values()) and all(records.OTHERWISE.values())


def test_what_a_record_keeps_is_what_was_written() -> None:
    assert KEPT.keys() == {*records.DECIDED, *records.MOVES}, "give the new field a value, unlike its default"
    before = State(size=2).with_(**KEPT)
    assert all(before.value(name) != State(size=2).value(name) for name in KEPT)
    written = json.loads(json.dumps(records.decided(before, ()).record.to_json()))
    after = records.restore(2, [written])
    assert {name: after.value(name) for name in KEPT} == KEPT
    kinds = (*after.absent.out.values(), *after.arrivals.unproven.values())
    assert all(isinstance(kind, FailureKind) for kind in kinds)
    assert after.phase is Phase.RETURNING and after.known == {"a": ONE, "b": OTHER}


def test_what_follows_from_other_records() -> None:
    state = State(size=2).with_(**{**KEPT, "learnt": {"1": [{"what": "broadcast"}]}, "closing": None}, since=5.0)
    resume = Resume(target=12, next=13, attempt=1)
    event = {"event": "x", "t": 1.0, "worker": "0:0"}
    written = [records.learnt(state), records.decided(state, ()), records.went(state, resume, "sha256:1", ()),
               records.offer(state, 9), records.proven(state, "0:0", event), records.moves(state.with_(move=5), ())]
    journal = json.loads(json.dumps([one.record.to_json() for one in written]))
    after = records.taken_up(records.restore(2, journal), journal, {"sha256:1": ONE_PLAN}.get)
    assert (after.resume, after.offers, after.arrivals.unproven, after.moving.move) == (resume, 9, {}, 5)
    assert (after.forming.learnt, after.round.plan, after.since) == ({"1": ({"what": "broadcast"},)}, ONE_PLAN, 5.0)
    more = [records.adopted(state, "sha256:2", event), records.resumed(state, event),
            records.committed(state.with_(committed=14)),
            records.checkpoint(state, Checkpoint(13, "/here", None), event),
            records.ended(1, "over", True, event)]
    journal += json.loads(json.dumps([one.record.to_json() for one in more]))
    after = records.taken_up(records.restore(2, journal), journal, {"sha256:2": OTHER_PLAN}.get)
    assert (after.round.plan, after.since, after.progress.committed) == (OTHER_PLAN, None, 14)
    assert after.ended == (1, "over", True)
    assert after.phase is Phase.ENDED and after.checkpoints == (Checkpoint(13, "/here", None),)


def test_what_was_committed_before_all_went_back_is_not_committed_after_another_failure() -> None:
    """And not where the record of that failure is missing, or what came after it."""
    went, before = State(size=2).with_(generation=7, committed=3), State(size=2).with_(generation=7, committed=12)
    resume, restored = Resume(target=3, next=4, attempt=2, restored={"1": "0:0"}), {"event": "restored", "t": 5.0}
    late = State(size=2).with_(generation=8, committed=4, back=7)
    written = [records.committed(before), records.decided(before, ()), records.went(went, resume, None, (restored,)),
               records.decided(late, ()), records.went(late, Resume(target=4, next=5, attempt=3), None, ())]
    journal = json.loads(json.dumps([one.record.to_json() for one in written]))
    assert [records.restore(2, journal[:number]).progress.committed for number in (2, 3, 4, 5)] == [12, 3, 4, 4]
    notes = [records.committed(late.with_(committed=number)).record.to_json() for number in (4, 6)]
    assert records.restore(2, [*journal[:3], notes[0]]).progress.committed == 4
    assert records.restore(2, [*journal, notes[1]]).progress.committed == 6
    assert records.restore(2, [*journal[1:3], journal[0]]).progress.committed == 3, "a store has the note behind all"
    assert records.restore(2, journal[:3]).progress.back == 7


def test_a_generation_begins_without_what_was_of_the_last_one_alone() -> None:
    state = State(size=2).with_(generation=3, reports={"0:0": report()}, plan=ONE_PLAN, switch=4, hints={"0:0": "e"},
                                offers=4, closing=Closing("the disk is full"))
    after = state.next_generation(mended=1)
    assert after.generation == 4 and after.round == Round() and after.closing is None
    assert (after.offers, after.tries.mended) == (4, 1)


def test_kinds_travel_as_their_text() -> None:
    assert json.dumps({"kind": FailureKind.EXIT}) == '{"kind": "exit"}' and f"{FailureKind.EXIT}" == "exit"
    assert FailureKind("stalled").lives and not FailureKind.UNREACHABLE.refilled and FailureKind.MOVE.asked_for
    assert {*KINDS} == {*FailureKind}, "what events are shown with"


def test_a_journal_of_another_version_is_refused_by_name(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path / "journal.jsonl")
    journal.append({**records.decided(State(size=2).with_(**KEPT), ()).record.to_json(), "out": {"1:0": "spare"}})
    journal.close()
    with pytest.raises(JournalError, match="only with the version that has begun it"):
        process.open_journal(CoordinatorSpec(2, resume=True), tmp_path)


def test_a_journal_of_protocol_version_5_is_read() -> None:
    """Its descriptions have the framework's settings beside ours, which nothing reads any more."""
    lines = Path(__file__).with_name("journal-5.jsonl").read_text().splitlines()
    state = records.restore(6, [json.loads(line) for line in lines])
    assert (state.generation, state.progress.committed, state.absent.out) == (3, 5, {"1:0": "exit", "1:1": "exit"})
    assert state.job.tied == ((0, 1),) and state.job.seed == 7 and state.forming.models["0"] == Model(model="m")
    assert state.checkpoints == (Checkpoint(3, "/checkpoints/step4", {"name": "1.1"}),)
    assert state.script.faults[0].fault.where == "in F1.3 of iteration 4" and state.resume is not None
    assert (state.resume.target, state.resume.attempt) == (3, 2)
