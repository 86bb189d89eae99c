"""Several would-be leaders, and a store that delays, forgets to answer and ends leases: never two decisions for one
generation."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from megatron_recycle.control import Coordinator, etcd
from megatron_recycle.control.etcd import Entry, Etcd, Place, StoreRefused, StoreUnreachable
from megatron_recycle.control.journal import JournalError
from megatron_recycle.control.leader_election import LEASE_S, Candidate, ElectedJournal, LeadLost, Sealed
from megatron_recycle.control.process import until_answered
from megatron_recycle.control.searches import Plans
from megatron_recycle.errors import ConfigError
from megatron_recycle.membership import inputs
from megatron_recycle.plan.plan_file import PlanFile

TOKEN = "a token that only this test has"


class Paper:
    """A store on paper, with a clock of its own. `meanwhile` happens in the middle of any request."""

    def __init__(self, dice: random.Random, trouble: float = 0.0) -> None:
        self.now = 0.0
        self.revision = 1
        self.keys: dict[str, tuple[bytes, int, int]] = {}
        self.terms: dict[str, int] = {}
        """The term in which each record was written, as the store saw it."""
        self.leases: dict[int, float] = {}
        self.meanwhile: Callable[[], None] = lambda: None
        self.full = False
        self._dice = dice
        self._trouble = trouble
        self._late: list[Callable[[], Any]] = []
        self._next = 0

    def clock(self) -> float:
        return self.now

    def range(self, prefix: str) -> list[Entry]:
        return self._ask(lambda: [Entry(key, value, created) for key, (value, created, _) in sorted(self.keys.items())
                                  if key.startswith(prefix)])

    def put_if(self, created: Mapping[str, int], puts: Mapping[str, bytes], lease: int = 0,
               leased: tuple[str, ...] = ()) -> int:
        if self.full:
            raise StoreRefused("mvcc: database space exceeded")

        def do() -> int:
            if any(self.keys.get(key, (b"", 0, 0))[1] != revision for key, revision in created.items()):
                return 0
            if leased and lease not in self.leases:
                return 0
            self.revision += 1
            self.terms.update({key: sum("/term/" in each for each in self.keys) for key in puts if "/journal/" in key
                               and "recycle/job/leader" in self.keys})
            for key, value in puts.items():
                before = self.keys.get(key)
                self.keys[key] = value, before[1] if before else self.revision, lease if key in leased else 0
            return self.revision

        return self._ask(do)

    def grant(self, seconds: int) -> int:
        def do() -> int:
            self._next += 1
            self.leases[self._next] = self.now + seconds
            return self._next

        return self._ask(do)

    def keep(self, lease: int) -> bool:
        def do() -> bool:
            if lease in self.leases:
                self.leases[lease] = self.now + LEASE_S
            return lease in self.leases

        return self._ask(do)

    def revoke(self, lease: int) -> None:
        self._ask(lambda: self.leases.pop(lease, None))
        self.expire()

    def expire(self) -> None:
        self.leases = {lease: until for lease, until in self.leases.items() if until > self.now}
        self.keys = {key: entry for key, entry in self.keys.items() if not entry[2] or entry[2] in self.leases}

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.expire()

    def _ask(self, do: Callable[[], Any]) -> Any:
        """Do it: at once, or late, or not at all, with an answer or without."""
        self.meanwhile()
        self.expire()
        if self._late and self._dice.random() < 0.3:
            self._late.pop(self._dice.randrange(len(self._late)))()
        if self._dice.random() >= self._trouble:
            return do()
        self.pass_time(self._dice.choice((0.1, 1.0, 2.5)))
        kind = self._dice.random()
        if kind < 0.4:
            do()
        elif kind < 0.7:
            self._late.append(do)
        raise StoreUnreachable("no answer")


class Contender:
    """A host's coordinator: stands by, leads, decides generations, dies and comes back."""

    def __init__(self, name: str, store: Paper, told: list[tuple[int, str]], dice: random.Random) -> None:
        self.name, self.store, self.told, self.dice = name, store, told, dice
        self.busy = False
        self.journal: ElectedJournal | None = None
        self.count = 0
        self.born()

    def born(self) -> None:
        self.count += 1
        self.journal = None
        self.candidate = Candidate(Sealed(self.store, "job", TOKEN), f"{self.name}.{self.count}", "h:1",
                                   self.store.clock)

    def step(self) -> None:
        """One thing that it may do; others may do theirs in the middle of it, and it never is in two."""
        if self.busy:
            return
        self.busy = True
        try:
            if self.dice.random() < 0.02:
                self.born()  # killed, and started again
            elif self.journal is None:
                self.journal = self.candidate.try_lead()
            elif self.dice.random() < 0.3:
                self.journal.beat()
            else:
                decided = [one for one in self.journal.records if one["kind"] == "decided"]
                generation = len(decided) + 1
                self.journal.append({"kind": "decided", "generation": generation, "by": f"{self.name}/{self.count}",
                                     "chance": self.dice.random()})
                self.told.append((generation, repr(self.journal.records[-1])))  # told only now
                self.journal.note({"kind": "committed", "iteration": generation})
        except StoreUnreachable:
            pass
        except LeadLost:
            self.born()
        finally:
            self.busy = False


def campaign(seed: int) -> int:
    """Returns how many generations were decided. Raises AssertionError."""
    dice = random.Random(seed)
    store, told = Paper(dice, trouble=dice.choice((0.05, 0.2, 0.4))), []
    contenders = [Contender(name, store, told, dice) for name in "abc"]
    depth = [0]

    def meanwhile() -> None:
        if depth[0] < 3 and dice.random() < 0.3:
            depth[0] += 1
            store.pass_time(dice.choice((0.0, 0.1, LEASE_S + 1.0)) if dice.random() < 0.3 else 0.0)
            dice.choice(contenders).step()
            depth[0] -= 1

    store.meanwhile = meanwhile
    for _ in range(150):
        store.pass_time(dice.choice((0.0, 0.1, 0.5)))
        dice.choice(contenders).step()
    store.meanwhile, store._trouble = (lambda: None), 0.0
    found = Sealed(store, "job", TOKEN).read("journal/")
    assert list(found) == [f"journal/{number:08d}" for number in range(len(found))], "a record is missing"
    records = [content for content, _ in found.values()]
    assert [one["record"]["generation"] for one in records] == list(range(1, len(records) + 1)), "decided twice"
    terms = {f"recycle/job/{name}": one["term"] for name, (one, _) in found.items()}
    assert terms == store.terms, "an old leader wrote"
    for generation, text in told:
        assert text == repr(records[generation - 1]["record"]), "what was told is not what is written"
    leaders = Sealed(store, "job", TOKEN).read("term/")
    assert len({content["nonce"] for content, _ in leaders.values()}) == len(leaders), "one leader had two terms"
    return len(records)


def test_no_generation_is_decided_twice_whatever_the_store_and_the_hosts_do() -> None:
    assert sum(campaign(seed) for seed in range(80)) > 1600, "the store let nobody decide"


def without_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transactions without the fence: on a record's number alone an old leader still writes."""
    real = ElectedJournal._put

    def unfenced(self: ElectedJournal, created: Mapping[str, int], contents: Mapping[str, Any]) -> None:
        mine, self._mine = self._mine, {}
        try:
            real(self, created, contents)
        finally:
            self._mine = mine

    monkeypatch.setattr(ElectedJournal, "_put", unfenced)


def test_the_campaign_finds_a_leader_that_does_not_ask_for_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    without_fence(monkeypatch)
    with pytest.raises(AssertionError, match="an old leader wrote"):
        for seed in range(300):
            campaign(seed)


def leading(store: Paper, name: str = "0", token: str = TOKEN) -> ElectedJournal:
    journal = Candidate(Sealed(store, "job", token), name, "h:1", store.clock).try_lead()
    assert journal is not None
    return journal


def test_the_next_leader_finds_records_of_any_size_the_note_and_the_plan() -> None:
    store = Paper(random.Random(0))
    first = leading(store)
    dice = random.Random(1)
    large = {"kind": "learnt", "text": [dice.random() for _ in range(40_000)]}
    first.append(large)
    first.append({"kind": "decided"})
    first.note({"kind": "committed", "iteration": 3})
    first.beat()
    assert Candidate(Sealed(store, "job", TOKEN), "1", "h:2", store.clock).try_lead() is None
    first.close()
    second = leading(store, "1")
    assert second.records == [large, {"kind": "decided"}, {"kind": "committed", "iteration": 3}] and second.term == 2
    assert (first.before, second.before) == ("", "0")
    assert all(len(value) < 600 * 1024 for value, _, _ in store.keys.values())
    with pytest.raises(LeadLost, match="term 1"):
        first.append({"kind": "decided"})


def test_a_leader_that_the_store_does_not_answer_leads_no_more() -> None:
    store = Paper(random.Random(0))
    journal = leading(store)
    store._trouble = 1.0
    with pytest.raises(LeadLost, match="has not answered"):
        journal.append({"kind": "decided"})
    with pytest.raises(LeadLost):
        journal.beat()


class Seconds:
    """What `etcd` takes for the module `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_leader_whose_store_refuses_connections_does_not_ask_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = Seconds(), list[str]()

    def refuse(self: Etcd, host: str, port: int, path: str, body: bytes, left: float) -> Any:
        asked.append(host)
        clock.now += 0.001
        raise ConnectionRefusedError

    monkeypatch.setattr(etcd, "time", clock)
    monkeypatch.setattr(Etcd, "_ask", refuse)
    store = Sealed(Etcd(Place.parse("etcd://a,b,c")), "job", TOKEN)
    with pytest.raises(LeadLost, match="has not answered"):
        ElectedJournal(store, 1, 1, 1, {}, 0.0, clock.monotonic).append({"kind": "decided"})
    assert {*asked} == {*"abc"} and len(asked) < 100 * LEASE_S


class NotedMeanwhile(ElectedJournal):
    """The event loop notes the second iteration right after another thread has read the first one."""

    @property
    def _note(self) -> Mapping[str, Any] | None:
        note, self.next = self.next, {"kind": "committed", "iteration": 2}
        return note

    @_note.setter
    def _note(self, note: Mapping[str, Any] | None) -> None:
        self.next = note


def test_a_note_that_is_set_while_the_last_one_is_taken_is_not_lost() -> None:
    store = Paper(random.Random(0))
    journal = leading(store)
    journal.__class__ = NotedMeanwhile
    journal.note({"kind": "committed", "iteration": 1})
    journal.flush()
    journal.flush()
    store.pass_time(LEASE_S + 1.0)
    assert leading(store).records == [{"kind": "committed", "iteration": 2}]


def test_a_record_that_a_stranger_has_written_deposes_the_leader() -> None:
    async def lead() -> None:
        store = Paper(random.Random(0))
        coordinator = Coordinator(size=1, token=TOKEN, journal=leading(store), plans=Plans(lambda *_: PlanFile()),
                                  emit=lambda event: None)
        await coordinator.start()
        store.keys["recycle/job/journal/00000000"] = b"not sealed", store.revision, 0
        coordinator.feed(inputs.Interrupted(1, "over"))
        with pytest.raises(LeadLost, match="written without this job's token"):
            await coordinator.wait_ended()
        await coordinator.close()

    asyncio.run(lead())


def test_a_leader_whose_store_is_full_leads_on_and_one_that_stands_by_waits_for_room() -> None:
    store = Paper(random.Random(1))
    candidates = [Candidate(Sealed(store, "job", TOKEN), name, "h:1", store.clock) for name in "ab"]
    journal = candidates[0].try_lead()
    assert journal is not None
    asked, lost, store.full = threading.Event(), list[str](), True
    journal.note({"kind": "note", "n": 1})
    journal.beat()
    for _ in range(2):
        journal.note({"kind": "note", "n": 2})
        store.meanwhile = asked.set
        if not asked.is_set():
            journal.keep_lead(lost.append)
        assert asked.wait(60)
        asked.clear()
    with pytest.raises(StoreRefused):
        journal.append({"kind": "decided"})
    store.full = False
    journal.append({"kind": "decided"})
    assert not lost
    journal.close()
    store.full, store.meanwhile = True, lambda: setattr(store, "full", store.now < 1)
    taken = until_answered(lambda: store.pass_time(0.4) or candidates[1].try_lead(), bears=True)
    assert taken is not None and taken.term == 2


@pytest.mark.parametrize(("seconds", "leads"), [(0.3, True), (0.7, True), (1.5, False), (4.0, False)])
def test_a_slow_store_is_borne_or_refused_by_name(seconds: float, leads: bool) -> None:
    store = Paper(random.Random(0))
    candidate = Candidate(Sealed(store, "job", TOKEN), "0", "h:1", store.clock)
    store.meanwhile = lambda: store.pass_time(seconds)
    if not leads:
        with pytest.raises(JournalError, match=f"takes {seconds} s and more to write a key"):
            candidate.announce()
        return
    candidate.announce()
    journal = candidate.try_lead()
    assert journal is not None and journal.leads()
    for number in range(40):  # as `keep_lead` does, with a decision between two signs of life
        store.pass_time(0.25)
        journal.beat()
        journal.append({"kind": "decided", "generation": number})
    assert journal.term == 1 and len(journal.records) == 40


def test_what_was_written_without_the_token_is_not_believed() -> None:
    store = Paper(random.Random(0))
    leading(store).append({"kind": "decided"})
    store.keys["recycle/job/journal/00000001"] = store.keys["recycle/job/journal/00000000"]
    store.pass_time(LEASE_S + 1.0)
    with pytest.raises(JournalError, match="journal/00000001 .* without this job's token"):
        leading(store)
    with pytest.raises(JournalError, match="without this job's token"):
        Candidate(Sealed(store, "job", "another"), "1", "h:1", store.clock).announce()


def test_a_journal_that_was_emptied_is_not_taken_for_a_new_one() -> None:
    store = Paper(random.Random(0))
    leading(store).append({"kind": "decided"})
    standing_by = Candidate(Sealed(store, "job", TOKEN), "1", "h:1", store.clock)
    assert standing_by.try_lead() is None
    store.keys.clear()
    with pytest.raises(JournalError, match="has been emptied"):
        standing_by.try_lead()


def test_a_new_job_does_not_go_on_with_an_old_ones_journal() -> None:
    store = Paper(random.Random(0))
    first = Candidate(Sealed(store, "job", TOKEN), "0", "h:1", store.clock)
    first.announce()
    journal = first.try_lead()
    assert journal is not None
    journal.append({"kind": "decided"})
    candidate = Candidate(Sealed(store, "job", TOKEN), "1", "h:2", store.clock)
    with pytest.raises(JournalError, match="runs already.* --join h:1"):
        candidate.announce()
    store.pass_time(LEASE_S + 1.0)
    with pytest.raises(JournalError, match="has been run .* choose another --job"):
        candidate.announce()


def test_hosts_meet_each_other_and_not_what_an_earlier_start_has_left() -> None:
    store = Paper(random.Random(0))

    def came(name: str, port: int) -> Candidate:
        candidate = Candidate(Sealed(store, "job", TOKEN), name, f"h:{port}", store.clock)
        candidate.announce()
        return candidate

    earlier = [came(str(k), 10 + k) for k in range(4)]
    for _ in range(3):
        met = [one.meet(4) for one in earlier]
    assert met == [["h:10", "h:11", "h:12", "h:13"]] * 4
    hosts = [came("0", 20)]
    assert [hosts[0].meet(3) for _ in range(9)] == [[]] * 9, "the others of this start have not come"
    hosts += [came("1", 21), came("2", 22)]
    for _ in range(3):
        met = [one.meet(3) for one in hosts]
    assert met == [["h:20", "h:21", "h:22"]] * 3
    with pytest.raises(JournalError, match="as --node-rank 1, at h:11 and h:21"):
        earlier[1].meet(3)
    leading(store).append({"kind": "decided"})
    hosts[2].announce()  # its answer was lost, and the others have begun


@pytest.mark.parametrize("url", ["h:2379", "http://h:2379", "etcd://", "etcd://h:x", "etcd://user:secret@h", "etcd://h,",
                                 "etcd://::1", "etcd://[::1", "etcd://h:0", "etcd://h:99999"])
def test_a_store_is_named_by_its_members(url: str) -> None:
    assert Place.parse("etcds://a,b:1") == Place("https", (("a", 2379), ("b", 1)))
    assert Place.parse("etcd://[fd00::1],[::1]:1").members == (("fd00::1", 2379), ("::1", 1))
    with pytest.raises(ConfigError, match="etcd://HOST:PORT"):
        Place.parse(url)
