"""The launcher's own output neither fails nor holds it up, whatever becomes of its reader."""

from __future__ import annotations

import io
import os
import pty
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TextIO

import pytest

from megatron_recycle.observe import output

Ends = Callable[[], tuple[int, int]]


class Output:
    """Standard output of a launcher, with the end that its reader has."""

    def __init__(self, ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reading, writing = ends()
        self.given = io.TextIOWrapper(os.fdopen(writing, "wb"), "ascii", line_buffering=True)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", None)
            patch.setattr(sys, "stdout", self.given)
            output.detach_output()
            self.stream: TextIO = sys.stdout

    def read(self) -> str:
        """All that can be read now."""
        os.set_blocking(self.reading, False)
        read = b""
        with suppress(BlockingIOError):
            while data := os.read(self.reading, 1 << 16):
                read += data
        return read.decode().replace("\r\n", "\n")

    def hang_up(self) -> None:
        os.close(self.reading)
        self.reading = -1


@pytest.fixture(params=[os.pipe, pty.openpty], ids=["pipe", "terminal"])
def out(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Output]:
    monkeypatch.setattr(output, "_PATIENCE_MS", 20)
    found = Output(request.param, monkeypatch)
    yield found
    os.close(found.stream.fileno())
    found.given.close()
    if found.reading >= 0:
        found.hang_up()


def test_a_reader_that_goes_away_is_not_missed(out: Output) -> None:
    print("one", file=out.stream)
    assert out.read() == "one\n" and out.stream.isatty() == out.given.isatty()
    out.hang_up()
    print("two", file=out.stream)


def test_a_reader_that_does_not_read_holds_nothing_up_and_learns_of_the_gap(out: Output) -> None:
    for number in range(5000):
        print(number, "x" * 100, file=out.stream)
    lines = out.read().split()[0:-1:2]
    assert lines == [str(number) for number in range(len(lines))] and 10 < len(lines) < 5000
    print("it reads again", file=out.stream)
    assert out.read().endswith("\n[recycle: output is left out here, since it was not read]\nit reads again\n")


def test_a_character_that_the_encoding_has_no_form_for_is_written_all_the_same(out: Output) -> None:
    print("caf\xe9 \udce9", file=out.stream)
    assert out.read() == "caf\\xe9 \\udce9\n"


def test_others_that_write_to_the_same_place_wait_as_before(out: Output) -> None:
    assert os.get_blocking(out.given.fileno()) and not os.get_blocking(out.stream.fileno())
