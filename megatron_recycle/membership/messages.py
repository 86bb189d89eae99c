"""The messages of the control protocol and the fields each must have.

Both sides check what they receive, so that a malformed message is refused at the door and no code behind it
has to expect one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_recycle.membership.fault import Fault
from megatron_recycle.membership.names import Process
from megatron_recycle.plan.grid import Grid

Message = dict[str, Any]


class WireError(ValueError):
    """A frame or message that is malformed, too large, of another version, replayed, or made without the token."""


_NUMBER = (int, float)
_OPTIONAL_NUMBER = (int, float, type(None))

FROM_WORKER: Mapping[str, Mapping[str, Any]] = {
    "hello": {"worker": str, "rank": int, "incarnation": str, "pid": int, "host": str, "generation": int},
    "ready": {"description": dict, "report": dict},
    "heartbeat": {"progress": (dict, type(None))},
    "report": {"generation": int, "report": dict},
    "holds": {"generation": int, "received": dict},
    "resumed": {"generation": int, "t": _NUMBER},
    "committed": {"iteration": int, "generation": int, "loss": _OPTIONAL_NUMBER},
    "event": {"event": str, "fields": dict},
    "hint": {"generation": int, "error": str},
    "raised": {"number": int, "fault": dict, "t": _NUMBER},
    "adopted": {"generation": int, "iteration": int, "digest": str},
    "finished": {"generation": int},
    "leave": {},
    "saved": {"generation": int, "place": str, "error": str},
    "ending": {"fault": (dict, type(None)), "t": _NUMBER},
    "boundary": {"generation": int, "iteration": int, "t": _NUMBER},
}
FROM_LAUNCHER: Mapping[str, Mapping[str, Any]] = {
    "hello": {"host": str, "ranks": list},
    "heartbeat": {"progress": (dict, type(None))},
    "exit": {"rank": int, "pid": int, "status": (int, type(None)), "t": _NUMBER, "log": str, "move": int},
    "interrupt": {"status": int, "message": str},
    "join": {"count": int},
    "stays_out": {"rank": int},
}
FROM_NEWCOMER: Mapping[str, Mapping[str, Any]] = {
    "hello": {"rank": int},
    "heartbeat": {"progress": (dict, type(None))},
}
"""Of a process that is to join, before its script begins."""
TO_NEWCOMER: Mapping[str, Mapping[str, Any]] = {"learnt": {"record": list}}
TO_WORKER: Mapping[str, Mapping[str, Any]] = {
    "stop": {"generation": int, "role": str, "missing": int},
    "go": {
        "generation": int,
        "attempt": int,
        "members": dict,
        "plan": dict,
        "resume": dict,
        "prefix": str,
        "closing": (str, type(None)),
        "left_out": list,
        "tries": int,
    },
    "answer": {"number": int},
    "offer": {"generation": int, "number": int, "plan": (dict, type(None))},
    "end": {"status": int, "message": str},
}
TO_LAUNCHER: Mapping[str, Mapping[str, Any]] = {
    "event": {"event": dict},
    "places": {"ranks": list, "size": int, "store": str, "environ": dict, "refusal": str, "again_s": _NUMBER},
    "end": {"status": int, "message": str},
}
REPORT = {
    "iteration": int,
    "attempt": int,
    "holds": int,
    "stepped": int,
    "verdict": (dict, type(None)),
    "actions": int,
}
OPTIONAL_REPORT = {"committed": int, "earlier": int}
"""What a report may have beside (see `resume.decide`); a field of a wrong type is refused all the same."""


def check(message: Message, known: Mapping[str, Mapping[str, Any]]) -> Message:
    """`message` itself if it is one of `known` and has its fields; raises WireError if not."""
    kind = message["type"]
    if kind not in known:
        raise WireError(f"a {kind!r} message is not expected here")
    _fields(kind, message, known[kind])
    if "report" in known[kind]:
        check_report(message["report"])
    if message.get("fault") is not None and "fault" in known[kind]:
        _check_fault(kind, message["fault"])
    if kind == "hello" and "worker" in known[kind]:
        _check_worker(message["worker"])
    if kind == "ready":
        _check_description(message["description"])
        _fields(kind, message, {"learnt": list} if "learnt" in message else {})
    return message


def check_report(report: Mapping[str, Any]) -> None:
    """Raises WireError if a report (see `resume.decide`) lacks a field or has one of a wrong type."""
    _fields("report", report, REPORT)
    _fields("report", report, {name: OPTIONAL_REPORT[name] for name in OPTIONAL_REPORT if name in report})
    verdict = report["verdict"]
    if verdict is not None and not isinstance(verdict.get("iteration"), int):
        raise WireError("report: its verdict names no iteration")


def _check_fault(kind: str, fault: Mapping[str, Any]) -> None:
    try:
        Fault.parse(fault)
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"{kind}: its fault is none: {error}") from error


def _check_worker(name: str) -> None:
    try:
        plain = str(Process.parse(name))
    except ValueError as error:
        raise WireError(f"hello: {error}") from error
    if plain != name:
        raise WireError(f"hello: worker {name!r} is to be written {plain!r}")


def _check_description(description: Mapping[str, Any]) -> None:
    grid = description.get("grid")
    if not isinstance(grid, dict):
        raise WireError("ready: the description has no grid")
    _fields("grid", grid, {"stages": int, "microbatches": list})
    wanted = {"parts": int, "heartbeat_interval": _NUMBER, "heartbeat_timeout": _NUMBER, "report_timeout": _NUMBER}
    _fields("ready", description, {name: kind for name, kind in wanted.items() if name in description})
    try:
        Grid(grid["stages"], tuple(grid["microbatches"]))
    except ValueError as error:
        raise WireError(f"ready: {error}") from error


def _fields(kind: str, message: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for name, types in wanted.items():
        if name not in message:
            raise WireError(f"{kind}: {name} is missing")
        value = message[name]
        # A bool is an int to isinstance, but no number on the wire.
        if not isinstance(value, types) or isinstance(value, bool):
            raise WireError(f"{kind}: {name} is {value!r:.60}, which is no {_names(types)}")


def _names(types: Any) -> str:
    many = types if isinstance(types, tuple) else (types,)
    return " or ".join("null" if item is type(None) else item.__name__ for item in many)
