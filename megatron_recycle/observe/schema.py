"""All events of events.jsonl with their fields: the only list of them. docs/events.md is its output:
`python -m megatron_recycle.observe.schema`.

Times are Unix seconds, `ms` milliseconds since the failure unless said otherwise, a worker is "d:s" (with tensor
parallelism its part, "d:s.p"), a host as its launcher calls it ("n3/2": the third launcher, on n3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_recycle.observe.rolling import FILES, FIRST, LATEST, MOST

VERSION = 1
"""Version of the schema, in `started` as ``v``. A field that goes away or changes its meaning raises it, a new one does
not."""
_TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (int,), "number": (int, float), "text": (str,), "list": (list,), "object": (dict,), "bool": (bool,),
    "any": (int, float, str, list, dict, bool),
}
_EVERY = {"t": "number", "event": "text"}
_COMMON: Mapping[str, tuple[str, str]] = {
    "generation": ("int", "number of the membership"),
    "attempt": ("int", "number of the try at an iteration"),
    "iteration": ("int", "counted from 0"),
    "worker": ("text", "the one that it is about"),
    "kind": ("text", "how a worker failed or left"),
    "ms": ("number", "milliseconds since the failure: since the end of the process was seen, since its last sign of "
           "life, or since it began what it is stuck in"),
    "rank": ("int", "torch's number of the process"),
    "pid": ("int", "of the process, on its host"),
}
"""Common fields of events, with their type and meaning."""


@dataclass(frozen=True)
class Kind:
    """One event: when it is written, its common fields, and its own fields, name -> type. Fields whose name ends with
    ``?`` may be missing. A ``tick`` is written in every iteration or on every worker."""

    when: str
    common: str = ""
    own: Mapping[str, str] = field(default_factory=dict)
    tick: bool = False

    def fields(self) -> dict[str, str]:
        """All fields but `t` and `event`, with their type."""
        return {**{name: _COMMON[name.rstrip("?")][0] for name in self.common.split()}, **self.own}


EVENTS: Mapping[str, Kind] = {
    "started": Kind("all workers are there, training begins", "generation", {
        "v": "int", "members": "object", "ranks": "object", "pids": "object", "hosts": "object", "survival": "text",
        "fatal_hosts": "object", "grid": "object", "max_restarts": "int"}),
    "started_again": Kind("the script was started again (--job-restarts); its first event", "", {
        "restart": "int", "of": "int", "workers": "int", "reason": "text"}),
    "leads": Kind("with --store: this host's coordinator leads from now on", "", {"term": "int", "control": "text"}),
    "restarted": Kind("a coordinator has taken the job up after its predecessor's end", "generation"),
    "suspected": Kind("a worker has failed; with `removed: false` it stays", "generation iteration worker kind ms? "
                      "rank pid", {"host?": "text", "removed?": "bool", "error?": "text", "where?": "text",
                                   "progress?": "object", "digests?": "object", "shard?": "int", "shards?": "list",
                                   "stranded?": "bool"}),
    "explained": Kind("a host shows why a process of its has failed: `causes` are lines, `repair` takes a broken node "
                      "out of service", "generation worker rank pid", {
                          "host": "text", "causes": "list", "gpu?": "text", "repair?": "text"}),
    "left": Kind("a worker has left as it was asked, moved, or its script has come to its end", "generation iteration? "
                 "worker kind rank? pid?"),
    "decided": Kind("a new membership: `out` has who is out and how", "generation ms?", {
        "members": "object", "out": "object", "reason?": "text"}),
    "stopped": Kind("all members stand still, and have said where", "generation ms?", {"reports": "object"}),
    "planned": Kind("a plan was made, for the membership or a better one for it; costs in the unit of the plan, "
                    "microseconds once they are measured", "generation ms?", {
                        "plan_ms": "number", "source?": "text", "digest?": "text", "period?": "number",
                        "makespan?": "number", "lower_bound?": "number", "lending?": "any"}),
    "reconciled": Kind("where training goes on", "generation attempt iteration ms?", {
        "target": "int", "copies": "object", "redone": "int", "joined?": "list"}),
    "resumed": Kind("the last survivor begins its first action after a failure", "generation attempt iteration ms", {
        "survivors": "int"}),
    "rebuilt": Kind("a worker has its connections; `ms` is what that took", "generation worker ms", tick=True),
    "committed": Kind("an iteration counts, on all workers", "generation iteration", {
        "loss?": "any", "losses?": "object"}, tick=True),
    "rolled_back": Kind("a worker has undone a step made on a guess", "generation iteration worker", {
        "actions": "int"}, tick=True),
    "adopted": Kind("all use a better plan", "generation iteration", {"digest": "text"}),
    "unlent": Kind("a stage's layers cannot be lent", "generation worker", {"stage": "int", "why": "text"}),
    "profiled": Kind("costs were measured that differ from the plan's", "generation", {
        "costs": "object", "held?": "object", "kept?": "object", "room?": "any"}),
    "spent": Kind("where the time of the latest 12 iterations went, by worker", "generation iteration", {
        "costs?": "object", "seconds?": "object"}),
    "slow": Kind("a worker takes longer than its peers, by this factor", "generation iteration worker", {
        "factor": "number"}),
    "hint": Kind("a worker met an error of communication, which accuses nobody", "generation worker", {
        "error": "text"}),
    "retried": Kind("a recovery has failed, and is begun again", "generation worker", {
        "error": "text", "where": "text", "try": "int", "policy?": "text"}),
    "last_copy": Kind("stages have come down to one worker", "generation", {
        "stages": "object", "hosts": "object", "checkpoint?": "int", "kept_by?": "object"}),
    "last_host": Kind("hosts have come to hold all that is left of a stage, or of a shard", "generation", {
        "hosts": "object", "shards?": "object"}),
    "guarded": Kind("a worker has copied its state for `guard`; `ms` is what that took", "generation iteration worker "
                    "ms", {"stages": "list", "bytes": "int"}, tick=True),
    "restoring": Kind("a process is started for a stage that nobody holds", "generation worker rank", {"host": "text"}),
    "restored": Kind("all have gone back to a copy or a checkpoint", "generation iteration ms?", {
        "stages": "list", "from": "object", "lost": "int", "shards?": "any"}),
    "repeated": Kind("an iteration that these workers' scripts may have left is run again by all: a message of it is "
                     "lost with both its ends", "generation iteration", {"workers": "list"}),
    "left_out": Kind("pipelines that take no part from an iteration on (policy)", "generation iteration", {
        "pipelines": "list", "microbatches": "int"}),
    "skipped": Kind("a micro-batch was left out (poison: skip)", "generation iteration worker", {
        "microbatch": "text", "error": "text"}),
    "healed": Kind("a worker has got its peers' state in place of a corrupt one; `ms` is what that took",
                   "generation iteration worker kind ms rank pid", {"bytes": "int", "shard?": "int",
                                                                    "shards?": "list"}),
    "waiting": Kind("a process waits to join", "generation worker rank pid"),
    "joined": Kind("a process has joined and holds its stage's state; `ms`: how long the others waited",
                   "generation iteration worker ms rank pid", {
                       "moved_from?": "text", "bytes?": "int", "copy_ms?": "number", "mb_per_s?": "number"}),
    "join_failed": Kind("a process could not join", "generation worker rank pid", {"reason": "text"}),
    "leaving": Kind("a worker has asked to leave at the next boundary", "generation worker"),
    "moving": Kind("a process is started for a healthy worker's move", "generation worker rank pid", {
        "to": "text", "to_rank": "int", "number": "int"}),
    "move_failed": Kind("a move was given up", "generation worker", {
        "to": "text", "reason": "text", "to_rank": "int", "number": "int"}),
    "checkpoint": Kind("a checkpoint is whole and has its name", "generation iteration", {"place": "text"}),
    "unreadable": Kind("a checkpoint cannot be loaded", "generation iteration worker", {
        "place": "text", "error": "text"}),
    "save_failed": Kind("a checkpoint could not be written", "generation iteration worker", {
        "error": "text", "workers": "int"}),
    "surviving": Kind("the job ends, and survivors save what they hold", "generation iteration", {
        "missing": "list", "writers": "list"}),
    "saved": Kind("a last checkpoint is written; with `missing`, only what survivors hold", "generation iteration", {
        "place": "text", "missing?": "list", "places?": "object"}),
    "refused": Kind("a connection without the token, or with a malformed message", "", {
        "source": "text", "reason": "text"}),
    "ordered": Kind("the job's owner has given an order", "generation", {
        "what": "text", "by": "text", "workers": "list", "host?": "text"}),
    "finished": Kind("the job, or this life of it, is over", "generation iteration?", {
        "status": "int", "message": "text", "out": "object"}),
}
"""Name -> kind of each event of events.jsonl."""

TICKS = frozenset(name for name, kind in EVENTS.items() if kind.tick)
"""Events that are written all the time: old ones of them move to files of their own."""


def fault(event: Mapping[str, Any]) -> str | None:
    """Why this is no event of this version; None if it is one. Fields outside the table are faults, too."""
    kind = EVENTS.get(str(event.get("event")))
    if kind is None:
        return f"{event.get('event')!r} is no event"
    fields = kind.fields()
    known = {name.rstrip("?"): form for name, form in {**_EVERY, **fields}.items()}
    for name in [*_EVERY, *(name for name in fields if not name.endswith("?"))]:
        if name not in event:
            return f"{event['event']}: {name} is missing"
    for name, value in event.items():
        if name not in known:
            return f"{event['event']}: {name} is no field of it"
        wanted = _TYPES[known[name]]
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            return f"{event['event']}: {name} is {value!r:.60}, and no {known[name]}"
    return None


def page() -> str:
    """docs/events.md."""
    rows = "".join(f"| `{name}` | {_shown(kind)} | {kind.when} |\n" for name, kind in EVENTS.items())
    common = "".join(f"| `{name}` | {form} | {text} |\n" for name, (form, text) in _COMMON.items())
    return (
        "# Events\n\n"
        "`events.jsonl` in the run's folder has one JSON object per line, in the order in which things happened.\n"
        "The coordinator writes it; anybody may read it, also while it grows. It is for people and tools: nothing\n"
        f"acts on it, and a full disk leaves gaps. This is version {VERSION} of its form, which `started` has as `v`:\n"
        "a field that goes away or changes its meaning raises that number, a new event or field does not. This page\n"
        "is printed by `python -m megatron_recycle.observe.schema`, and tests compare it with real runs.\n\n"
        "Every event has `t` (Unix seconds) and `event`. Fields with `?` may be missing. A worker is `d:s`, with\n"
        "tensor parallelism its part `d:s.p`; a host is as its launcher calls it, `n3/2` for the third launcher,\n"
        "on n3.\n\n"
        f"Where the file becomes larger than {MOST >> 20} MiB, old {_listed()} move to\n"
        f"`ticks-0001.jsonl` and so on, of which the latest {FILES} stay. All decisions remain in `events.jsonl`,\n"
        f"with the first {FIRST} commits of each generation and the latest {LATEST} lines.\n\n"
        f"| field | type | meaning |\n| --- | --- | --- |\n{common}\n"
        f"| event | fields | when |\n| --- | --- | --- |\n{rows}")


def _listed() -> str:
    *first, last = (f"`{name}`" for name in sorted(TICKS))
    return f"{', '.join(first)} and {last}"


def _shown(kind: Kind) -> str:
    own = [f"`{name}` {form}" for name, form in kind.own.items()]
    return ", ".join([*(f"`{name}`" for name in kind.common.split()), *own])


if __name__ == "__main__":
    print(page(), end="")
