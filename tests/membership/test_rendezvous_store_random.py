"""Processes count, append and compare on the store while coordinators die and change, and answers are lost: what each
was answered is what one store that never died would have answered, in some order."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from megatron_recycle.control import rendezvous_store, store_client
from megatron_recycle.control.rendezvous_store import RendezvousStore
from megatron_recycle.control.store_client import StoreClient
from megatron_recycle.membership.protocol import FROM_STORE, TO_STORE, Ask, Found

TOKEN = "a token that only this test has"
STEPS, MOST_CHANGES = 100, 12
Message = dict[str, Any]


class World:
    """Coordinators, of which the latest leads, and the processes' ways to them. Whatever a process does may be
    interrupted by what others do, and none is in two things at a time."""

    def __init__(self, dice: random.Random, processes: int) -> None:
        self.dice = dice
        self.stores = [RendezvousStore(1)]
        self.trouble = 0.1
        self.depth, self.steps = 0, STEPS
        self.deaths = 0.0
        self.processes = [Process(self, rank) for rank in range(processes)]
        self.asks = {one.client._name: one for one in self.processes[1:]}

    def fail(self) -> None:
        """The coordinator dies or is stopped, and another one leads: from now on, or when it is looked for."""
        self.stores[-1]._leads = lambda: False
        self.stores.append(RendezvousStore(len(self.stores) + 1))
        self.stores[-1].gather(one.rank for one in self.processes if one.lives)

    def meanwhile(self) -> None:
        if self.depth < 4 and self.steps > 0 and self.dice.random() < 0.3:
            self.depth += 1
            self.dice.choice(self.processes).step()
            self.depth -= 1
        if len(self.stores) <= MOST_CHANGES and self.dice.random() < 0.03:
            self.fail()

    def all_tell(self) -> None:
        """As each agent does when it reaches a coordinator, in a thread of its own."""
        leads = self.stores[-1]
        for one in self.processes:
            if one.lives:
                one.tell()
        if leads is self.stores[-1]:
            leads.gathered()  # the dead are waited for no longer


class Died(Exception):
    """This process has, in the middle of what it did."""


class Line:
    """What stands for a connection: an exchange fails before it was heard or after, or is answered."""

    def __init__(self, world: World, at: RendezvousStore) -> None:
        self.world, self.at, self.store, self.busy = world, at, at.name, False

    def exchange(self, message: Ask, kind: type[Found], until: float, given_up: Callable[[], bool]) -> Found:
        self.busy, world = True, self.world
        world.meanwhile()
        heard = FROM_STORE.read(json.loads(json.dumps(message.to_json())))
        if world.dice.random() < world.trouble:
            raise ConnectionResetError("before it was heard")
        answers: list[Found] = []
        self.at.ask(self, heard, answers.append)
        if (one := world.asks.get(heard.once.partition(".")[0])) is not None and world.dice.random() < world.deaths:
            one.lives = False
            raise Died
        lost = world.dice.random() < world.trouble
        if not lost:
            world.meanwhile()
        if not answers and self.at is world.stores[-1]:
            world.all_tell()
        if lost or not answers:
            self.at.gone(self)
            raise ConnectionResetError("the answer was lost")
        self.busy = False
        return TO_STORE.read(json.loads(json.dumps(answers[0].to_json())))

    def close(self) -> None:
        self.at.gone(self)


class Process:
    """One that asks, and has the right to: it counts, appends its own words, and takes a place if it is free."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.lives, self.busy = world, rank, True, False
        self.client = StoreClient("a:1,b:2", TOKEN, rank)
        self.said = self.client.said(0)
        self.counted: list[int] = []
        self.words: list[str] = []
        self.won: list[str] = []

    def ask(self, op: str, key: str, *values: bytes, number: int = 0) -> Any:
        return self.client.ask(op, [key], values, number=number, timeout=1e9, said=self.said)

    def step(self) -> None:
        if self.busy or not self.lives:
            return
        self.busy = True
        self.world.steps -= 1
        try:
            kind = self.world.dice.randrange(4)
            if kind == 0:
                self.counted.append(self.ask("add", "n", number=1).number)
            elif kind == 1:
                word = f"{self.rank}.{len(self.words)} "
                self.ask("append", "text", word.encode())
                self.words.append(word)
            elif kind == 2:
                place = f"place{self.world.dice.randrange(12)}"
                mine = f"{self.rank}".encode()
                if self.ask("compare_set", place, b"", mine).number:
                    self.won.append(place)
            else:
                self.ask("set", f"own{self.rank}", str(len(self.words)).encode())
        except Died:
            return
        finally:
            self.busy = False

    def tell(self) -> None:
        with suppress(Died):
            self.client.tell(1e9)


@pytest.fixture(autouse=True)
def on_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_client, "_PAUSE", 0.0)


def campaign(monkeypatch: pytest.MonkeyPatch, seed: int) -> int:
    """Returns how often another coordinator has led. Raises AssertionError."""
    dice = random.Random(seed)
    world = World(dice, 5)
    world.trouble, world.deaths = dice.choice((0.05, 0.2, 0.4)), dice.choice((0.0, 0.0, 0.02))

    def to(target: tuple[str, int], *_: object) -> Line:
        if dice.random() < world.trouble:
            raise ConnectionRefusedError("nobody is there")
        stale = len(world.stores) > 1 and dice.random() < 0.2
        return Line(world, world.stores[-2 if stale else -1])

    monkeypatch.setattr(store_client._Line, "to", to)
    while world.steps > 0:
        dice.choice(world.processes).step()
    world.trouble = world.deaths = 0.0
    first, living = world.processes[0], [one for one in world.processes if one.lives]
    world.all_tell()
    counted = sorted(number for one in living for number in one.counted)
    words = sorted(word.strip() for one in living for word in one.words)
    last = first.ask("add", "n", number=0).number
    text = first.ask("append", "text", b"end").values[0].decode().split()[:-1]
    if len(living) == len(world.processes):
        assert counted == [*range(1, last + 1)], f"counted {counted}"
        assert sorted(text) == words
    assert len(counted) == len({*counted}) and max((0, *counted)) <= last, f"counted {counted}"
    assert len(text) == len({*text}) and {*words} <= {*text}, "a word is missing, or there twice"
    won = [place for one in living for place in one.won]
    assert len(won) == len({*won}), "two have the same place"
    for one in living:
        for place in one.won:
            assert first.ask("get", place).values == [str(one.rank).encode()]
    return len(world.stores) - 1


def test_each_count_word_and_place_is_given_once_whoever_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = sum(campaign(monkeypatch, seed) for seed in range(60))
    assert changes > 300, f"only {changes} coordinators have followed"


@pytest.mark.parametrize("without", ["marks", "gathering", "epoch"])
def test_the_campaign_finds_a_shelf_that_forgets_one_of_its_means(monkeypatch: pytest.MonkeyPatch, without: str
                                                                  ) -> None:
    if without == "marks":
        monkeypatch.setattr(rendezvous_store.Marks, "put", lambda self, slot, mark: None)
    elif without == "gathering":
        monkeypatch.setattr(RendezvousStore, "gather", lambda self, ranks: None)
    else:
        monkeypatch.setattr(StoreClient, "_counts", counts_always)
    with pytest.raises(AssertionError):
        for seed in range(300):
            campaign(monkeypatch, seed)


def counts_always(self: StoreClient, line: Any, message: Ask, values: Any, told: Found, said: Any) -> bool:
    if said is not None and told.stamp:
        self._memory.add(said, message.op, message.keys, values, told)
    return True
