"""The messages of the control protocol, and the fields each must have.

Both sides check what they receive, so that a malformed message is refused at the door and no code behind it
has to expect one. Below the tables are the messages that several decisions tell.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

from megatron_recycle.membership.decisions import Tell
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.fault import Fault
from megatron_recycle.membership.names import Process
from megatron_recycle.membership.state import Member, State
from megatron_recycle.plan.grid import Grid

Message = dict[str, Any]
MOST_BYTES = 128 * 1024 * 1024
"""Of a message with a plan, unpacked: some 14 million actions."""
FENCED_STATUS = 3
"""Exit status of a worker that was declared out and notices."""


class Role(str, Enum):
    """Part of a process in a new generation."""

    MEMBER = "member"
    OUTSIDE = "outside"


class WireError(ValueError):
    """A frame or message that is malformed, too large, of another version, replayed, or made without the token."""


class TooLarge(WireError):
    """A message that cannot be sent, now or ever."""


_NUMBER = (int, float)
_OPTIONAL_NUMBER = (int, float, type(None))
_MOST = 1e18
"""Seconds or bytes; nothing that is measured comes near."""
_MESSAGE = re.compile(r"[FB]\d+\.\d+\Z")
_ACTION = re.compile(r"(?:F|B|W|FB)\d{1,9}\.\d{1,9}(?:/\d{1,9})?\Z")

FROM_WORKER: Mapping[str, Mapping[str, Any]] = {
    "hello": {"worker": str, "rank": int, "incarnation": str, "pid": int, "host": str, "generation": int},
    "ready": {"description": dict, "report": dict},
    "heartbeat": {"progress": (dict, type(None))},
    "report": {"generation": int, "report": dict},
    "holds": {"generation": int, "received": dict},
    "resumed": {"generation": int, "t": _NUMBER},
    "committed": {"iteration": int, "generation": int, "loss": _OPTIONAL_NUMBER},
    "event": {"event": str, "fields": dict},
    "measured": {"iterations": list, "lags": list, "memory": (dict, type(None))},
    "hint": {"generation": int, "error": str},
    "raised": {"number": int, "fault": dict, "t": _NUMBER},
    "adopted": {"generation": int, "iteration": int, "digest": str},
    "unlent": {"generation": int, "stage": int, "why": str},
    "finished": {"generation": int},
    "leave": {},
    "speaks": {"offset": int},
    "saved": {"generation": int, "place": str, "error": str},
    "written": {"generation": int, "iteration": int, "place": str, "facts": (dict, type(None))},
    "unreadable": {"generation": int, "place": str, "why": str},
    "unwritten": {"generation": int, "why": str},
    "ending": {"fault": (dict, type(None)), "t": _NUMBER},
    "boundary": {"generation": int, "iteration": int, "t": _NUMBER},
    "fetch": {"digest": str, "part": int, "memory": str},
    "fetched": {"digest": str, "memory": str},
    "stacks": {"number": int, "text": str},
}
FROM_LAUNCHER: Mapping[str, Mapping[str, Any]] = {
    "hello": {"host": str, "ranks": list, "places": int},
    "heartbeat": {"progress": (dict, type(None))},
    "exit": {"rank": int, "pid": int, "status": (int, type(None)), "t": _NUMBER, "log": str, "move": int,
             "said": str},
    "interrupt": {"status": int, "message": str},
    "join": {"count": int},
    "stays_out": {"rank": int},
    "explains": {"rank": int, "pid": int, "causes": list, "gpu": str, "repair": str},
}
FROM_NEWCOMER: Mapping[str, Mapping[str, Any]] = {
    "hello": {"rank": int},
    "heartbeat": {"progress": (dict, type(None))},
}
"""Messages of a process that is to join, before its script begins."""
FROM_STORE: Mapping[str, Mapping[str, Any]] = {
    "hello": {},
    "ask": {"op": str, "keys": list, "values": list, "stamps": list, "number": int, "once": str, "marks": dict},
}
"""Messages of a process's connection to the job's store: one ask at a time; see `control.shelf`."""
TO_STORE: Mapping[str, Mapping[str, Any]] = {
    "welcome": {"shelf": str},
    "lives": {},
    "answer": {"keys": list, "values": list, "number": int, "stamp": int, "marks": dict, "error": str},
}
FROM_OPERATOR: Mapping[str, Mapping[str, Any]] = {
    "hello": {},
    "ask": {"what": str, "workers": list, "host": str, "by": str},
}
"""Messages of the job's owner at a command line; see `control.operators`."""
TO_OPERATOR: Mapping[str, Mapping[str, Any]] = {
    "answer": {"refusal": str, "facts": dict},
    "stacks": {"worker": str, "text": str},
    "lives": {},
}
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
        "keepers": dict,
        "without": list,
        "carried": (dict, type(None)),
    },
    "answer": {"number": int},
    "lives": {},
    "noted": {"generation": int, "place": str},
    "offer": {"generation": int, "number": int, "plan": (dict, type(None))},
    "end": {"status": int, "message": str},
    "parcel": {"generation": int, "digest": str, "data": str},
    "part": {"digest": str, "part": int, "parts": int, "data": str},
    "there": {"digest": str},
    "leave": {},
    "stacks": {"number": int},
}
"""A go and an offer travel as parcels; see `control.parcels`."""
TO_LAUNCHER: Mapping[str, Mapping[str, Any]] = {
    "event": {"event": dict},
    "begun": {"max_restarts": int, "max_failures_per_host": int, "leave_timeout": _OPTIONAL_NUMBER},
    "terminate": {"seconds": _NUMBER},
    "out": {"rank": int, "pid": int, "kind": str, "error": str},
    "joined": {"rank": int, "pid": int},
    "start": {"rank": int, "beside": int, "pid": int, "move": int},
    "drop": {"rank": int, "move": int},
    "lives": {},
    "progress": {},
    "speaks": {"rank": int, "pid": int, "offset": int},
    "places": {"ranks": list, "size": int, "environ": dict, "refusal": str, "again_s": _NUMBER},
    "end": {"status": int, "message": str},
}
EVENTS: Mapping[str, Mapping[str, Any]] = {
    "corrupt": {"iteration": int, "digests": dict},
    "guarded": {"iteration": int, "stages": list, "bytes": int, "ms": _NUMBER},
    "healed": {"iteration": int, "bytes": int, "ms": _NUMBER},
    "rebuilt": {"generation": int, "ms": _NUMBER},
    "refuses_itself": {"reason": str},
    "rolled_back": {"iteration": int, "actions": int},
    "save_failed": {"iteration": int, "error": str, "workers": int},
}
"""The events that a worker may say, with their fields; none has the name of one that the coordinator decides on."""
OPTIONAL_EVENT = {"shard": int, "shards": list}
REPORT = {
    "iteration": int,
    "attempt": int,
    "holds": int,
    "stepped": int,
    "verdict": (dict, type(None)),
    "actions": int,
}
OPTIONAL_REPORT = {"committed": int, "earlier": int, "asked": int, "guard": dict, "kept": list,
                   "closed": dict}
"""Further fields of a report (see `resume.decide`); one of a wrong type is refused all the same."""


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
    if kind == "out" and message["kind"] not in [*FailureKind]:
        raise WireError(f"out: {message['kind']!r:.60} is no kind of failure")
    if kind == "measured":
        _check_measured(message)
    if kind == "ask" and "keys" in known[kind]:
        _check_ask(message)
    if kind == "ask" and "workers" in known[kind] and not all(isinstance(name, str) for name in message["workers"]):
        raise WireError("ask: a worker is no text")
    if kind == "explains" and not all(isinstance(cause, str) for cause in message["causes"]):
        raise WireError("explains: a cause is no text")
    if kind == "event" and "fields" in known[kind]:
        _check_event(message["event"], message["fields"])
    if kind == "ready":
        _check_description(message["description"])
        _fields(kind, message, {"learnt": list} if "learnt" in message else {})
    return message


def check_report(report: Mapping[str, Any]) -> None:
    """Raises WireError if a report (see `resume.decide`) lacks a field or has one of a wrong type."""
    _fields("report", report, REPORT)
    _fields("report", report, {name: OPTIONAL_REPORT[name] for name in OPTIONAL_REPORT if name in report})
    kept = {"own": [], "of": {}, **report.get("guard", {})}
    if not isinstance(kept["of"], dict) or not all(isinstance(each, list) and all(type(one) is int for one in each)
                                                   for each in (kept["own"], *kept["of"].values())):
        raise WireError(f"report: guard is {report['guard']!r:.60}, which names no iterations")
    for attempt in report.get("kept", ()):
        if not isinstance(attempt, dict):
            raise WireError(f"report: kept names {attempt!r:.60}, which is no attempt")
        _fields("report: kept", attempt, {"iteration": int, "chain": int, "actions": list, "microbatches": int,
                                          "block": int})
        if not isinstance(attempt.get("lent", ""), str):
            raise WireError(f"report: kept names {attempt['lent']!r:.60}, which is no plan's digest")
        if type(attempt.get("provisional")) is not bool:
            raise WireError("report: kept does not say whether it is provisional")
        if not all(isinstance(action, str) and _ACTION.match(action) for action in attempt["actions"]):
            raise WireError("report: kept has something that is no action")
    if "closed" in report:
        _fields("report: closed", report["closed"],
                {"iteration": int, "loss": _NUMBER, "weight": _NUMBER, "stages": list})
        if not all(type(stage) is int for stage in report["closed"]["stages"]):
            raise WireError(f"report: {report['closed']['stages']!r:.60} are no stages")
    for name in ("back", "read"):
        if not isinstance(kept.get(name), (int, type(None))):
            raise WireError(f"report: guard goes back to {kept[name]!r:.60}, which is no iteration")
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


def _check_ask(message: Message) -> None:
    texts = [*message["keys"], *(value for value in message["values"] if value is not None)]
    if not all(isinstance(text, str) for text in texts):
        raise WireError("ask: a key or value is no text")


def _check_event(name: str, fields: Mapping[str, Any]) -> None:
    if name not in EVENTS:
        raise WireError(f"event: {name!r:.60} is none that a worker says")
    optional = {field: kind for field, kind in OPTIONAL_EVENT.items() if field in fields}
    _fields(name, fields, {**EVENTS[name], **optional})
    if more := [*fields.keys() - EVENTS[name].keys() - optional.keys()]:
        raise WireError(f"{name}: {more[0]!r:.60} is no field of it")
    for field, value in fields.items():
        parts: Any = value.values() if isinstance(value, dict) else value if isinstance(value, list) else (0,)
        if not all(type(part) in (int, str) for part in parts):
            raise WireError(f"{name}: {field} is {value!r:.60}, which holds more than numbers and texts")


def _check_measured(message: Mapping[str, Any]) -> None:
    """Raises WireError if a number is none, is negative, or is beyond all that anything takes."""
    for seconds in message["iterations"]:
        _numbers("iterations", seconds)
    for lags in message["lags"]:
        if not isinstance(lags, dict):
            raise WireError(f"measured: lags are {lags!r:.60}")
        _fields("lags", lags, {"of": list, "sent": dict, "came": dict})
        if len(lags["of"]) != 2 or any(type(number) is not int for number in lags["of"]):
            raise WireError(f"lags: of is {lags['of']!r:.60}, which is no iteration and attempt")
        for times in (lags["sent"], lags["came"]):
            _numbers("lags", times, negative=True)
            strange = [name for name in times if not _MESSAGE.match(name)]
            if strange:
                raise WireError(f"lags: {strange[0]!r:.60} is no message of a plan")
    if (memory := message["memory"]) is not None:
        _fields("memory", memory, {"held": dict, "kept": dict, "room": (int, type(None))})
        _fields("held", memory["held"], dict.fromkeys(("before_b", "after_b", "message", "peak", "planned"), int))
        for told in (memory["held"], memory["kept"], {"room": memory["room"] or 0}):
            _numbers("memory", told)


def _numbers(kind: str, told: Any, negative: bool = False) -> None:
    if not isinstance(told, dict):
        raise WireError(f"{kind}: {told!r:.60} is no object")
    for name, value in told.items():
        if type(value) not in _NUMBER or not (-_MOST if negative else 0) <= value < _MOST:
            raise WireError(f"{kind}: {name} is {value!r:.60}, which is no measurement")


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


# What is told


def group_prefix(generation: int, members: Mapping[str, str]) -> str:
    """The store prefix of a generation's groups: workers that disagree on the members never meet."""
    text = json.dumps(dict(members), sort_keys=True, separators=(",", ":"))
    return f"g{generation}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def stop(state: State) -> Message:
    """The end of all generations before the current one, with its members; see `wire_forms`."""
    return {"type": "stop", "generation": state.generation, "members": state.incarnations(), "out": dict(state.out)}


def wire_forms(tell: Tell) -> list[Tell]:
    """The messages that really travel. A stop is the most urgent of all: each process hears of its own part in the new
    generation only, since everybody's, for thousands of workers, would take longer to send than to decide on."""
    message = tell.message
    if message["type"] != "stop":
        return [tell]
    members = set(message["members"].values())
    short = {"type": "stop", "generation": message["generation"], "missing": len(message["out"])}
    return [Tell(tuple(one for one in tell.to if (one in members) is inside), {**short, "role": role.value})
            for inside, role in ((True, Role.MEMBER), (False, Role.OUTSIDE))]


def switch(state: State) -> Message:
    """The offer of a boundary: an offer without a plan."""
    return {"type": "offer", "generation": state.generation, "number": state.switch, "plan": None}


def end(to: tuple[str, ...], status: int, message: str) -> Tell:
    """The job is over for these incarnations."""
    return Tell(to, {"type": "end", "status": status, "message": message})


def ended(state: State, incarnation: str) -> Tell:
    """The end of the job, told to a process that comes too late."""
    status, message, _ = state.ended or (1, "the job has ended", False)
    return end((incarnation,), status, message)


def learnt(state: State, rank: int) -> Message:
    """To a process that is to join, before its script begins: what the process of its rank was told at the start."""
    return {"type": "learnt", "record": list(state.learnt.get(str(rank), ()))}


def refuse(member: Member, text: str) -> Tell:
    """A process that may not come in."""
    return end((member.incarnation,), 1, text)


def fence(state: State, member: Member) -> Tell:
    """A process that was declared out, should it still live."""
    kind = state.out.get(member.worker, FailureKind.EXIT)
    text = (
        f"worker {member.worker} was declared out ({kind}); the job goes on without it in generation "
        f"{state.generation}, and nothing this process does counts any more"
    )
    return end((member.incarnation,), FENCED_STATUS, text)


def farewell(member: Member, kind: FailureKind, generation: int) -> Tell:
    """The end of the job for a process that has asked to leave, or whose worker has moved."""
    moved = kind is FailureKind.MOVE
    why = "moved to another stage, where another process stands for it" if moved else "left as it was asked to"
    text = f"worker {member.worker} has {why}; the job goes on in generation {generation}"
    return end((member.incarnation,), 0, text)
