"""The mapping that large states are made of behaves as a dict does, and older ones stay as they were."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as some

from megatron_recycle.membership.persistent_map import Table, put


@given(some.lists(some.tuples(some.text(max_size=2), some.integers()), max_size=200))
def test_a_table_is_a_dict_that_is_never_changed(items: list[tuple[str, int]]) -> None:
    plain: dict[str, int] = {}
    table: Table[int] = Table()
    before = []
    for key, value in items:
        before.append((table, dict(plain)))
        plain[key] = value
        table = put(table, key, value)
    assert dict(table) == plain == table and len(table) == len(plain)
    assert all(key in table and table.get(key) == value for key, value in plain.items())
    assert table.get("no such key") is None
    assert all(dict(older) == was for older, was in before)


def test_any_mapping_becomes_a_table() -> None:
    assert put({"a": 1}, "b", 2) == {"a": 1, "b": 2}
