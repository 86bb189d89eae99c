"""The table of events is that of the code, and of its page. Jobs of tests/launch are compared with it, too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from megatron_recycle.control.event_fields import EventFields
from megatron_recycle.membership.decisions import Emit
from megatron_recycle.membership.worker_events import WorkerEvent
from megatron_recycle.observe.event_kinds import KINDS
from megatron_recycle.observe.schema import EVENTS, VERSION, fault, page
from tests.membership.cluster import Cluster

ROOT = Path(__file__).parents[2]
SAID = {str(each.__struct_config__.tag): each for each in get_args(WorkerEvent)}
WORKERS_OWN = {"corrupt": "suspected", "refuses_itself": "join_failed"}
"""Words of workers that are recorded as another event."""


def test_the_page_is_the_output_of_the_table() -> None:
    made = "python -m megatron_recycle.observe.schema > docs/events.md"
    assert (ROOT / "docs" / "events.md").read_text() == page(), made


def test_every_event_of_the_code_is_in_the_table_and_no_other() -> None:
    told = {name for path in (ROOT / "megatron_recycle").rglob("*.py") if path.parent.name in ("membership", "control")
            for name in re.findall(r'"event": "([a-z_]+)"', path.read_text())}
    told |= {WORKERS_OWN.get(name, name) for name in SAID} | {"hint"}
    assert told == EVENTS.keys()


def test_a_worker_says_only_fields_of_the_table() -> None:
    for name, each in SAID.items():
        known = {field.rstrip("?") for field in EVENTS[WORKERS_OWN.get(name, name)].fields()}
        assert {*each.__struct_fields__} <= known, name


def test_what_is_read_of_an_event_is_in_the_table_and_may_be_missing_where_the_table_says_so() -> None:
    for name, kind in KINDS.items():
        fields = EVENTS[name].fields()
        assert {each.rstrip("?") for each in fields} >= {*kind.__struct_fields__}, name
        needed = kind.__struct_fields__[:len(kind.__struct_fields__) - len(kind.__struct_defaults__)]
        assert {*needed} <= fields.keys(), name


@pytest.mark.parametrize("name", EVENTS)
def test_a_coordinator_understands_any_event_of_the_table(name: str) -> None:
    values: dict[str, Any] = {"int": 1, "number": 0.5, "text": "a", "list": [1], "object": {"a": 1}, "bool": True,
                              "any": "a"}
    assert EventFields.understood({"event": name, "t": 0.5, **{
        field.rstrip("?"): values[kind] for field, kind in EVENTS[name].fields().items()}})


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
