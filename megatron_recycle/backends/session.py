"""One process's part in a job, from the coordinator's address to the end of the script: the same for all frameworks.

A backend makes a `Session` as soon as its framework knows the grid, and starts it when the script first trains. The
session begins iterations, knows whether the script is still catching up with the job, and announces the script's errors
and the job's end. It keeps operations that need all workers from waiting for dead ones. The backend's
`runtime.stage.Stage` computes an iteration.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import _get_current_function_mode_stack

from megatron_recycle.backends.options import Options
from megatron_recycle.config import RecycleConfig
from megatron_recycle.control import Agent
from megatron_recycle.environment import Launched
from megatron_recycle.errors import ConfigError, GenerationOver, JobEnded, SaveError, UnsupportedError
from megatron_recycle.job_status import HERE, JobStatus
from megatron_recycle.membership import Fault
from megatron_recycle.membership.finish import BY_ITSELF
from megatron_recycle.observe.log import get_logger
from megatron_recycle.plan import Worker
from megatron_recycle.policy import POLICIES
from megatron_recycle.runtime.admit import refuse_itself
from megatron_recycle.runtime.comm.comm import failing_ends
from megatron_recycle.runtime.comm.handles import Groups, is_broken
from megatron_recycle.runtime.comm.network import TorchNetwork
from megatron_recycle.runtime.comm.standalone import is_joining
from megatron_recycle.runtime.comm.threads import keep_some
from megatron_recycle.runtime.comm.user_collectives.calls import Call
from megatron_recycle.runtime.comm.user_collectives.exchange import Group
from megatron_recycle.runtime.comm.user_collectives.script_groups import Asks, ScriptGroups, UnderWay
from megatron_recycle.runtime.compute.data import DataSource
from megatron_recycle.runtime.compute.random_state import Generators, Seeds
from megatron_recycle.runtime.compute.split import Deferring
from megatron_recycle.runtime.grids import Grids
from megatron_recycle.runtime.place import Place
from megatron_recycle.runtime.recovery import comes_of_failure
from megatron_recycle.runtime.registered import THINGS, Registered
from megatron_recycle.runtime.saving import Save, Write
from megatron_recycle.runtime.script_end import ScriptEnd
from megatron_recycle.runtime.script_transfers import Message
from megatron_recycle.runtime.site import Framework
from megatron_recycle.runtime.stage import Stage
from megatron_recycle.runtime.start import connect
from megatron_recycle.runtime.worker import StageWorker

Restore = Callable[[Groups, str, str], None]
"""(groups of the live workers, where a checkpoint is, the name of the try that wrote it): loads this worker's part of
it; see `Framework.restore`."""
SaveLast = Callable[[Groups, int], str]
"""(groups of the live workers, last committed iteration) -> where the checkpoint is; see `StageWorker`."""


def _unprotected(place: Place, settings: RecycleConfig) -> str | None:
    """A warning, before anything fails, for a job with one pipeline and no guard; None for all others."""
    if place.grid.pipelines > 1 or settings.guard == "memory":
        return None
    guard = "`--recycle-guard memory`, which keeps each stage's copy on another one, " if place.grid.stages > 1 else ""
    return ("this job has one pipeline, so nobody can take a lost worker's work over. Give "
            f"{guard}`recycle run --job-restarts N`, or more pipelines (data parallelism of 2 or more)")


class Session:
    """Connects this process to the job's coordinator; the end of the process is the end of its part.

    Args:
        place: position, grid, ranks.
        settings: of the job.
        options: the arguments of `enable()`.
        device: where the stage computes.

    Attributes:
        agent: this process's link to the coordinator.
        network: makes the groups of a generation.
        generators: all sources of random numbers that the user's code may draw from.
        grids: of iterations.
        iteration: the last one that the script has asked for.
        busy: whether the runtime is at work, and not the script's own code.
        shares: whether the runtime is inside `together`, which all workers run.
    """

    def __init__(self, place: Place, settings: RecycleConfig, options: Options, device: torch.device) -> None:
        self.place = place
        self.settings = settings
        self.network = TorchNetwork()
        self.generators = Generators(device, place.part)
        self.grids = Grids(place.grid, settings.block_size)
        self.iteration = -1
        self._options = options
        self._worker: StageWorker | None = None
        self.busy = self.shares = False
        self._thread = 0
        self._groups: ScriptGroups | None = None
        self._unsaved: str | None = None
        """Why the script's last checkpoint could not be written."""
        policy = POLICIES[settings.policy]
        if self.rank == 0:
            get_logger().info(settings.describe())
            if policy.gives_up:
                get_logger().warning("megatron-recycle: policy %s: %s", policy.name, policy.gives_up)
            if (line := _unprotected(place, settings)) is not None:
                get_logger().warning("megatron-recycle: %s", line)
        if policy.ends_job and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
            raise ConfigError(f"policy {policy.name} ends this life of the job with the first failure, and nobody "
                              "starts the script again: give `recycle run --job-restarts N`, or another policy")
        if settings.guard == "memory" and not Launched.read().by_recycle_run:
            raise ConfigError("guard memory needs `recycle run`, which starts a process for a stage that is lost; the "
                              "launcher of this job starts none. Use `recycle run`, or leave guard out")
        self.agent: Agent = connect(place, settings, options.embed, self._abort)
        self._script = ScriptEnd(self.fail, self.finish, self._outside)
        HERE.reported_by(self.status)
        keep_some()
        atexit.register(self.finish)

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.place.ranks[self.place.me][self.place.part]

    def seeds(self, kind: str = "data") -> Seeds:
        """Random numbers by place for ``kind``: the code that reads or makes micro-batches."""
        return Seeds(self.generators, self.settings.seed, kind)

    def start(self, stage: Stage, splitter: Deferring, data: DataSource, *, first: int = 0,
              number: int = 0, save_last: SaveLast | None = None, restore: Restore | None = None,
              folder: Callable[[], str | None] = lambda: None) -> None:
        """Make the worker, when the script is about to train for the first time.

        Args:
            stage: the framework's side.
            splitter: defers weight gradients of the stage's linear layers.
            data: micro-batches by place.
            first: number of the script's first iteration.
            number: of each pipeline's first micro-batch.
            save_last: writes this worker's part of a last checkpoint; None: not supported.
            restore: loads this worker's part of a checkpoint of this run. Inside of it torch knows the live workers
                only. None: not supported.
            folder: where the script saves, if that is known.
        """
        self.iteration = first - 1
        self.grids.begin(first, number)
        self._worker = StageWorker(
            place=self.place, agent=self.agent, config=self.settings, observer=self._options.observer,
            network=self.network, framework=Framework(
                stage=stage, splitter=splitter, data=data, generators=self.generators, grids=self.grids,
                setup=self._options.setup, registered=Registered(THINGS),
                save_last=None if save_last is None else lambda: save_last(
                    self.worker.current_groups(), self.worker.standing.committed),
                restore=None if restore is None or not Launched.read().by_recycle_run else partial(
                    self._restore, restore),
                folder=lambda: folder() or Launched.read().run_dir))
        if self.rank == 0 and self.agent.handles_sigterm():
            saves = self.settings.on_leave == "checkpoint" and save_last is not None and (
                self.settings.emergency_checkpoint != "none")
            what = ("does not ask it: what is committed is saved, and the job ends (on_leave)" if saves else
                    f"is passed on to it, and the job has {BY_ITSELF:.0f} s to end by itself")
            get_logger().info("megatron-recycle: the script has a SIGTERM handler of its own; SIGTERM to `recycle run` "
                              "%s", what)

    def _restore(self, restore: Restore, place: str, name: str) -> None:
        with self.worker.among_those_left(), failing_ends("the way back to a checkpoint", means=is_broken):
            restore(self.worker.current_groups(), place, name)

    @property
    def started(self) -> bool:
        """Whether there is a `worker`."""
        return self._worker is not None

    @property
    def worker(self) -> StageWorker:
        """This process as the runtime knows it. Requires `started`."""
        assert self._worker is not None
        return self._worker

    # ---- the script's calls

    @contextmanager
    def call(self) -> Iterator[None]:
        """A training or evaluation call of the script: an error in it ends the script's part in the job.

        Raises SystemExit at the end of the job, with one log line.
        """
        self._thread = threading.get_ident()
        HERE.tell()
        with self._script.call(), self.at_work():
            yield
        HERE.tell()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Inside the block the runtime is at work, and not the script's own code. The job's end raises SystemExit. Its
        status is 0 if the other workers have ended well and this part was stranded."""
        before, self.busy = self.busy, True
        try:
            yield
        except JobEnded as end:
            get_logger().log(logging.ERROR if end.status else logging.INFO, "megatron-recycle: %s", end)
            HERE.end(end.status, str(end))
            raise SystemExit(end.status) from None
        finally:
            self.busy = before

    @property
    def in_thread(self) -> bool:
        """Whether the caller is the training thread."""
        return threading.get_ident() == self._thread

    @property
    def in_script(self) -> bool:
        """Whether the caller is the script's own code, in the training thread, between two iterations."""
        return self._worker is not None and not self.busy and self.in_thread

    def _outside(self) -> bool:
        """Whether the caller is the script's own code, between two iterations or after the last one, while no other
        thread trains."""
        trains = self._thread in {thread.ident for thread in threading.enumerate()}
        return not self.busy and (self.in_thread or not trains)

    def begin(self) -> bool:
        """Begin the script's next iteration; the first call makes this worker take part in the job.

        Returns whether the job had done the iteration before this worker came in. Then nothing is to be trained: the
        script's loop passes over it, and so ends with the other workers' loops.
        """
        self._begin()
        self.iteration += 1
        return self.worker.has_done(self.iteration)

    def _begin(self) -> None:
        self.worker.begin(self.iteration + 1)
        if self._groups is None:
            self._groups = ScriptGroups(LivingGroups(self, self.at_work))
            self._groups.install()

    def resize(self, microbatches: int) -> None:
        """Set the micro-batches per pipeline from the script's next iteration on. Raises UnsupportedError."""
        policy, before = self.settings.policy, max(self.grids.of(self.iteration + 1).microbatches)
        if not POLICIES[policy].reroutes and microbatches != before:
            raise UnsupportedError(f"another number of micro-batches is not there with policy {policy}, whose plans "
                                   "are the coordinator's alone: leave policy out, or keep the batch size")
        if self.started and max(self.grids.of(self.iteration + 1).microbatches) != microbatches:
            # All workers drain void iterations alike, so they need the same plan.
            self.worker.settle()
        if self.started and self.worker.comes_in:  # its grids are the job's already
            return
        if self.grids.change(self.iteration + 1, microbatches) and self.rank == 0:
            get_logger().info("megatron-recycle: from iteration %d on each pipeline has %d micro-batches",
                              self.iteration + 1, microbatches)

    def reshape(self, what: str) -> None:
        """Allow other shapes between stages from the script's next iteration on. ``what``: the call by which all
        workers' scripts ask for it."""
        with self.call():
            self.worker.reshape(self.iteration + 1, what)

    def follow(self, microbatches: int) -> None:
        """End this worker alone if its script asks for another number of micro-batches than the job's for the iteration
        begun: a script that catches up may compute another one. Raises JobEnded."""
        wanted = max(self.grids.of(self.iteration).microbatches)
        if microbatches != wanted:
            refuse_itself(self.worker.site, (
                f"its script trains iteration {self.iteration} on {microbatches} micro-batches of each pipeline, and "
                f"the job on {wanted}; a batch size must not depend on when a worker was started, or on what no other "
                "worker knows"))

    def train(self) -> float:
        """Run the iteration that the script has begun, through any failures. Returns the mean loss of its global batch,
        or the last known one if the job has done it without this worker."""
        return self.worker.train(self.iteration)

    def save(self, what: str, write: Write, clear: Callable[[], None], otherwise: Callable[[], Any], *,
             ends: bool = False) -> Any:
        """Write a checkpoint with all live workers, through failures. Returns True once it is there, or was when this
        worker came in, and False where it cannot be written.

        Args:
            what: the subject of messages.
            write: writes this worker's part. Inside of it torch knows the live workers only.
            clear: removes the remains of a checkpoint that cannot be written.
            otherwise: the framework's own way. Runs for calls outside the training thread, or before the first
                iteration, where no worker is missing.
            ends: whether this only ends a write begun before, if there is one.
        """
        if not self.in_script:
            return self.together(what, otherwise, False)

        def among(save: Save) -> bool:
            with self.worker.among_those_left():
                return write(save)

        with self.call():
            reason = self.worker.save(self.iteration + 1, among, clear)
        if reason is not None or not ends:
            self._unsaved = reason
        return reason is None

    def evaluate(self, data: DataSource, number: int, limit: int | None = None) -> torch.Tensor:
        """Forwards of global batch ``number`` of ``data``; see `StageWorker.evaluate`."""
        self._begin()
        return self.worker.evaluate(self.iteration + 1, data, number, limit)

    @property
    def catches_up(self) -> bool:
        """Whether the script is at an iteration that the job had done before this worker came in, or came in again: the
        other workers have done all that belongs to it."""
        if self._worker is None:
            return is_joining()
        entered = self._worker.standing.joined_after
        return entered is not None and entered >= self.iteration

    def settle(self) -> None:
        """Wait until the last step is final: with staggered steps it may still be undone before. Raises SystemExit."""
        if self._worker is not None:
            with self.at_work():
                self._worker.settle()

    # ---- calls of all workers together, between two iterations

    def live(self) -> tuple[Worker, ...]:
        """The live workers, in the order of their ranks."""
        return self._worker.live() if self._worker is not None else tuple(self.place.ranks)

    def missing(self) -> list[str]:
        """The names of the grid's other workers."""
        return [str(worker) for worker in sorted(set(self.place.ranks) - set(self.live()))]

    def status(self) -> JobStatus:
        """The job's status, for the script."""
        live, agent = self.live(), self.agent
        of = Counter(worker.stage for worker in live)
        last_copies = tuple(stage for stage in sorted(of) if of[stage] == 1) if self.place.grid.pipelines > 1 else ()
        return JobStatus(worker=str(self.place.me), rank=self.rank, generation=agent.generation,
                         iteration=self.iteration, committed=self.worker.standing.committed if self.started else -1,
                         live=tuple(map(str, live)), missing=tuple(self.missing()), last_copies=last_copies,
                         lives=agent.members)

    def is_logging_rank(self, which: int = 0) -> bool:
        """Whether this is the logging rank: the first live worker in rank order or, with ``which`` -1, where a
        framework logs on its last rank, the last live worker that computes the loss."""
        if self._worker is None:
            return False
        live = self.live()
        with_loss = [worker for worker in live if worker.stage == self.place.loss_stage]
        return (with_loss or live if which else live)[which] == self.place.me

    def together(self, what: str, run: Callable[[], Any], otherwise: Any, without: str | None = None) -> Any:
        """The result of ``run``; or ``otherwise``, with a log line on why, where not all workers can run it.

        Args:
            what: the subject of messages.
            run: waits for all workers.
            without: the message if workers are missing, before their names.

        Raises the errors of ``run``, except those of a failure: the next iteration then begins with the recovery.
        """
        if self.in_script:  # called from another script thread, settling must not start a second training loop
            self.settle()
        if self.catches_up:
            get_logger().info("megatron-recycle: %s is left out: the job did that before this worker came in", what)
            return otherwise
        if missing := self.missing():
            get_logger().error("megatron-recycle: %s (%s); training goes on",
                               without or f"{what} is left out while workers are missing", ", ".join(missing))
            return otherwise
        setup = self._options.setup
        # Not recorded: a joining worker leaves this out, also before its first iteration.
        with self.at_work(), nullcontext() if setup is None else setup.apart():
            self.shares = True
            try:
                return run()
            except (RuntimeError, GenerationOver) as error:
                if isinstance(error, RuntimeError) and not (
                        self._worker is not None and comes_of_failure(self._worker.site, self._worker.standing, error)):
                    raise
                get_logger().error("megatron-recycle: %s was cut short by a failure (%s): what it wrote is not "
                                   "complete; training goes on", what, error)
                return otherwise
            finally:
                self.shares = False

    # ---- the end

    def fail(self, error: BaseException) -> None:
        """Report the ``error`` that ended the script, and wait for the coordinator's decision."""
        if self.agent.ended is not None:
            return
        self.busy = True  # from now on a reader of parameters is not the script, and a recovery may be under way
        if self._worker is None:
            self.agent.ending(Fault.of(error))
        else:
            self._worker.fail(error)

    def finish(self) -> None:
        """At the end of the process: if the script ended well, stand by until all other workers have ended too."""
        if self._worker is None:
            self.agent.close()
            return
        self.busy = True  # as in `fail`
        try:
            if self._script.error is None and self.agent.ended is None and self._unsaved is not None:
                self._worker.settle()
                self._worker.fail(SaveError(f"training has come to its end, but not its last checkpoint: "
                                            f"{self._unsaved}"))
            elif self._script.error is None and self.agent.ended is None:
                self._worker.finish()
        except JobEnded as end:
            get_logger().error("megatron-recycle: %s", end)
        finally:
            self._worker.close()
            if self._groups is not None:
                self._groups.close()
            if self.agent.ended is not None:
                HERE.end(self.agent.ended.status, self.agent.ended.message)

    def _abort(self, generation: int) -> None:
        """End the generation in force: the one numbered ``generation`` follows. Called in the agent's thread."""
        if self._worker is not None:
            self._worker.abort(generation)


class LivingGroups:
    """Carries out the script's calls to its groups, from its first iteration on.

    Args:
        session: this process's.
        at_work: a block during which the runtime is at work.
    """

    def __init__(self, session: Session, at_work: Callable[[], AbstractContextManager[None]]) -> None:
        self._session, self._at_work = session, at_work
        self._modes = tuple(_get_current_function_mode_stack())

    @contextmanager
    def _as_in_training(self) -> Iterator[None]:
        """Restore the script's function modes, which torch disables while one of them handles a collective. The runtime
        may train inside that call, and must repeat a step or an iteration under all modes."""
        with ExitStack() as modes:
            for mode in self._modes[len(_get_current_function_mode_stack()):]:
                modes.enter_context(mode)
            yield

    def asks(self) -> Asks:
        """As in `script_groups.Job`."""
        session = self._session
        if not (session.started and session.in_thread) or session.worker.standing.epoch.generation == 0:
            return Asks.LIBRARY
        if session.shares:
            return Asks.TOGETHER
        if not session.in_script:
            return Asks.LIBRARY
        return Asks.LATE if session.catches_up else Asks.SCRIPT

    def after(self) -> int:
        """As in `script_groups.Job`."""
        return self._session.iteration

    def inside(self) -> tuple[tuple[int, ...], dist.ProcessGroup] | None:
        """As in `script_groups.Job`."""
        site, last = self._session.worker.site, self._session.worker.stepper.current.last
        if site.place.parts == 1 or last is None or last.groups.siblings is None:
            return None
        return tuple(site.place.ranks[site.place.me]), last.groups.siblings.group

    def make(self, group: Group, call: Call) -> None:
        """As in `script_groups.Job`. Raises SystemExit at the end of the job."""
        with self._at_work(), self._as_in_training():
            if self._session.shares:
                self._session.worker.collective_once(group, call)
            else:
                self._session.worker.collective(group, call, self._session.iteration)

    def recall(self, group: Group, call: Call) -> None:
        """As in `script_groups.Job`."""
        self._session.worker.recall(group, call, self._session.iteration)

    def transfer(self, group: Group, peer: int, tensor: torch.Tensor, tag: int, sends: bool) -> Message:
        """As in `script_groups.Job`. Raises SystemExit at the end of the job."""
        worker = self._session.worker
        with self._at_work(), self._as_in_training():
            if self._session.shares:
                return worker.transfer_once(group, peer, tensor, tag, sends)
            return worker.transfer(group, peer, tensor, tag, sends, self._session.iteration)

    def arrive(self, message: UnderWay) -> None:
        """As in `script_groups.Job`. Raises SystemExit at the end of the job."""
        once = not self._session.in_script  # otherwise the wait comes in the midst of an iteration, say
        with self._at_work(), self._as_in_training():
            assert isinstance(message, Message)
            self._session.worker.arrive(message, once)
