"""The parts of a worker when a failure elsewhere has ended the generation: each ends what its siblings have come to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from megatron_recycle.errors import GenerationOver
from megatron_recycle.runtime.comm.comm import Comm
from megatron_recycle.runtime.comm.levelling import Levelling
from megatron_recycle.runtime.comm.tags import FRAMEWORK
from megatron_recycle.runtime.comm.threads import Threads
from tests.fakes.network.fabric import Fabric

LIMIT = 20.0


class Part:
    """One of a worker's parts, whose actions are sums over all of them."""

    def __init__(self, siblings: Comm, limit: float = LIMIT) -> None:
        self.siblings, self.levelling = siblings, Levelling(siblings, Threads(), limit)
        self.over = threading.Event()
        self.done = 0

    def run(self, actions: int, between: Callable[[int], None] = lambda done: None) -> str:
        """So many actions, or until the generation is over; how that ended."""
        self.levelling.begin(3, 1, 0)
        try:
            for _ in range(actions):
                if self.over.is_set():
                    return "stands"
                self.siblings.sum(torch.ones(1)).wait()
                self.done += 1
                self.levelling.did()
                between(self.done)
        except GenerationOver:
            return "is pulled out"
        finally:
            self.levelling.stand()
        return "stands"

    def stop(self) -> None:
        """By the agent's thread."""
        self.over.set()
        self.levelling.start()


def parts(count: int, seed: int = 0) -> list[Part]:
    return [Part(comm) for comm in Fabric(seed).comms(count, FRAMEWORK)]


def in_threads(*runs: Callable[[], object]) -> list[object]:
    found: list[object] = [None] * len(runs)

    def note(number: int) -> None:
        found[number] = runs[number]()

    threads = [threading.Thread(target=note, args=(number,), daemon=True) for number in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [2, 3, 4])
def test_parts_end_the_action_that_all_have_come_to(count: int, seed: int):
    """The first hears of the failure between two actions; the others have ended the first of them, or not yet."""
    members = parts(count, seed)

    def first(part: Part) -> str:
        return part.run(3, between=lambda done: [each.stop() for each in members] if done == 2 else None)

    ends = in_threads(lambda: first(members[0]), *(lambda part=part: part.run(9) for part in members[1:]))
    assert {part.done for part in members} <= {2, 3} and all(end in ("stands", "is pulled out") for end in ends)
    for part in members:
        part.levelling.wait(lambda: False)
    assert all(part.siblings.aborted for part in members)


def test_who_waits_for_a_sibling_that_stands_still_is_got_out_of_that():
    """It has begun its third action before it hears of the failure."""
    one, other = parts(2)

    def stop() -> None:
        while other.siblings._group.sums < 3:
            time.sleep(0.001)
        one.stop()
        other.stop()

    ends = in_threads(lambda: one.run(2), lambda: other.run(9), stop)
    assert ends[:2] == ["stands", "is pulled out"]
    assert (one.done, other.done) == (2, 2)


def test_a_sibling_that_is_dead_keeps_nobody():
    one, other = parts(2)
    one.stop()
    other.siblings.abort()
    began = time.monotonic()
    one.levelling.wait(lambda: False)
    assert time.monotonic() - began < LIMIT / 2


def test_a_sibling_that_says_nothing_is_waited_for_until_the_limit_only():
    silent = Fabric(0).comms(2, FRAMEWORK)
    one = Part(silent[0], limit=0.2)
    one.stop()
    one.levelling.wait(lambda: False)
    assert one.siblings.aborted


def test_nobody_is_waited_for_once_this_process_is_out():
    one, _ = parts(2)
    one.stop()
    out = threading.Event()
    out.set()
    one.levelling.wait(out.is_set)
    assert one.siblings.aborted
