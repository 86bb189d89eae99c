"""The life of a communicator goes one way, whoever asks for what, and in whichever order."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_recycle.errors import GenerationOver
from megatron_recycle.runtime.comm import abort as aborts
from megatron_recycle.runtime.comm.abort import Teardown, abort
from megatron_recycle.runtime.comm.comm import Comm
from megatron_recycle.runtime.comm.life import CommState, Life
from megatron_recycle.runtime.comm.tags import CONTROL
from megatron_recycle.runtime.comm.threads import Threads

REACHED = {"void": CommState.VOID, "leave": CommState.LEFT, "abort": CommState.ABORTED, "destroy": CommState.DESTROYED}


class Library:
    """A communicator of two members that does nothing."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


def comm() -> Comm:
    backend: Any = SimpleNamespace(abort=lambda group: None, destroy=lambda group: None, ordered=False)
    return Comm(Library(), backend, CONTROL, identity="generation 1/world")


@given(st.lists(st.sampled_from([*REACHED, "again"]), max_size=12))
def test_states_only_give_way_to_later_ones(calls: list[str]) -> None:
    one = comm()
    furthest = CommState.OPEN
    for call in calls:
        if call == "again":
            before, one, furthest = one, one.again("generation 2"), CommState.OPEN
            assert one.life is not before.life and one.ledger is before.ledger
        else:
            getattr(one, call)()
            furthest = max(furthest, REACHED[call])
        assert one.life.state is furthest
        assert one.aborted == (furthest > CommState.OPEN) and one.life.closed == (furthest >= CommState.ABORTED)
        assert not one.ledger.gone or not one.can_stay, "an aborted one is never used again"


@pytest.mark.parametrize("call", [name for name in REACHED if name != "destroy"])
def test_no_operation_begins_once_it_is_void(call: str) -> None:
    one = comm()
    getattr(one, call)()
    with pytest.raises(GenerationOver, match="the generation has been ended"):
        one.send(None, 1, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["one may be used again", "all are aborted", "at once"])
def test_all_are_void_before_a_thread_is_freed_from_one(way: str) -> None:
    """Else it would go on with the next one, and meet members there that know more."""
    comms = [comm(), comm()]
    seen: list[bool] = []

    def freed(*_: object) -> None:
        seen.extend(each.aborted for each in comms)

    for each in comms:
        each.backend.abort = freed  # type: ignore[method-assign]
        each.backend.quick = True  # type: ignore[misc]
    threads = Threads()
    ending = Teardown(threads)
    with comms[0].life.token.beside(freed):
        if way == "at once":
            abort(comms, threads)
        else:
            ending.abort(comms, lambda: comms[:1] if way == "one may be used again" else ())
    assert seen and all(seen)
    ending.retire(comms)
    threads.close()


def test_who_leaves_while_a_spared_one_is_being_aborted_knows_of_that_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread has been away for too long. The next generation's communicators are made once all aborts are over."""
    monkeypatch.setattr(aborts, "_LONGEST_LEAVE", 0.0)
    threads, spared, parked, on = Threads(), comm(), list[Any](), threading.Event()
    ending = Teardown(threads)

    class Lock:
        """Says when a second thread comes to it."""

        def __init__(self) -> None:
            self._lock = threading.Lock()

        def __enter__(self) -> None:
            if not self._lock.acquire(blocking=False):
                on.set()
                self._lock.acquire()

        def __exit__(self, *_: object) -> None:
            self._lock.release()

    def park() -> None:
        parked.extend(ending.park([spared], lambda: [spared]))
        on.set()

    def begins() -> None:
        if threading.current_thread().name == "recycle-leave-watch" and not on.is_set():
            leaves.start()
            assert on.wait(60.0)
        void()

    void, leaves = spared.void, threading.Thread(target=park)
    monkeypatch.setattr(ending, "_lock", Lock())
    monkeypatch.setattr(spared, "void", begins)
    spared.backend.quick = False  # type: ignore[misc]
    ending.abort([spared], lambda: [spared])
    threads.close()
    leaves.join(60.0)
    kept, aborting = parked
    assert not kept and len(aborting) == 1


def test_of_threads_that_ask_at_once_the_latest_state_stays() -> None:
    life = Life()
    threads = [threading.Thread(target=life.reach, args=[state]) for state in (*CommState, *reversed(CommState))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert life.state is CommState.DESTROYED


def test_a_cancelled_wait_is_not_the_end() -> None:
    """Waits may begin again while the communicator is open; a left one stays left."""
    life = Life()
    life.token.cancel()
    life.wait_again()
    assert life.open and not life.token.cancelled


def test_the_page_of_states_is_that_of_the_code() -> None:
    from megatron_recycle.runtime.comm import life  # its docstring is the documentation

    drawing, *rows = str(life.__doc__).split("\n- ")
    assert [row.partition(":")[0] for row in rows] == [state.name for state in CommState]
    assert all(state.name in drawing for state in CommState)
