"""Operations begun on a communicator, as its one member here has begun them: whether it may go on after a failure.

A failure interrupts workers at different points. A communicator that has lost no member can only go on if its members
agree on the operations begun there: then all pending operations end by themselves, and each member's next operation
meets those of the others. Otherwise a sum of one generation would silently meet another generation's.
"""

from __future__ import annotations

import threading
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from types import TracebackType

import torch

from megatron_recycle.runtime.comm.cancellation import Cancelled


class Ledger:
    """The ledger of one library's communicator, through all generations that use it.

    Attributes:
        lock: held while an operation is begun.
        lent: whether the library's communicator was given to other code, which may have begun anything there.
        gone: whether it is unusable: an operation has failed, or it has been aborted.
        met: the pairs of ranks that are connected, where a library connects pairs (`Backend.lazy`).
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.lent = self.gone = False
        self.met = frozenset[tuple[int, int]]()
        self._sums = 0
        self._sent, self._received = Counter[int](), Counter[int]()
        self._open = 0
        self._watched = deque[tuple[Callable[[], bool], Sequence[torch.Tensor]]]()

    def asking(self) -> _Asking:
        """A block in which the library is called: a failure there makes the communicator unusable."""
        return _Asking(self)

    def begin(self, kind: str, peer: int) -> None:
        """A sum, or a transfer to or from rank ``peer``, has been begun; under the lock."""
        if kind == "sum":
            self._sums += 1
        else:
            (self._sent if kind == "send" else self._received)[peer] += 1
            self._open += 1

    def over(self) -> None:
        """A transfer is over, and was waited for."""
        with self.lock:
            self._open -= 1

    def watch(self, over: Callable[[], bool], tensors: Sequence[torch.Tensor]) -> None:
        """An operation on ``tensors`` has been begun, after all before it; under the lock. The tensors are held until
        it is ``over()`` (`Backend.probe`): after a failure NCCL may still write to them when all other references are
        gone, and the next generation would get their memory."""
        while self._watched and self._watched[0][0]():
            self._watched.popleft()
        self._watched.append((over, tensors))

    @property
    def busy(self) -> bool:
        """Whether a thread is inside the library right now, beginning an operation."""
        if not self.lock.acquire(blocking=False):
            return True
        self.lock.release()
        return False

    @property
    def idle(self) -> bool:
        """Whether all watched operations are over, and no thread is beginning one."""
        return not self.busy and all(over() for over, _ in [*self._watched])

    def begun(self, size: int, rests: bool) -> str | None:
        """A text of the operations begun among ``size`` members, for `agree`; None: the communicator cannot go on.
        ``rests``: it is known that nothing is under way. Otherwise transfers have to be over, since perhaps only one
        end has begun them; sums that all members have begun end by themselves."""
        if self.gone or (not rests and (self.lent or self._open)):
            return None
        met = zlib.crc32(repr(sorted(self.met)).encode())
        return "/".join([f"{self._sums} {met}", *(",".join(str(counts[rank]) for rank in range(size))
                                                  for counts in (self._sent, self._received))])


class _Asking:
    """As `Ledger.asking`; a class, since it runs for every transfer and must be cheap."""

    __slots__ = ("_ledger",)

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if error is not None and not isinstance(error, Cancelled):
            self._ledger.gone = True


def agree(begun: Sequence[str]) -> bool:
    """Whether all members of a communicator, by rank, have begun the same operations (as many sums, each transfer at
    both ends) and have connected the same pairs."""
    sums, sent, received = zip(*(_read(text) for text in begun), strict=True)
    ranks = range(len(begun))
    return len(set(sums)) == 1 and all(sent[one][other] == received[other][one] for one in ranks for other in ranks)


def _read(text: str) -> tuple[str, list[int], list[int]]:
    sums, sent, received = text.split("/")
    return sums, [int(count) for count in sent.split(",")], [int(count) for count in received.split(",")]
