"""Differences of the libraries that carry tensors: one object for each library.

No other code asks which library is in use. To add one (a test's, for instance), put it into `BACKENDS` under torch's
name for it.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_recycle.errors import UnsupportedError
from megatron_recycle.observe.log import get_logger
from megatron_recycle.runtime.comm.cancellation import Wait
from megatron_recycle.runtime.comm.tags import ABORT

_NO_GROUP = 5
"""ncclInvalidUsage: NCCL's answer when a thread has no group open."""
_DEEPEST = 8
"""Limit of nested groups that a thread may have open; torch opens two."""
_WAITING_CTAS = 8
"""Thread blocks, each on a multiprocessor of its own, that one transfer may take, of 108 to 148 on current GPUs.
NCCL_MAX_CTAS in the environment takes precedence."""


class Work(Protocol):
    """A library's operation under way, as torch shows it."""

    def is_completed(self) -> bool:
        """Whether it is over; NCCL says so too once a member is known to be dead, while the device still waits."""

    def wait(self, limit: timedelta = ...) -> Any: ...


class Backend:
    """Adapter of one library. It has no state: one object serves all communicators.

    Attributes:
        ordered: whether operations of a communicator run in the order of posting, each after the end of the one before,
            and ignore tags. Operations that the two ends post in different orders, outside of a batch, then deadlock.
        host: whether it moves tensors that lie in CPU memory.
        quick: whether `abort` takes milliseconds for each other member. Otherwise it may hang, and needs a thread.
        lazy: whether two members are connected at their first transfer in each direction. The posting thread blocks in
            the library until the other member posts its own, and may never be freed (`runtime.p2p_warmup`).
        partner_cost: seconds that the first transfer of two workers takes in addition to the message's own time.
    """

    ordered: bool
    host: bool
    quick: bool
    lazy: bool = False
    partner_cost: float = 0.0

    def limit(self, group: Any) -> timedelta | None:
        """Timeout of an operation on ``group``; None if the library needs none."""
        return None

    def wait(self, work: Work, limit: timedelta | None, wait: Wait, read: bool) -> None:
        """Block this thread until ``work`` is over: the tensor is whole, or an abort has ended it.

        ``wait``: how this wait can be left. ``read``: ``work`` is a send that the receiver is known to have got. Raises
        `Cancelled`, and the library's RuntimeError.
        """
        raise NotImplementedError

    def abort(self, group: Any) -> None:
        """Free all threads that wait on ``group``, from any thread. No operation on it succeeds afterwards, although
        NCCL may report success. Raises nothing."""
        raise NotImplementedError

    def destroy(self, group: Any) -> None:
        """Free the resources of ``group``, some time after its abort. Raises nothing."""
        try:
            dist.destroy_process_group(group)
        except (RuntimeError, ValueError) as error:
            # A group that cannot be torn down, or that a script has destroyed at its end, must not keep the others.
            get_logger().debug("megatron-recycle: a group of an old generation stays: %s", error)

    def options(self, transfers: bool, limit: timedelta) -> Any:
        """The library's options for a communicator; None: its defaults. ``limit``: timeout of its creation.
        ``transfers``: operations on it wait for other workers' computations."""
        return None

    def ahead(self) -> AbstractContextManager[None]:
        """A block in which tensors are allocated, and receives into them posted, without waiting for computations
        queued on the device before."""
        return nullcontext()

    def arrived(self, tensor: torch.Tensor) -> None:
        """``tensor``, allocated in `ahead`, has been received; this thread's computations use it from now on."""

    def probe(self, work: Work) -> Callable[[], bool]:
        """A function that tells whether ``work``, which this thread has just begun, is over: nothing reads or writes
        its tensors any more, whatever has become of its members. Never blocks."""
        return work.is_completed

    def unwind(self) -> None:
        """An operation has raised in this thread: close the library's state that it has left open there, so that later
        postings of the thread are started."""

    def begin_batch(self, group: Any) -> None:
        """Begin a batch: operations that are posted on ``group`` from now on start together when it ends."""

    def end_batch(self, group: Any) -> Work | None:
        """Start the batch. Returns one work for all of it; None: each operation has its own."""
        return None

    def in_thread(self) -> Callable[[], None]:
        """A function to be called by a worker thread of this thread before it connects."""
        return lambda: None

    def connect(self, group: Any) -> None:
        """Connect ahead, so that the first collective on ``group`` does not block until the other members come to
        theirs. All members call this at the same time. Call it in a thread that can be abandoned: it may be impossible
        to interrupt."""


class Gloo(Backend):
    """torch's library for tensors in CPU memory. Pairs are connected when the group is made. A pair may have any number
    of transfers under way."""

    ordered, host, quick = False, True, True

    def limit(self, group: Any) -> timedelta | None:
        # By default gloo gives a point-to-point transfer (not a collective) the timeout of connecting.
        limit: timedelta = group._get_backend(torch.device("cpu")).options._timeout
        return limit

    def wait(self, work: Work, limit: timedelta | None, wait: Wait, read: bool) -> None:
        assert limit is not None
        # gloo cannot be stuck in a send that has been read or in a collective that is completed: these waits need no
        # way out.
        if read or work.is_completed():
            work.wait(limit)
        else:
            wait.aside(lambda: work.wait(limit))

    def abort(self, group: Any) -> None:
        """gloo has no abort, but it closes a pair on which a receive times out and then fails all operations of the
        group's context: so one receive with a 1 ms timeout is posted per peer. It forgets only a transfer that it is in
        the middle of: `wait` leaves that a second later."""
        scratch = torch.zeros(1)
        for peer in range(group.size()):
            if peer == group.rank():
                continue
            try:
                group.recv([scratch], peer, ABORT).wait(timedelta(milliseconds=1))
            except RuntimeError:
                continue  # this is the purpose: the pair is closed now, or was already


class Nccl(Backend):
    """NVIDIA's library for tensors on GPUs."""

    ordered, host, quick, lazy = True, False, False, True
    partner_cost = 0.15  # of a communicator of two (NVIDIA/nccl issue 1605); a bare connection has no published figure

    def __init__(self) -> None:
        self._streams = threading.local()

    def wait(self, work: Work, limit: timedelta | None, wait: Wait, read: bool) -> None:
        over = self._over(work)
        if not over.query():
            wait.aside(over.synchronize)

    def probe(self, work: Work) -> Callable[[], bool]:
        # Its own is_completed() says yes once a member is known to be dead, while the device still waits.
        query: Callable[[], bool] = self._over(work).query
        return query

    def unwind(self) -> None:
        # torch opens an NCCL group for each transfer, and leaves it open if the transfer raises. All later postings of
        # the thread would be queued there and never started, and their events complete at once: a receive seems to be
        # over, with anything in its tensor.
        end = _nccl().ncclGroupEnd
        if not any(end() == _NO_GROUP for _ in range(_DEEPEST)):
            raise RuntimeError(f"NCCL has more than {_DEEPEST} groups open in one thread")

    def abort(self, group: Any) -> None:
        abort = getattr(group, "abort", None)  # since torch 2.7
        try:
            (abort or group._get_backend(torch.device("cuda")).abort)()
        except RuntimeError as error:
            get_logger().warning("megatron-recycle: NCCL did not abort a group: %s", error)

    def options(self, transfers: bool, limit: timedelta) -> Any:
        if not transfers:
            return None
        # A transfer that waits for its other end holds multiprocessors, which computations then lack.
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        options.config.max_ctas = _WAITING_CTAS
        return options

    def ahead(self) -> AbstractContextManager[None]:
        # An operation waits for the stream that is current when it is posted. Memory allocated under a stream may be
        # memory that only this stream has used before: so the tensors are allocated there as well.
        block: AbstractContextManager[None] = torch.cuda.stream(self._own("ahead"))
        return block

    def arrived(self, tensor: torch.Tensor) -> None:
        # Keeps the allocator from reusing it under the other stream before this one is done with it.
        tensor.record_stream(torch.cuda.current_stream())

    def begin_batch(self, group: Any) -> None:
        group._start_coalescing(_gpu())

    def end_batch(self, group: Any) -> Work | None:
        work: Work = group._end_coalescing(_gpu())
        return work

    def in_thread(self) -> Callable[[], None]:
        gpu = _gpu()  # each thread has its own current device, which starts as the first
        return lambda: torch.cuda.set_device(gpu)

    def connect(self, group: Any) -> None:
        _nccl()  # fail here if it is missing, not in `unwind`
        # The group then has one communicator, and one queue for everything.
        group._get_backend(_gpu()).eager_connect_single_device(_gpu())

    def _over(self, work: Work) -> torch.cuda.Event:
        """The event that ``work`` is over, aborted or not. Its own wait() only makes the current stream wait, and
        reports success after an abort: so a stream of this thread's own waits for it."""
        side, over = self._own("side"), torch.cuda.Event(blocking=True)
        with torch.cuda.stream(side):
            work.wait()
            over.record(side)
        return over

    def _own(self, name: str) -> torch.cuda.Stream:
        """This thread's own stream for this purpose."""
        if not hasattr(self._streams, name):
            setattr(self._streams, name, torch.cuda.Stream())
        stream: torch.cuda.Stream = getattr(self._streams, name)
        return stream


@functools.cache
def _nccl() -> ctypes.CDLL:
    """The NCCL that torch calls, a library of its own or a part of torch's. Raises UnsupportedError."""
    path = Path(torch.__file__).with_name("lib") / "libtorch_cuda.so"
    try:
        library = ctypes.CDLL(str(path))
        library.ncclGroupEnd.restype = ctypes.c_int
    except (OSError, AttributeError) as error:
        raise UnsupportedError(f"{path} does not show torch's NCCL, which has to be reset after a failure ({error}); "
                               "use a build of torch for CUDA as on PyPI, or one that links to libnccl.so") from error
    return library


def _gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


GLOO = Gloo()
BACKENDS: dict[str, Backend] = {"gloo": GLOO, "nccl": Nccl()}
"""By torch's name."""


def backend_of(group: dist.ProcessGroup) -> Backend:
    """The backend of a foreign group; an unknown one is aborted as gloo's are."""
    return BACKENDS.get(group.name(), GLOO)
