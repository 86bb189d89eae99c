"""Each defect that NCCL's rules would have brought to light is noticed if it is put back.

The rules are those of a network in memory (`tests.in_memory_job.wires`). A defect is noticed as a job in which nobody
can go on, with where each worker stands; as a worker that ends, or that has other numbers than without failures; or as
a promise of one function. What only a GPU can show is asked there: `scripts/gpu/check.sh --part a` has a check for each
defect, which shows it on bare torch beside the remedy. ``python scripts/gpu/nccl_checks.py --list`` tells what each
means, ``--only NAMES`` runs some, ``--cpu`` does so on tests/nccl_rules:

    D1  ahead_one_group, planned_order            D5  connecting_is_left_behind
    D2  abort, abort_frees_who_waits              D6  first_operations_cross
    D3  dead_peer, dead_peer_torchs_settings      D7  first_operations_cross
    D4  abort_one_after_the_other, abort_together, abort_while_enqueuing, abort_while_enqueuing_locked
    D8  bound_default_group, unbound_default_group

With real processes, on tests/nccl_rules: in `tests.nccl_rules.backend.Ordered` leave out ``connect`` (D5), or the
batches (D6, D7); in `megatron_recycle.runtime.comm.activations.Transport` let ``post`` post ahead (D1); then run
``pytest tests/nccl_rules/test_jobs.py``. It fails after a minute, with every worker's queues and stacks.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from megatron_recycle import nccl_settings
from megatron_recycle.control.planning import problem_of
from megatron_recycle.launch.worker_command import torchrun_environment
from megatron_recycle.planner import quick
from megatron_recycle.planner.baselines import drop
from megatron_recycle.runtime import loop, recovery
from megatron_recycle.runtime.comm import abort, comm, ledger, rendezvous
from megatron_recycle.runtime.comm.activations import Transport
from megatron_recycle.runtime.comm.backend import BACKENDS
from megatron_recycle.runtime.comm.comm import Comm, Pending
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.rendezvous import CONNECTING
from megatron_recycle.runtime.comm.tags import ACTIVATIONS, WORLD
from megatron_recycle.runtime.comm.threads import Threads
from megatron_recycle.runtime.quiesce import Halt
from megatron_recycle.runtime.worker import StageWorker
from tests.fakes.network.ends import IN_MEMORY, Host
from tests.in_memory_job import control
from tests.in_memory_job.job import LIMIT, Job, Shape, check
from tests.in_memory_job.wires import Wires
from tests.moments import Moment
from tests.runtime import test_network

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

EXACT = Shape(3, 2, 2, 2)
FAST = EXACT.with_settings(reduction="fast")
TIED = replace(FAST, tied=True)
PutBack = Callable[[pytest.MonkeyPatch], None]
NCCL = 1
"""A seed whose network has NCCL's rules."""


def job(shape: Shape, kill: Moment | None = None, waits: Sequence[str] = ()) -> str:
    """How it is noticed that something is wrong; nothing if all is well. Who is killed dies when others have come as
    far as it, and wait for it."""
    came = set[Moment]()
    made = Job(shape, holds=[kill] if kill else [], seed=NCCL, at=lambda job, moment: came.add(moment))
    with made:
        if kill is not None:
            made.wait_held()
            peers = {replace(kill, worker=name) for name in shape.workers if name.endswith(kill.worker[1:])}
            made.wait_for(lambda: came >= peers, f"all of {peers}")
            made.wait_waiting(*waits)
            made.release(kill, die=True)
        if stuck := made.wait_or_stuck():
            return f"nobody can go on:\n{stuck}"
        try:
            check(made, made.wait(), {kill.worker} if kill else (), within=1e-5)
        except AssertionError as error:
            return str(error)
    return ""


# ---- D1: transfers are posted as the plan's order has it


def posting_ahead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Transport, "post", lambda self: self._receiver.post_next())
    patch.setattr(Transport, "_post_before", lambda self, message, sent: None)


# ---- D2: nothing counts that was pending at an abort, and nothing before it is complete


def waits_see_no_abort(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Comm, "is_aborted", lambda self: False)
    patch.setattr(Groups, "counting", lambda self, what: contextlib.nullcontext())
    patch.setattr(Groups, "_spared", lambda self: [])


def gradients_count_at_once(patch: pytest.MonkeyPatch) -> None:
    waits = Pending.wait

    def wait(self: Pending, read: bool = False, stays: bool = False) -> None:
        if self._kind != "sum" or not self._comm.backend.ordered:
            waits(self, read, stays)

    patch.setattr(Pending, "wait", wait)


# ---- D3: torch's watchdog does not end survivors


def no_settings(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nccl_settings, "SETTINGS", {})


def watchdog() -> str:
    """By ProcessGroupNCCL.cpp, in a worker that `recycle run` has started."""
    environment = torchrun_environment({}, "host:1", 1, 0)
    ends = [name for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING",
                              "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_RETHROW_CUDA_ERRORS",
                              "TORCH_NCCL_PROPAGATE_ERROR") if environment.get(name) != "0"]
    return f"torch ends survivors: {', '.join(ends)}" if ends else ""


# ---- D4: all communicators are aborted at once, in no thread that is needed, with nobody inside


def in_the_agents_thread(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BACKENDS[IN_MEMORY[True]], "quick", True)


def without_a_lock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ledger.threading, "RLock", Free)


class Free:
    """A lock that keeps nobody out."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        return True

    def release(self) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *failure: object) -> None:
        pass


def abort_while_two_are_busy() -> str:
    """A survivor waits on two communicators: the abort of one ends when that of the other has begun."""
    library, threads = Wires(NCCL, lambda process, what: None, ordered=True, first_pairs="free"), Threads()
    me, partner = Host(0), Host(1)
    ends = {process: [library.end(process, ("", name), process.rank, 2, WORLD) for name in ("world", "stage")]
            for process in (me, partner)}
    for each in ends[me]:
        each.receive(comm.torch.zeros(1), 1, ACTIVATIONS[0])
    aborting: list[threading.Thread] = []

    def as_the_agent() -> None:
        aborting.append(threading.current_thread())
        abort.abort(ends[me], threads)

    agent = threads.start("agent", as_the_agent, 60)
    stuck = ""
    while agent.is_alive() and not stuck:
        agent.join(0.2)
        stuck = library.stuck(aborting)
    if stuck:
        library.die(me)
    agent.join(60)
    return f"nobody can go on:\n{stuck}" if stuck else ""


def abort_while_posting(patch: pytest.MonkeyPatch) -> str:
    """An abort comes while another thread is inside an operation."""
    patch.setattr(comm, "_ABORT_WAITS", 60.0)
    inside, asked, came = threading.Event(), threading.Event(), list[str]()

    def at(process: Host, what: str) -> None:
        if what.startswith("sum"):
            inside.set()
            asked.wait(60)
            aborted.wait(0.2)
            came.append("posted")

    class Library(Wires):
        def abort(self, end: Any) -> None:
            came.append("aborted")
            aborted.set()

    aborted = threading.Event()
    one, _ = Library(NCCL, at, ordered=True).comms(2)
    threads = Threads()
    poster = threads.start("poster", lambda: one.sum(comm.torch.zeros(1)), 60)
    inside.wait(60)
    aborting = abort.abort([one], threads)
    asked.set()
    for thread in [poster, *aborting]:
        thread.join(60)
    return "" if came == ["posted", "aborted"] else f"the library was {' and '.join(came)}: memory in use is freed"


# ---- D5: communicators stand before training goes on with them


def connecting_at_first_uses(patch: pytest.MonkeyPatch) -> None:
    made = Wires.__init__
    patch.setattr(Wires, "__init__", lambda self, seed, at, **options: made(self, seed, at, first_uses=True, **options))
    # Who is never free does not report either: nobody is to be taken out for that before it has been looked at.
    patch.setattr(control, "LIMITS", replace(control.LIMITS, report_timeout=2 * LIMIT))


def death_before_a_first_use() -> str:
    """Of the stage's communicator, in the first iteration; a peer waits there already."""
    made = Job(FAST, holds=[kill := Moment("1:1", "reduce", 0)], seed=NCCL)
    with made:
        made.wait_held()
        made.wait_waiting(r"worker-0:1 for .*stage1\.0")
        made.release(kill, die=True)
        made.wait_event("decided", generation=2)
        peer = next(process for process in made.processes.values() if process.name == "0:1")
        first = [end for end in peer.network.ends if end.board.ordered][:3]
        made.wait_for(lambda: all(end.aborted for end in first), "the abort")  # whom it can free is free
        for _ in range(100):  # looks: who is free may not have left yet
            told = made.fabric.standing()
            if "first use" not in told:
                break
            peer.thread.join(0.02)
        else:
            return f"nobody can go on:\n{told}"
        check(made, made.wait(), {"1:1"}, within=1e-5)
    return ""


# ---- the first transfers of pairs, too


def pairs_connect_in_training(patch: pytest.MonkeyPatch) -> None:
    for module in (recovery, loop):
        patch.setattr(module, "connect_partners", lambda *given: None)


def pairs_of_a_better_plan_connect_in_training(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loop, "connect_partners", lambda *given: None)


def death_before_a_first_transfer() -> str:
    """A worker dies before it has received its first activation; who sends that is there already."""
    made = Job(FAST, holds=[kill := Moment("1:1", "forward", 0)], seed=NCCL, first_pairs="block")
    with made:
        made.wait_held()
        made.wait_waiting("worker-1:0 for ")
        made.release(kill, die=True)
        made.wait_event("decided", generation=2)
        threads, stood, told = [process.thread for process in made.processes.values()], 0, ""
        while any(thread.is_alive() for thread in threads) and stood < 250:  # looks: an abort frees threads in a moment
            looked = made.fabric.standing()  # they look around now and then, and stand nowhere meanwhile
            if "for its partners' first transfer" in looked:
                stood, told = stood + 1, looked
            threads[0].join(0.02)
        if stood == 250:
            return f"nobody can go on:\n{told}"
        check(made, made.wait(), {"1:1"}, within=1e-5)
    return ""


def a_better_plan(patch: pytest.MonkeyPatch) -> str:
    """Two pipelines of three go on without the third, until a plan comes in which its worker is a guest's host."""
    patch.setattr(control, "_plan", lambda job, failed: drop(problem_of(job, failed)).to_file())
    shape = replace(FAST, iterations=6, microbatches=4).with_settings(keep_messages="none")  # or they have met
    made = Job(shape, holds=[kill := Moment("1:1", "forward", 0), late := Moment("0:0", "forward", 1)], seed=NCCL)
    with made:
        made.wait_held(kill)
        made.release(kill, die=True)
        made.wait_event("decided", generation=2)
        made.wait_held(late)
        better = quick(problem_of(made.control.state.job, frozenset({"1:1"})))
        made.control.call(lambda: made.control.improved(2, better))
        left = [each.worker for each in made.processes.values() if each.thread.is_alive() and each.worker is not None]
        made.wait_for(lambda: all(each.site.agent.offer is not None for each in left), "the offer")
        made.release(late)
        try:
            check(made, made.wait(), {"1:1"}, within=1e-5)
        except AssertionError as error:
            return str(error)
        made.wait_event("adopted", digest=better.digest)
    return ""


# ---- D6, D7: both ends send and receive


def without_batches(patch: pytest.MonkeyPatch) -> None:
    batch = Comm.batch
    patch.setattr(Comm, "batch", lambda self: batch(self) if threading.current_thread().name == CONNECTING
                  else contextlib.nullcontext())


# ---- D8: our groups are not split off a default group that is bound to a device


def bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rendezvous, "_unbound_default_group", contextlib.nullcontext)


def beside_a_bound_default(patch: pytest.MonkeyPatch) -> str:
    try:
        test_network.test_a_group_is_not_split_off_a_default_group_that_is_bound_to_a_device(patch)
    except AssertionError as error:
        return f"it is split off: {error}"
    return ""


# ---- D9: a wrong guess rebuilds nothing


def everything_is_aborted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Halt, "agree", Halt.break_off)


def has_heard(worker: StageWorker) -> bool:
    """That iteration 0 is void: its training thread, which may wait for others, need not know it yet."""
    pending = worker.stepper.pending
    return worker.standing.committed == 0 or (pending is not None and pending.known)


def one_is_behind() -> str:
    """It stands in an action when the others hear that the iteration is void."""
    behind, verdict = Moment("1:1", "forward", 1), Moment("0:2", "reduced", 0)
    made = Job(Shape(2, 3, 2, 2, clipping=0.05), holds=[behind, verdict], seed=0)
    with made:
        made.wait_held()
        made.release(verdict)
        others = [each.worker for each in made.processes.values() if each.worker and each.name != "1:1"]
        made.wait_for(lambda: all(map(has_heard, others)), "the verdict elsewhere")
        made.release(behind)
        if stuck := made.wait_or_stuck():
            return f"nobody can go on:\n{stuck}"
        check(made, made.wait())
    again = len({prefix for prefix, _ in made.fabric.communicators}) - 1
    return f"all communicators were made again, {again} times" if again else ""


@dataclass(frozen=True)
class Defect:
    """``put_back``, and then ``shown``: a job or a function that says what is wrong, in words among which are these."""

    name: str
    put_back: PutBack
    shown: Callable[..., str]
    words: Sequence[str]
    stuck: bool = False


STANDING = [f"waits in thread worker-{worker}" for worker in EXACT.workers]
DEFECTS = [
    Defect("D1 posted ahead", posting_ahead, lambda: job(EXACT), ["a receive from its rank", *STANDING], stuck=True),
    Defect("D2 an aborted sum counts", waits_see_no_abort,
           lambda: job(FAST, Moment("1:1", "reduce", 1), [f"worker-{peer} for stage1.0" for peer in ("0:1", "2:1")]),
           ["has ended with 1"]),
    Defect("D2 an aborted header counts", waits_see_no_abort,
           lambda: job(EXACT, Moment("1:0", "forward", 0), ["worker-1:1 for world.0"]),
           ["IndexError"]),
    Defect("D2 a sum counts before it is complete", gradients_count_at_once, lambda: job(FAST), ["differs"]),
    Defect("D3 torch's watchdog", no_settings, watchdog, ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]),
    Defect("D4 one after the other in the agent's thread", in_the_agents_thread,
           abort_while_two_are_busy, ["thread agent for an abort that stage keeps waiting"]),
    Defect("D4 while another thread posts", without_a_lock, abort_while_posting, ["aborted and posted"]),
    Defect("D5 first uses", connecting_at_first_uses, death_before_a_first_use,
           ["worker-0:1 for the others' first use of stage1.0"], stuck=True),
    Defect("a first transfer of a pair in training", pairs_connect_in_training, death_before_a_first_transfer,
           ["for its partners' first transfer on world.0"], stuck=True),
    Defect("a first transfer of a pair in training, by another rule", pairs_connect_in_training, lambda: job(FAST),
           ["it is the first of its pair"]),
    Defect("a first transfer of a better plan's pair in training", pairs_of_a_better_plan_connect_in_training,
           a_better_plan, ["it is the first of its pair"]),
    Defect("D6 exact without batches", without_batches, lambda: job(EXACT), ["a send to its rank", *STANDING],
           stuck=True),
    Defect("D7 ties without batches", without_batches, lambda: job(TIED), ["a send to its rank"], stuck=True),
    Defect("D8 split off", bound, beside_a_bound_default, ["cuda:0"]),
    Defect("D9 a wrong guess rebuilds everything", everything_is_aborted, one_is_behind, ["were made again"]),
]


@pytest.mark.every
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_defect_that_is_put_back_is_noticed(defect: Defect, monkeypatch: pytest.MonkeyPatch):
    options = {"patch": monkeypatch} if "patch" in defect.shown.__annotations__ else {}
    assert not defect.shown(**options), "as it is, all is well"
    defect.put_back(monkeypatch)
    told = defect.shown(**options)
    assert all(words in told for words in defect.words), told
    assert not defect.stuck or told.startswith("nobody can go on"), told
