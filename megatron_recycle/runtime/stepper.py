"""Steps and commits of one worker: a step on a guess, which the verdict makes final or undoes.

A worker that holds an iteration's reduced gradient steps at once, with the coefficient (clipping) that its own
numbers suggest, and goes on to the next iteration. The verdict arrives meanwhile. If every stage guessed
right, the step is final. Otherwise the stages that guessed wrong undo it and step again, and *all* workers
discard their work on the next iteration, since it was computed from wrong parameters somewhere.

No worker reduces an iteration before the previous one is committed. So stages are never more than one step
apart, and one snapshot and one kept gradient per worker suffice to go back or forward after a failure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from struct import Struct
from types import MappingProxyType
from typing import NamedTuple

import torch
from msgspec.structs import asdict

from megatron_recycle.errors import FailureMet, GenerationOver, RecycleError
from megatron_recycle.membership import Reconciliation, Resume, Standing, StepMode, Verdict
from megatron_recycle.observe.log import get_logger
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.reduction import count
from megatron_recycle.runtime.comm.sharded_reduction import Cuts
from megatron_recycle.runtime.comm.tags import HELD, SHARD_HELD
from megatron_recycle.runtime.commit import Commit, Committer, Held
from megatron_recycle.runtime.compute.random_state import seed_of
from megatron_recycle.runtime.facts import Facts
from megatron_recycle.runtime.generation import Current
from megatron_recycle.runtime.phases import Phase
from megatron_recycle.runtime.profiling import Profiling
from megatron_recycle.runtime.quiesce import Halt
from megatron_recycle.runtime.shards import cuts, gather, keep_only, views
from megatron_recycle.runtime.site import Site
from megatron_recycle.runtime.undo import Undo

_LOSS = Struct("d")
_FIRST = ("0:0", "0:0.0")
"""Names of the process that logs on behalf of all."""


class WrongGuess(Exception):
    """A verdict showed that some stage's step was wrong; the work on the next iteration is void.

    Attributes:
        drains: whether all workers have stopped where they can go on with their communicators.
    """

    def __init__(self, iteration: int, drains: bool) -> None:
        super().__init__(f"iteration {iteration}")
        self.drains = drains


@contextmanager
def only_failures() -> Iterator[None]:
    """A block of exchanges that a wrong guess does not cut short. Raises FailureMet for a GenerationOver."""
    try:
        yield
    except GenerationOver as error:
        raise FailureMet(str(error)) from error


class Committed(NamedTuple):
    """Of the last committed iteration: its reports, and the digests of the data that this worker has read of it, as
    `Held.digests`."""

    reports: torch.Tensor | None = None
    read: Mapping[tuple[int, int, bool], int] = MappingProxyType({})


class Stepper:
    """The commit protocol of one worker: carries out on the tensors what its `Standing` decides.

    Args:
        site: the worker's surroundings.
        standing: where the worker stands.

    Attributes:
        current: the generation in force.
        held: the reduced gradient of an iteration that is not committed yet.
        last: of the last committed iteration.
        pending: the commit under way; None: there is none.
        refuted: whether some stage guessed wrong in the last committed iteration: all results computed before the
            right step are void.
    """

    def __init__(self, site: Site, standing: Standing) -> None:
        self.standing = standing
        self.held: Held | None = None
        self.last = Committed()
        self.pending: Commit | None = None
        self.refuted = False
        self.current = Current()
        self.undo = Undo(site.stage)
        self._site = site
        self._profiling = Profiling()
        self._committer = Committer()

    # ---- an iteration

    def hold(self, held: Held, groups: Groups, offer: int, plan: int) -> None:
        """The stage's gradient is complete: begin the commit, and step, now or when the verdict is known.

        Raises GenerationOver if the generation ends before that.
        """
        self.standing.hold(held.iteration)
        keep_only(self._site.stage, self.current.get().cuts, groups.me)
        self.held, early = held, self.standing.early
        self._site.phases.enter(Phase.REDUCED, held.iteration)
        guess, halt = self.guess(), Halt(groups, held.iteration) if early else None
        self._begin_commit(held, groups, guess, halt, offer, plan)
        if early:
            self._save()
            self._step(guess)
            self.gather()
        else:
            self.wait()

    @property
    def rejoins(self) -> bool:
        """Whether the held iteration is closed here, and its commit has not begun since a recovery."""
        return self.pending is None and self.standing.rejoins

    def commit_again(self, groups: Groups, offer: int, plan: int) -> None:
        """Take part in the commit of the held iteration, which this worker has stepped in an earlier generation."""
        assert self.held is not None
        self._begin_commit(self.held, groups, self.guess(), Halt(groups, self.held.iteration), offer, plan)

    def _begin_commit(self, held: Held, groups: Groups, guess: float, halt: Halt | None, offer: int, plan: int) -> None:
        self.pending = Commit(held, self._site.grids.of(held.iteration), groups, guess=guess, offer=offer, plan=plan,
                              coefficient=self._coefficient, heard=self._heard, halt=halt,
                              last=self._site.place.loss_stage)
        self._committer.start(self.pending)

    def wait(self) -> None:
        """Wait for the verdict on the last step, if that is still out, and make the step final.

        Raises WrongGuess, GenerationOver (the generation ended), DataError, VerificationError.
        """
        if self.pending is not None:
            if self.pending.halt is not None:
                self.pending.halt.stay_out()
            with self._site.phases.waiting("a verdict"):
                self.pending.done.wait()
            self.poll()

    def begin(self) -> None:
        """An attempt at the next iteration begins."""
        if self.pending is not None and self.pending.halt is not None:
            self.pending.halt.begin()

    def enter_action(self) -> None:
        """Begin the attempt's next action, whose inputs are there. Raises GenerationOver if the attempt is void and
        stops before it."""
        halt = None if self.pending is None else self.pending.halt
        if halt is None:
            return
        number = len(self.standing.done) + 1
        while (may := halt.enter(number)) is None:
            with self._site.phases.waiting("a verdict"):
                halt.decided.wait()
        if not may:
            raise GenerationOver(f"the attempt is void, and stops before action {number}")

    def poll(self) -> None:
        """Make the last step final if its verdict has arrived. Raises as `wait`."""
        commit = self.pending
        if commit is None or not commit.done.is_set() or (commit.halt is not None and commit.halt.runs_on):
            return
        (verdict, adopt), early = commit.verdict(), self.standing.early
        self.pending = None
        self.settle(verdict, commit.right, adopt)
        if early and self.refuted:
            raise WrongGuess(verdict.iteration, commit.halt is not None and commit.halt.drains)
        if not early:
            self.gather()

    def gather(self) -> None:
        """With a sharded optimizer, fetch the parameters that peers have stepped. Returns once all peers have theirs,
        so that no script changes values still to be sent. Raises FailureMet: the step is made all the same."""
        generation, owed, site = self.current.get(), self.current.owed, self._site
        if generation.cuts is not None:
            with site.phases.waiting("parameters"), only_failures():
                with site.phases.writing():
                    gather(site.stage, generation.groups, owed.had if owed else generation.cuts,
                           generation.groups.peers(generation.groups.me.stage))
                site.trainable.gathered = self.standing.stepped
                count(generation.groups.stage_control, True)

    def settle(self, verdict: Verdict, right: float, adopt: bool = False) -> None:
        """Make the update of ``verdict.iteration`` final, as the verdict asks: with the coefficient ``right``."""
        before = self.standing.mode
        todo = self.standing.settlement(verdict.iteration, right)
        if todo.undo:
            self._undo()
        if todo.step:
            self._step(right)
        assert self.held is not None
        self.last = Committed(self.held.reports, self.held.digests)
        self.held, self.refuted = None, verdict.refutes(right)
        if self.standing.commit(verdict, right) and self._site.place.name in _FIRST:
            _announce(verdict, before.seen(self.refuted), self.standing.mode)
        self._committed(verdict, adopt)

    def _committed(self, verdict: Verdict, adopt: bool) -> None:
        """An iteration is final. ``adopt``: every worker has promised the same offer as this one."""
        site, last = self._site, self.current.last
        self.current.kept.let_go([each for each in self.current.kept if each <= verdict.iteration])
        assert self.last.reports is not None
        row = _LOSS.pack(verdict.loss) + site.stage.summary(verdict, self.last.reports)
        site.asked.iterations.note(verdict.iteration, row)
        oldest = site.trainable.guard.oldest
        site.forget_data(verdict.iteration if oldest is None else min(oldest, verdict.iteration))
        site.agent.committed(verdict.iteration, verdict.loss)
        if last is not None:
            self._profiling.committed(site, last, verdict.iteration, self.undo.nbytes)
        if adopt:
            self.standing.promises.agreed(verdict.iteration)

    @property
    def confirmed(self) -> bool:
        """Whether the last step is known, without waiting, to stay: its verdict has come, and no stage guessed
        wrong."""
        commit = self.pending
        if commit is None:
            return self.standing.committed == self.standing.stepped
        return commit.known and not self._is_wrong(commit)

    def told(self, iteration: int) -> tuple[float, bytes]:
        """The loss of ``iteration``, which is committed, and the framework's `Stage.summary` of it."""
        row = self._site.asked.iterations.of(iteration)
        assert row is not None
        return _LOSS.unpack_from(row)[0], row[_LOSS.size:]

    def guess(self) -> float:
        """The coefficient that this stage's own numbers suggest."""
        assert self.held is not None
        place = self._site.place
        own = self.held.norm_squares
        known = [0.0] * (place.grid.stages * place.parts * len(own))
        slot = place.me.stage * place.parts + place.part
        known[slot * len(own):(slot + 1) * len(own)] = own
        return self._site.stage.coefficient(known, self.held.weight)

    def _coefficient(self, verdict: Verdict) -> float:
        return self._site.stage.coefficient(verdict.norm_squares, verdict.weight)

    def _save(self) -> None:
        """Copy what the step of the held iteration is about to change."""
        self.undo.save()
        self.standing.save()

    def _undo(self) -> None:
        """Undo the last step, which is not final."""
        self.standing.undo()  # refused where nothing was saved, before a tensor is written to
        self._site.trainable.gathered = None
        with self._site.phases.writing():
            self.undo.restore()

    def _step(self, coefficient: float) -> None:
        """One update of the held iteration; nothing interrupts it."""
        assert self.held is not None
        iteration = self.held.iteration
        with self._stepping(iteration):
            self._site.phases.enter(Phase.STEP, iteration)
            self._site.trainable.gathered = None
            gradients = views(self._site.stage, self._site.trainable.layout, self.held.gradient)
            if coefficient != 1.0 and self.pending is not None and self.standing.early:
                gradients = [view.clone() for view in gradients]  # the raw gradient may be needed again
            with self._site.phases.writing(), torch.no_grad(), self._site.meters.watch.measure("step"):
                self._site.stage.step(gradients, coefficient)
            self.standing.step(coefficient)
            self._site.phases.enter(Phase.STEPPED, iteration)

    @contextmanager
    def _stepping(self, iteration: int) -> Iterator[None]:
        """A block of work inside a wait: a worker that steps in a recovery waits for the others again afterwards, for
        as long as they take. An optimizer's random numbers are the same on all peers, and in a repeated step."""
        site = self._site
        number = seed_of(site.config.seed, "step", iteration, site.place.me.stage)
        with site.phases.working("step"), site.framework.generators.at(number):
            yield

    def remake(self) -> None:
        """Repeat the last step, which is not final, from the state before it. Tensors written to since then get that
        step's result again."""
        used, trainable = self.standing.used, self._site.trainable
        assert used is not None
        gathered = trainable.gathered
        self._undo()
        self._save()
        self._step(used)
        trainable.gathered = gathered  # peers' parameters have been fetched, and may have been written to

    def _heard(self, commit: Commit) -> None:
        """Free the training thread, which may wait for messages that no worker will send any more."""
        if commit.halt is None:
            return
        try:
            refuted = commit.refuted
        except RecycleError:
            commit.halt.break_off()  # the training thread will meet the same error, but must be woken up for it
            return
        if refuted:
            commit.halt.agree()

    def _is_wrong(self, commit: Commit) -> bool:
        try:
            return commit.refuted
        except RecycleError:
            return True

    def close(self) -> None:
        """Nothing more is committed here."""
        self._give_up()
        self._committer.close()

    def _give_up(self) -> Commit | None:
        commit, self.pending = self.pending, None
        if commit is not None and commit.halt is not None:
            commit.halt.give_up()
        return commit

    # ---- a failure

    def leave(self) -> None:
        """The generation is over: settle a verdict that has arrived, and forget an unfinished commit."""
        commit = self._give_up()
        if commit is not None and commit.known:
            self.settle(commit.verdict()[0], commit.right)
            if self.refuted:
                self.current.kept.let_go()

    def reconcile(self, todo: Reconciliation, resume: Resume, groups: Groups) -> None:
        """Bring this worker to the end of ``resume.target``, committed, where all workers resume.

        Raises GenerationOver if yet another generation begins.
        """
        target, cut = resume.target, cuts(self._site.stage, groups, resume, begun=True)
        self._undo_and_drop(todo)
        self._copy(todo, target, groups)
        self._copy_slices(todo, target, groups, cut)
        if todo.verdict is not None:
            self.settle(todo.verdict, self._coefficient(todo.verdict))
        elif todo.anew:
            assert self.held is not None
            commit = Commit(self.held, self._site.grids.of(target), groups, guess=self.guess(), offer=0, plan=0,
                            coefficient=self._coefficient, last=self._site.place.loss_stage)
            self._committer.start(commit)
            commit.done.wait()
            self.settle(commit.verdict()[0], commit.right)

    def reconcile_alone(self, todo: Reconciliation) -> None:
        """As `reconcile`, without communication: the verdict is known."""
        self._undo_and_drop(todo)
        if todo.verdict is not None:
            self.settle(todo.verdict, self._coefficient(todo.verdict))

    def _undo_and_drop(self, todo: Reconciliation) -> None:
        if todo.undo:
            self._undo()
        if todo.drop:
            self.standing.drop()
            self.held = None

    # ---- a worker that comes in

    def facts(self) -> Facts:
        """The facts that a new peer of this stage needs beside the stage's tensors, between two iterations."""
        standing = self.standing
        assert self.pending is None and self.held is None and standing.verdict is not None
        return Facts(**asdict(self._site.past), counters=self._site.stage.counters(), verdict=standing.verdict,
                     reports=self.last.reports, pace=standing.mode, grids=self._site.grids.told(),
                     read=dict(list(self.last.read.items())[:1]))

    def enter(self, tensors: Mapping[str, torch.Tensor], facts: Facts) -> None:
        """Stand where the peer stands that sent ``tensors`` and `facts`."""
        self._site.stage.load_state(tensors, facts.counters)
        self.held, self.pending, self.last = None, None, Committed(facts.reports, facts.read)
        self.refuted = False
        self._site.asked.iterations.take(facts.history)
        self.standing.enter(facts.verdict, self.standing.mode.like(facts.pace))
        self._site.trainable.gathered = self.standing.stepped

    def _copy(self, todo: Reconciliation, target: int, groups: Groups) -> None:
        """Copy the reduced gradient of ``target`` to the peers that lack it.

        A copy lands in a buffer of its own and counts only once it is whole.
        """
        me, total = self._site.place.me, self._site.grids.of(target).total
        peers, width = groups.peers(me.stage), self._site.stage.report_width
        for receiver, giver in todo.copies:
            if receiver == me:
                gradient = self._site.trainable.layout.empty()
                numbers = torch.empty(Held.count(total, width, 1), dtype=torch.float64)
                groups.stage.receive(gradient, peers.index(giver), HELD[0]).wait()
                groups.stage_control.receive(numbers, peers.index(giver), HELD[1]).wait()
                self.held = Held.from_numbers(target, gradient, numbers, total, 1)
                self.standing.receive(target)
            else:
                assert self.held is not None and self.held.iteration == target
                groups.stage.send(self.held.gradient, peers.index(receiver), HELD[0]).wait()
                groups.stage_control.send(self.held.numbers(), peers.index(receiver), HELD[1]).wait()

    def _copy_slices(self, todo: Reconciliation, target: int, groups: Groups, cut: Cuts | None) -> None:
        """As `_copy`, for the slices of shards, and the numbers."""
        if cut is None or not todo.slices:
            return
        shards, layout, total = self._site.stage.shards, self._site.trainable.layout, self._site.grids.of(target).total
        assert shards is not None
        me, peers, count = groups.me, groups.peers(groups.me.stage), len(cut.holders)
        values = [torch.empty(shards.length(shard), dtype=layout.dtype, device=layout.device) for shard in shards.held]
        numbers = None
        for receiver, giver, shard in todo.slices:
            if receiver == me and shard < 0:
                numbers = torch.empty(Held.count(total, self._site.stage.report_width, count), dtype=torch.float64)
                groups.stage_control.receive(numbers, peers.index(giver), HELD[1]).wait()
            elif receiver == me and shards.length(shard):
                groups.stage.receive(values[shards.held.index(shard)], peers.index(giver), SHARD_HELD[shard]).wait()
            elif giver == me:
                assert self.held is not None and self.held.iteration == target
                if shard < 0:
                    groups.stage_control.send(self.held.numbers(), peers.index(receiver), HELD[1]).wait()
                elif shards.length(shard):
                    groups.stage.send(shards.split(self.held.gradient)[shards.held.index(shard)],
                                      peers.index(receiver), SHARD_HELD[shard]).wait()
        if numbers is not None:
            gradient = torch.cat(values) if values else layout.empty()[:0]
            self.held = Held.from_numbers(target, gradient, numbers, total, count)
            self.standing.receive(target)


def _announce(verdict: Verdict, seen: Sequence[bool], mode: StepMode) -> None:
    """Log that ``mode`` has changed, and the last guesses (``seen``) that led to it."""
    get_logger().info(
        "megatron-recycle: after iteration %d stages %s (%d of the last %d steps would have been undone)",
        verdict.iteration, "step at once again" if mode.staggered else "wait for each other's gradient norms",
        sum(seen), len(seen))
