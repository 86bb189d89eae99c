"""Checks of ends: aborts, ranks that die or never come, and what torch's watchdog makes of them."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from nccl_rank import SMALL, Rank, since, text

from megatron_recycle.errors import GenerationOver
from megatron_recycle.runtime.comm.comm import Comm
from megatron_recycle.runtime.comm.tags import WORLD


def abort(at: Rank) -> None:
    """A receive that nobody answers is aborted: how soon it is over, what `wait()` and the data say then."""
    group = at.group()
    at.transfer(group, at.tensor(SMALL))
    at.meet("connected")
    if at.rank == 1:
        tensor = at.tensor(SMALL, 123.0)
        work = group.recv([tensor], 0, 0)
        thread, begun = at.abort_in(1.0, group), time.monotonic()
        try:
            work.wait()
            at.sync()
            at.tell(over_after_s=round(since(begun) - 1.0, 3), raised=None, completed=work.is_completed(),
                    data=str(float(tensor[0])))
        except RuntimeError as error:
            at.tell(over_after_s=round(since(begun) - 1.0, 3), raised=text(error))
        thread.join()
        try:
            group.recv([tensor], 0, 0)
            at.tell(next_operation="taken")
        except RuntimeError as error:
            at.tell(next_operation=text(error))
        begun = time.monotonic()
        at.library.backend.destroy(group)
        at.tell(destroy_s=since(begun))
    at.meet("over")


def abort_frees_who_waits(at: Rank) -> None:
    """The same for a thread that waits as the runtime does, for a side stream that waits for the work."""
    group = at.group()
    at.transfer(group, at.tensor(SMALL))
    at.meet("connected")
    if at.rank == 1:
        work = group.recv([at.tensor(SMALL)], 0, 0)
        at.abort_in(1.0, group)
        begun = time.monotonic()
        try:
            at.wait(work)
            at.tell(raised=None)
        except RuntimeError as error:
            at.tell(raised=text(error))
        at.tell(right=0.9 < since(begun) < 5, over_after_s=round(since(begun) - 1.0, 3))
    at.meet("over")


def abort_with_short_limit(at: Rank) -> None:
    """The group's limit is set to two seconds before the abort, which is said to wait as long as the limit."""
    group = at.group()
    at.transfer(group, at.tensor(SMALL))
    at.meet("connected")
    if at.rank == 1:
        group.recv([at.tensor(SMALL)], 0, 0)
        group.set_timeout(timedelta(seconds=2))
        begun = time.monotonic()
        group.abort()
        at.tell(abort_s=since(begun), right=since(begun) < 5)
        at.sync()
        at.tell(synchronised_s=since(begun))
    at.meet("over")


def abort_and_rebuild(at: Rank) -> None:
    """Five times: a group is made, connected and used, and aborted while a receive is pending: what that costs."""
    rebuilt, aborted = [], []
    for number in range(5):
        begun = time.monotonic()
        group = at.group()
        at.library.backend.connect(group)
        tensor = at.tensor(SMALL, 5.0 if at.rank == 0 else 0.0)
        at.transfer(group, tensor)
        right = at.total(group) == at.size and float(tensor[0]) == 5.0
        rebuilt.append(since(begun))
        if at.rank == 1:
            group.recv([tensor], 0, 0)
        at.meet(f"pending {number}")
        begun = time.monotonic()
        group.abort()
        at.sync()
        aborted.append(since(begun))
        threading.Thread(target=at.library.backend.destroy, args=(group,), daemon=True).start()
        at.meet(f"aborted {number}")
        at.tell(right=right, build_and_use_s=rebuilt, abort_s=aborted)
    if at.on_gpu:
        free, whole = torch.cuda.mem_get_info()
        at.tell(gpu_gib_in_use=round((whole - free) / 2**30, 2))


def _two_pending(at: Rank, together: bool) -> None:
    first, second = at.group(), at.group()
    at.transfer(first, at.tensor(SMALL))
    at.total(second)
    at.meet("connected")
    if at.rank == 1:
        first.recv([at.tensor(SMALL)], 0, 0)
        second.allreduce([at.tensor(SMALL, 1.0)])
        time.sleep(1)
        begun = time.monotonic()
        threads = [at.abort_in(0, first), at.abort_in(0, second)] if together else [at.abort_in(0, first, second)]
        for thread in threads:
            thread.join(20)
        at.tell(right=not any(thread.is_alive() for thread in threads), took_s=since(begun))
        at.sync()
        at.tell(synchronised_s=since(begun))
    at.meet("over")


def abort_one_after_the_other(at: Rank) -> None:
    """Two groups with something pending in each are aborted by one thread."""
    _two_pending(at, together=False)


def abort_together(at: Rank) -> None:
    """The same, each by a thread of its own."""
    _two_pending(at, together=True)


def _aborted_first_use(at: Rank, options: Any = None) -> None:
    group = at.group(limit=6.0, bare=True, options=options)
    at.meet("made")
    if at.rank == 0:
        at.abort_in(2.0, group)
        begun = time.monotonic()
        try:
            group.send([at.tensor(SMALL)], 1, 0)
            at.tell(returned_s=since(begun))
        except RuntimeError as error:
            at.tell(raised_s=since(begun), error=text(error))
    else:
        time.sleep(60)


def abort_first_use(at: Rank) -> None:
    """The lower rank's first operation of a pair, whose other rank never comes, is aborted after two seconds."""
    _aborted_first_use(at)


def abort_first_use_nonblocking(at: Rank) -> None:
    """The same with a communicator that does not block."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.blocking = 0
    _aborted_first_use(at, options)


def first_use_store_limit(at: Rank) -> None:
    """The higher rank of a pair comes first, the other one never; its store has a limit of six seconds."""
    group = at.group(limit=6.0)
    at.meet("made")
    if at.rank == 1:
        begun = time.monotonic()
        try:
            group.recv([at.tensor(SMALL)], 0, 0)
            at.tell(right=False, returned_s=since(begun))
        except RuntimeError as error:
            at.tell(right=since(begun) < 15, raised_s=since(begun), error=text(error))
    at.meet("over")


def connecting_is_left_behind(at: Rank) -> None:
    """One thread connects a group whose third rank never comes; meanwhile the process makes and uses another group."""
    if at.rank == 2:
        time.sleep(60)
        return
    lost = at.group([0, 1, 2], limit=60.0)

    in_thread = at.library.backend.in_thread()

    def connect() -> None:
        in_thread()
        at.library.backend.connect(lost)

    threading.Thread(target=connect, daemon=True).start()
    time.sleep(2)
    begun = time.monotonic()
    at.tell(right=at.total(at.group([0, 1])) == 2, another_group_s=since(begun))


def abort_while_enqueuing(at: Rank) -> None:
    """One thread sends or receives without a pause while another aborts at a random moment; twelve times."""
    _abort_while_enqueuing(at, threading.Lock(), locked=False)


def abort_while_enqueuing_locked(at: Rank) -> None:
    """The same with a lock around each operation, which the aborting thread takes before."""
    _abort_while_enqueuing(at, threading.Lock(), locked=True)


def _abort_while_enqueuing(at: Rank, lock: threading.Lock, locked: bool) -> None:
    class Guarded:
        """A group whose abort waits for the lock."""

        def __init__(self, group: Any) -> None:
            self.group, self.over = group, False

        def abort(self) -> None:
            with lock:
                self.over = True
                self.group.abort()

    for number in range(12):
        group, outcome = at.group(), "no error"
        at.transfer(group, at.tensor(SMALL))
        tensors = [at.tensor(SMALL) for _ in range(8)]
        at.meet(f"connected {number}")
        guarded = Guarded(group)
        thread = at.abort_in(random.uniform(0.0, 0.05), guarded if locked else group)
        operation, posted = (group.send if at.rank == 0 else group.recv), []
        try:
            while thread.is_alive() and not guarded.over:
                # No more than a job has under way: a full queue of the device blocks who adds to it.
                if posted and not posted[-1].is_completed():
                    continue
                for tensor in tensors:
                    if not locked:
                        posted = [operation([tensor], 1 - at.rank, 0)]
                        continue
                    with lock:
                        if not guarded.over:
                            posted = [operation([tensor], 1 - at.rank, 0)]
        except RuntimeError as error:
            outcome = text(error)
        thread.join(20)
        at.tell(rounds=number + 1, last=outcome)
        at.sync()
        at.meet(f"aborted {number}")


def dead_peer(at: Rank) -> None:
    """Rank 0 is killed while rank 1 waits for it, and for nobody else: what rank 1 hears in twelve seconds."""
    group = at.group()
    at.transfer(group, at.tensor(SMALL))
    store = at.store(60.0)
    if at.rank == 0:
        store.wait(["pending"], timedelta(seconds=60))
        os.kill(os.getpid(), signal.SIGKILL)
    work = group.recv([at.tensor(SMALL)], 0, 0)
    store.set("pending", "1")
    for second in range(12):
        time.sleep(1)
        at.tell(alive_s=second + 1, completed=work.is_completed())
    begun = time.monotonic()
    group.abort()
    at.sync()
    at.tell(abort_s=since(begun))


def transfer_after_an_error(at: Rank) -> None:
    """A send raises since its peer has died; the thread's next receive, of another group, after `Backend.unwind`."""
    _receive_after_an_error(at, at.library.backend.unwind)


def transfer_after_an_error_left_open(at: Rank) -> None:
    """The same without: torch has left a group of NCCL's open, so that the receive is never started and seems over."""
    _receive_after_an_error(at, lambda: None)


def _receive_after_an_error(at: Rank, unwind: Callable[[], None]) -> None:
    group, store = at.group(), at.store(60.0)
    at.transfer(group, at.tensor(SMALL))
    if at.rank == 0:
        store.wait(["connected"], timedelta(seconds=60))
        os.kill(os.getpid(), signal.SIGKILL)
    if at.rank == 1:
        store.set("connected", "1")
        at.tell(raised=_until_it_raises(lambda: group.send([at.tensor(SMALL)], 0, 0)))
        unwind()
        at.abort_in(0.0, group).join()
    # As the runtime does, in a thread of its own: a group that is open in this one would not keep it back.
    with ThreadPoolExecutor(1, initializer=at.library.backend.in_thread()) as pool:
        other = pool.submit(at.group, [1, 2]).result()
    if at.rank == 2:
        other.send([at.tensor(SMALL, 7.0)], 0, 0).wait()
        at.sync()
    else:
        tensor = at.tensor(SMALL)
        at.wait(other.recv([tensor], 1, 0))
        at.tell(right=float(tensor[0]) == 7.0, data=float(tensor[0]))


def _until_it_raises(post: Callable[[], object]) -> str:
    for _ in range(200):
        try:
            post()
        except RuntimeError as error:
            return text(error)
        time.sleep(0.05)
    return "nothing in ten seconds"


def dead_peer_torchs_settings(at: Rank) -> None:
    """A dead peer with torch's own settings: the watchdog is said to end rank 1 some 60 s later."""
    group = at.group()
    at.transfer(group, at.tensor(SMALL))
    store = at.store(60.0)
    if at.rank == 0:
        store.wait(["pending"], timedelta(seconds=60))
        os.kill(os.getpid(), signal.SIGKILL)
    group.recv([at.tensor(SMALL)], 0, 0)
    store.set("pending", "1")
    _live(at, 100)


def long_wait(at: Rank) -> None:
    """A receive is pending for longer than the group's limit of five seconds."""
    _pending_for_long(at, 20)


def long_wait_torchs_settings(at: Rank) -> None:
    """The same with torch's own settings: the watchdog is said to end rank 1 some 60 s later."""
    _pending_for_long(at, 90)


def _pending_for_long(at: Rank, seconds: int) -> None:
    group = at.group()
    at.transfer(group, at.tensor(SMALL))
    group.set_timeout(timedelta(seconds=5))
    if at.rank == 1:
        group.recv([at.tensor(SMALL)], 0, 0)
        _live(at, seconds)
    else:
        time.sleep(seconds + 30)


def _live(at: Rank, seconds: int) -> None:
    for second in range(seconds):
        time.sleep(1)
        at.tell(alive_s=second + 1)


def left_and_drained(at: Rank) -> None:
    """Rank 1 leaves its wait for the first of two receives; rank 0 sends two that nobody wants, and then others."""
    group = at.group()
    at.library.backend.connect(group)
    at.both_ways(group)
    comm = Comm(group, at.library.backend, WORLD)
    if at.rank == 0:
        at.meet("left")
        for value in range(4):
            comm.send(at.tensor(SMALL, float(value)), 1, 0).wait()
        return
    tensors = [at.tensor(SMALL, -1.0) for _ in range(4)]
    void = [comm.receive(tensor, 0, 0) for tensor in tensors[:2]]
    threading.Timer(0.2, comm.life.token.cancel).start()
    begun = time.monotonic()
    try:
        void[0].wait()
        at.tell(left=False)
    except GenerationOver:
        at.tell(left=True, left_after_s=round(since(begun) - 0.2, 3))
    at.meet("left")
    comm.life.wait_again()
    for pending in [*void, *(comm.receive(tensor, 0, 0) for tensor in tensors[2:])]:
        pending.wait()
    at.sync()
    at.tell(right=[float(tensor[0]) for tensor in tensors] == [0.0, 1.0, 2.0, 3.0])
