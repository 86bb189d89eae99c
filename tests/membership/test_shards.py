"""Who holds which shard, after any deaths and returns."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as some

from megatron_recycle.membership.shards import ShardTable, assign, those_that_may_go


def _own(count: int) -> list[list[str]]:
    return [[f"{shard}:0"] for shard in range(count)]


def test_twins_are_neighbours_where_each_has_a_host() -> None:
    names = [f"{number}:0" for number in range(4)]
    found = assign(_own(4), names, {name: name for name in names}, 2)
    assert found == (("0:0", "1:0"), ("1:0", "2:0"), ("2:0", "3:0"), ("0:0", "3:0"))


def test_twins_lie_on_different_hosts() -> None:
    names = [f"{number}:0" for number in range(4)]
    hosts = dict(zip(names, "aabb"))
    for of in assign(_own(4), names, hosts, 2):
        assert len({hosts[name] for name in of}) == 2


def test_the_shards_of_the_dead_are_adopted_and_given_back() -> None:
    names = [f"{number}:0" for number in range(4)]
    hosts = {name: name for name in names}
    before = assign(_own(4), names, hosts, 2)
    left = ["0:0", "2:0", "3:0"]
    had = [[name for name in of if name in left] for of in before]
    after = assign(had, left, hosts, 2)
    assert len(ShardTable(0, 0, tuple(map(tuple, had)), after).moves) == 2
    again = ShardTable(0, 0, after, assign(after, names, hosts, 2))
    assert {taker for _, _, taker in again.moves} == {"1:0"} and len(again.moves) == 2


def test_twins_that_are_asked_to_leave_go_one_after_the_other() -> None:
    names = [f"{number}:0" for number in range(4)]
    table = ShardTable(0, 0, (), assign(_own(4), names, {name: name for name in names}, 2))
    assert those_that_may_go([table], ["0:0", "1:0", "2:0"]) == ["0:0", "2:0"]


@given(some.integers(2, 8), some.integers(1, 4), some.integers(1, 4), some.data())
def test_any_history(count: int, copies: int, machines: int, data: some.DataObject) -> None:
    names = [f"{number}:0" for number in range(count)]
    hosts = {name: str(data.draw(some.integers(0, machines - 1))) for name in names}
    copies = min(copies, count)
    held = assign(_own(count), names, hosts, copies)
    live = set(names)
    for _ in range(data.draw(some.integers(1, 5))):
        change = data.draw(some.sampled_from(names))
        live = live ^ {change} if live != {change} else live
        had = [[name for name in of if name in live and name != change] for of in held]
        if not all(had):
            return  # the job has ended
        held = assign(had, live, hosts, copies)
        load = Counter({name: sum(name in of for of in held) for name in live})
        for before, of in zip(had, held):
            assert len(of) == len(set(of)) == min(copies, len(live)) and set(of) <= live
            assert copies == 1 or set(of) & set(before), "somebody has it to begin with"
            if min(copies, len(live)) > 1 and len({hosts[name] for name in live}) > 1:
                assert len({hosts[name] for name in of}) > 1
        if len({hosts[name] for name in live}) == len(live):
            assert max(load.values()) - min(load.values()) <= 1
            missing = sum(max(0, len(of) - len(before)) for before, of in zip(had, held))
            moved = sum(len(set(of) - set(before)) for before, of in zip(had, held))
            share = -(-count * min(copies, len(live)) // len(live))
            assert moved <= max(missing, share) + sum(
                max(0, sum(name in of for of in had) - share) for name in live), "no copy without a reason"
