"""The events of docs/events.md are those of the code. Jobs of tests/launch are compared with the page, too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from megatron_recycle.control.event_fields import EventFields
from megatron_recycle.membership.decisions import Emit
from megatron_recycle.membership.worker_events import WorkerEvent
from megatron_recycle.observe import rolling
from megatron_recycle.observe.event_kinds import KINDS
from megatron_recycle.observe.events import VERSION
from tests.membership.cluster import Cluster
from tests.observe.events_page import EVENTS, PAGE, TYPES, fault

ROOT = Path(__file__).parents[2]
SAID = {str(each.__struct_config__.tag): each for each in get_args(WorkerEvent)}
WORKERS_OWN = {"corrupt": "suspected", "refuses_itself": "join_failed"}
"""Words of workers that are recorded as another event."""


def test_the_page_is_read_as_it_is_meant() -> None:
    rows = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| `") and line.count(" | ") == 2]
    assert len(EVENTS) > 40 and {form for fields in EVENTS.values() for form in fields.values()} <= TYPES.keys()
    assert EVENTS["started_again"] == {"restart": "int", "of": "int", "workers": "int", "reason": "text"}
    assert EVENTS["left"]["rank?"] == "int" and EVENTS["leads"] == {"term": "int", "control": "text"}
    events = {name: fields for name, fields, _ in rows if name.strip("| `") in EVENTS}
    assert {name.strip("| `"): fields.count("`") // 2 for name, fields in events.items()} == {
        name: len(fields) for name, fields in EVENTS.items()}


def test_the_page_says_how_the_file_stays_small() -> None:
    *first, last = (f"`{name}`" for name in sorted(rolling.TICKS))
    text = " ".join(PAGE.split())
    assert f"than {rolling.MOST >> 20} MiB, old {', '.join(first)} and {last} move to" in text
    assert f"the latest {rolling.FILES} stay" in text and f"version {VERSION} of its form" in text
    assert f"first {rolling.FIRST} commits of each generation and the latest {rolling.LATEST} lines" in text


def test_every_event_of_the_code_is_in_the_table_and_no_other() -> None:
    told = {name for path in (ROOT / "megatron_recycle").rglob("*.py") if path.parent.name in ("membership", "control")
            for name in re.findall(r'"event": "([a-z_]+)"', path.read_text())}
    told |= {WORKERS_OWN.get(name, name) for name in SAID} | {"hint"}
    assert told == EVENTS.keys()


def test_a_worker_says_only_fields_of_the_table() -> None:
    for name, each in SAID.items():
        known = {field.rstrip("?") for field in EVENTS[WORKERS_OWN.get(name, name)]}
        assert {*each.__struct_fields__} <= known, name


def test_what_is_read_of_an_event_is_in_the_table_and_may_be_missing_where_the_table_says_so() -> None:
    for name, kind in KINDS.items():
        fields = EVENTS[name]
        assert {each.rstrip("?") for each in fields} >= {*kind.__struct_fields__}, name
        needed = kind.__struct_fields__[:len(kind.__struct_fields__) - len(kind.__struct_defaults__)]
        assert {*needed} <= fields.keys(), name


@pytest.mark.parametrize("name", EVENTS)
def test_a_coordinator_understands_any_event_of_the_table(name: str) -> None:
    values: dict[str, Any] = {"int": 1, "number": 0.5, "text": "a", "list": [1], "object": {"a": 1}, "bool": True,
                              "any": "a"}
    assert EventFields.understood({"event": name, "t": 0.5, **{
        field.rstrip("?"): values[kind] for field, kind in EVENTS[name].items()}})


def test_what_the_machine_tells_is_of_the_table() -> None:
    cluster = Cluster().train()
    cluster.commit_all(0)
    cluster.exit("1:1")
    cluster.reports()
    cluster.plan()
    cluster.resume_all()
    cluster.commit_all(1)
    for name in ("0:1", "2:1"):
        cluster.exit(name)
    events = [dict(one.event) for one in cluster.log if isinstance(one, Emit)]
    assert {"started", "committed", "suspected", "decided", "resumed", "finished"} <= {each["event"] for each in events}
    for event in events:
        more = {"v": VERSION} if event["event"] == "started" else {}
        assert fault({name: value for name, value in {**event, **more}.items() if value is not None}) is None


@pytest.mark.parametrize(("event", "text"), [
    ({"event": "exploded"}, "no event"),
    ({"event": "leaving", "worker": "1:1"}, "generation is missing"),
    ({"event": "leaving", "generation": 1, "worker": "1:1", "mood": 1}, "mood is no field"),
    ({"event": "leaving", "generation": True, "worker": "1:1"}, "no int"),
])
def test_an_event_of_another_form_is_a_fault(event: dict[str, Any], text: str) -> None:
    assert text in str(fault({"t": 1.0, **event}))
