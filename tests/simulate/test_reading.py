"""Traces are read, cleaned with a report, or refused with the number of the line."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from megatron_recycle.tools.simulate.generating import Failures, generate, spaced
from megatron_recycle.tools.simulate.reading import read
from megatron_recycle.tools.simulate.trace import Outage, Trace, TraceError
from tests.seeds import examples

INFINITY = float("inf")


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_machines_that_are_added_and_removed(tmp_path: Path):
    found = read(written(tmp_path, "0,add,a\n0,add,b\n60000,remove,a\n90000,add,c\n120000,add,a\n180000,remove,b\n"))
    assert found.hosts == ("a", "b", "c") and found.duration == 180
    assert found.outages == (Outage(0, 90, "c", "host"), Outage(60, 120, "a", "host"))
    assert not found.cleaned


def test_a_machine_that_is_removed_before_it_was_added_was_not_there(tmp_path: Path):
    found = read(written(tmp_path, "0,add,a\n60000,remove,b\n120000,remove,a\n180000,add,b\n"))
    assert found.hosts == ("a", "b") and found.outages == (Outage(0, 180, "b", "host"),
                                                           Outage(120, INFINITY, "a", "host"))
    assert "left out" in found.cleaned[0] and "line 2" in found.cleaned[0]
    assert read(written(tmp_path, "0,add,a\n60000,remove,b\n120000,remove,a\n")).hosts == ("a",)


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path):
    path = tmp_path / "trace"
    path.write_bytes("0,add,a\r\n60000,remove,a\r\n90000,add,b\r\n".encode("utf-8-sig"))
    assert Outage(60, INFINITY, "a", "host") in read(path).outages


def test_machines_that_are_only_counted_get_names_by_the_seed(tmp_path: Path):
    path = written(tmp_path, "2021-12-11, 11:00:00, 4\n2021-12-11, 11:10:00, 2\n2021-12-11, 11:20:00, 3\n"
                             "2021-12-11, 11:30:00, 3\n")
    found = read(path, seed=1)
    assert len(found.hosts) == 4 and found.duration == 1800
    assert sorted((one.down, one.up) for one in found.outages) == [(600, 1200), (600, INFINITY)]
    assert read(path, seed=1) == found


def test_a_long_gap_is_reported_or_cut(tmp_path: Path):
    path = written(tmp_path, "2021-12-11, 11:00:00, 4\n2021-12-11, 15:00:00, 3\n2021-12-11, 15:10:00, 4\n")
    assert "no reading for 4.0 h" in read(path).cleaned[0] and "line 2" in read(path).cleaned[0]
    cut = read(path, longest_gap=600)
    assert cut.duration == 1200 and "cut down to 600 s" in cut.cleaned[0]


@pytest.mark.parametrize(("text", "said"), [
    ("0,add,a\n5,remove,a\n3,add,b\n9,remove,b\n", "sorted"),
    ("0,add,a\n5,add,a\n9,remove,a\n", "left out"),
    ("2021-12-11, 11:00:00, 4\n2021-12-11, 10:00:00, 2\n2021-12-11, 11:10:00, 3\n", "not later"),
    ('{"hosts": 2, "duration": 9}\n{"host": "host0", "down": 1, "up": 5}\n{"host": "host0", "down": 3, "up": 7}\n',
     "made one"),
    ('{"hosts": 2, "duration": 9}\n{"host": "host0", "down": 1, "up": 1}\n', "no time"),
])
def test_what_cannot_be_true_is_cleaned_and_reported(tmp_path: Path, text: str, said: str):
    found = read(written(tmp_path, text))
    assert any(said in note for note in found.cleaned)


@pytest.mark.parametrize(("text", "line", "said"), [
    ("0,add,a\n\n# a comment\nx,add,b\n", 4, "no number"),
    ("0,add,a\n1,moved,b\n", 2, "add|remove"),
    ("-5,add,a\n", 1, "before 0"),
    ("2021-12-11, 11:00:00, 4\n2021-13-11, 11:10:00, 2\n", 2, "date"),
    ("2021-12-11, 11:00:00, 4\n2021-12-11, 11:10:00, many\n", 2, "count"),
    ("once upon a time\n", 1, "neither"),
    ('{"hosts": 2}\n', 1, "duration"),
    ('{"duration": 9}\n', 1, "hosts"),
    ('{"hosts": 2, "duration": 9}\n{"host": "other", "down": 1}\n', 2, "does not name"),
    ('{"hosts": 2, "duration": 9}\n{"host": "host0", "down": 3, "up": 1}\n', 2, "up before it is down"),
    ('{"hosts": 2, "duration": 9}\n{"host": "host0", "down": 3, "kind": "odd"}\n', 2, "none of exit, host, absent"),
    ('{"hosts": 2, "duration": 9}\n{"host": "host0", "gpu": -1, "down": 3}\n', 2, "gpu"),
    ('{"hosts": 2, "duration": 9}\nnot JSON\n', 2, "JSON"),
    ('{"hosts": ["a", "a"], "duration": 9}\n', 1, "twice"),
    ('{"hosts": 2, "duration": NaN}\n', 1, "duration"),
    ("0,add,a\n1,add,\n", 2, "add|remove"),
])
def test_malformed_lines_are_refused_with_their_number(tmp_path: Path, text: str, line: int, said: str):
    with pytest.raises(TraceError, match=rf"line {line}\b.*{said.replace('|', '[|]')}"):
        read(written(tmp_path, text))


@pytest.mark.parametrize("text", ["", "\n# nothing\n", "0,add,a\n", '{"hosts": 0, "duration": 5}\n'])
def test_a_trace_of_nothing_is_refused(tmp_path: Path, text: str):
    with pytest.raises(TraceError, match="trace"):
        read(written(tmp_path, text))


@pytest.mark.parametrize("text", ['{"hosts": 2, "duration": 1e300}\n', "0,add,a\n1e300,remove,a\n"])
def test_a_trace_of_more_than_a_hundred_years_is_refused(tmp_path: Path, text: str):
    with pytest.raises(TraceError, match="lasts 1e.[0-9]* s: .* at most a hundred years"):
        read(written(tmp_path, text))


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(TraceError, match="nowhere"):
        read(tmp_path / "nowhere")


def test_a_made_up_trace_is_the_same_for_a_seed_and_comes_back_from_its_lines(tmp_path: Path):
    def made(seed: int) -> Trace:
        return generate(8, 4, 7 * 86400, seed, of_gpus=Failures(4e6, 0.7, 3600), of_hosts=Failures(2e6, repair=7200),
                        of_racks=Failures(1e6, repair=INFINITY), rack=4)

    first = made(1)
    assert first == made(1) != made(2)
    assert read(written(tmp_path, "\n".join(first.lines()))).outages == first.outages


def test_a_made_up_trace_of_more_than_a_hundred_years_is_refused_before_it_is_drawn():
    with pytest.raises(TraceError, match="a hundred years"):
        generate(8, 4, 1e13, 0, of_hosts=Failures(4e4))


def test_a_host_and_its_gpu_may_be_lost_and_come_back_together(tmp_path: Path):
    lines = ['{"hosts": 1, "duration": 9}', '{"host": "host0", "down": 1, "up": 5, "gpu": 0}',
             '{"host": "host0", "down": 1, "up": 5}']
    assert read(written(tmp_path, "\n".join(lines))).outages == (Outage(1, 5, "host0"), Outage(1, 5, "host0", gpu=0))


@pytest.mark.parametrize("shape", [0.7, 1.0, 2.0])
def test_the_mean_time_between_failures_is_as_asked(shape: float):
    units, mtbf, duration = 400, 1e5, 4e6
    found = generate(units, 1, duration, 3, of_hosts=Failures(mtbf, shape, 1.0))
    # The first failure of a new unit comes sooner or later than the mean if it is not exponential: some per cent here.
    assert found.failures == pytest.approx(units * duration / mtbf, rel=0.05)


def test_one_failure_every_so_often():
    found = spaced(4, 600, 3600, 0, repair=900)
    assert [one.down for one in found.outages] == [600, 1200, 1800, 2400, 3000]
    assert all(one.up == one.down + 900 for one in found.outages)


def test_part_of_a_trace():
    whole = Trace(("a", "b"), (Outage(0, 50, "a"), Outage(80, 200, "b"), Outage(150, INFINITY, "a")), 300)
    part = whole.part(60, 160)
    assert part.outages == (Outage(20, 140, "b"), Outage(90, INFINITY, "a")) and part.duration == 100
    with pytest.raises(TraceError, match="nothing left"):
        whole.part(300, 400)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(some.lists(some.tuples(some.integers(0, 3), some.integers(0, 90), some.integers(0, 40)), max_size=12))
def test_cleaned_outages_of_a_host_never_overlap(tmp_path_factory: pytest.TempPathFactory,
                                                  drawn: list[tuple[int, int, int]]):
    lines = [json.dumps({"hosts": 4, "duration": 100})]
    lines += [json.dumps({"host": f"host{host}", "down": down, "up": down + length}) for host, down, length in drawn]
    path = tmp_path_factory.mktemp("traces") / "trace"
    path.write_text("\n".join(lines))
    found = read(path)
    for host in found.hosts:
        mine = [one for one in found.outages if one.host == host]
        assert all(earlier.up < later.down for earlier, later in pairwise(mine))
    before = {(f"host{host}", moment) for host, down, length in drawn for moment in range(down, down + length)}
    after = {(one.host, moment) for one in found.outages for moment in range(int(one.down), int(one.up))}
    assert before == after


@pytest.mark.skipif(not os.environ.get("RECYCLE_TRACES"), reason="RECYCLE_TRACES names no folder with real traces")
def test_the_public_traces_are_read():
    for path in sorted(Path(os.environ["RECYCLE_TRACES"]).glob("*.csv")):
        found = read(path)
        assert found.failures > 100 and found.duration > 36_000
