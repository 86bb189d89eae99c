#!/usr/bin/env python3
"""Random campaigns: jobs of the tests' small model are hurt at random moments and compared with undisturbed ones.

    python scripts/campaign.py 30 100          # seeds 100 to 129
    python scripts/campaign.py 1 117           # that one again

A seed decides on the grid, on what happens, to whom and when. With `reduction: exact` whoever is left must have the
parameters, optimizer state and losses of the run without failures, bit for bit, and every iteration must have been
committed once. One line for each campaign: seed, job, what was done, result, milliseconds until training went on
(without a membership change: until the coordinator was back). The files of a failed one are in runs/campaign/. Exit
status 1 if any differed or hung.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jobs import exit_on_sigterm

from megatron_recycle.control.coordinator_spec import CoordinatorSpec
from megatron_recycle.launch import coordinator_process
from megatron_recycle.observe.events import read_events
from tests.backends import gpt_job
from tests.backends.comparing import differences
from tests.harness import Hold, Job, Result

ROOT = Path(__file__).resolve().parent.parent
ITERATIONS = 12
_SETTINGS: Mapping[str, Any] = {"reduction": "exact", "heartbeat_timeout": 3.0, "stall_floor": 3.0,
                                "report_timeout": 10.0}
JOBS: Mapping[str, Mapping[str, Any]] = {
    "3x2": {"pipelines": 3, "stages": 2},
    "3x2 barrier": {"pipelines": 3, "stages": 2, "settings": {"step": "barrier"}},
    "3x2 clipped": {"pipelines": 3, "stages": 2, "clipping": 0.05, "settings": {"clip_norm": "global"}},
    "3x2 tied": {"pipelines": 3, "stages": 2, "tied": True},
    "2x3": {"pipelines": 2, "stages": 3, "microbatches": 3},
    "4x2 sgd": {"pipelines": 4, "stages": 2, "microbatches": 3, "optimizer": "SGD"},
}
"""Arguments of `gpt_job.train`, beside the settings that all have."""
PHASES = {"forward": 2, "backward": 2, "weight": 2, "reduce": 1, "reduced": 1, "step": 1, "stepped": 1}
"""Phase -> how many times every worker surely passes it in an iteration."""


class CampaignJob(Job):
    """A job whose coordinator is a process, so that it can be killed."""

    def _start_coordinator(self) -> str:
        environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        spec = CoordinatorSpec(self.size, embedded=True)
        self._service = coordinator_process.start(spec, self.folder, "token", environ)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="events")
        self._thread.start()
        return self._service.control

    def _follow(self) -> None:
        """Pass on the events that the coordinator writes; start it again when it has died."""
        path, known = self.folder / "events.jsonl", 0
        while not self._over.wait(0.01):
            status = self._service.child.status()
            if status == -signal.SIGKILL:
                self._service.bury()
                self._service.revive()
            for event in (read_events(path) if path.exists() else [])[known:]:
                known += 1
                self._emit(event)

    def __exit__(self, *failure: object) -> None:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
        self._over.set()
        self._thread.join()
        self._service.child.signal(signal.SIGKILL)
        self._service.end()
        self.coordinated = False  # nothing of it is left for the base class
        super().__exit__(*failure)

    def kill_coordinator(self) -> float:
        now = time.time()
        os.kill(self._service.child.pid, signal.SIGKILL)
        return now


@dataclass
class Scene:
    """The events of a campaign: `play` makes them happen and returns when (Unix seconds) the worst of it happened.

    `victims` are out at the end, `coming` is a rank that is back.
    """

    text: str
    holds: Sequence[Hold]
    play: Callable[[CampaignJob], float]
    victims: set[str] = field(default_factory=set)
    coming: int | None = None
    decides: bool = True


class Scenes:
    """Draws scenes for one grid."""

    def __init__(self, draw: random.Random, pipelines: int, stages: int) -> None:
        self._draw = draw
        self._pipelines = pipelines
        self._workers = [f"{pipeline}:{stage}" for pipeline in range(pipelines) for stage in range(stages)]

    def any(self) -> Scene:
        kinds = [self.kill, self.freeze, self.stall, self.coordinator, self.two, self.second, self.with_coordinator,
                 self.rejoin]
        return self._draw.choice(kinds)()

    def _hold(self, worker: str, first: int = 0, last: int = ITERATIONS - 1) -> Hold:
        phase = self._draw.choice(list(PHASES))
        # The last iteration is special: others have nothing left to do. So it gets a fifth of all.
        final = last == ITERATIONS - 1 and self._draw.random() < 0.2
        iteration = last if final else self._draw.randint(first, last)
        return Hold(worker, phase, iteration, self._draw.randrange(PHASES[phase]))

    def _pair(self) -> list[str]:
        """Two workers that are not all that a stage has."""
        while True:
            pair = self._draw.sample(self._workers, 2)
            if self._pipelines > 2 or pair[0][-1] != pair[1][-1]:
                return pair

    def kill(self) -> Scene:
        hold = self._hold(self._draw.choice(self._workers))

        def play(job: CampaignJob) -> float:
            job.wait_held(hold)
            return job.kill(hold)

        return Scene(f"kill {hold}", [hold], play, {hold.worker})

    def freeze(self) -> Scene:
        """The worker wakes up after it was declared out, or never."""
        hold, wakes = self._hold(self._draw.choice(self._workers)), self._draw.random() < 0.5

        def play(job: CampaignJob) -> float:
            job.wait_held(hold)
            moment = job.kill(hold, with_signal=signal.SIGSTOP)
            job.release(hold)
            job.wait_event("decided")
            job.kill(hold, with_signal=signal.SIGCONT if wakes else signal.SIGKILL)
            return moment

        return Scene(f"freeze{' and wake' * wakes} {hold}", [hold], play, {hold.worker})

    def stall(self) -> Scene:
        # How long an action may take is learnt first; and nobody is stalled who is in no action.
        worker = self._draw.choice(self._workers)
        hold = Hold(worker, self._draw.choice(("forward", "backward", "weight")), self._draw.randint(4, 9), 1)

        def play(job: CampaignJob) -> float:
            job.wait_held(hold)
            moment = time.time()
            job.wait_event("decided")
            job.release(hold)
            return moment

        return Scene(f"stall {hold}", [hold], play, {hold.worker})

    def coordinator(self) -> Scene:
        hold = self._hold(self._draw.choice(self._workers))

        def play(job: CampaignJob) -> float:
            job.wait_held(hold)
            moment = job.kill_coordinator()
            job.release(hold)
            return moment

        return Scene(f"coordinator, {hold}", [hold], play, decides=False)

    def two(self) -> Scene:
        one, other = self._pair()
        first = self._hold(one)
        second = Hold(other, "forward", first.iteration)

        def play(job: CampaignJob) -> float:
            job.wait_held(first, second)
            return job.kill(first, second)

        return Scene(f"kill {first} and {second}", [first, second], play, {one, other})

    def second(self) -> Scene:
        one, other = self._pair()
        first = self._hold(one)
        later = [Hold(other, "recovering", iteration) for iteration in range(first.iteration - 1, first.iteration + 2)]

        def play(job: CampaignJob) -> float:
            job.wait_held(first)
            job.kill(first)
            return job.kill(job.wait_any(later))

        return Scene(f"kill {first}, then {other} in the recovery", [first, *later], play, {one, other})

    def with_coordinator(self) -> Scene:
        """The coordinator dies while it lets the others recover."""
        hold, pause = self._hold(self._draw.choice(self._workers)), self._draw.uniform(0.0, 0.15)

        def play(job: CampaignJob) -> float:
            job.wait_held(hold)
            moment = job.kill(hold)
            time.sleep(pause)  # anywhere in the recovery, or after it
            job.kill_coordinator()
            return moment

        return Scene(f"kill {hold}, coordinator {1000 * pause:.0f} ms later", [hold], play, {hold.worker})

    def rejoin(self) -> Scene:
        one, other = self._draw.sample(self._workers, 2)
        first = self._hold(one, last=3)
        late = Hold(other, "forward", first.iteration + 2)
        rank = rank_of(one, self._pipelines)

        def play(job: CampaignJob) -> float:
            job.wait_held(first)
            moment = job.kill(first)
            job.wait_ended(rank)
            job.wait_held(late)
            job.rejoin(rank)
            job.wait_event("waiting", worker=one)
            job.release(late)
            return moment

        return Scene(f"kill {first}, it comes back", [first, late], play, coming=rank)


def rank_of(worker: str, pipelines: int) -> int:
    pipeline, stage = map(int, worker.split(":"))
    return stage * pipelines + pipeline


def arguments_of(name: str) -> dict[str, Any]:
    wanted = JOBS[name]
    return {**wanted, "iterations": ITERATIONS, "settings": {**_SETTINGS, **wanted.get("settings", {})}}


def undisturbed(name: str, limit: float) -> dict[int, Result]:
    arguments = arguments_of(name)
    with Job(gpt_job.train, arguments["pipelines"] * arguments["stages"], arguments, limit=limit) as job:
        results = job.wait()
        if any(result.status != 0 for result in results.values()):
            raise RuntimeError(f"the job without failures failed\n{job.where()}")
    return results


def faults(job: CampaignJob, scene: Scene, reference: Mapping[int, Result], pipelines: int) -> list[str]:
    """Differences from the end of a job without failures; empty if there are none."""
    found = []
    out = {rank_of(worker, pipelines) for worker in scene.victims}
    for rank, result in job.wait().items():
        if rank in out:
            if result.status != 0:
                continue  # it has no effect; but one that wakes up in its last step can make it, and ends well
        elif result.status != 0:
            found.append(f"rank {rank} ended with status {result.status}: {result.error}")
            continue
        differ = differences(result, reference[rank])
        found += [f"rank {rank} differs in {', '.join(sorted(differ))}"] if differ else []
    committed = [event["iteration"] for event in job.events if event["event"] == "committed"]
    return found + ([] if committed == list(range(ITERATIONS)) else [f"committed: {committed}"])


def recovered_ms(job: CampaignJob, scene: Scene, moment: float) -> float | None:
    name = "resumed" if scene.decides else "restarted"
    if scene.coming is not None:
        name = "joined"
    times = [event["t"] for event in job.events if event["event"] == name and event["t"] >= moment]
    return 1000 * (times[-1] - moment) if times else None


def run_campaign(seed: int, references: dict[str, dict[int, Result]], limit: float,
                 folder: Path) -> tuple[str, float | None]:
    """One campaign; prints its line and returns ("equal", "differs" or "hung", milliseconds)."""
    draw = random.Random(seed)
    name = draw.choice(list(JOBS))
    arguments = arguments_of(name)
    pipelines, stages = arguments["pipelines"], arguments["stages"]
    scene = Scenes(draw, pipelines, stages).any()
    if name not in references:
        references[name] = undisturbed(name, limit)
    verdict, reasons, took, where = "equal", [], None, ""
    with CampaignJob(gpt_job.train, pipelines * stages, arguments, scene.holds, limit=limit) as job:
        try:
            moment = scene.play(job)
            reasons = faults(job, scene, references[name], pipelines)
            took = recovered_ms(job, scene, moment)
            verdict = "differs" if reasons else verdict
        except AssertionError as error:  # the harness waited in vain
            verdict, reasons = "hung", [str(error).splitlines()[0]]
        if verdict != "equal":
            coordinator = (job.folder / "coordinator.log").read_text(errors="replace")
            where = "\n".join([job.where(), *map(str, job.events), coordinator])
    shown = "" if took is None else f"{took:.0f} ms"
    print(f"seed {seed:<6} {name:<12} {scene.text:<62} {verdict:<8} {shown}", flush=True)
    if verdict != "equal":
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / f"seed-{seed}.log"
        log.write_text("\n".join([scene.text, *reasons, where]))
        print("".join(f"    {reason}\n" for reason in reasons[:6]) + f"    more in {log}", flush=True)
    return verdict, took


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("campaigns", type=int, metavar="N", help="how many")
    parser.add_argument("seed", type=int, metavar="SEED", help="of the first; each next one has the next number")
    parser.add_argument("--limit", type=float, default=90.0, metavar="SECONDS", help="after which one counts as hung")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "campaign", help="for logs of failed ones")
    args = parser.parse_args()
    exit_on_sigterm()
    references: dict[str, dict[int, Result]] = {}
    verdicts: dict[str, list[int]] = {"equal": [], "differs": [], "hung": []}
    times = []
    for seed in range(args.seed, args.seed + args.campaigns):
        try:
            verdict, took = run_campaign(seed, references, args.limit, args.output)
        except (RuntimeError, OSError):
            traceback.print_exc()
            verdict, took = "hung", None
        verdicts[verdict].append(seed)
        times += [took] if took is not None else []
    middle = f"; median {statistics.median(times):.0f} ms, worst {max(times):.0f} ms" if times else ""
    counts = ", ".join(f"{len(seeds)} {name}" for name, seeds in verdicts.items())
    print(f"{args.campaigns} campaigns: {counts}{middle}")
    for name in ("differs", "hung"):
        if verdicts[name]:
            print(f"{name}: seeds {', '.join(map(str, verdicts[name]))}")
    return 1 if verdicts["differs"] or verdicts["hung"] else 0


if __name__ == "__main__":
    sys.exit(main())
