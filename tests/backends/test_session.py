"""What a session does for every backend: with a worker that does as it is told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_recycle.backends import session as sessions
from megatron_recycle.backends.options import Options
from megatron_recycle.backends.session import Session
from megatron_recycle.config import RecycleConfig
from megatron_recycle.errors import GenerationOver, JobEnded
from megatron_recycle.job_status import Telling
from megatron_recycle.membership import Process
from megatron_recycle.membership.protocol import End
from megatron_recycle.membership.standing import Standing
from megatron_recycle.membership.verdict import StepMode, Verdict
from megatron_recycle.observe.log import get_logger
from megatron_recycle.plan import Grid, Worker
from megatron_recycle.runtime.place import Place

GRID = Grid(2, (3, 3))
ME = Worker(0, 1)


class FakeWorker:
    """Trains by doing ``meanwhile`` and standing one iteration further on."""

    def __init__(self) -> None:
        self.standing = Standing(Process(ME))
        self.members = tuple(GRID.workers())
        self.meanwhile: Callable[[], None] = lambda: None
        self.done: list[Any] = []

    def begin(self, iteration: int) -> None:
        pass

    def has_done(self, iteration: int) -> bool:
        return iteration <= self.standing.stepped

    def train(self, iteration: int) -> float:
        if not self.has_done(iteration):
            self.standing.stand_at(iteration + 1)
            self.meanwhile()
        return 0.5

    def settle(self) -> None:
        self.done.append("settle")

    def live(self) -> tuple[Worker, ...]:
        return self.members

    def comes_in(self, after: int) -> None:
        self.standing.enter(Verdict(after, 0.5, 0.0, (), ()), StepMode())

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.done.append((name, *given))


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    agent = SimpleNamespace(ended=None, told=[], breaks_off=True, generation=0, members={})
    agent.ending, agent.close = agent.told.append, lambda: agent.told.append("closed")
    monkeypatch.setattr(sessions, "connect", lambda *_: agent)
    monkeypatch.setattr(sessions.atexit, "register", lambda run: None)
    monkeypatch.setattr(sessions, "ScriptEnd", lambda *_: SimpleNamespace(error=None, call=threading.Lock))
    ranks = {worker: (number,) for number, worker in enumerate(GRID.workers())}
    made = Session(Place(ME, GRID, ranks, "gloo"), RecycleConfig(), Options(), torch.device("cpu"))
    yield made
    if made._groups is not None:
        made._groups.close()


def started(session: Session) -> FakeWorker:
    session._worker = worker = FakeWorker()  # type: ignore[assignment]
    return worker


def test_the_script_passes_over_what_the_job_had_done_and_leaves_out_what_belongs_to_that(session):
    worker = started(session)
    worker.comes_in(after=1)
    for iteration in range(4):
        with session.call():
            assert session.begin() == session.catches_up == (iteration < 2)
            session.train()
        assert session.together("save()", lambda: True, False) == (iteration >= 2)


def test_who_was_out_for_a_while_passes_on_and_who_was_only_brought_back_does_not(session):
    """In the recovery at the end of an iteration peers are compared: one that differs takes the others' state."""
    worker = started(session)
    session.begin()
    worker.meanwhile = lambda: worker.comes_in(after=0)
    session.train()
    assert session.together("save()", lambda: True, False), "the others write the checkpoint, and wait for this one"
    session.begin()
    worker.meanwhile = lambda: worker.comes_in(after=4)
    session.train()
    assert not session.together("save()", lambda: True, False)


def test_a_callback_of_the_script_is_told_of_a_loss_when_the_call_is_over_and_of_the_end(session, monkeypatch):
    telling, told = Telling(), list[Any]()
    monkeypatch.setattr(sessions, "HERE", telling)
    telling.reported_by(session.status)
    telling.add(told.append)
    worker = started(session)
    session.agent.generation, session.agent.members = 1, {str(one): "first" for one in GRID.workers()}

    def dies() -> None:
        worker.members = worker.members[:3]
        session.agent.generation, session.agent.members = 2, {str(one): "first" for one in worker.members}
        assert told == [], "not in the midst of a recovery"

    worker.meanwhile = dies
    with session.call():
        session.begin()
        session.train()
    assert [event["event"] for event in told] == ["lost", "resumed", "last_copy"]
    assert told[0]["workers"] == ["1:1"] and session.status().degraded and session.status().last_copies == (1,)
    session.agent.ended = End(0, "the job has finished")
    session.finish()
    assert told[-1]["event"] == "ended" and told[-1]["status"] == 0


def test_what_needs_all_is_left_out_while_one_is_missing_and_is_no_error_when_cut_short(session, monkeypatch, caplog):
    monkeypatch.setattr(get_logger(), "propagate", True)  # to caplog
    worker = started(session)
    worker.members = worker.members[1:]
    assert session.together("save()", pytest.fail, "nothing") == "nothing" and worker.done == []  # not in its thread
    with session.call():
        pass
    assert session.together("save()", pytest.fail, "nothing") == "nothing" and worker.done == ["settle"]
    assert "save() is left out while workers are missing (0:0); training goes on" in caplog.text
    session.together("it", pytest.fail, None, without="no checkpoint of 3: it needs those that are missing")
    assert "no checkpoint of 3: it needs those that are missing (0:0); training goes on" in caplog.text
    worker.members = tuple(GRID.workers())

    def broken(error: Exception) -> Any:
        raise error

    for failure, error in ((True, RuntimeError("peer")), (False, GenerationOver("over"))):
        monkeypatch.setattr(sessions, "comes_of_failure", lambda *_, failure=failure: failure)
        assert session.together("save()", lambda error=error: broken(error), 0) == 0
        assert f"cut short by a failure ({error})" in caplog.text
    for own in (RuntimeError("the disk is full"), ValueError("no such tag")):
        with pytest.raises(type(own)):
            session.together("save()", lambda own=own: broken(own), 0)
    assert not session.busy


def test_what_a_joiner_leaves_out_before_its_first_iteration_is_not_expected_of_it(session):
    """A baseline evaluation or a checkpoint before training: the set-up's record is without them."""
    apart: list[str] = []

    @contextmanager
    def block() -> Iterator[None]:
        apart.append("begins")
        yield
        apart.append("ends")

    session._options = Options(setup=SimpleNamespace(apart=block))
    assert session.together("eval_batch()", lambda: list(apart), None) == ["begins"]
    assert apart == ["begins", "ends"]


@pytest.mark.parametrize("status", [0, 1])
def test_the_jobs_end_is_the_scripts(session, status):
    with pytest.raises(SystemExit) as end, session.call(), session.at_work():
        raise JobEnded("all of stage 1 are lost", status)
    assert end.value.code == status and not session.busy


def test_only_the_scripts_own_code_in_the_thread_that_trains_settles(session):
    assert not session.in_script
    started(session)
    with session.call():
        assert not session.in_script
    assert session.in_script
    seen: list[bool] = []
    other = threading.Thread(target=lambda: seen.append(session.in_script))
    other.start()
    other.join()
    assert seen == [False]


def test_a_script_that_fails_before_it_trains_tells_the_others_and_one_that_has_trained_asks(session):
    session.fail(ValueError("no such file"))
    fault, = session.agent.told
    assert "no such file" in fault.text
    session.finish()
    assert session.agent.told[1:] == ["closed"]
    worker = started(session)
    session.fail(ValueError("late"))
    session.finish()
    assert [name for name, *_ in worker.done] == ["fail", "finish", "close"]


def test_a_process_that_ends_itself_is_in_the_scripts_own_code_between_two_iterations_only(session):
    started(session)
    assert session._outside(), "it has not trained yet"
    found: list[bool] = []
    seen, over = threading.Event(), threading.Event()

    def trains() -> None:
        with session.call():
            found.append(session._outside())
        found.append(session._outside())
        seen.set()
        over.wait(60)

    thread = threading.Thread(target=trains)
    thread.start()
    assert seen.wait(60) and found == [False, True]
    assert not session._outside(), "a thread of the script's, beside the one that trains"
    over.set()
    thread.join(60)
    assert session._outside(), "which has ended"


@pytest.mark.parametrize(("grid", "guard", "said"), [
    (Grid(2, (3,)), "checkpoint", "recycle-guard memory"), (Grid(1, (3,)), "none", "job-restarts"),
    (Grid(2, (3,)), "memory", None), (GRID, "checkpoint", None)])
def test_a_job_with_one_pipeline_is_told_that_nobody_can_take_its_work_over(grid, guard, said):
    place: Any = SimpleNamespace(grid=grid)
    line = sessions._unprotected(place, RecycleConfig(guard=guard))
    assert (line is None) == (said is None)
    assert line is None or (said in line and ("guard" in line) == (grid.stages > 1))
