"""Differences of the libraries that carry tensors: one object for each library.

Nobody else asks which library it is. A further one (a test's, for instance) is put into `BACKENDS` under the name that
torch knows it by.
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
"""ncclInvalidUsage: what NCCL answers where a thread has no group open."""
_DEEPEST = 8
"""Groups that may be open in a thread, one in the other; torch opens two."""
_WAITING_CTAS = 8
"""Thread blocks, each on a multiprocessor of its own, that one transfer may take: of 108 to 148 on GPUs of these years.
NCCL_MAX_CTAS in the environment comes before it."""


class Work(Protocol):
    """A library's operation under way, as torch shows it."""

    def is_completed(self) -> bool:
        """Whether it is over; NCCL's says so too once a member is known to be dead, while the device still waits."""

    def wait(self, limit: timedelta = ...) -> Any: ...


class Backend:
    """How one library is spoken to. Has no state: one object serves all communicators.

    Attributes:
        ordered: whether what is posted on a communicator runs in that order, each after the one before it has ended,
            and tags mean nothing. Operations that both ends post in different orders, outside of a batch, then wait for
            ever.
        host: whether it moves tensors that lie in CPU memory.
        quick: whether `abort` takes milliseconds for each other member. Otherwise it may hang, and needs a thread.
        lazy: whether two members are connected at their first transfer in each direction. The thread that posts it
            stands in the library until the other one posts its own, and may never be freed (`runtime.p2p_warmup`).
        partner_cost: seconds that the first transfer of two workers takes beside what the message does.
    """

    ordered: bool
    host: bool
    quick: bool
    lazy: bool = False
    partner_cost: float = 0.0

    def limit(self, group: Any) -> timedelta | None:
        """How long an operation on ``group`` may take; None if the library does not need to be told."""
        return None

    def wait(self, work: Work, limit: timedelta | None, wait: Wait, read: bool) -> None:
        """Block this thread until ``work`` is over: the tensor is whole, or an abort has ended it.

        ``wait``: how it can be left. ``read``: it is a send that its receiver is known to have got. Raises `Cancelled`,
        and what the library raises, RuntimeError.
        """
        raise NotImplementedError

    def abort(self, group: Any) -> None:
        """Free whoever waits on ``group``, from any thread; no operation on it succeeds afterwards, but one of NCCL's
        may say so. Raises nothing."""
        raise NotImplementedError

    def destroy(self, group: Any) -> None:
        """Give back what ``group`` takes, some time after its abort. Raises nothing."""
        try:
            dist.destroy_process_group(group)
        except (RuntimeError, ValueError) as error:
            # What cannot be torn down, or was by a script that destroys all in the end, must not keep the others.
            get_logger().debug("megatron-recycle: a group of an old generation stays: %s", error)

    def options(self, transfers: bool, limit: timedelta) -> Any:
        """The library's options for a communicator, whose making may take ``limit``; None: its defaults. ``transfers``:
        operations on it wait for other workers' computations."""
        return None

    def ahead(self) -> AbstractContextManager[None]:
        """A block in which tensors are made, and receives into them posted, that do not wait for what the device has
        been asked to compute before."""
        return nullcontext()

    def arrived(self, tensor: torch.Tensor) -> None:
        """``tensor``, made `ahead`, has been received, and this thread's computations use it from now on."""

    def probe(self, work: Work) -> Callable[[], bool]:
        """Tells whether ``work``, which this thread has just begun, is over: nothing reads or writes its tensors any
        more, whatever has become of its members. Never blocks."""
        return work.is_completed

    def unwind(self) -> None:
        """An operation has raised in this thread: end whatever the library has left open of it there, so that it
        starts what the thread posts from now on."""

    def begin_batch(self, group: Any) -> None:
        """Begin a batch: operations that are posted on ``group`` from now on start together when it ends."""

    def end_batch(self, group: Any) -> Work | None:
        """Start the batch. The work that stands for all of it; None: each operation has its own."""
        return None

    def in_thread(self) -> Callable[[], None]:
        """A function that a thread which works for this one calls before it connects."""
        return lambda: None

    def connect(self, group: Any) -> None:
        """Do what would make the first collective on ``group`` wait for the others to come to theirs; all members come
        here at the same time. In a thread that can be left behind: nothing may be able to interrupt it."""


class Gloo(Backend):
    """torch's library for tensors in CPU memory. A pair is connected when the group is made, and any transfers of a
    pair may be under way at a time."""

    ordered, host, quick = False, True, True

    def limit(self, group: Any) -> timedelta | None:
        # Left to itself gloo gives a transfer between two workers (not a collective) the time that connecting had.
        limit: timedelta = group._get_backend(torch.device("cpu")).options._timeout
        return limit

    def wait(self, work: Work, limit: timedelta | None, wait: Wait, read: bool) -> None:
        assert limit is not None
        # gloo is in the midst neither of a send that has been read nor of a collective that is completed, so that
        # nobody has to be able to leave them.
        if read or work.is_completed():
            work.wait(limit)
        else:
            wait.aside(lambda: work.wait(limit))

    def abort(self, group: Any) -> None:
        """gloo has no abort, but it closes a pair on which a receive times out and then fails all operations of the
        group's context: so one receive with a 1 ms limit is posted per peer. Only what it is in the midst of sending
        or receiving it forgets: `wait` leaves that, a second later."""
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
    partner_cost = 0.15  # of a communicator of two (NVIDIA/nccl issue 1605); nobody has published a bare connection

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
        # torch opens a group of NCCL's for each transfer, and leaves it open where the transfer raises. All that the
        # thread posts afterwards would be noted there and never started, and its events come at once: a receive seems
        # to be over, with anything in its tensor.
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
        # A transfer that waits for its other end holds multiprocessors, which those that compute are short of.
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        options.config.max_ctas = _WAITING_CTAS
        return options

    def ahead(self) -> AbstractContextManager[None]:
        # An operation waits for the stream that is current when it is posted. What is allocated under a stream may be
        # memory that this stream alone has used before: so the tensors are made there as well.
        block: AbstractContextManager[None] = torch.cuda.stream(self._own("ahead"))
        return block

    def arrived(self, tensor: torch.Tensor) -> None:
        # So that it is not given out again, under the other stream, before this one is done with it.
        tensor.record_stream(torch.cuda.current_stream())

    def begin_batch(self, group: Any) -> None:
        group._start_coalescing(_gpu())

    def end_batch(self, group: Any) -> Work | None:
        work: Work = group._end_coalescing(_gpu())
        return work

    def in_thread(self) -> Callable[[], None]:
        gpu = _gpu()  # each thread has a current device of its own, and begins with the first
        return lambda: torch.cuda.set_device(gpu)

    def connect(self, group: Any) -> None:
        _nccl()  # which `unwind` must not be the first to miss
        # The group then has one communicator, and one queue for everything.
        group._get_backend(_gpu()).eager_connect_single_device(_gpu())

    def _over(self, work: Work) -> torch.cuda.Event:
        """The event that ``work`` is over, aborted or not. Its own wait() only makes the current stream wait, and says
        yes after an abort: so a stream of this thread's own waits for it."""
        side, over = self._own("side"), torch.cuda.Event(blocking=True)
        with torch.cuda.stream(side):
            work.wait()
            over.record(side)
        return over

    def _own(self, name: str) -> torch.cuda.Stream:
        """The stream that this thread has for this purpose."""
        if not hasattr(self._streams, name):
            setattr(self._streams, name, torch.cuda.Stream())
        stream: torch.cuda.Stream = getattr(self._streams, name)
        return stream


@functools.cache
def _nccl() -> ctypes.CDLL:
    """The NCCL that torch calls, be it a library of its own or a part of torch's. Raises UnsupportedError."""
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
"""By the name that torch has for them."""


def backend_of(group: dist.ProcessGroup) -> Backend:
    """The backend of a group that somebody else has made; an unknown one is ended as gloo's are."""
    return BACKENDS.get(group.name(), GLOO)
