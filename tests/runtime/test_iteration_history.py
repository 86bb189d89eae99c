"""What a worker that comes in later is told of what is over."""

from __future__ import annotations

from msgspec.structs import astuple

from megatron_recycle.runtime.iteration_history import History


def kept(history: History, upto: int) -> list[bytes | None]:
    return [history.of(number) for number in range(upto)]


def test_who_comes_in_knows_what_the_others_knew():
    history, other = History(), History()
    for number in (2, 3, 5, 6):
        history.note(number, b"%d" % number * (number % 3))
    other.take(history.told())
    assert kept(other, 8) == [b"22", b"22", b"22", b"", b"55", b"55", b"", b""]
    other.take(History().told())
    assert other.of(3) is None


def test_what_is_made_again_is_told_again():
    history = History()
    for number in (0, 1, 2, 1):
        history.note(number, b"%d" % number)
    assert kept(history, 4) == [b"0", b"1", b"1", b"1"]


def test_the_oldest_are_let_go_where_memory_ends():
    history = History(most=1000)
    for number in range(1000):
        history.note(number, b"%03d" % number)
    assert history.of(999) == b"999" and history.of(980) == b"980"
    assert (first := history.of(0)) is not None and b"900" < first < b"980"
    assert sum(tensor.nbytes for tensor in astuple(history.told())) <= 1000
