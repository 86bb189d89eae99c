"""A full disk: what is expendable is left out, and what must be remembered and cannot be ends the job, in words."""

from __future__ import annotations

import asyncio
import base64
import errno
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from megatron_recycle.control import Coordinator, Journal, write_ahead
from megatron_recycle.control import journal as store_module
from megatron_recycle.control.parcels import opened
from megatron_recycle.control.searches import Plans
from megatron_recycle.membership import decisions as do
from megatron_recycle.membership import inputs
from megatron_recycle.membership import state as st
from megatron_recycle.membership.protocol import TO_LAUNCHER, TO_WORKER, Parcel
from megatron_recycle.membership.records import restore, taken_up
from megatron_recycle.membership.state import Phase
from tests.membership.cluster import PLAN, Cluster, described, report
from tests.membership.service import TOKEN

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Paper:
    """A journal in memory whose disk takes so many writes, and fails at the next one, once or from then on."""

    def __init__(self, path: Path, writes: float = float("inf"), once: bool = False) -> None:
        self.path = path
        self.records: list[dict[str, Any]] = []
        self.left, self.once = writes, once

    def append(self, record: Any) -> None:
        self.left -= 1
        if self.left == -1 or (self.left < 0 and not self.once):
            raise FULL
        self.records.append(json.loads(json.dumps(record)))

    note = append

    def close(self) -> None:
        return


class Told:
    """A peer's end of a connection: what it was told, in order, and what was in the journal when it was."""

    def __init__(self, journal: Paper) -> None:
        self.journal = journal
        self.messages: list[Any] = []

    def send_encoded(self, encoded: bytes) -> None:
        data = json.loads(encoded)
        kinds = TO_LAUNCHER if data["type"] in ("begun", "event", "out", "joined", "progress") else TO_WORKER
        message = kinds.read(data)
        self.send(opened(base64.b64decode(message.data), message) if isinstance(message, Parcel) else message)

    def send(self, message: Any) -> None:
        self.messages.append(message)
        if message.type in ("stop", "go"):
            kind = {"stop": "decided", "go": "go"}[message.type]
            assert any((r["kind"], r.get("generation")) == (kind, message.generation) for r in self.journal.records)
        if message.type == "offer":
            assert any(r["kind"] == "offer" and r["number"] == message.number for r in self.journal.records)


class Job(Cluster):
    """A cluster whose machine is driven by a real coordinator with this journal; a peer for each worker."""

    def __init__(self, journal: Paper, said: Callable[[Any], None]) -> None:
        super().__init__()
        plans = Plans(lambda *_: PLAN, lambda *_: None)
        self.coordinator = Coordinator(size=6, token=TOKEN, journal=journal, plans=plans, emit=said)
        self.coordinator._searches._in_thread = lambda *_, **__: None  # type: ignore[method-assign]
        self.peers = {f"{name}/0": Told(journal) for name in self.names}
        self.launcher = Told(journal)
        self.coordinator.server.workers.update(self.peers)  # type: ignore[arg-type]
        self.coordinator.server.launchers.add(self.launcher)  # type: ignore[arg-type]

    @property
    def state(self) -> st.State:
        return self.coordinator.state

    @state.setter
    def state(self, state: st.State) -> None:
        """As `Cluster` begins with one of its own."""

    def feed(self, happened: Any, after: float = 0.01) -> list[do.Decision]:
        self.coordinator.feed(happened)
        return []


def _a_life(job: Job) -> None:
    """A job that loses a worker, adopts a better plan, takes a joiner in, and ends well."""
    for name in job.names:
        job.hello(name)
    for name in job.names:
        job.ready(name)
    job.plan()
    job.resume_all()
    job.commit_all(0)
    job.exit("1:1")
    job.reports(holds=0)
    job.plan()
    job.resume_all()
    job.feed(inputs.Improved(2, replace(PLAN, digest="sha256:better"), 1.0))
    for name in tuple(job.state.members):
        job.feed(inputs.Adopted(f"{name}/0", 2, 1, "sha256:better"))
    job.hello("1:1", life=1)
    job.feed(inputs.Ready("1:1/1", described({"grid": job.grid, "block": 2, "reduction": "exact"}), report()))
    for name in tuple(job.state.members):
        job.feed(inputs.Boundary(f"{name}/0", 2, 2, 1.0))
    job.reports(holds=1)
    job.plan()
    job.feed(inputs.Holds("1:1/1", job.state.generation, inputs.Received()))
    for member in tuple(job.state.members.values()):
        job.feed(inputs.Resumed(member.incarnation, job.state.generation, 1.0))
        job.feed(inputs.Committed(member.incarnation, job.state.generation, 5, 1.0))
    for member in tuple(job.state.members.values()):
        job.feed(inputs.Finished(member.incarnation, job.state.generation))


@pytest.mark.parametrize("once", [False, True])
def test_whichever_write_fails_what_is_on_disk_what_was_told_and_the_end_agree(tmp_path: Path, once: bool) -> None:
    """Each write of a job's life in turn. Nobody ever waits for what does not come: the job ends, for all of them, or
    it goes on."""

    async def lives(writes: float) -> tuple[Job, Paper]:
        journal = Paper(tmp_path / "journal.jsonl", writes, once)
        job = Job(journal, lambda event: None)
        _a_life(job)
        return job, journal

    async def all_of_them() -> None:
        job, journal = await lives(float("inf"))
        assert job.state.ended == (0, "the job has finished", False) and job.state.generation == 3
        ends = []
        for writes in range(len(journal.records)):
            job, journal = await lives(writes)
            ended = job.state.ended
            assert job.state.phase is Phase.ENDED and ended is not None
            assert job.coordinator._executor.ended.result() == do.End(*ended)
            told = [message for message in job.launcher.messages if message.type == "end"]
            assert [(one.status, one.message) for one in told] == [ended[:2]]
            for incarnation, peer in job.peers.items():
                if incarnation not in job.state.absent.fenced:
                    assert peer.messages[-1].type == "end" and peer.messages[-1].message == ended[1]
            if ended[0]:
                assert f"{journal.path} cannot be written (No space left on device)" in ended[1]
                assert str(tmp_path) in ended[1] and "--run-dir" in ended[1]
            ends.append(ended[0])
        assert (ends[0] == 1) is not once, "a job without a memory does not begin; a moment's trouble is none"
        assert 0 in ends and (1 in ends) is not once, "what is not needed is left out"

    asyncio.run(all_of_them())


def test_without_room_for_an_offer_the_job_trains_on_as_it_is(tmp_path: Path) -> None:
    async def run() -> None:
        journal = Paper(tmp_path / "journal.jsonl")
        job = Job(journal, lambda event: None)
        job.train()
        journal.left = 0
        job.feed(inputs.Improved(1, replace(PLAN, digest="sha256:better"), 1.0))
        job.feed(inputs.Leave("1:1/0"))
        job.commit_all(7)
        assert job.state.phase is Phase.TRAINING and job.state.progress.committed == 7
        assert not [peer for peer in job.peers.values() if peer.messages[-1].type != "go"]
        journal.left = float("inf")
        job.commit_all(8)
        assert {peer.messages[-1].type for peer in job.peers.values()} == {"offer"}, "now the leave is agreed upon"

    asyncio.run(run())


def test_a_decision_is_carried_out_to_its_end_whatever_fails_of_it(tmp_path: Path) -> None:
    def breaks(event: Any) -> None:
        raise FULL

    async def run() -> None:
        job = Job(Paper(tmp_path / "journal.jsonl"), breaks)
        job.train()
        job.exit("1:1")
        assert job.peers["0:0/0"].messages[-1].type == "stop"
        assert job.peers["1:1/0"].messages[-1].type == "end", "it comes after the events that failed"

    asyncio.run(run())


# ---- what a coordinator that comes back knows


def test_commits_plans_and_recoveries_are_known_from_the_journal_alone(tmp_path: Path) -> None:
    cluster = Cluster().train()
    cluster.commit_all(3)
    cluster.exit("1:1")
    cluster.reports(holds=3)
    cluster.plan()
    assert taken_up(restore(6, cluster.journal), cluster.journal, lambda digest: PLAN).since is not None
    cluster.resume_all()
    cluster.feed(inputs.Improved(2, replace(PLAN, digest="sha256:better"), 1.0))
    for name in tuple(cluster.state.members):
        cluster.feed(inputs.Adopted(f"{name}/0", 2, 5, "sha256:better"))
    cluster.commit_all(6)
    read: list[str] = []
    state = taken_up(restore(6, cluster.journal), cluster.journal, read.append)
    assert (state.progress.committed, state.since, read) == (6, None, ["sha256:better"])


def test_joiners_come_in_though_the_plan_in_force_was_lost_with_its_file(tmp_path: Path) -> None:
    cluster = Cluster().train()
    cluster.exit("1:1")
    cluster.reports(holds=0)
    cluster.plan()
    cluster.state = taken_up(restore(6, cluster.journal), cluster.journal, lambda digest: None)
    cluster.feed(inputs.Restarted())
    for name in tuple(cluster.state.members):
        cluster.feed(inputs.Hello(cluster.member(name), 2))
    cluster.resume_all()
    assert cluster.state.round.plan is None and cluster.state.since is None
    cluster.hello("1:1", life=1)
    cluster.feed(inputs.Ready("1:1/1", described({"grid": cluster.grid, "block": 2, "reduction": "exact"}), report()))
    assert cluster.state.round.switch


# ---- the file


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)],
                                      capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> None:
    with (folder / "others").open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while file.write(b"x" * size) == size:
                    continue
            except OSError as error:
                assert error.errno == errno.ENOSPC


def test_disk_is_set_aside_for_the_decisions_to_come(small_disk: Path) -> None:
    journal = Journal.create(small_disk / "journal.jsonl")
    journal.append({"kind": "decided", "generation": 1})
    fill(small_disk)
    for generation in range(2, 50):
        journal.append({"kind": "decided", "generation": generation, "text": "x" * 5000})
        journal.note({"kind": "committed", "iteration": generation})
    with pytest.raises(OSError, match="No space left"):
        for generation in range(50, 500):
            journal.append({"kind": "decided", "generation": generation, "text": "x" * 5000})
    journal.close()
    again = Journal.reopen(small_disk / "journal.jsonl")
    assert [r["generation"] for r in again.records if r["kind"] == "decided"] == [*range(1, generation)]
    again.close()


def test_a_disk_that_takes_half_a_line_has_none_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal.create(tmp_path / "journal.jsonl")
    journal.append({"kind": "decided", "generation": 1})
    written = os.pwrite
    room = [0]

    def pwrite(descriptor: int, data: bytes, at: int) -> int:
        if not room[0]:
            raise FULL
        size = written(descriptor, data[:room[0]], at)
        room[0] -= size
        return size

    with monkeypatch.context() as patched:
        patched.setattr(store_module.os, "pwrite", pwrite)
        for write in (journal.append, journal.note):
            for room[0] in (0, 1, 10, 20):
                with pytest.raises(OSError, match="No space left"):
                    write({"kind": "decided", "generation": 2})
    journal.append({"kind": "decided", "generation": 3})
    journal.close()
    again = Journal.reopen(tmp_path / "journal.jsonl")
    assert [record["generation"] for record in again.records] == [1, 3]
    again.close()


def test_a_note_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path / "journal.jsonl")
    for iteration in range(1000):
        journal.note({"kind": "committed", "iteration": iteration})
    journal.append({"kind": "decided", "generation": 2})
    journal.note({"kind": "committed", "iteration": 1000})
    kept = journal.records
    journal.close()
    again = Journal.reopen(tmp_path / "journal.jsonl")
    assert again.records == kept and [record["kind"] for record in kept] == ["committed", "decided", "committed"]
    assert [record.get("iteration") for record in kept] == [999, None, 1000]
    again.close()


@pytest.mark.parametrize("kind", ["Hello", "Ready", "Planned", "Resumed", "Committed", "Exited", "Reported", "Boundary",
                                  "Adopted", "Finished"])
def test_what_cannot_be_decided_ends_the_job_for_all(kind, tmp_path, monkeypatch):
    """A defect of the machine: its input would be told again on every new connection, and nobody would go on."""
    real = write_ahead.step

    def step(state: st.State, happened: Any, *rest: Any) -> Any:
        if type(happened).__name__ == kind:
            raise KeyError("0:7")
        return real(state, happened, *rest)

    async def life() -> None:
        journal = Paper(tmp_path / "journal.jsonl")
        job = Job(journal, lambda event: None)
        _a_life(job)
        ended = job.state.ended
        assert ended is not None and ended[0] == 1
        assert f"cannot decide what follows from {kind} (KeyError('0:7')), a defect" in ended[1]
        assert journal.records[-1]["kind"] == "end" and job.coordinator._executor.ended.result() == do.End(*ended)

    monkeypatch.setattr(write_ahead, "step", step)
    asyncio.run(life())
