"""`recycle status [RUN]`: the state of a job, what would end it next, and the repair.

It asks the coordinator. Without an answer it reads the run's events and journal and says how old they are.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_recycle.launch.meeting import Meeting
from megatron_recycle.membership.names import Process, in_order
from megatron_recycle.observe.text import one_line
from megatron_recycle.plan import Costs, Worker
from megatron_recycle.tools.operate.ask import Refused, Unreachable, add_token_file, ask, secret
from megatron_recycle.tools.operate.outlook import Facts, Level, Outlook, duration, judge
from megatron_recycle.tools.operate.runs import add_run, folder_of, read
from megatron_recycle.tools.profile import planned_seconds
from megatron_recycle.usage import Parser, number

VERSION = 1
"""Version of the JSON that `--json` prints; raised when a field goes away or changes its meaning."""
_SHOWN = 32
"""Most workers shown one by one, unless all are asked for."""
_OFTEN = 2.0
_pause = number("seconds, 0.1 or more", lambda found: 0.1 <= found < math.inf)


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `recycle status`. An error of usage has status 3: 2 is a job at risk."""
    parser.status = int(Level.OVER)
    add_run(parser)
    parser.epilog = f"{parser.epilog}; exit status: 0 healthy, 1 degraded, 2 at risk, 3 ended or unreachable"
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--watch", nargs="?", type=_pause, const=_OFTEN, metavar="SECONDS",
                        help=f"again every so often (default {_OFTEN:g}), until the job is over")
    parser.add_argument("--workers", action="store_true", help=f"each worker, also where there are more than {_SHOWN}")
    add_token_file(parser)


def run(args: argparse.Namespace) -> int:
    """Print the status, once or again and again; returns the level of the last one. Raises ConfigError."""
    folder = folder_of(args.run)
    while True:
        status = _once(folder, args)
        if args.watch is None or status == Level.OVER:
            return int(status)
        time.sleep(args.watch)


def _ask(found: Meeting | None, token_file: Path | None) -> tuple[dict[str, Any] | None, str]:
    if found is None or not found.control:
        return None, "the run's folder does not say where its coordinator listens (it has no join.json)"
    try:
        return ask(found.control, secret(found, token_file), "status"), ""
    except (Unreachable, Refused) as error:
        return None, str(error)


def _once(folder: Path, args: argparse.Namespace) -> Level:
    facts = read(folder)
    if not facts.over:
        reply, silent = _ask(facts.meeting, args.token_file)
        facts = replace(facts, told=reply, silent=silent)
    outlook = judge(facts)
    if args.json:
        print(json.dumps(to_json(facts, outlook, plan_seconds(facts))), flush=True)
    else:
        if args.watch is not None and sys.stdout.isatty():
            print("\x1b[H\x1b[2J", end="")
        show(facts, outlook, args.workers)
    return outlook.level


def plan_seconds(facts: Facts) -> float | None:
    """Seconds of an iteration of the plan in force: with the costs of the latest breakdown, if it is of this plan, or
    as it was planned; None: there are no measurements yet."""
    seen = facts.seen
    if seen.spent and seen.spent.get("digest") == seen.digest and seen.spent.get("costs"):
        with suppress(KeyError, TypeError, ValueError):
            found = planned_seconds(Path(facts.run), seen.digest, Costs.from_json(seen.spent["costs"]))
            return seen.period if found is None else found
    return seen.period


def to_json(facts: Facts, outlook: Outlook, planned: float | None = None) -> dict[str, Any]:
    """The status as `--json` prints it, with the ``planned`` seconds of an iteration. Times are Unix seconds, durations
    seconds."""
    seen = facts.seen
    return {
        "v": VERSION, "t": facts.now, "run": facts.run, "verdict": outlook.word.lower().replace(" ", "_"),
        "exit_status": int(outlook.level), "line": outlook.line, "next_end": outlook.next_end, "repair": outlook.repair,
        "generation": seen.generation, "iteration": seen.iteration, "last_commit_age_s": facts.commit_age,
        "loss": seen.loss, "degraded_since": seen.degraded_since, "recovering_since": seen.recovering_since,
        "throughput": {"iteration_s": seen.seconds, "fault_free_s": seen.whole_seconds, "plan_s": planned,
                       "against_fault_free": facts.against_whole,
                       "against_plan": None if not planned or not seen.seconds else planned / seen.seconds},
        "cost": {"stood_still_s": seen.stood_still, "slower_s": max(0.0, seen.slower),
                 "lost_iterations": seen.lost_iterations, "workers_lost": len(seen.failures)},
        "workers": workers(facts), "out": [asdict(one) for one in seen.out.values()],
        "slow": seen.slow, "copies": list(outlook.copies), "fatal_hosts": list(outlook.fatal_hosts),
        "checkpoint": {key: seen.checkpoint[key] for key in ("iteration", "place", "t") if key in seen.checkpoint},
        "coordinator": {"reachable": facts.told is not None, "why": facts.silent, "events_age_s": facts.event_age,
                        "control": facts.meeting.control if facts.meeting else ""},
        "problems": list(facts.problems),
    }


def workers(facts: Facts) -> list[dict[str, Any]]:
    """Each position of the grid: state, host, and its activity as far as the coordinator has reported it."""
    seen, live = facts.seen, (facts.told or {}).get("workers", {})
    rows = []
    for name in in_order({*seen.ranks, *live, *seen.out}):
        report, gone = live.get(name, {}), seen.out.get(name)
        state = gone.kind if gone is not None else "slow" if name in seen.slow else "up"
        if gone is None and name in (facts.told or {}).get("leaving", ()):
            state = "leaving"
        rank = report.get("rank", seen.ranks.get(name))
        rows.append({"worker": name, "state": state, "rank": rank, "gpu": facts.gpus.get(rank),
                     "host": report.get("host", seen.hosts.get(name, "")),
                     "pid": report.get("pid", seen.pids.get(name)),
                     "iteration": report.get("iteration"), "silent_s": report.get("silent_s"),
                     "doing": _doing(report.get("progress")), "since": None if gone is None else gone.since})
    return rows


def _doing(progress: Mapping[str, Any] | None) -> str:
    """A worker's activity in words: `waiting 0.3 s for F1.0`."""
    if not progress:
        return ""
    doing = progress.get("doing") or {}
    state, what, seconds = doing.get("state"), doing.get("what", ""), doing.get("for_s")
    if not state:
        return str(progress.get("action", ""))
    long = f" {seconds:.1f} s" if isinstance(seconds, (int, float)) else ""
    return f"waiting{long} for {what}" if state == "waiting" else f"{what}{long}"


def show(facts: Facts, outlook: Outlook, every: bool) -> None:
    """Print the status for people."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = sys.stdout.isatty()
    console = Console(file=sys.stdout, highlight=False, markup=False, width=None if terminal else 120)
    colour = {Level.HEALTHY: "bold green", Level.DEGRADED: "bold yellow"}.get(outlook.level, "bold red")
    if outlook.word == "ENDED":
        colour = "bold"
    print_line = partial(console.print, soft_wrap=True)
    print_line(Text.assemble((outlook.word, colour), "  ", one_line(outlook.line)))
    for title, text in (("next", outlook.next_end), ("repair", outlook.repair), *_numbers(facts)):
        if text:
            print_line(f"{title:9} {one_line(text)}")
    over = outlook.word in ("ENDED", "STOPPED", "FAILED")
    for one in facts.seen.out.values() if not over else ():
        print_line(f"{'out':9} {_absent(one, facts.now)}")
    for repair in dict.fromkeys(one.repair for one in facts.seen.out.values() if one.repair):
        print_line(f"{'drain':9} {one_line(repair, 500)}")
    for problem in facts.problems:
        print_line(f"{'warning':9} {one_line(problem)}")
    rows = workers(facts)
    if over and not every:
        return
    if rows and facts.seen.grid[0]:
        print_line(f"{'grid':9} {_legend(rows)}")
        for line in _grid(facts, rows):
            print_line(f"{'':9} {line}")
    if not rows or (len(rows) > _SHOWN and not every):
        return
    gpus = ("gpu",) if any(row["gpu"] for row in rows) else ()
    shown = ("worker", "state", "host", *gpus, "rank", "pid", "iteration", "doing")
    table = Table(*("GPU" if key == "gpu" else key for key in shown), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*("" if row[key] is None else str(row[key]) for key in shown))
    console.print(table)


def _numbers(facts: Facts) -> list[tuple[str, str]]:
    seen, planned = facts.seen, plan_seconds(facts)
    speed = []
    if seen.seconds:
        speed = [f"an iteration takes {seen.seconds:.3f} s"]
        speed += [f"fault-free {seen.whole_seconds:.3f} s ({facts.against_whole:.2f} of its throughput)"
                  if seen.whole_seconds and facts.against_whole else "fault-free unknown"]
        speed += [f"plan {planned:.3f} s ({planned / seen.seconds:.2f})"] if planned else []
    cost = []
    if seen.failures:
        cost = [f"{len(seen.failures)} workers lost", f"{duration(seen.stood_still)} standing still",
                f"{duration(max(0.0, seen.slower))} by slower iterations"]
        cost += [f"{seen.lost_iterations} iterations made again"] if seen.lost_iterations else []
    saved = seen.checkpoint
    behind = f", {seen.iteration - saved['iteration']} iterations ago" if saved else ""
    place = [f"{saved['place']} (iteration {saved['iteration']}{behind})"] if saved else []
    sources = [] if facts.told is not None or seen.finished else [
        "not asked" if not facts.silent else f"from files alone: {facts.silent}"]
    sources += [] if facts.event_age is None or facts.told is not None else [
        f"last event {duration(facts.event_age)} ago"]
    return [("speed", "; ".join(speed)), ("cost", ", ".join(cost)), ("saved", "; ".join(place)),
            ("source", "; ".join(sources) if facts.told is None else "")]


def _absent(one: Any, now: float) -> str:
    where = f" on {one.host}" if one.host else ""
    rank = "" if one.rank is None else f" (rank {one.rank}, pid {one.pid})"
    at = "" if one.iteration is None else f" in iteration {one.iteration}"
    why = f": {one_line('; '.join(one.causes) or one.why, 200)}" if one.causes or one.why else ""
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.since))
    return f"{one.worker}{rank}{where}: {one.kind}{at}, since {clock}, {duration(now - one.since)} ago{why}"


_MARKS = {"up": "#", "slow": "s", "leaving": "l", "exit": "X", "frozen": "F", "stalled": "S", "unreachable": "U",
          "corrupt": "C", "leave": "-", "move": "m", "stranded": "o"}


def _legend(rows: list[dict[str, Any]]) -> str:
    states = sorted({row["state"] for row in rows}, key=lambda state: (state != "up", state))
    return "a line for each pipeline, stages from left to right: " + ", ".join(
        f"{_MARKS.get(state, '?')} {state}" for state in states)


def _grid(facts: Facts, rows: list[dict[str, Any]]) -> list[str]:
    """One line for each pipeline; of a worker with several parts the worst counts."""
    pipelines, stages = facts.seen.grid
    marks: dict[Worker, str] = {}
    for row in rows:
        worker = Process.parse(row["worker"]).worker
        if marks.get(worker, "up") in ("up", "stranded"):
            marks[worker] = row["state"]
    width = len(str(pipelines - 1))
    return [f"{pipeline:>{width}} " + "".join(_MARKS.get(marks.get(Worker(pipeline, stage), ""), "?")
                                              for stage in range(stages)) for pipeline in range(pipelines)]
