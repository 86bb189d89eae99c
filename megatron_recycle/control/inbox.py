"""Messages of workers as inputs of the membership machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron_recycle.control.wire import Message
from megatron_recycle.membership import inputs
from megatron_recycle.membership.fault import Fault
from megatron_recycle.membership.state import Member

_LONGEST_TEXT, _LONGEST_PLACE = 500, 1000


def member_of(hello: Message) -> Member:
    """The process that a worker's hello presents."""
    return Member(**{name: hello[name] for name in ("worker", "rank", "incarnation", "pid", "host")})


def input_of(who: str, message: Message) -> inputs.Input | None:
    """The input that a message of incarnation ``who`` is; None of messages that change no state: signs of life, events,
    measurements, an end without an error."""
    kind = message["type"]
    if kind == "ending" and message["fault"] is None:
        return None
    found = _INPUTS.get(kind)
    return None if found is None else found(who, message)


def _raised(who: str, m: Message) -> inputs.Raised:
    return inputs.Raised(who, Fault.parse(m["fault"]), m["t"], m.get("number", 0))


_INPUTS: Mapping[str, Callable[[str, Message], inputs.Input]] = {
    "hello": lambda who, m: inputs.Hello(member_of(m), m["generation"]),
    "ready": lambda who, m: inputs.Ready(who, m["description"], m["report"], m.get("learnt", ())),
    "report": lambda who, m: inputs.Reported(who, m["generation"], m["report"]),
    "holds": lambda who, m: inputs.Holds(who, m["generation"], m["received"]),
    "resumed": lambda who, m: inputs.Resumed(who, m["generation"], m["t"]),
    "committed": lambda who, m: inputs.Committed(who, m["iteration"], m["loss"]),
    "adopted": lambda who, m: inputs.Adopted(who, m["generation"], m["iteration"], m["digest"]),
    "unlent": lambda who, m: inputs.Unlent(who, m["generation"], m["stage"], m["why"][:_LONGEST_TEXT]),
    "saved": lambda who, m: inputs.Saved(who, m["generation"], m["place"][:_LONGEST_PLACE], m["error"][:_LONGEST_TEXT]),
    "unreadable": lambda who, m: inputs.Unreadable(
        who, m["generation"], m["place"], m["why"][:_LONGEST_TEXT]),
    "unwritten": lambda who, m: inputs.Unwritten(who, m["generation"], m["why"][:_LONGEST_TEXT]),
    "written": lambda who, m: inputs.Written(who, m["generation"], m["iteration"], m["place"], m["facts"]),
    "leave": lambda who, m: inputs.Leave(who),
    "boundary": lambda who, m: inputs.Boundary(who, m["generation"], m["iteration"], m["t"]),
    "finished": lambda who, m: inputs.Finished(who, m["generation"]),
    "hint": lambda who, m: inputs.Hinted(who, m["generation"], m["error"][:_LONGEST_TEXT]),
    "raised": _raised,
    "ending": _raised,
}
