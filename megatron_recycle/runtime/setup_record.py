"""The record of a process's set-up: the results of its collectives, for a process that joins later.

A script broadcasts a run's name, gathers lengths, loads a checkpoint. A process that joins the running job goes through
the same set-up alone. So every process of the start records, in order, the results of its collectives
(`SetUpRecorder`), and the coordinator keeps the record of each rank. A joiner gets its rank's record, and its groups
answer from it (`SetUpReplay`, `Alone`): with the same values, or, where its set-up differs, with a SetUpError that
names the collective. They never answer with a tensor's old content.
"""

from __future__ import annotations

import base64
import gc
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from msgspec import field
from msgspec.structs import replace
from torch import nn
from torch._C import _distributed_c10d as c10d
from torch.futures import Future

from megatron_recycle.errors import SetUpError
from megatron_recycle.plan.value import Value

Record = Sequence[Mapping[str, Any]]
"""The results that a process received, for JSON."""

ALONE = "alone"
"""torch's name of the backend that connects to no other process."""

_INFORMING = {
    "broadcast": "broadcast", "allreduce": "all_reduce", "allreduce_coalesced": "all_reduce_coalesced",
    "reduce": "reduce", "allgather": "all_gather", "_allgather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor", "allgather_coalesced": "all_gather_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor", "gather": "gather", "scatter": "scatter",
    "all_gather_single_coalesced": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter", "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor",
    "alltoall": "all_to_all", "alltoall_base": "all_to_all_single", "all_to_all_single": "all_to_all_single",
    "recv": "recv", "recv_anysource": "recv",
}
"""Methods of a process group that return data -> their names for users. The first argument is the output."""
_IN_PLACE = ("broadcast", "allreduce", "allreduce_coalesced", "reduce")
_RECEIVES = ("recv", "recv_anysource")
_FLAG = 64
"""Bytes up to which a value is kept without checking whether it is a parameter."""
_LONGEST = 64 * 1024
"""Bytes of the longest value that is kept."""
_MOST = 512 * 1024
"""Bytes that a whole record may take: the coordinator keeps one for each rank."""
_OF_ENTRY = 100
"""Bytes of an entry beside its value."""
_REMEDY = ("a worker cannot come back to this job: let the script do the same from its start to its first iteration "
           "whenever it is started, and pass parameters only, or short values, there")


class Entry(Value, frozen=True, omit_defaults=True):
    """One result that a process received: from a collective over ``group`` in ``tensors``, or else from `SetUp.note`.
    ``lost``: why its ``value`` is not known."""

    what: str
    group: str = ""
    tensors: list[list[Any]] = field(default_factory=list)
    value: Any = None
    lost: str = ""

    def __str__(self) -> str:
        kinds = ", ".join(" x ".join(map(str, kind)) for kind in self.tensors)
        return f"torch.distributed.{self.what}({kinds or 'nothing'}) over {self.group}" if self.group else self.what


class SetUp(Protocol):
    """The time until a process takes part in training: records results, or replays them."""

    def apart(self) -> AbstractContextManager[None]:
        """A block whose results no joiner needs."""

    def note(self, name: str, find: Callable[[], Any]) -> Any:
        """The result of ``find`` (anything JSON can hold); in a process that joins, the result at the job's start."""

    def close(self) -> Record:
        """Training begins; returns the record, in a process of the start. Raises SetUpError."""


class _Apart:
    """The common part of both sides of a record.

    ``_hidden``: how many blocks of `apart` this process is in.
    """

    def __init__(self) -> None:
        self._hidden = 0

    @contextmanager
    def apart(self) -> Iterator[None]:
        self._hidden += 1
        try:
            yield
        finally:
            self._hidden -= 1


class SetUpRecorder(_Apart):
    """Records the results of this process's collectives, from `begin` to `close`.

    Parameters are left out: a joiner gets them from its peers. Once the record is too long, recording ends: training
    goes on all the same, and joiners are refused.
    """

    def __init__(self) -> None:
        super().__init__()
        self._entries: list[Entry] = []
        self._bytes = 0
        self._thread = threading.get_ident()
        self._stock: dict[str, Any] = {}
        self._parameters: dict[int, weakref.ref[nn.Parameter]] = {}

    def begin(self) -> SetUpRecorder:
        methods = vars(dist.ProcessGroup)
        for name in [name for name in _INFORMING if name in methods]:
            self._stock[name] = methods[name]
            setattr(dist.ProcessGroup, name, self._recording(name, getattr(dist.ProcessGroup, name)))
        return self

    def close(self) -> Record:
        for name, method in self._stock.items():
            setattr(dist.ProcessGroup, name, method)
        self._stock = {}
        return [entry.to_json() for entry in self._entries]

    def note(self, name: str, find: Callable[[], Any]) -> Any:
        value = find()
        self._add(Entry(name, value=value), 0)
        return value

    def _recording(self, name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        def method(group: dist.ProcessGroup, *arguments: Any, **keywords: Any) -> Any:
            work = stock(group, *arguments, **keywords)
            if group.size() > 1 and not self._hidden and self._stock and threading.get_ident() == self._thread:
                into, *_ = (*arguments, *keywords.values())
                return self._keep(name, group, list(_tensors(into)), work)
            return work

        setattr(method, _RECORDER, self)
        return method

    def _keep(self, name: str, group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], work: Any) -> Any:
        """Record the result, once the script has waited for it. Returns ``work``, or its stand-in."""
        size = sum(tensor.nbytes for tensor in tensors)
        if size > _FLAG and self._are_parameters(tensors):
            return work
        entry = _described(name, group, tensors)
        if size > _LONGEST:
            self._add(replace(entry, lost=f"its {size} bytes are more than {_LONGEST}"), 0)
            return work
        if work is None and name not in _RECEIVES:  # NCCL: it is done, in the order of its stream
            self._add(replace(entry, value=_content(tensors)), size)
            return work
        entry = replace(entry, lost="the script had not waited for it when training began")
        self._add(entry, size)
        return None if work is None else _Awaited(work, lambda: self._know(entry, tensors))

    def _know(self, entry: Entry, tensors: Sequence[torch.Tensor]) -> None:
        """Fill in the value of an ``entry`` that was lost, if it is still kept."""
        for place, one in enumerate(self._entries):
            if one is entry:
                self._entries[place] = replace(entry, value=_content(tensors), lost="")

    def _are_parameters(self, tensors: Sequence[torch.Tensor]) -> bool:
        places = _memory(tensors)
        if not all(map(self._is_parameter, places)):  # finding all parameters takes long
            self._parameters = {place: weakref.ref(one) for one in _parameters() for place in _memory([one])}
        return all(map(self._is_parameter, places))

    def _is_parameter(self, place: int) -> bool:
        found = self._parameters[place]() if place in self._parameters else None
        return found is not None and _memory([found]) == {place}

    def _add(self, entry: Entry, size: int) -> None:
        if self._bytes > _MOST:
            return
        self._bytes += size + _OF_ENTRY
        if self._bytes <= _MOST:
            self._entries.append(entry)
        else:
            self._entries.append(Entry("more than was kept"))
            self.close()


_RECORDER = "recycle_recorder"


def recorder() -> SetUpRecorder:
    """The recorder of this process, recording; created on first use."""
    found = getattr(dist.ProcessGroup.broadcast, _RECORDER, None)
    return SetUpRecorder().begin() if found is None else found


class _Awaited:
    """A torch Work that calls ``on_done`` when it has been waited for."""

    def __init__(self, work: Any, on_done: Callable[[], None]) -> None:
        self._work = work
        self._on_done = on_done

    def wait(self, *arguments: Any, **keywords: Any) -> Any:
        done = self._work.wait(*arguments, **keywords)
        self._on_done()
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class SetUpReplay(_Apart):
    """Answers a joiner's set-up from ``record``, the results of the process of its rank at the start."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = [Entry.from_json(entry) for entry in record]
        self._next = 0
        self._closed = False

    def close(self) -> Record:
        if self._next < len(self._record) and not self._closed:
            raise SetUpError(f"this worker's set-up has left out what the job's own did: {self._expected()}; {_REMEDY}")
        self._closed = True
        return []

    @property
    def closed(self) -> bool:
        """Whether this process has asked to come in."""
        return self._closed

    def note(self, name: str, find: Callable[[], Any]) -> Any:
        return self._take(Entry(name)).value

    def answer(self, name: str, group: dist.ProcessGroup, tensors: Sequence[torch.Tensor]) -> None:
        """Fill ``tensors`` with the collective's result at the start. Raises SetUpError."""
        if self._hidden:
            return
        asked = _described(name, group, tensors)
        if self._closed:
            raise SetUpError(f"{asked} in a group that this worker's script made before it came in, which "
                             "talks to nobody: the other members have another one. Use torch.distributed's default "
                             "group, which is a new one once all workers are there")
        if sum(tensor.nbytes for tensor in tensors) > _FLAG and _memory(tensors) <= _memory(_parameters()):
            return  # peers send parameters
        entry = self._take(asked)
        if entry.lost:
            raise SetUpError(f"nobody knows any more what {asked} brought at the start: {entry.lost}; {_REMEDY}")
        content = torch.frombuffer(bytearray(base64.b64decode(entry.value)) or bytearray(1), dtype=torch.uint8)
        start = 0
        with torch.no_grad():
            for tensor in tensors:
                part = content[start:start + tensor.nbytes].clone().view(tensor.dtype)
                tensor.copy_(part.reshape(tensor.shape))
                start += tensor.nbytes

    def _take(self, asked: Entry) -> Entry:
        if self._next == len(self._record) or replace(self._record[self._next], value=None, lost="") != asked:
            raise SetUpError(f"nobody can answer {asked}: at this point of its set-up the job did {self._expected()}; "
                             f"{_REMEDY}")
        self._next += 1
        return self._record[self._next - 1]

    def _expected(self) -> str:
        return str(self._record[self._next]) if self._next < len(self._record) else "nothing of the kind any more"


class Unconnected(dist.ProcessGroup):
    """A group that torch knows, and that has no connections."""

    def __init__(self, rank: int, size: int, name: str = "") -> None:
        super().__init__(rank, size)
        self._called = name

    def _set_group_name(self, name: str) -> None:
        self._called = name

    @property
    def group_name(self) -> str:
        """torch's name of the group, by which device meshes find it."""
        return self._called

    @property
    def _device_types(self) -> list[torch.device]:
        """As torch's own groups have them, for its functions that branch on them."""
        return [torch.device(kind.partition(":")[0]) for kind in dist.get_backend_config(self).split(",")]


class Alone(Unconnected):
    """A group whose other members, if it has any, are training: collectives are answered by ``replay``, barriers pass,
    sends go nowhere."""

    def __init__(self, replay: SetUpReplay, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.replay = replay

    def getBackendName(self) -> str:
        return ALONE

    def barrier(self, *arguments: Any, **keywords: Any) -> dist.Work:
        return done()

    def monitored_barrier(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def send(self, *arguments: Any, **keywords: Any) -> dist.Work:
        return done()


def _answering(name: str) -> Callable[..., dist.Work]:
    def method(self: Alone, *arguments: Any, **keywords: Any) -> dist.Work:
        into, *rest = (*arguments, *keywords.values())
        if self.size() > 1:
            self.replay.answer(name, self, list(_tensors(into)))
        elif name not in _IN_PLACE:
            for tensor, own in zip(_tensors(into), _tensors(rest[0]), strict=True):
                tensor.copy_(own.reshape(tensor.shape))
        return done(into)

    return method


for _name in _INFORMING:
    setattr(Alone, _name, _answering(_name))


def answer_from(replay: SetUpReplay) -> None:
    """Make ALONE a backend of torch whose groups are answered by ``replay``."""
    dist.Backend.register_backend(
        ALONE, lambda common, options: Alone(replay, common.group_rank, common.group_size), extended_api=True,
        devices=["cpu", "cuda"])


def done(result: Any = None) -> dist.Work:
    """The work of a completed operation."""
    future: Future[Any] = Future()
    future.set_result(result)
    make: Any = getattr(c10d, "_create_work_from_future")  # noqa: B009 - torch's stubs lack it
    work: dist.Work = make(future)
    return work


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _described(name: str, group: dist.ProcessGroup, tensors: Sequence[torch.Tensor]) -> Entry:
    ranks = dist.get_process_group_ranks(group)
    kinds: list[list[Any]] = [[list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for tensor in tensors]
    if len(kinds) > 1 and all(kind == kinds[0] for kind in kinds):
        kinds = [[len(kinds), *kinds[0]]]
    return Entry(_INFORMING[name], f"{len(ranks)} ranks ({zlib.crc32(repr(ranks).encode()):08x})", kinds)


def _content(tensors: Sequence[torch.Tensor]) -> str:
    return base64.b64encode(b"".join(_bytes_of(tensor).cpu().numpy().tobytes() for tensor in tensors)).decode()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _memory(tensors: Sequence[torch.Tensor]) -> set[int]:
    """Addresses of the memory of ``tensors``; a view has its base's."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _parameters() -> list[nn.Parameter]:
    """All parameters alive in this process."""
    return [value for value in gc.get_objects() if issubclass(type(value), nn.Parameter)]
