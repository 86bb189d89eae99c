"""A checkpoint that Megatron-LM writes beside training gets its name once all have written, or is given up by all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_recycle.backends.megatron import checkpoint_hooks as background
from megatron_recycle.backends.megatron.checkpoint_hooks import Background
from megatron_recycle.errors import GenerationOver
from megatron_recycle.plan import Worker
from megatron_recycle.runtime.saving import Written

SIZE = 3


class Writer:
    """Stands in for Megatron's; `busy` for so many looks."""

    def __init__(self, busy: int) -> None:
        self.busy, self.killed, self.closed = busy, False, False
        self.process = SimpleNamespace(is_alive=self.look, kill=self.kill, join=lambda: None)

    def look(self) -> bool:
        self.busy -= 1
        return self.busy >= 0

    def kill(self) -> None:
        self.killed = True

    def close(self) -> None:
        self.closed = True


class Case:
    """One worker of three; ``others`` changes what the sum over all is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.members = [Worker(0, 0), Worker(1, 0), Worker(2, 0)]
        self.others: Callable[[list[int]], list[int]] = lambda mine: [2 * one for one in mine]
        self.named: list[int] = []
        self.forgotten: list[int] = []
        self.background = Background(lambda: tuple(self.members), lambda: True, self.forgotten.append)
        self.folder = folder
        monkeypatch.setattr(background, "count", self._add)
        monkeypatch.setattr(background, "_started", lambda request: request)
        monkeypatch.setattr(background, "_LOOK_SECONDS", 0.0)

    def _add(self, comm: Any, *flags: bool) -> list[int]:
        return [mine + others for mine, others in zip(map(int, flags), self.others([*map(int, flags)]), strict=True)]

    def begin(self, busy: int = 0) -> Writer:
        writer = Writer(busy)
        (self.folder / ".iter_0000004.g1.part").mkdir()
        (self.folder / ".iter_0000004.g0.part").mkdir()  # a try before
        self.background.begin(4, Written(3, None), str(self.folder), "g1", writer)
        return writer

    def finish(self, wait: bool = False) -> list[int]:
        self.background.finish(self.save(), lambda written: self.named.append(written.iteration), wait)
        return self.named

    def save(self) -> Any:
        groups = SimpleNamespace(members=tuple(self.members), control=SimpleNamespace(size=SIZE))
        return SimpleNamespace(generation=SimpleNamespace(groups=groups), check=lambda: None)


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Case:
    return Case(monkeypatch, tmp_path)


def test_it_is_named_once_all_have_written(case: Case):
    assert case.finish() == [] == case.finish(wait=True), "there is none"
    writer = case.begin(busy=2)
    assert case.finish() == [] == case.finish()
    case.others = lambda mine: [2, 1]
    assert case.finish() == [], "another one still writes"
    case.others = lambda mine: [2, 0]
    assert case.finish() == [4] and writer.closed and not writer.killed
    assert case.finish() == [4], "once"


def test_at_the_end_of_training_it_is_waited_for(case: Case):
    case.begin(busy=5)
    assert case.finish(wait=True) == [4]


@pytest.mark.parametrize("what", ["one has gone", "one has come in its place"])
def test_where_a_worker_is_lost_all_give_it_up_and_what_was_written_goes(case: Case, what: str):
    writer = case.begin()
    if what == "one has gone":
        case.members.pop()
        case.others = lambda mine: [0, 0]
    else:
        case.others = lambda mine: [1, 0]
    assert case.finish() == [] and writer.killed
    assert not [*case.folder.iterdir()] and case.forgotten == [3]
    case.others = lambda mine: [0, 0]
    assert case.finish() == []


def test_a_failure_while_it_gets_its_name_costs_it(case: Case):
    """What its writers have told is read once."""
    case.begin()

    def lost(written: Any) -> None:
        raise GenerationOver("one has gone")

    with pytest.raises(GenerationOver):
        case.background.finish(case.save(), lost, False)
    case.others = lambda mine: [0, 0]
    assert case.finish() == []


def test_where_its_files_could_not_be_written_nothing_is_left_of_it(case: Case):
    """Nor does anybody keep what it takes to go back to it."""
    case.begin()

    def full(written: Any) -> None:
        raise GenerationOver("the checkpoint cannot be written here")

    with pytest.raises(GenerationOver):
        case.background.finish(case.save(), full, False)
    case.background.unwritten()  # as all agree in the next generation
    assert not [*case.folder.iterdir()] and case.forgotten == [3]
    case.background.unwritten()
    assert case.forgotten == [3], "once"
