"""What a launcher does with its processes, without a coordinator: processes that only sleep."""

from __future__ import annotations

import dataclasses
import errno
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron_recycle.control.coordinator_spec import CoordinatorSpec
from megatron_recycle.control.ports import listen
from megatron_recycle.errors import RecycleError
from megatron_recycle.launch.child import Child
from megatron_recycle.launch.coordinator_process import DEPOSED, Deaths, Service, Silence
from megatron_recycle.launch.launcher import Launcher
from megatron_recycle.launch.processes import Grace, Job, WorkerProcess
from megatron_recycle.launch.restarts import Restarts
from megatron_recycle.launch.worker_logs import Follower
from megatron_recycle.membership.inputs import Exited, StaysOut
from megatron_recycle.membership.protocol import (
    TO_LAUNCHER,
    Begun,
    Drop,
    End,
    EventTold,
    Interrupt,
    Message,
    Start,
    Terminate,
)

IGNORES = ("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', end='', flush=True); "
           "time.sleep(60)")
SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@contextmanager
def launcher(
    folder: Path, said: list[str], ranks: range = range(2), command: Sequence[str] = SLEEP, ending: float = 0.2
) -> Iterator[Launcher]:
    """With `max_restarts` 1 and a process for each rank."""
    job = Job(command, os.environ, folder, ranks, len(ranks), show="none", grace=Grace(ending=ending))
    made = Launcher(job, "127.0.0.1:1", "token", said.append)
    made.restarts.most = 1
    for rank in ranks:
        made.spawn(rank)
    try:
        yield made
    finally:
        made.processes.kill_all()


def tell(made: Launcher, name: str, worker: WorkerProcess, /, **fields: Any) -> None:
    made._receive(TO_LAUNCHER.read({"type": name, "rank": worker.rank, "pid": worker.child.pid, **fields}))


def move(made: Launcher, number: int) -> None:
    """The coordinator wants a process for rank 7 on the device of rank 0."""
    made._receive(Start(7, 0, made.processes.workers[0].child.pid, number))


def until_ended(made: Launcher, worker: WorkerProcess) -> None:
    limit = time.monotonic() + 60
    while worker.status is None:
        assert time.monotonic() < limit
        made._wait()


def test_a_process_that_has_failed_and_hangs_is_killed_and_started_again(tmp_path: Path) -> None:
    said: list[str] = []
    with launcher(tmp_path, said) as made:
        worker = made.processes.workers[0]
        tell(made, "out", worker, kind="exit", error="")
        assert worker.child.status() is None, "it may need a moment"
        until_ended(made, worker)
        assert worker.status == -signal.SIGKILL and made.restarts.pending() and made.processes.workers[1].status is None
    assert f"rank 0 (pid {worker.child.pid}) has failed: see {tmp_path / 'worker-0.log'}" in said
    assert "has failed and does not end: SIGKILL" in "".join(said)


def test_a_process_that_has_failed_ends_with_its_own_status_though_the_job_is_over(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys, time; time.sleep(0.5); sys.exit(7)"]
    with launcher(tmp_path, [], range(1), command, ending=20.0) as made:
        worker = made.processes.workers[0]
        tell(made, "out", worker, kind="exit", error="")
        made._receive(End(0, "the job has finished"))
        until_ended(made, worker)
        assert worker.status == 7


def test_a_worker_fails_while_the_process_that_it_moves_to_lives(tmp_path: Path) -> None:
    said: list[str] = []
    with launcher(tmp_path, said, range(1)) as made:
        mover = made.processes.workers[0]
        move(made, 1)
        made._wait()
        assert made.processes.workers[7].move == 1
        mover.child.signal(signal.SIGKILL)
        until_ended(made, mover)
        assert made.restarts.given_up == {0} and not made.restarts.pending()
        assert StaysOut(0) in made._hello()
        made.processes.workers[7].child.signal(signal.SIGKILL)
        until_ended(made, made.processes.workers[7])
        assert made.restarts.pending(), "it is alone now: another life"
        assert [message.move for message in made._hello() if isinstance(message, Exited)] == [0, 1]


def test_a_process_that_a_worker_moves_to_fails_while_that_one_lives(tmp_path: Path) -> None:
    said: list[str] = []
    with launcher(tmp_path, said, range(1)) as made:
        move(made, 1)
        made._wait()
        made.processes.workers[7].child.signal(signal.SIGKILL)
        until_ended(made, made.processes.workers[7])
        assert not made.restarts.pending() and not made.restarts.given_up


def test_an_earlier_move_that_failed_is_told_again_and_this_ones_process_lives(tmp_path: Path) -> None:
    said: list[str] = []
    with launcher(tmp_path, said, range(1)) as made:
        for number in (1, 2):
            move(made, number)
            made._wait()
            if number == 1:
                made._receive(Drop(7, 1))
                until_ended(made, made.processes.workers[7])
        made._receive(Drop(7, 1))
        assert made.processes.workers[7].move == 2 and made.processes.workers[7].child.status() is None
        made._receive(Drop(7, 2))
        until_ended(made, made.processes.workers[7])


def test_an_interrupt_is_told_again_after_a_reconnect(tmp_path: Path) -> None:
    with launcher(tmp_path, [], range(1)) as made:
        made.ending.interrupt(signal.SIGTERM)
        assert made._hello()[-1].type == "interrupt"


def test_an_interrupt_of_a_host_that_has_joined_does_not_end_the_job(tmp_path: Path) -> None:
    with launcher(tmp_path, [], range(1)) as made:
        made.processes.job = dataclasses.replace(made.job, joining=True)
        made.ending.interrupt(signal.SIGINT)
        assert [message.type for message in made._hello()] == ["hello"]
        until_ended(made, made.processes.workers[0])
        assert made.processes.workers[0].status == -signal.SIGTERM, "asked to leave; this one does not know how"
        assert not made._awaits_end() and made.message == "this host has left the job"


def test_a_host_ends_once_the_coordinator_has_refused_for_long_enough(tmp_path: Path) -> None:
    """The first host's launcher has died: nobody else tells this one, and its workers may not have said hello."""
    grace = Grace(terminated=5.0, refused=0.3)
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    made = Launcher(Job(SLEEP, os.environ, tmp_path, range(2, 4), 4, show="none", grace=grace, leader=False),
                    f"127.0.0.1:{port}", "token", print)
    begun = time.monotonic()
    assert made.run() == 1 and time.monotonic() - begun < 50
    assert f"the coordinator at 127.0.0.1:{port} has refused connections for 0 s" in made.message
    assert {worker.status for worker in made.processes.lives} == {-signal.SIGTERM} and not made.informed


def test_hosts_but_the_first_tell_of_their_own_workers_only(tmp_path: Path) -> None:
    said: list[str] = []
    with launcher(tmp_path, said, range(2, 4)) as made:
        made.processes.job = dataclasses.replace(made.job, leader=False)
        names = {f"{d}:{s}": 2 * s + d for d in range(2) for s in range(2)}
        ours = made.processes.workers[2]
        for event in ({"event": "started", "t": 1.0, "ranks": names}, {"event": "hint", "t": 1.0, "worker": "1:0"},
                      {"event": "hint", "t": 1.0, "worker": "1:1", "error": "\x1b[1mhere"},
                      {"event": "suspected", "t": 1.0, "rank": 0, "pid": 1, "worker": "0:0", "kind": "exit",
                       "generation": 1, "iteration": 3},
                      {"event": "joined", "t": 1.0, "rank": 2, "pid": ours.child.pid, "worker": "0:1", "generation": 2},
                      {"event": "finished", "t": 1.0}):
            made._receive(EventTold(event))
    assert said == ["recycle: hint worker=1:1 error=here",
                    f"recycle: joined generation=2 worker=0:1 rank=2 pid={ours.child.pid}"]


# ---- a host that was cut off


def cut_off(made: Launcher, worker: WorkerProcess) -> None:
    tell(made, "out", worker, kind="unreachable", error="")


def until(made: Launcher, reached: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < limit
        made._wait()


@pytest.mark.parametrize(("most", "told_first"), [(0, False), (1, True)])
def test_a_host_that_was_cut_off_offers_its_places_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, told_first: bool
) -> None:
    """Whether it hears that it was given up before its workers have ended or afterwards, whatever `max_restarts`."""
    monkeypatch.setattr("megatron_recycle.launch.restarts._FIRST_PAUSE", 0.2)
    said: list[str] = []
    program = "import os, time; time.sleep(60 if 'RECYCLE_JOIN' in os.environ else 0.2); exit(3)"
    with launcher(tmp_path, said, command=[sys.executable, "-c", program]) as made:
        made.restarts.most = most
        before = dict(made.processes.workers)
        if told_first:
            for worker in before.values():
                cut_off(made, worker)
        until(made, lambda: all(worker.status is not None for worker in before.values()))
        if not told_first:
            for worker in before.values():
                cut_off(made, worker)
        for _ in range(3):
            made._wait()
        assert made.processes.workers == before, "nobody would let them in"
        made._link.lost_since = None
        until(made, lambda: all(made.processes.workers[rank] is not before[rank] for rank in (0, 1)))
        if most == 0 or told_first:
            assert "this host's 2 places are free again: rejoining (rank 0, 1)" in said
        assert not made.restarts.given_up and all(worker.status is None for worker in made.processes.workers.values())


def test_a_network_that_comes_and_goes_makes_the_pauses_longer_and_what_never_joins_stays_out() -> None:
    said: list[str] = []
    known = Restarts(said.append)
    now = 0.0
    for pause in (1.0, 2.0, 4.0):
        known.cut_off(0, now, "log")
        known.cut_off(0, now, "log")
        assert known.due(now + pause - 0.1) == [] and known.due(now + pause) == [0]
        known.joined(0)
    for _ in range(3):
        known.cut_off(0, now, "log")
        assert known.due(now + 100) == [0]
    known.cut_off(0, now, "log")
    assert not known.pending() and known.given_up == {0} and "before it had joined" in said[0]


def test_a_host_without_workers_says_what_becomes_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_recycle.launch.launcher._IDLE", 0.1)
    said: list[str] = []
    with launcher(tmp_path, said, range(1), [sys.executable, "-c", "exit(1)"]) as made:
        made.restarts.most = 0
        made._link.lost_since = None
        until(made, lambda: "starts none by itself" in "".join(said))
        for _ in range(3):
            made._wait()
        assert len([line for line in said if "recycle run --join 127.0.0.1:1 --nproc 1" in line]) == 1


# ---- signals


def test_sigterm_twice_within_two_seconds_is_one_signal_and_ctrl_c_is_not(tmp_path: Path) -> None:
    with launcher(tmp_path, [], range(2), [sys.executable, "-c", IGNORES]) as made:
        for rank in (0, 1):
            until(made, lambda rank=rank: (tmp_path / f"worker-{rank}.log").read_text() == "ready")
        made.ending.interrupt(signal.SIGTERM, 100.0)
        made.ending.interrupt(signal.SIGTERM, 101.9)
        for _ in range(3):
            made._wait()
        assert [worker.child.status() for worker in made.processes.workers.values()] == [None, None]
        made.ending.interrupt(signal.SIGINT, 101.95)
        until(made, lambda: all(worker.status == -signal.SIGKILL for worker in made.processes.workers.values()))


def test_what_a_terminal_or_systemd_sends_at_once_is_one_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with launcher(tmp_path, [], range(1)) as made:
        sent: list[int] = []
        monkeypatch.setattr(made.processes, "signal_all", sent.append)
        made._receive(Begun(0, 60.0))
        made.ending.interrupt(signal.SIGTERM, 100.0)
        made.ending.interrupt(signal.SIGHUP, 100.1)
        made.ending.interrupt(signal.SIGHUP, 100.2)
        assert not sent and made.ending.saves
        monkeypatch.undo()


def test_the_coordinator_hears_of_sigterm_before_scripts_that_would_end_by_it(tmp_path: Path) -> None:
    """They would end well, and so would the job, which is to be started again."""
    with launcher(tmp_path, [], range(1)) as made:
        made._receive(Begun(0, None))
        made.processes.job = dataclasses.replace(made.job, grace=Grace(terminated=0.2))
        made.ending.interrupt(signal.SIGTERM)
        assert made._hello()[-1] == Interrupt(143, "interrupted by SIGTERM")
        assert made.ending._kill_at is not None and made.ending._kill_at[1] == signal.SIGTERM, "it is still to come"
        until_ended(made, made.processes.workers[0])  # nobody has answered
        assert made.processes.workers[0].status == -signal.SIGTERM


@pytest.mark.parametrize("ignored", [True, False])
def test_a_terminal_that_goes_away_ends_the_job_unless_nohup_has_started_it(tmp_path: Path, ignored: bool) -> None:
    hang_up = [sys.executable, "-c", "import os, signal; os.kill(os.getppid(), signal.SIGHUP)"]
    found = signal.SIG_IGN if ignored else lambda number, frame: None
    before = signal.signal(signal.SIGHUP, found)
    try:
        job = Job(hang_up, os.environ, tmp_path, range(1), 1, show="none", grace=Grace(failed=0.0, cut_off=0.0))
        made = Launcher(job, "127.0.0.1:1", "token", print)
        made.run()
        assert made.ending.interrupted is not ignored
        assert signal.getsignal(signal.SIGHUP) is found
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_deaf_child_takes_no_notice_of_what_slurm_signals(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(60)"]
    child = Child(command, os.environ, tmp_path / "log", deaf=True)
    try:
        limit = time.monotonic() + 60
        while not (tmp_path / "log").read_text():
            assert time.monotonic() < limit
            time.sleep(0.01)
        child.signal(signal.SIGTERM)
        child.signal(signal.SIGINT)
        assert child.wait(0.2) is None
    finally:
        child.signal(signal.SIGKILL)
        assert child.wait(60.0) == -signal.SIGKILL
        child.release()


def test_a_signal_to_a_process_that_has_just_ended_leaves_its_status_for_who_collects_it(tmp_path: Path) -> None:
    child = Child([sys.executable, "-c", "raise SystemExit(7)"], os.environ, tmp_path / "log")
    try:
        assert select.select([child.pidfd], [], [], 60)[0]
        child.signal(signal.SIGTERM)
        assert child.collect() == 7
        child.signal(signal.SIGTERM)
        assert child.collect() == 7, "it is known already"
    finally:
        child.release()


# ---- services that die


def test_a_service_may_die_again_and_again_while_iterations_are_committed() -> None:
    now = [0.0]
    deaths = Deaths(lambda: now[0])
    for _ in range(4):
        for _ in range(5):
            deaths.died("log")
        deaths.progress()
    for _ in range(5):
        deaths.died("log")
    now[0] += 61.0
    deaths.died("log")  # an iteration may take long
    for _ in range(4):
        deaths.died("log")
    with pytest.raises(RecycleError, match="has died 6 times in a row, without an iteration committed in between"):
        deaths.died("log")


@pytest.mark.parametrize(("standby", "status", "told"), [
    (False, -9, "the coordinator (pid 7) has died; starting it again"),
    (True, -9, "this host's coordinator (pid 7) has died; starting it again to stand by"),
    (True, DEPOSED, "this host's coordinator (pid 7) leads no more"),
])
def test_a_coordinator_that_stood_by_is_not_called_the_coordinator(standby: bool, status: int, told: str) -> None:
    child = SimpleNamespace(pid=7, status=lambda: status)
    assert Service(cast(Any, child), "", cast(Any, None), cast(Any, None), standby=standby).end_told().startswith(told)


def test_workers_are_left_alone_while_the_job_saves_and_only_so_long(tmp_path: Path) -> None:
    said: list[str] = []
    with launcher(tmp_path, said, range(1)) as made:
        made._receive(Begun(0, 0.2))
        made.processes.job = dataclasses.replace(made.job, grace=Grace(terminated=0.1))
        made.ending.interrupt(signal.SIGTERM, 100.0)
        made.ending.interrupt(signal.SIGTERM, 100.1)
        assert made.processes.workers[0].child.status() is None and "within 0 s (leave_timeout)" in said[-1]
        assert made._hello()[-1] == Interrupt(143, "interrupted by SIGTERM")
        until_ended(made, made.processes.workers[0])
        assert made.processes.workers[0].status == -signal.SIGTERM


@pytest.mark.parametrize(("seconds", "code", "said"), [
    (83.0, "1", "its host was without a coordinator for 8"), (2.0, "1", ""), (83.0, "0", ""), (None, "1", "")])
def test_the_end_of_a_process_says_that_its_host_was_without_a_coordinator(tmp_path: Path, seconds, code, said) -> None:
    with launcher(tmp_path, [], range(1), [sys.executable, "-c", f"raise SystemExit({code})"]) as made:
        made._link.lost_since = None if seconds is None else time.monotonic() - seconds
        until_ended(made, made.processes.workers[0])
        (told,) = [message for message in made._reports if isinstance(message, Exited)]
        assert told.said.startswith(said) and bool(told.said) == bool(said)


HANDLES = """
import signal, time
got = lambda number, frame: print("got it", end="", flush=True)
signal.signal(signal.SIGTERM, got)
print("ready", end="", flush=True)
while True:
    time.sleep(60)
"""


@pytest.mark.parametrize("told_first", [True, False])
def test_scripts_that_handle_sigterm_get_it_once_and_have_their_time(tmp_path: Path, told_first: bool) -> None:
    """This host is signalled, or another one, and this one a moment later."""
    said: list[str] = []
    with launcher(tmp_path, said, range(1), [sys.executable, "-c", HANDLES]) as made:
        log = tmp_path / "worker-0.log"
        until(made, lambda: log.read_text() == "ready")
        made.processes.job = dataclasses.replace(made.job, grace=Grace(terminated=0.1))
        if told_first:
            made.ending.interrupt(signal.SIGTERM)
        made._receive(Terminate(60.0))
        made._receive(Terminate(0.0))
        if not told_first:
            made.ending.interrupt(signal.SIGTERM)
        again = [told.handled for told in made._hello()[1:]]
        assert again == [True] * told_first, "told again to one that may not have heard of the scripts"
        until(made, lambda: log.read_text() == "readygot it")
        assert made.ending._kill_at is not None and made.ending._kill_at[0] > time.monotonic() + 5.0
        assert said[-1] == "the script handles SIGTERM itself: it has 60 s to end; a second one ends it at once"
        made.ending._kill_at = (0.0, signal.SIGKILL)
        until_ended(made, made.processes.workers[0])
        assert made.processes.workers[0].status == -signal.SIGKILL and log.read_text() == "readygot it"


def test_scripts_that_have_ended_may_take_their_time_though_the_job_has_failed(tmp_path: Path) -> None:
    for message, grace in ((End(1, ""), 10.0), (End(1, "", finished=True), 60.0), (End(0, ""), 60.0)):
        with launcher(tmp_path, [], range(1)) as made:
            begun = time.monotonic()
            made._receive(message)
            assert made.ending._kill_at is not None and 0 <= made.ending._kill_at[0] - begun - grace < 5.0


def cannot_start(monkeypatch: pytest.MonkeyPatch, number: int, times: int = 1000) -> None:
    """The next processes are not started, for this error's number."""
    before, left = subprocess.Popen, iter(range(times))

    def start(*args: Any, **options: Any) -> Any:
        if next(left, None) is not None:
            raise OSError(number, os.strerror(number))
        return before(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", start)


def test_a_worker_that_cannot_be_started_again_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its program is gone."""
    monkeypatch.setattr("megatron_recycle.launch.restarts._FIRST_PAUSE", 0.05)
    said: list[str] = []
    with launcher(tmp_path, said) as made:
        made.restarts.most, made._link.lost_since = 2, None
        cannot_start(monkeypatch, errno.ENOENT)
        made.processes.workers[0].child.signal(signal.SIGKILL)
        until(made, lambda: 0 in made.restarts.given_up)
        assert made.processes.workers[1].child.status() is None
    assert len([line for line in said if "rank 0 cannot be started: [Errno 2]" in line]) == 2


def test_a_worker_waits_for_its_host_to_have_room_and_loses_no_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_FIRST_PAUSE", "_SHORTAGE_PAUSE"):
        monkeypatch.setattr(f"megatron_recycle.launch.restarts.{name}", 0.05)
    said: list[str] = []
    with launcher(tmp_path, said) as made:
        made.restarts.most, made._link.lost_since = 1, None
        first = made.processes.workers[0]
        cannot_start(monkeypatch, errno.EAGAIN, times=4)
        first.child.signal(signal.SIGKILL)
        until(made, lambda: made.processes.workers[0] is not first)
        assert made.processes.workers[0].child.status() is None and not made.restarts.given_up
    assert len([line for line in said if "rank 0 cannot be started: [Errno 11]" in line]) == 4


def test_a_process_that_nobody_could_watch_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no descriptor left, though the process was started."""
    pids: list[int] = []

    def none_left(pid: int) -> int:
        pids.append(pid)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", none_left)
    with pytest.raises(OSError, match="Too many open files"):
        Child(SLEEP, os.environ, tmp_path / "log")
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


@pytest.mark.parametrize("spoil", [
    lambda log: log.symlink_to("/nowhere"), Path.mkdir, lambda log: shutil.rmtree(log.parent)],
    ids=["a link", "a folder", "no folder"])
def test_a_worker_whose_log_cannot_be_written_is_started_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], None]
) -> None:
    monkeypatch.setattr("megatron_recycle.launch.restarts._FIRST_PAUSE", 0.05)
    said: list[str] = []
    (run := tmp_path / "run").mkdir()
    with launcher(run, said, range(1)) as made:
        made._follower = Follower(run, "all", said.append)
        made._link.lost_since = None
        first, log = made.processes.workers[0], made.processes.log(0)
        log.unlink()
        spoil(log)
        first.child.signal(signal.SIGKILL)
        until(made, lambda: made.processes.workers[0] is not first)
        made._wait()
        assert made.processes.workers[0].child.status() is None
    (line,) = [line for line in said if "what it prints is lost" in line]
    assert line.startswith(f"rank 0: {log} cannot be written (")


def test_a_host_without_room_for_all_workers_ends_the_job_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Message] = []
    made = Launcher(Job(SLEEP, os.environ, tmp_path, range(2), 2, show="none"), "127.0.0.1:1", "token", print)
    monkeypatch.setattr(made._link, "send", sent.append)
    cannot_start(monkeypatch, errno.EAGAIN)
    assert made.run() == 1
    why = f"{made.processes.host} cannot start rank 0: [Errno 11] Resource temporarily unavailable"
    assert made.message == why and Interrupt(1, why) in sent, "the other hosts hear of it"


def test_the_coordinator_waits_for_its_host_to_have_room_and_no_worker_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_recycle.launch.launcher._PAUSE", 0.05)
    said: list[str] = []

    def spawn(spec: CoordinatorSpec) -> Child:
        return Child(SLEEP, os.environ, tmp_path / "coordinator.log", stdout=subprocess.PIPE)

    service = Service(spawn(CoordinatorSpec(2)), "127.0.0.1:1", CoordinatorSpec(2), spawn)
    with launcher(tmp_path, said) as made:
        made._coordinator, first = service, service.child
        made._watch_coordinator()
        cannot_start(monkeypatch, errno.EAGAIN, times=3)
        first.signal(signal.SIGKILL)
        until(made, lambda: service.child is not first)
        assert service.spec.resume and service.child.status() is None and len(made.processes.live()) == 2
        service.kill()
    assert len([line for line in said if "the coordinator cannot be started yet: [Errno 11]" in line]) == 3


def test_a_coordinator_that_gives_no_sign_is_killed_and_started_again(tmp_path: Path) -> None:
    """It is stopped, or stuck: a failure would wait for it for ever."""
    said: list[str] = []

    def spawn(spec: CoordinatorSpec) -> Child:
        return Child(SLEEP, os.environ, tmp_path / "coordinator.log", stdout=subprocess.PIPE)

    service = Service(spawn(CoordinatorSpec(1)), "127.0.0.1:1", CoordinatorSpec(1), spawn)
    with launcher(tmp_path, said, range(1)) as made:
        made._coordinator, first = service, service.child
        made.processes.job = dataclasses.replace(made.job, grace=Grace(silent=0.5))
        made._watch_coordinator()
        first.signal(signal.SIGSTOP)
        made._link.lost_since = None
        until(made, lambda: service.child is not first)
        assert first.status() == -signal.SIGKILL
        service.kill()
    assert said[0].startswith(f"the coordinator (pid {first.pid}) has given no sign for ")


def test_silence_does_not_count_while_the_listener_itself_was_stopped() -> None:
    now = [100.0]
    silence = Silence(lambda: now[0])
    for seconds in range(50):
        now[0] = 100.0 + seconds
        assert silence.since(90.0) == seconds
    now[0] += 1000.0
    assert silence.since(90.0) == 0.0 and silence.since(now[0]) == 0.0
    now[0] += 3.0
    assert silence.since(90.0) == 3.0 and silence.since(now[0] - 1.0) == 1.0


def test_a_failure_that_no_thread_explains_is_told_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    with launcher(tmp_path, []) as made:
        made.processes.workers[0].child.signal(signal.SIGKILL)
        until_ended(made, made.processes.workers[0])
        assert [message.rank for message in made._reports if isinstance(message, Exited)] == [0]
        with pytest.raises(RecycleError, match="cannot talk to the job's coordinator: can't start new thread"):
            made._link.start()
    assert "no failure is explained at present: can't start new thread" in caplog.text


def test_a_process_that_was_to_join_and_ends_well_has_failed(tmp_path: Path) -> None:
    said: list[str] = []
    with launcher(tmp_path, said, range(1), [sys.executable, "-c", "pass"]) as made:
        until_ended(made, made.processes.workers[0])
        assert not said
        made.restarts.most = 2
        made.spawn(0, "exit")
        until_ended(made, made.processes.workers[0])
        assert made.restarts.pending()
    log = tmp_path / "worker-0.log"
    pid = made.processes.workers[0].pid
    host = made.processes.host
    assert said[0] == f"rank 0 ({host}, pid {pid}) ended with status 0 before it had joined: see {log}"
