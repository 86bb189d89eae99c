"""Who is suspected, from the clock and from what was told: nobody waits in these tests."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_recycle.control.clocks import Findings, Watch
from megatron_recycle.membership.detectors import Doing, HangUps, Hosts, Stalls, ThreadState
from megatron_recycle.membership.state import Member

INTERVAL, TIMEOUT = 0.5, 10.0


def doing(state: str, for_s: float, limit_s: float | None = 10.0, what: str = "forward") -> Doing:
    return Doing(ThreadState(state), what, 1, for_s, limit_s)


def stalls(*keys: str) -> Stalls[str]:
    made: Stalls[str] = Stalls(INTERVAL)
    made.watch(keys)
    return made


# ---- stuck


def test_a_worker_that_works_for_too_long_is_stalled_and_those_that_wait_for_it_are_not() -> None:
    found = stalls("a", "b", "c")
    found.heard("a", doing("working", 10.5), 100.0)
    found.heard("b", doing("waiting", 50.0), 100.0)
    found.heard("c", doing("outside", 500.0, None), 100.0)
    assert found.stalled(100.1) == {"a": pytest.approx(89.5)}
    assert found.all_wait(100.1) is None


def test_nobody_is_stalled_before_a_limit_is_known_nor_by_the_time_since_a_sign_of_life() -> None:
    found = stalls("a", "b")
    found.heard("a", doing("working", 300.0, None), 100.0)
    found.heard("b", doing("working", 9.5), 100.0)
    assert found.stalled(105.0) == {}


def test_a_sign_of_life_that_says_otherwise_takes_the_suspicion_back() -> None:
    found = stalls("a")
    found.heard("a", doing("working", 11.0), 100.0)
    found.heard("a", doing("working", 0.1), 100.5)
    assert found.stalled(100.6) == {}


def test_all_members_waiting_longer_than_any_of_them_has_learnt_is_a_lost_message() -> None:
    found = stalls("a", "b", "c")
    found.heard("a", doing("waiting", 12.0, 10.0), 100.0)
    found.heard("b", doing("waiting", 11.0, 10.5), 100.2)
    found.heard("c", doing("standing by", 60.0, 10.0), 100.3)
    waiting = found.all_wait(100.4)
    assert waiting is not None and set(waiting) == {"a", "b", "c"}
    found.heard("b", doing("waiting", 11.5, 14.0), 100.7)
    assert found.all_wait(100.8) is None, "one of them knows of exchanges that take longer"


@pytest.mark.parametrize("third", [doing("outside", 60.0, None), doing("working", 1.0), doing("waiting", 0.1), None])
def test_a_message_is_not_lost_while_one_member_may_still_act(third: Doing | None) -> None:
    found = stalls("a", "b", "c")
    for key in "ab":
        found.heard(key, doing("waiting", 60.0), 100.0)
    found.heard("c", third, 100.0)
    assert found.all_wait(100.1) is None


def test_a_message_is_not_lost_when_everybody_stands_by_or_what_was_told_is_old() -> None:
    found = stalls("a", "b")
    for key in "ab":
        found.heard(key, doing("standing by", 60.0), 100.0)
    assert found.all_wait(100.1) is None, "the job is over"
    for key in "ab":
        found.heard(key, doing("waiting", 60.0), 100.0)
    assert found.all_wait(100.1) is not None
    assert found.all_wait(102.0) is None, "what they do now is not known"


def test_who_stood_still_itself_forgets_what_it_was_told() -> None:
    found = stalls("a", "b")
    found.heard("a", doing("working", 60.0), 100.0)
    found.restart(130.0)
    assert found.stalled(130.0) == {}
    found.heard("a", doing("working", 60.0), 130.1)  # may have lain unread for long
    assert found.stalled(130.2) == {}
    found.heard("a", doing("working", 62.0), 132.0)
    assert found.stalled(132.1) == {"a": pytest.approx(70.0)}


@pytest.mark.parametrize("told", [None, 7, {}, {"state": "working"}, {"state": "working", "what": "forward",
                                                                       "number": "x", "for_s": 1, "limit_s": None}])
def test_what_cannot_be_understood_suspects_nobody(told: Any) -> None:
    assert Doing.read(told) is None


def test_what_was_told_is_read() -> None:
    told = {"state": "working", "what": "forward", "number": 3, "for_s": 1, "limit_s": None}
    assert Doing.read(told) == Doing("working", "forward", 3, 1.0, None)


# ---- hosts


def hosts() -> Hosts[str]:
    made: Hosts[str] = Hosts(INTERVAL)
    made.watch({"a": "one", "b": "one", "c": "two", "d": "two"})
    return made


def test_a_host_whose_workers_all_go_silent_is_one_decision() -> None:
    judged = hosts().judge({"a": 100.0, "b": 100.3}, {"a": 100.0, "b": 100.3, "c": 110.2, "d": 110.2}, TIMEOUT, 110.4)
    assert judged == {"a": "unreachable", "b": "unreachable"}


def test_the_first_silent_worker_waits_for_its_host_mates() -> None:
    seen = {"a": 100.0, "b": 100.4, "c": 110.0, "d": 110.0}
    assert hosts().judge({"a": 100.0}, seen, TIMEOUT, 110.1) == {}
    assert hosts().judge({"a": 100.0, "b": 100.4}, seen, TIMEOUT, 110.5) == dict.fromkeys("ab", "unreachable")


def test_a_silent_worker_with_a_live_host_mate_is_frozen_at_once() -> None:
    seen = {"a": 100.0, "b": 109.8, "c": 110.0, "d": 110.0}
    assert hosts().judge({"a": 100.0}, seen, TIMEOUT, 110.1) == {"a": "frozen"}


def test_the_wait_for_host_mates_ends_after_two_heartbeats() -> None:
    seen = {"a": 100.0, "b": 101.0, "c": 111.0, "d": 111.0}
    assert hosts().judge({"a": 100.0}, seen, TIMEOUT, 110.9) == {}
    assert hosts().judge({"a": 100.0}, seen, TIMEOUT, 111.01) == {"a": "frozen"}


def test_the_launcher_is_a_sign_of_life_of_its_host() -> None:
    found = hosts()
    silent = {"a": 100.0, "b": 100.2}
    seen = {**silent, "c": 110.0, "d": 110.0}
    found.launcher_beat("one", 110.1)
    assert found.judge(silent, seen, TIMEOUT, 110.3) == {"a": "frozen", "b": "frozen"}
    found = hosts()
    found.launcher_beat("one", 100.1)
    assert found.judge(silent, seen, TIMEOUT, 110.3) == {"a": "unreachable", "b": "unreachable"}


def test_a_worker_alone_on_its_host_is_frozen_unless_its_launcher_is_silent_too() -> None:
    for launcher, kind in ((None, "frozen"), (99.9, "unreachable"), (110.0, "frozen")):
        found: Hosts[str] = Hosts(INTERVAL)
        found.watch({"a": "one", "c": "two"})
        if launcher is not None:
            found.launcher_beat("one", launcher)
        assert found.judge({"a": 100.0}, {"a": 100.0, "c": 110.0}, TIMEOUT, 110.3) == {"a": kind}


# ---- hung up


def hang_ups() -> HangUps[str]:
    """Hosts one (a, b) and two (c), all of them here, with their launchers; the clock stands at 100."""
    made: HangUps[str] = HangUps()
    for key in "abc":
        made.came(key)
    made.watch({"a": "one", "b": "one", "c": "two"})
    made.launcher_came("one")
    made.launcher_came("two")
    assert made.tick(100.0) == {}
    return made


def lost_by(found: HangUps[str], now: float, until: float) -> tuple[dict[str, float], float]:
    """What the ticks from ``now`` on find first, and when."""
    while now < until:
        now += 0.25
        if lost := found.tick(now):
            return lost, now
    return {}, now


def test_a_host_that_has_hung_up_altogether_and_stays_away_for_two_seconds_is_lost() -> None:
    found = hang_ups()
    found.launcher_gone("one", 100.1)
    found.gone("a", 100.1)
    found.gone("b", 100.3)
    assert lost_by(found, 100.0, 110.0) == ({"a": 100.3, "b": 100.3}, 102.5)


@pytest.mark.parametrize("stays", ["launcher", "a"])
def test_one_that_hangs_up_alone_is_no_host(stays: str) -> None:
    """Only the launcher, or only workers: of a worker's end its launcher tells, and heartbeats do the rest."""
    found = hang_ups()
    found.gone("b", 100.1)
    found.launcher_gone("one", 100.1) if stays == "a" else found.gone("a", 100.1)
    assert lost_by(found, 100.0, 130.0)[0] == {}


@pytest.mark.parametrize("back", ["launcher", "a"])
def test_after_a_blip_that_breaks_every_connection_the_first_one_back_shows_that_the_host_lives(back: str) -> None:
    found = hang_ups()
    found.launcher_gone("one", 100.1)
    found.gone("a", 100.1)
    found.gone("b", 100.1)
    assert lost_by(found, 100.0, 101.9)[0] == {}
    found.launcher_came("one") if back == "launcher" else found.came("a")
    assert lost_by(found, 102.0, 130.0)[0] == {}


def test_a_coordinator_that_has_just_come_back_judges_nobody_that_it_has_not_met() -> None:
    found: HangUps[str] = HangUps()
    found.watch({"a": "one", "b": "one"})
    found.launcher_came("one")
    found.came("a")
    found.launcher_gone("one", 100.0)
    found.gone("a", 100.0)
    assert lost_by(found, 100.0, 120.0)[0] == {}, "b may be on its way still"
    found.came("b")
    found.gone("b", 120.0)
    assert lost_by(found, 120.0, 130.0) == ({"a": 120.0, "b": 120.0}, 122.25)


def test_hang_ups_while_the_coordinator_stood_still_count_from_when_it_goes_on() -> None:
    """Their new connections wait unread."""
    found = hang_ups()
    found.launcher_gone("one", 100.1)
    found.gone("a", 100.1)
    found.gone("b", 100.1)
    assert found.tick(107.0) == {}
    found.came("a")
    assert lost_by(found, 107.0, 120.0)[0] == {}


def test_a_host_without_a_launcher_is_not_judged() -> None:
    found: HangUps[str] = HangUps()
    found.watch({"a": "one"})
    found.came("a")
    found.gone("a", 100.0)
    assert lost_by(found, 100.0, 120.0)[0] == {}


# ---- all together


def watch(now: float) -> Watch:
    made = Watch(INTERVAL, 2.0)
    members = [Member(name, rank, name, 1, host) for rank, (name, host) in enumerate(
        [("a", "one"), ("b", "one"), ("c", "two"), ("d", "two")])]
    made.members(members, [], INTERVAL, 2.0, now)
    return made


def beats(found: Watch, now: float, keys: str, state: str = "waiting", for_s: float = 0.0) -> None:
    told = {"doing": {"state": state, "what": "forward", "number": 1, "for_s": for_s, "limit_s": 10.0}}
    for key in keys:
        found.beat(key, now)
        found.told(key, told, now)


def test_silence_of_a_host_and_a_stall_elsewhere_are_found_together() -> None:
    found = watch(100.0)
    now = 100.0
    while now < 102.5:
        now += 0.25
        beats(found, now, "c")
        beats(found, now, "d", "working", 8.0 + now - 100.0)
        if now < 102.0:
            assert found.tick(now) == Findings()
    lost = found.tick(now)
    assert lost.lost == {"a": "unreachable", "b": "unreachable", "d": "stalled"} and lost.since < 101


def test_a_watch_that_stood_still_suspects_nobody_and_finds_later_what_is_still_so() -> None:
    found = watch(100.0)
    beats(found, 100.1, "abcd")
    assert found.tick(100.1) == Findings()
    assert found.tick(130.0) == Findings()
    beats(found, 130.0, "bcd", "working", 60.0)
    assert found.tick(130.1) == Findings()
    now, kinds = 130.1, {}
    while now < 133.0:
        now += 0.25
        beats(found, now, "bcd", "working", 0.1)
        kinds.update(found.tick(now).lost)
    assert kinds == {"a": "frozen"}


@pytest.mark.parametrize(("comes", "until"), [("nobody", 107.0), ("c", 110.0), ("launcher", 110.0)])
def test_the_host_of_the_leader_before_has_been_silent_since_its_lease_was_kept(comes: str, until: float) -> None:
    """Unless a single one of its processes comes: then it is others that are silent, and they may need the time."""
    members = [Member(name, rank, name, 1, f"name/{rank // 2}") for rank, name in enumerate("abcd")]
    found = Watch(INTERVAL, 10.0)
    found.members(members, [], INTERVAL, 10.0, 100.0)
    found.left("1", 97.0)
    now, lost = 100.0, {}
    while not lost and now < 120.0:
        now += INTERVAL
        if now == 105.0 and comes == "c":
            found.came("c")
        if now == 105.0 and comes == "launcher":
            found.launcher_came("name/1")
            found.launcher_beat("name/1", now)
        beats(found, now, "ab" if comes != "c" or now < 105.0 else "abc")
        lost = found.tick(now).lost
    assert set(lost) == ({"d"} if comes == "c" else {"c", "d"}) and until < now <= until + 1.0, (lost, now)


def test_who_stood_still_beside_the_leader_that_is_gone_is_not_judged_by_what_was_before() -> None:
    """And hosts of one number that are two are not credited with the silence of one."""
    members = [Member(name, rank, name, 1, f"{host}/0") for rank, (name, host) in enumerate(
        [("a", "one"), ("b", "one")])]
    found = Watch(INTERVAL, 10.0)
    found.members(members, [], INTERVAL, 10.0, 100.0)
    found.left("0", 97.0)
    assert found.tick(100.0) == Findings()
    assert found.tick(109.0) == Findings(), "it stood still itself"
    found.came("a")
    beats(found, 109.0, "a")
    assert [found.tick(each).lost for each in (110.5, 111.0, 112.0)] == [{}, {}, {}], "b has what it had"
    two = Watch(INTERVAL, 10.0)
    two.members([*members, Member("c", 2, "c", 1, "two/0")], [], INTERVAL, 10.0, 100.0)
    two.left("0", 97.0)
    assert all(at == 100.0 for at in two._heartbeats.seen.values())
