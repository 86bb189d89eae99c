"""Communicators of one generation: built together, and aborted together.

Every collective and every transfer of a generation runs on handles that one :class:`Groups` object owns. A new
generation gets new handles under its own store prefix, so that late messages of an older generation's worker can reach
no worker (promise P6). It goes on with an old one only where `reuse` allows that: with the same members, and nothing
half-done on it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property

from megatron_recycle.errors import GenerationOver, JobEnded
from megatron_recycle.plan import Worker
from megatron_recycle.runtime.comm.abort import Teardown
from megatron_recycle.runtime.comm.comm import Comm, failing_ends, is_broken
from megatron_recycle.runtime.comm.levelling import Levelling
from megatron_recycle.runtime.comm.reuse import ReusableGroups


@dataclass(frozen=True)
class Limits:
    """Timeouts in seconds: of every operation on the handles, of connecting each handle, and until all members have
    come to the store."""

    operation: float
    connect: float
    meet: float


@dataclass
class Groups:
    """The communicators of one generation.

    Where workers have several parts (tensor parallelism), equal parts of all workers have a ``world`` of their own,
    and so on: a part meets its siblings in ``siblings`` and ``control`` only.

    Attributes:
        members: live workers in ascending order; a worker's index is its rank in ``world``.
        world: all members; activations and gradients travel here.
        stage: the members of this worker's stage; gradients are reduced here.
        siblings: all parts of this worker, in order; None if it has one part.
        control: all parts of all members, for small tensors in CPU memory: never NCCL. A commit is under way there
            while the next iteration's activations travel.
        control_ranks: rank in ``control`` of each member's process that is the same part as this one.
        stage_control: the same members as ``stage``, for tensors in CPU memory; the same communicator if that can.
        teardown: aborts them and tears them down.
        control_siblings: rank in ``control`` of each part of this worker.
        levelling: of this worker's parts when a failure ends the generation; None: each part's work counts for itself,
            or not at all.
    """

    members: tuple[Worker, ...]
    world: Comm
    stage: Comm
    siblings: Comm | None
    control: Comm
    control_ranks: Mapping[Worker, int]
    stage_control: Comm
    teardown: Teardown
    control_siblings: Sequence[int] = ()
    levelling: Levelling | None = None

    @cached_property
    def me(self) -> Worker:
        """This process's worker."""
        return self.members[self.world.rank]

    @property
    def part(self) -> int:
        """Index of this process among the parts of its worker."""
        return 0 if self.siblings is None else self.siblings.rank

    @property
    def parts(self) -> int:
        """The number of parts of each worker."""
        return 1 if self.siblings is None else self.siblings.size

    def peers(self, stage: int) -> tuple[Worker, ...]:
        """Live workers of ``stage``, ascending; their index is their rank in that stage's group."""
        return tuple(worker for worker in self.members if worker.stage == stage)

    def rank(self, worker: Worker) -> int:
        """Rank of ``worker`` in ``world``."""
        return self.members.index(worker)

    def all(self) -> list[Comm]:
        comms = [self.world, self.stage, self.control]
        comms += [] if self.siblings is None else [self.siblings]
        return comms if self.stage_control is self.stage else [*comms, self.stage_control]

    def abort(self, level: bool = False) -> None:
        """Free all threads that wait on these handles, from any thread. On return none of their results counts any
        more, and libraries with a quick abort have freed all threads, whichever thread began it. The library's
        communicators may stay where another generation may go on with them (`park`).

        ``level``: all parts of this worker go on, so their common computations may complete.
        """
        levelling = self.levelling
        if levelling is None or not levelling.begun or self.teardown.rests:
            self.teardown.abort(self.all(), self._spared)
        elif level:
            self.teardown.abort([comm for comm in self.all() if comm is not self.siblings], self._spared)
            levelling.start()
        else:
            self.teardown.abort(self.all(), self._spared)
            levelling.give_up()  # it may have begun

    def park(self, given_up: Callable[[], bool] = lambda: True) -> ReusableGroups:
        """Leave the handles, in the training thread: no thread waits on them any more. Returns the communicators that
        another generation may go on with; the others are torn down in the background. ``given_up()``: this worker's
        parts do not go on together, or their progress is not needed."""
        if self.levelling is not None:
            self.abort(level=not given_up())
            self.levelling.wait(given_up)
        kept, aborting = self.teardown.park(self.all(), self._spared)
        return ReusableGroups(kept, self.teardown.threads, self.teardown.rests, aborting)

    def _spared(self) -> list[Comm]:
        """Communicators to be left instead of aborted: a stage may have lost no member. An abort of NCCL's waits for
        all that is under way on the device, so of NCCL's only one with nothing under way may be left."""
        return [comm for comm in dict.fromkeys((self.stage, self.stage_control))
                if comm.can_stay and (comm.backend.quick or comm.ledger.idle)]

    def reopen(self) -> None:
        """Allow waits for transfers again, after a cancellation."""
        self.world.life.wait_again()

    def together(self, settle: Callable[[], None] | None = None) -> AbstractContextManager[None]:
        """Inside the block this worker's parts compute together: the loss of a part ends the generation, as a broken
        transfer does. Raises GenerationOver.

        ``settle()`` waits until the device has done the block's work. Then its results are whole, also where an abort
        ends the parts' collectives on the device as if they had succeeded.
        """
        siblings = self.siblings
        if siblings is None:
            return nullcontext()
        failing = failing_ends(f"a collective of the parts of worker {self.me}",
                               means=lambda error: siblings.aborted or is_broken(error))
        return failing if settle is None or siblings.backend.host else self._settled(failing, settle)

    @contextmanager
    def _settled(self, failing: AbstractContextManager[None], settle: Callable[[], None]) -> Iterator[None]:
        with failing, self.counting(f"a computation of the parts of worker {self.me}"):
            yield
            settle()

    @contextmanager
    def counting(self, what: object) -> Iterator[None]:
        """A block whose outcome counts, unless the handles have been aborted meanwhile: then ``what`` may have been
        computed from an abort's leftovers, even if nothing was raised. Raises GenerationOver."""
        try:
            yield
        except (GenerationOver, JobEnded):
            raise
        except Exception as error:
            if not self.world.aborted:
                raise
            raise GenerationOver(f"{what} failed after the generation had been ended: {error}") from error
        if self.world.aborted:
            raise GenerationOver(f"{what} does not count: the generation has been ended")

    def rest(self) -> None:
        """Nothing is under way on the handles, and no thread is going to wait on them: `abort` leaves them alone, and
        the next generation may use some of them again."""
        self.teardown.rests = True

    def retire(self, kept: Collection[str] = ()) -> None:
        """Abort the handles, unless that is done, and tear them down in the background, except those named in
        ``kept``."""
        if self.levelling is not None and not kept:
            self.levelling.give_up()
        self.teardown.retire([comm for comm in self.all() if comm.name not in kept])
