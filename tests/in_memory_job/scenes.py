"""Random campaigns in memory: a seed decides on the job, on what happens, to whom and when."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from tests.in_memory_job.job import Job, Shape, check
from tests.in_memory_job.wires import Asked
from tests.moments import Moment

SHAPES = {
    "3x2": Shape(3, 2, 2, 3),
    "3x2, four": Shape(3, 2, 4, 3),
    "2x3": Shape(2, 3, 3, 3),
    "3x3": Shape(3, 3, 2, 3),
    "2x4": Shape(2, 4, 2, 3),
    "4x2": Shape(4, 2, 2, 3),
    "clipped": Shape(3, 2, 2, 4, clipping=0.05),
    "clipped now and then": Shape(2, 3, 2, 4, clipping=0.9),
    "overflows": Shape(3, 2, 2, 4, scale=64.0, overflows=((1, 1), (0, 2))),
    "tied": Shape(3, 2, 2, 3, tied=True),
    "evaluates": Shape(3, 2, 2, 3, evaluate=(1, 2)),
    "saves": Shape(3, 2, 2, 3, evaluate=(1,), save=(0, 1, 2)),
    "collects": Shape(3, 2, 2, 3, collect=(0, 2)),
    "longer": Shape(3, 2, 2, 4, lengths=(1, 2, 2, 3)),
    "longer, clipped": Shape(2, 3, 2, 4, lengths=(2, 3, 1), clipping=0.05, evaluate=(2,)),
    "settles": Shape(3, 2, 2, 3, anneals=True).with_settings(keep_messages="none"),
    "settles, clipped": Shape(2, 3, 2, 4, clipping=0.05).with_settings(keep_messages="none"),
    "waits": Shape(3, 2, 2, 3).with_settings(step="barrier"),
    "waits, clipped": Shape(2, 3, 2, 3, clipping=0.05).with_settings(step="barrier"),
}
PHASES = ("forward", "backward", "weight", "reduce", "reduced", "step", "stepped")
PER_MICROBATCH = ("forward", "backward", "weight", "evaluate")


@dataclass
class Scene:
    """What happens in a job: ``kills`` and ``asked`` where somebody gets there, ``play`` beside it."""

    name: str
    shape: Shape
    kills: list[Moment] = field(default_factory=list)
    holds: list[Moment] = field(default_factory=list)
    play: Callable[[Job], None] | None = None
    out: set[str] = field(default_factory=set)
    came: set[str] = field(default_factory=set)
    slow: float = 0.0
    sure: bool = False
    """Whether all of ``kills`` come to pass."""
    asked: list[Asked] = field(default_factory=list)

    def __str__(self) -> str:
        told = [f"kill {one}" for one in [*self.kills, *self.asked]] + [f"hold {one}" for one in self.holds]
        return f"{self.name}: {', '.join(told)}"

    def run(self, seed: int) -> Job:
        """Raises AssertionError if anything differs, or hangs."""
        job = Job(self.shape, self.kills, holds=self.holds, seed=seed, slow=self.slow, asked=self.asked)
        try:
            with job:
                if self.play is not None:
                    self.play(job)
                check(job, job.wait(), self.out, self.came)
                assert not self.sure or not job.kills, f"nobody got to {job.kills}"
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {self}: {error}") from error
        return job


@functools.cache
def operations(shape: Shape) -> dict[str, list[Asked]]:
    """All that each worker asks of a network with NCCL's rules in a job without failures."""
    job = Job(shape, seed=1)
    job.run()
    return {worker: [one for one in job.deaths.all() if one.worker == worker] for worker in shape.workers}


class Draw:
    """Draws scenes, of these jobs."""

    def __init__(self, seed: int, shapes: Mapping[str, Shape] = SHAPES) -> None:
        self.random = random.Random(seed)
        self._shapes = shapes
        self._ordered = bool(seed % 2)  # as `Job` has it

    def scene(self) -> Scene:
        name = self.random.choice(list(self._shapes))
        kind = self.random.choice([self.one, self.asks, self.both_ask, self.two, self.during_the_recovery, self.apart,
                                   self.coordinator, self.with_coordinator, self.comes_back,
                                   self.asks_while_one_comes_back, self.frozen])
        scene = kind(self._shapes[name])
        scene.name = f"{name}, {kind.__name__}"
        scene.slow = self.random.choice([0.0, 0.1, 0.5])
        return scene

    def moment(self, shape: Shape, worker: str, first: int = 0, last: int | None = None) -> Moment:
        """That surely comes, if nobody else fails before."""
        last = shape.iterations - 1 if last is None else last
        # Others have nothing left to do in the last iteration: it gets a fifth of all.
        iteration = last if self.random.random() < 0.2 else self.random.randint(first, last)
        phases = (PHASES + (("evaluate",) if iteration + 1 in shape.evaluate else ())
                  + (("save",) if iteration + 1 in shape.save else ()))
        phase = self.random.choice(phases)
        return Moment(worker, phase, iteration, self.random.randrange(
            shape.microbatches) if phase in PER_MICROBATCH else 0)

    def pair(self, shape: Shape) -> list[str]:
        """Two workers that are not all that a stage has."""
        while True:
            pair = self.random.sample(shape.workers, 2)
            if shape.pipelines > 2 or pair[0][-1] != pair[1][-1]:
                return pair

    # ---- kinds

    def one(self, shape: Shape) -> Scene:
        worker = self.random.choice(shape.workers)
        return Scene("", shape, [self.moment(shape, worker)], out={worker}, sure=True)

    def asks(self, shape: Shape) -> Scene:
        """It dies inside a reduction, a commit, a roll-back, or while its communicators are made."""
        worker = self.random.choice(shape.workers)
        return Scene("", shape, out={worker}, asked=[self.random.choice(operations(shape)[worker])])

    def both_ask(self, shape: Shape) -> Scene:
        pair = self.pair(shape)
        return Scene("", shape, out=set(pair), asked=[self.random.choice(operations(shape)[one]) for one in pair])

    def two(self, shape: Shape) -> Scene:
        """The second may have nothing to die of any more, so it is not sure to be out."""
        one, other = self.pair(shape)
        first = self.moment(shape, one)
        second = Moment(other, "forward", first.iteration)
        return Scene("", shape, [first], [second], play=lambda job: _release(job, second), out={one, other})

    def during_the_recovery(self, shape: Shape) -> Scene:
        one, other = self.pair(shape)
        first = self.moment(shape, one)
        later = [Moment(other, "recovering", iteration, nth) for iteration in range(shape.iterations + 1)
                 for nth in range(self.random.choice([1, 2]))]
        return Scene("", shape, [first, *later], out={one, other})

    def apart(self, shape: Shape) -> Scene:
        """Another one stands somewhere when the first dies, and goes on once that is decided."""
        one, other = self.pair(shape)
        first = Moment(one, "forward", self.random.randrange(1, shape.iterations))
        held = self.moment(shape, other, first.iteration - (shape.step == "staggered" and shape.ahead),
                           first.iteration)
        # After wrong guesses they wait for each other, and in what the script does between iterations for everybody;
        # for parameters that others' shards step, too. A stage that is not closed by itself waits for the commit.
        together = (shape.clipping or shape.scale or shape.sharded or shape.lengths or shape.tied or shape.parts > 1
                    or self._ordered or one[-1] == other[-1]
                    or first.iteration in shape.evaluate + shape.save or first.iteration - 1 in shape.collect)
        if together and held.iteration < first.iteration:
            held = replace(held, iteration=first.iteration)
        if held.iteration < first.iteration:  # stages are never more than one step apart
            held = Moment(other, self.random.choice(["reduced", "step", "stepped"]), held.iteration)
            phase = self.random.choice(["forward", "reduce"])
            # Whoever stands keeps its own pipeline from getting to its reduction.
            first = replace(first, phase="forward" if one[0] == other[0] else phase)
        return Scene("", shape, [first], [held], play=lambda job: _once_decided(job, held), out={one})

    def coordinator(self, shape: Shape) -> Scene:
        at, absent = self.random.uniform(0.0, 0.2), self.random.choice([0.0, 0.01, 0.1])
        return Scene("", shape, play=lambda job: _kill_coordinator(job, at, absent))

    def with_coordinator(self, shape: Shape) -> Scene:
        scene = self.one(shape)
        after, absent = self.random.uniform(0.0, 0.05), self.random.choice([0.0, 0.01])

        def play(job: Job) -> None:
            job.wait_event("suspected")
            job.control.call(lambda: job.control.kill(absent), after)

        scene.play = play
        return scene

    def comes_back(self, shape: Shape) -> Scene:
        shape = replace(shape, iterations=6)
        worker = self.random.choice(shape.workers)
        first = self.moment(shape, worker, 0, 0)
        late = Moment(self.random.choice([one for one in shape.workers if one != worker]), "forward", 1)

        def play(job: Job) -> None:
            job.wait_event("decided", generation=2)
            job.wait_held(late)
            job.start(worker, joining=True)
            job.wait_event("waiting", worker=worker)
            job.release(late)
            job.wait_event("joined", worker=worker)

        return Scene("", shape, [first], [late], play=play, came={worker})

    def asks_while_one_comes_back(self, shape: Shape) -> Scene:
        """It, or another one that may give it the state, dies at something that is asked of the network."""
        shape = replace(shape, iterations=6)
        worker, other = self.pair(shape)
        first = self.moment(shape, worker, 0, 0)
        late = Moment(self.random.choice([one for one in shape.workers if one not in (worker, other)]), "forward", 1)
        dies = self.random.choice([worker, other])
        asked = self.random.choice(operations(shape)[dies])  # in its second life, if it has asked for less in its first
        if dies == other:
            asked = replace(asked, nth=asked.nth + self.random.randrange(3))

        def play(job: Job) -> None:
            job.wait_event("decided", generation=2)
            job.wait_held(late)
            job.start(worker, joining=True)
            job.wait_event("waiting", worker=worker)
            job.release(late)

        return Scene("", shape, [first], [late], play=play, out={worker, other}, came={worker}, asked=[asked])

    def frozen(self, shape: Shape) -> Scene:
        """Declared out while it stands still; then it goes on, and nothing that it does counts."""
        worker = self.random.choice(shape.workers)
        held = self.moment(shape, worker)

        def play(job: Job) -> None:
            job.wait_held(held)
            job.control.lost(worker)
            job.wait_event("decided", generation=2)
            wake = threading.Timer(self.random.choice([0.0, 0.05]), lambda: job.release(held))
            wake.start()

        return Scene("", shape, holds=[held], play=play, out={worker})


def _release(job: Job, hold: Moment) -> None:
    job.wait_held(hold)
    job.release(hold, die=True)


def _once_decided(job: Job, hold: Moment) -> None:
    job.wait_event("decided", generation=2)
    job.release(hold)


def _kill_coordinator(job: Job, at: float, absent: float) -> None:
    job.control.call(lambda: job.control.kill(absent), at)
