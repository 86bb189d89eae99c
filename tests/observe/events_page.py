"""The events of docs/events.md, read from its tables, and whether an event is of their form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGE = (Path(__file__).parents[2] / "docs" / "events.md").read_text(encoding="utf-8")
TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (int,), "number": (int, float), "text": (str,), "list": (list,), "object": (dict,), "bool": (bool,),
    "any": (int, float, str, list, dict, bool),
}
COMMON = dict(re.findall(r"^\| `(\w+)` \| (\w+) \| ", PAGE, re.MULTILINE))
"""Common fields with their types."""
EVENTS: Mapping[str, Mapping[str, str]] = {
    name: {field: form or COMMON[field.rstrip("?")] for field, form in re.findall(r"`([\w?]+)`(?: (\w+))?", fields)}
    for name, fields in re.findall(r"^\| `(\w+)` \| ((?:`.*?)?) \| ", PAGE, re.MULTILINE)}
"""Event -> its fields but for `t` and `event`, with their types. Fields whose name ends with ``?`` may be missing."""


def fault(event: Mapping[str, Any]) -> str | None:
    """Why this is no event of the page; None if it is one. Fields that the page does not name are faults, too."""
    if event.get("event") not in EVENTS:
        return f"{event.get('event')!r} is no event"
    fields = {"t": "number", "event": "text", **EVENTS[event["event"]]}
    known = {name.rstrip("?"): form for name, form in fields.items()}
    if missing := [name for name in fields if not name.endswith("?") and name not in event]:
        return f"{event['event']}: {missing[0]} is missing"
    for name, value in event.items():
        if name not in known:
            return f"{event['event']}: {name} is no field of it"
        wanted = TYPES[known[name]]
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            return f"{event['event']}: {name} is {value!r:.60}, and no {known[name]}"
    return None
