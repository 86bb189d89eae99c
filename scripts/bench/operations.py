#!/usr/bin/env python3
"""What looking after a job costs it: iterations with everything switched on beside iterations without, in one job.

The job's stages sleep (`emulated_stage.py`), so that an iteration takes about 0.3 s and the two sides differ by
nothing else. By turns nobody looks at it, and `recycle watch` does with an alarm's command, metrics that are scraped
every 5 s, a file for node exporters and a page that a browser asks every second; once in each turn `recycle status`
runs too. Turns are short and follow each other, so that other load on the machine meets both. What workers do for it
all the time (the record for `recycle timeline`) is timed apart, by itself. Prints both, and writes
runs/bench/operations.json.

    scripts/bench/operations.py [--turns 6] [--seconds 12] [--grid 2x2x4]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jobs import Job, JobFailed, exit_on_sigterm

from megatron_recycle.plan import Action
from megatron_recycle.runtime.activity import WAITING, Activity

OUT = Path("runs/bench")
UNITS = (0.020, 0.022, 0.018)
"""Seconds of a stage's forward, input gradient and weight gradient of a micro-batch."""
SETTLING = 4.0
"""Seconds of a turn that do not count: a watcher starts in them."""
AIM = 0.01


@contextmanager
def looked_after(run: Path) -> Iterator[list[float]]:
    """A block in which the job is watched with all there is; the list gets the watcher's processor seconds."""
    command = [sys.executable, "-m", "megatron_recycle.cli", "watch", str(run), "--on-event", "cat > /dev/null",
               "--metrics", "127.0.0.1:0", "--page", "127.0.0.1:0", "--textfile", str(run / "job.prom"), "--until-told"]
    log = (run / "watch.log").open("w+")
    watcher = subprocess.Popen(command, stderr=log, stdout=log)
    done, used = threading.Event(), list[float]()
    visitor = threading.Thread(target=visit, args=(run / "watch.log", done))
    visitor.start()
    try:
        yield used
        fields = Path(f"/proc/{watcher.pid}/stat").read_text().rpartition(")")[2].split()
        used.append((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
    finally:
        done.set()
        visitor.join()
        watcher.terminate()
        watcher.wait(30)
        log.close()


def visit(log: Path, done: threading.Event) -> None:
    """A browser and Prometheus."""
    turn = 0
    while not done.wait(1.0):
        places = {line.split(" at ")[0].rpartition(" ")[2]: line.split(" at ")[1].strip()
                  for line in log.read_text().splitlines() if " at http" in line}
        with suppress(OSError):
            if "page" in places:
                urllib.request.urlopen(places["page"] + "state", timeout=5).read()
            if "metrics" in places and turn % 5 == 0:
                urllib.request.urlopen(places["metrics"], timeout=5).read()
        turn += 1


def take_turns(job: Job, turns: int, seconds: float) -> tuple[dict[bool, list[float]], list[float], list[float]]:
    """Seconds of iterations of both sides, the watchers' processor seconds for each second, and for each pair of turns
    the difference of their medians."""
    commits: list[float] = []

    def listen() -> None:
        with suppress(JobFailed):
            for event in job.events():
                if event["event"] == "committed":
                    commits.append(float(event["t"]))

    reader = threading.Thread(target=listen, daemon=True)
    reader.start()
    limit = time.monotonic() + 120
    while len(commits) < 12:  # planned, warm
        if time.monotonic() > limit:
            raise JobFailed("the job does not begin")
        time.sleep(0.2)
    sides: dict[bool, list[float]] = {False: [], True: []}
    shares, differences, medians = [], [], {}
    for turn in range(2 * turns):
        on = turn % 2 == 1
        if on:
            with looked_after(job.run_dir) as used:
                found = measured(commits, seconds, job.run_dir)
            shares.append(used[0] / (seconds + SETTLING))
        else:
            found = measured(commits, seconds, None)
        sides[on] += found
        medians[on] = statistics.median(found)
        if on:
            differences.append(medians[True] - medians[False])
            print(f"turn {turn // 2 + 1}: {1000 * medians[False]:.1f} ms without, {1000 * medians[True]:.1f} ms with "
                  "all", flush=True)
    return sides, shares, differences


def measured(commits: list[float], seconds: float, run: Path | None) -> list[float]:
    """Seconds of the iterations of a turn."""
    time.sleep(SETTLING)
    if run is not None:
        subprocess.run([sys.executable, "-m", "megatron_recycle.cli", "status", str(run), "--json"],
                       stdout=subprocess.DEVNULL, check=False)
    since = time.time()
    time.sleep(seconds)
    times = [moment for moment in list(commits) if moment >= since]
    return [after - before for before, after in pairwise(times)]


def transition() -> float:
    """Seconds that the record adds to an action, with the wait in it: with it less without."""
    def took(record: bool, count: int = 20000) -> float:
        activity, action = Activity(10.0), Action("F", 0, 0)
        activity.spans.marks = activity.spans.marks if record else Nowhere()  # type: ignore[assignment]
        since = time.process_time()
        for number in range(count):
            if record:
                activity.at(number, action)
            activity.work("forward")
            with activity.during(WAITING, "F0.0"):
                pass
        return (time.process_time() - since) / count

    return max(0.0, min(took(True) for _ in range(5)) - min(took(False) for _ in range(5)))


class Nowhere:
    """A record that keeps nothing."""

    def append(self, mark: object) -> None:
        pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=6, help="of each side")
    parser.add_argument("--seconds", type=float, default=12.0, help="of a turn that count")
    parser.add_argument("--grid", default="2x2x4", help="pipelines x stages x micro-batches")
    args = parser.parse_args()
    exit_on_sigterm()
    pipelines, stages, microbatches = map(int, args.grid.split("x"))
    lasts = 2 * args.turns * (args.seconds + SETTLING + 4) + 60
    words = ["--pipelines", pipelines, "--stages", stages, "--microbatches", microbatches, "--layers", 1,
             "--parameters", 64, "--seconds", *UNITS, "--iterations", round(lasts / 0.1), "--clipping", 0,
             "--out", (OUT / "operations").resolve()]
    (OUT / "operations").mkdir(parents=True, exist_ok=True)
    job = Job("bench/emulated_stage.py", [str(word) for word in words], (OUT / "operations" / "run").resolve(),
              pipelines * stages, {}, lasts + 120)
    with job:
        sides, shares, differences = take_turns(job, args.turns, args.seconds)
    without, with_all = (statistics.median(sides[on]) for on in (False, True))
    cost = statistics.median(differences) / without
    record = transition()
    actions = 3 * microbatches + 1
    found = {"grid": args.grid, "without_s": without, "with_s": with_all, "iterations": len(sides[True]),
             "cost": cost, "differences_s": differences, "watcher_share_of_a_core": statistics.median(shares),
             "record_s_for_each_action": record, "record_share": record * actions / without,
             "load": os.getloadavg()[0]}
    (OUT / "operations.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"{args.grid}, {len(sides[False])} and {len(sides[True])} iterations by turns, load {found['load']:.0f}")
    print(f"an iteration: {1000 * without:.1f} ms without, {1000 * with_all:.1f} ms with all; the median of "
          f"{len(differences)} pairs of turns differs by {100 * cost:+.2f} % (aim: below {100 * AIM:.0f} %)")
    print(f"the watcher with scrapes and a page: {100 * found['watcher_share_of_a_core']:.1f} % of a core")
    print(f"the record of a worker: {1e6 * record:.1f} microseconds an action, {100 * found['record_share']:.3f} % of "
          f"an iteration of {actions} actions")
    return int(cost + found["record_share"] >= AIM)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except JobFailed as error:
        sys.exit(str(error))
