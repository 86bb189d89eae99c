"""Stands for a training process: follows the protocol with an Agent, computes nothing, needs no torch.

Where it stands is kept by a `Standing`, as in a real worker. Workers agree through files in the run directory, as a
real job does through its groups: a worker holds k when all members have computed it, and steps k when all members hold
it. Told what to do by RECYCLE_FAKE (JSON):
`iterations`; `pause`: {rank: iteration} and `pause_report`: {rank: generation}, where a worker says so in a file
and waits for it to go away, once: an iteration that is made again has no pause; `mute`: ranks that never report;
`fail_at_start`: ranks; `fail_when_connected`: ranks; `patience`: seconds that a waiting one bears a coordinator
out of reach; `offered`: an iteration from which on none is held without the offer of a boundary, until somebody has
come in; `full`: the same as long as a worker is missing; `learnt`: processes are told something at the start, and those
that come in ask for it; `handles`: scripts have a SIGTERM handler of their own, and all end after the iteration in
which one has got it; `marks`: a folder for these files.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_recycle.control import Agent, Go, Stop
from megatron_recycle.control.host_memory import HostMemory
from megatron_recycle.control.link import ask_record
from megatron_recycle.control.wire import GUEST
from megatron_recycle.environment import Launched
from megatron_recycle.errors import JobEnded
from megatron_recycle.membership import Process
from megatron_recycle.membership.description import Description
from megatron_recycle.membership.inputs import Received
from megatron_recycle.membership.standing import Standing
from megatron_recycle.membership.verdict import StepMode, Verdict
from megatron_recycle.membership.worker_events import Rebuilt, RolledBack
from megatron_recycle.observe.holds import observer_for
from megatron_recycle.plan import Action

STAGES = 2


class FakeWorker:
    def __init__(self) -> None:
        self.orders = json.loads(os.environ["RECYCLE_FAKE"])
        self.folder = Path(os.environ["RECYCLE_RUN_DIR"])
        self.marks = Path(self.orders.get("marks", self.folder / "marks"))
        self.rank = int(os.environ["RANK"])
        pipelines = int(os.environ["WORLD_SIZE"]) // STAGES
        # Not rank = d * S + s: the launcher must not assume an order.
        self.name = f"{self.rank % pipelines}:{self.rank // pipelines}"
        self.standing = Standing(Process.parse(self.name), StepMode.of(False))
        self.observer = observer_for(Launched.read())
        self.agent = Agent(
            os.environ["RECYCLE_COORDINATOR"],
            os.environ["RECYCLE_TOKEN"],
            self.name,
            self.rank,
            f"{GUEST * os.environ['RECYCLE_TOKEN'].startswith(GUEST)}{self.name}/{os.getpid()}",
            heartbeat_interval=self.orders.get("heartbeat_interval", 0.1),
            host=os.environ.get("RECYCLE_HOST"),
            on_stop=self.on_stop,
            patience=self.orders.get("patience", 60.0),
            joining=os.environ.get("RECYCLE_JOIN") == "1",
            memory=HostMemory.given(Launched.read().memory),
        )
        self.waits_since: float | None = None
        self.paused: set[str] = set()
        self.joined = False
        if "patience" in self.orders:
            self.agent.doing = self.doing
        self.terminated = threading.Event()
        if self.orders.get("handles"):
            signal.signal(signal.SIGTERM, lambda number, frame: self.terminated.set())
            self.agent.handles_sigterm = lambda: True
        launched, life = Launched.read(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        batch = launched.microbatches or 2 * pipelines
        if life:  # what was ordered has been done
            self.orders = {name: order for name, order in self.orders.items() if name in ("iterations", "description")}
            self.marks = self.marks.with_name(f"marks-{life}")
        self.description = Description.from_json({
            "grid": {"stages": STAGES, "microbatches": [batch // pipelines] * pipelines},
            "block": 1,
            "reduction": "exact",
            "cap": None,
            "planner_budget": 0,
            **self.orders.get("description", {}),
        })

    def doing(self) -> dict[str, Any]:
        """What `runtime.activity` would say: it waits for other workers, or works for as long as it likes."""
        since, now = self.waits_since, time.monotonic()
        return {"state": "working" if since is None else "waiting", "what": "marks", "number": 0,
                "for_s": 0.0 if since is None else now - since, "limit_s": None}

    def on_stop(self, stop: Stop) -> None:
        self.agent.event(Rebuilt(stop.generation, 0.0))

    def enter(self) -> Go | None:
        """Wait for generation 1, or, in a job that runs already, to be taken in."""
        learnt = [{"rank": self.rank}] if self.orders.get("learnt") else []
        if self.agent.outside and learnt:
            launched = Launched.read()
            assert ask_record(str(launched.control), launched.token, self.rank) == learnt
        self.agent.ready(self.description, self.standing.report(), learnt)
        return self.agent.wait_taken_in() if self.agent.outside else self.agent.wait_go(1)

    def train(self) -> None:
        self.agent.start()
        if self.rank in self.orders.get("fail_when_connected", ()):
            self.agent.ending()
            self.agent.close()
            time.sleep(1.0)
            sys.exit(1)
        go = self.enter()
        while True:
            if go is not None:
                self.reconcile(go)
                self.joined |= bool(go.resume.joined)
                if self.name in go.resume.joined:
                    self.agent.holds(go.generation, Received(1000, 1.0))
                self.agent.resumed(go.generation)
                if self.run(go) and self.agent.finished():
                    return
            if self.agent.outside:
                go = self.enter()
                continue
            generation = self.agent.stop_generation
            if self.rank in self.orders.get("mute", ()):
                threading.Event().wait()
            self.pause("report", generation)
            self.standing.give_up()
            self.agent.report(generation, self.standing.report())
            go = self.agent.wait_go(generation)

    def reconcile(self, go: Go) -> None:
        """As if every gradient and verdict could be had at once."""
        standing, target = self.standing, go.resume.target
        standing.join(go.generation)
        todo = standing.reconciliation(go.resume)
        if todo.enter:
            standing.enter(verdict(target), standing.mode)
        if todo.drop:
            standing.drop()
        if todo.copies and standing.holds < target:
            standing.receive(target)
        if todo.anew or todo.verdict is not None:
            self.settle(target)
        standing.go_on(go.resume)

    def settle(self, iteration: int) -> None:
        self.standing.step(1.0)
        self.standing.commit(verdict(iteration), 1.0)

    def run(self, go: Go) -> bool:
        """All remaining iterations; False if a stop came."""
        standing = self.standing
        while standing.stepped + 1 < self.orders["iterations"]:
            iteration = standing.stepped + 1
            standing.begin(iteration)
            standing.did(Action("F", 0, 0))
            self.pause("iteration", iteration)
            self.observe("forward", iteration)
            if not self.agreed(go, f"computed-{iteration}", "last" * self.terminated.is_set()):
                return False
            if not self.may_hold(go, iteration):
                return False
            standing.hold(iteration)
            self.observe("reduced", iteration)
            offer = self.agent.offer
            if not self.agreed(go, f"held-{iteration}", str(offer.number) if offer else ""):
                return False
            self.settle(iteration)
            self.observe("stepped", iteration)
            self.agent.committed(iteration, 1.0 / (iteration + 1))
            if "last" in self.told(go, f"computed-{iteration}"):
                return True
            if offer is not None and offer.plan is None and self.told(go, f"held-{iteration}") == {str(offer.number)}:
                self.agent.boundary(go.generation, iteration + 1)
                self.agent.wait_stop(go.generation)
                return False
        return True

    def told(self, go: Go, what: str) -> set[str]:
        """The texts of all members' marks."""
        marks = self.marks / f"{go.generation}-{what}"
        return {(marks / name).read_text() for name in go.members}

    def may_hold(self, go: Go, iteration: int) -> bool:
        """Wait for an offer, if a test wants it; False if a stop came."""
        first, full = (self.orders.get(name) or iteration + 1 for name in ("offered", "full"))
        if iteration >= full and len(go.members) < int(os.environ["WORLD_SIZE"]):
            return self.waited(go, lambda: self.agent.offer is not None)
        return iteration < first or self.waited(go, lambda: self.joined or self.agent.offer is not None)

    def agreed(self, go: Go, what: str, text: str = "") -> bool:
        """Put a mark and wait for those of all members; False if a stop came."""
        marks = self.marks / f"{go.generation}-{what}"
        marks.mkdir(parents=True, exist_ok=True)
        (marks / f"{self.name}.part").write_text(text)
        (marks / f"{self.name}.part").rename(marks / self.name)
        self.waits_since = time.monotonic()
        try:
            return self.waited(go, lambda: all((marks / name).exists() for name in go.members))
        finally:
            self.waits_since = None

    def waited(self, go: Go, reached: Callable[[], bool]) -> bool:
        while not reached():
            if self.agent.stop_generation > go.generation:
                return False
            if self.agent.ended is not None:
                raise JobEnded(self.agent.ended.message, self.agent.ended.status)
            time.sleep(0.002)  # a stand-in for work
        return True

    def observe(self, phase: str, iteration: int) -> None:
        if self.observer is not None:
            self.observer.on(phase, iteration, None)

    def pause(self, before: str, number: int) -> None:
        """Stand still before this iteration or report, if a test wants it, until the file goes away or a stop
        comes.

        Whether an iteration has to be made again after a stop depends on who heard of it when. So the second time there
        is no pause, and the job goes on in any case.
        """
        wanted = self.orders.get("pause" if before == "iteration" else "pause_report", {})
        if wanted.get(str(self.rank)) != number or before in self.paused:
            return
        self.paused.add(before)
        stop = self.agent.stop_generation
        file = self.folder / f"paused-{self.rank}"
        file.write_text(str(os.getpid()))
        self.agent.event(RolledBack(number, 0))
        while file.exists() and self.agent.stop_generation == stop and self.agent.ended is None:
            time.sleep(0.002)
        file.unlink(missing_ok=True)


def verdict(iteration: int) -> Verdict:
    return Verdict(iteration, 1.0 / (iteration + 1), 0.0, (1.0,), (1.0,))


def main() -> int:
    worker = FakeWorker()
    print(f"rank {worker.rank} is worker {worker.name}", flush=True)
    if worker.rank in worker.orders.get("fail_at_start", ()):
        print("no such model", flush=True)
        return 7
    try:
        worker.train()
    except JobEnded as end:
        print(f"ended: {end}", flush=True)
        return end.status
    finally:
        worker.agent.close()
    print("finished", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
