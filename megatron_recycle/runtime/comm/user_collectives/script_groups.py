"""torch's process groups in a training job: the script's own collectives between two iterations are carried out here.

torch's objects stay; the methods of their class are replaced while the job trains. So groups made before, in whatever
way, are living ones. A group made later needs no member's consent: it is only a name and ranks, and nothing that could
break.
"""

from __future__ import annotations

import functools
import inspect
import pickle
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import Enum
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_recycle.errors import UnsupportedError
from megatron_recycle.runtime.comm.rendezvous import OWN
from megatron_recycle.runtime.comm.user_collectives.calls import Call, Objects
from megatron_recycle.runtime.comm.user_collectives.exchange import Group
from megatron_recycle.runtime.comm.user_collectives.torch_calls import METHODS
from megatron_recycle.runtime.setup_record import Alone, Unconnected, done

_GROUPS = 2**20
"""Limit to the groups of the same ranks that are made after one iteration."""


class Groups:
    """torch's groups, as all members of each know them: by ranks, and a number among groups of the same ranks. It is
    made of the iteration after which they are made, and their order after it: the script of a joiner may begin
    at a later iteration than the others' did.

    Args:
        after: the last iteration that the script has asked for.
    """

    def __init__(self, after: Callable[[], int]) -> None:
        self._seen: weakref.WeakKeyDictionary[Any, Group] = weakref.WeakKeyDictionary()
        self._asked, self._after = after, -1
        self._counts: Counter[tuple[int, ...]] = Counter()

    def begin(self) -> None:
        """Register the groups that were made before training."""
        self._note(-1)

    def add(self, group: dist.ProcessGroup, ranks: tuple[int, ...], after: int | None = None) -> None:
        """Register ``group``, which is made now."""
        after = self._asked() if after is None else after
        if after != self._after:
            self._after = after
            self._counts.clear()
        self._seen[group] = Group(ranks, group.rank(), (after + 1) * _GROUPS + self._counts[ranks])
        self._counts[ranks] += 1

    def _note(self, after: int | None = None) -> None:
        """Register the groups that torch has made in another way."""
        for group, name in c10d._world.pg_names.items():
            if group not in self._seen and not name.startswith(OWN):
                places = c10d._world.pg_group_ranks[group]
                self.add(group, tuple(sorted(places, key=places.__getitem__)), after)

    def known(self, group: Any) -> Group | None:
        """The registered group; None: it is the runtime's own, or destroyed."""
        if group is dist.group.WORLD:  # the first of its ranks, whichever object it is
            return Group(tuple(range(group.size())), group.rank())
        if group not in self._seen:
            self._note()
        return self._seen.get(group)


class Asks(Enum):
    """The origin of an operation on a group."""

    LIBRARY = "library"
    """The framework inside of an iteration, or any code before training: torch answers."""
    SCRIPT = "script"
    """The script between two iterations."""
    TOGETHER = "together"
    """The framework, in operations of all workers together, which are given up when a failure cuts them short."""
    LATE = "late"
    """The script of a worker that has come in, after an iteration that the others have completed."""


Stock = Callable[..., Any]

class UnderWay(Protocol):
    """A transfer between two ranks. ``done``: whether it has arrived, or left."""

    @property
    def done(self) -> bool: ...


class Job(Protocol):
    """The job, as the script's groups need it."""

    def asks(self) -> Asks:
        """The origin of operations in this thread."""

    def after(self) -> int:
        """The last iteration that the script has asked for."""

    def make(self, group: Group, call: Call) -> None:
        """Carry ``call`` out. Raises JobEnded, UnsupportedError, and, if given up, GenerationOver."""

    def recall(self, group: Group, call: Call) -> None:
        """Give ``call`` the results that the others had of it before this worker came in, as far as they are known."""

    def inside(self) -> tuple[tuple[int, ...], dist.ProcessGroup] | None:
        """The ranks of this worker's tensor-parallel parts, and their current group; None if it has one part."""

    def transfer(self, group: Group, peer: int, tensor: torch.Tensor, tag: int, sends: bool) -> UnderWay:
        """Begin to send ``tensor`` to position ``peer``, or to receive it from there. Raises JobEnded, UnsupportedError
        if that member is gone, and, if given up, GenerationOver."""

    def arrive(self, message: UnderWay) -> None:
        """Wait for ``message``. Raises as `transfer`."""


class Hollow(Unconnected):
    """A group that the script has made while the job trains."""

    def getBackendName(self) -> str:
        return "living"


class ScriptGroups:
    """Replaces the methods of torch's groups, from `install` to `close`.

    Args:
        job: carries calls out.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._put_back: list[Callable[[], None]] = []
        self._batches = threading.local()
        self._groups = Groups(job.after)
        self._inside: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()

    def install(self) -> None:
        """Replace them from now on. Call once."""
        self._groups.begin()
        for kind in (dist.ProcessGroup, Alone):
            for name in (*METHODS, "send", "recv", "recv_anysource", "_start_coalescing", "_end_coalescing"):
                if name in vars(kind):
                    self._replace(kind, name, self._method(name, getattr(kind, name)))
        # torch asks the default group for new groups, if it makes any.
        self._replace(dist.ProcessGroup, "new_group", _While(self._new_group, lambda: self._job.asks() is not
                                                             Asks.LIBRARY))
        for name, carry, late in (("broadcast_object_list", self._broadcast_objects, False),
                                  ("all_gather_object", self._all_gather_objects, False),
                                  ("gather_object", self._gather_objects, False),
                                  ("scatter_object_list", self._scatter_objects, False),
                                  ("send_object_list", self._send_objects, True),
                                  ("recv_object_list", self._receive_objects, True)):
            function = self._function(getattr(c10d, name), carry, late)
            for module in (dist, c10d):
                self._replace(module, name, function)

    def close(self) -> None:
        """Restore torch's methods."""
        for put_back in reversed(self._put_back):
            put_back()
        self._put_back.clear()

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        before = vars(owner).get(name, self)
        self._put_back.append(lambda: delattr(owner, name) if before is self else setattr(owner, name, before))
        setattr(owner, name, value)

    # ---- collectives

    def _method(self, name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        read = METHODS.get(name)

        @functools.wraps(stock)
        def method(group: dist.ProcessGroup, *given: Any, **keywords: Any) -> Any:
            asks = self._job.asks()
            if asks is Asks.LIBRARY:
                if (now := self._of_now(group)) is not group:  # perhaps of another class: on a worker that has
                    return getattr(now, name)(*given, **keywords)  # come in, the group is Alone
                return stock(group, *given, **keywords)
            if (found := self._groups.known(group)) is None or (
                    len(found.ranks) == 1 and not isinstance(group, Hollow)):
                return stock(group, *given, **keywords)
            arguments = [*given, *keywords.values()]
            if read is None:
                return self._transfer(name, functools.partial(stock, group, *given, **keywords), found, arguments)
            self._carry_out(asks, found, read(len(found.ranks), arguments))
            return done(arguments[0] if arguments and name != "barrier" else None)

        return method

    def _of_now(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """The group in use for ``group`` inside of an iteration. Tensor-parallel groups are replaced by the
        generation's own, so that aborting it frees a part blocked on a dead sibling. A backward may name an earlier
        generation's group, in which its forward was run."""
        inside = self._job.inside()
        if inside is None:
            return group
        self._inside.add(inside[1])
        if group in self._inside:
            return inside[1]
        found = self._groups.known(group)
        return inside[1] if found is not None and found.ranks == inside[0] else group

    def _carry_out(self, asks: Asks, group: Group, call: Call) -> None:
        if asks is Asks.LATE:
            self._job.recall(group, call)
        else:
            self._job.make(group, call)

    # ---- between two ranks

    def _transfer(self, name: str, stock: Callable[[], Any], found: Group,
                  given: Sequence[Any]) -> Any:
        if name == "_start_coalescing":
            self._batches.open = []
            return None
        if name == "_end_coalescing":
            works, self._batches.open = self._batches.open, None
            return _All(works)
        if name == "recv_anysource":
            raise UnsupportedError("recv() from any rank is not there between two iterations: name the sender")
        tensor, peer, tag = given[0][0], given[1], given[2] if len(given) > 2 else 0
        if peer == found.me:
            return stock()
        work = _Transfer(self._job, self._job.transfer(found, peer, tensor, tag, name == "send"))
        if (batch := getattr(self._batches, "open", None)) is not None:
            batch.append(work)
        return work

    def _send_objects(self, asks: Asks, group: Group, dst: int | None = None, group_dst: int | None = None,
                      **given: Any) -> None:
        self._exchange_objects(group, _position(group, dst, group_dst), sends=True)

    def _receive_objects(self, asks: Asks, group: Group, src: int | None = None, group_src: int | None = None,
                         **given: Any) -> int:
        position = _position(group, src, group_src)
        self._exchange_objects(group, position, sends=False)
        return group.ranks[position]

    def _exchange_objects(self, group: Group, position: int, sends: bool) -> None:
        for _ in range(2):  # torch sends their length first
            self._job.transfer(group, position, torch.empty(0), 0, sends)

    # ---- groups

    def _new_group(self, ranks: Sequence[int], timeout: timedelta | None = None, pg_options: Any = None,
                   group_name: str = "", group_desc: str | None = None) -> dist.ProcessGroup | None:
        """Stands in for torch's creation of a group, which would connect all members."""
        me = dist.get_rank()
        if me not in ranks:
            return None
        made = Hollow(list(ranks).index(me), len(ranks), group_name)
        self._groups.add(made, tuple(ranks))
        return made

    # ---- objects: torch exchanges their sizes first, in a collective of its own; a member may die in between

    def _function(self, stock: Stock, carry: Callable[..., Any], late: bool) -> Stock:
        """A replacement of torch's function ``stock``: calls ``carry``, with all arguments by name, for living groups,
        and if ``late`` only on a worker that has come in (`Asks.LATE`)."""
        signature = inspect.signature(stock)

        @functools.wraps(stock)
        def function(*given: Any, **keywords: Any) -> Any:
            named = signature.bind(*given, **keywords)
            named.apply_defaults()
            return self._called(carry, late, functools.partial(stock, *given, **keywords), **named.arguments)

        return function

    def _called(self, carry: Callable[..., Any], late: bool, stock: Callable[[], Any], group: Any = None,
                **given: Any) -> Any:
        asks, found = self._asks(group)
        if found is None or (late and asks is not Asks.LATE):
            return stock()
        return carry(asks, found, **given)

    def _broadcast_objects(self, asks: Asks, group: Group, object_list: list[Any], src: int | None = None,
                           group_src: int | None = None, **given: Any) -> None:
        root = _position(group, src, group_src)
        call = Objects("broadcast_object_list", pickle.dumps(list(object_list)), source=root)
        self._carry_out(asks, group, call)
        if call.found and (group.me != root or asks is Asks.LATE):  # LATE: another member has sent in its place
            object_list[:] = pickle.loads(call.found[root])  # noqa: S301 - as torch does

    def _all_gather_objects(self, asks: Asks, group: Group, object_list: list[Any], obj: Any, **given: Any) -> None:
        call = Objects("all_gather_object", pickle.dumps(obj))
        self._carry_out(asks, group, call)
        object_list[:len(group.ranks)] = map(pickle.loads, call.found)

    def _gather_objects(self, asks: Asks, group: Group, obj: Any, object_gather_list: list[Any] | None = None,
                        dst: int | None = None, group_dst: int | None = None, **given: Any) -> None:
        call = Objects("gather_object", pickle.dumps(obj), sink=_position(group, dst, group_dst))
        self._carry_out(asks, group, call)
        if object_gather_list is not None and call.found:
            object_gather_list[:len(group.ranks)] = map(pickle.loads, call.found)

    def _scatter_objects(self, asks: Asks, group: Group, scatter_object_output_list: list[Any],
                         scatter_object_input_list: list[Any] | None = None, src: int | None = None,
                         group_src: int | None = None, **given: Any) -> None:
        root = _position(group, src, group_src)
        own = [pickle.dumps(each) for each in scatter_object_input_list or ()] if group.me == root else []
        call = Objects("scatter_object_list", own, source=root)
        self._carry_out(asks, group, call)
        if call.found and call.found[root]:
            scatter_object_output_list[0] = pickle.loads(call.found[root])  # noqa: S301 - as torch does

    def _asks(self, group: Any) -> tuple[Asks, Group | None]:
        """The origin of the operation, and the living group; None: torch's own."""
        asks = self._job.asks()
        if asks is Asks.LIBRARY or group is dist.GroupMember.NON_GROUP_MEMBER:
            return asks, None
        found = self._groups.known(group or c10d._get_default_group())
        return asks, None if found is None or len(found.ranks) == 1 else found


class _While:
    """A class attribute, a method of its objects, that exists as long as ``wanted()``."""

    def __init__(self, method: Callable[..., Any], wanted: Callable[[], bool]) -> None:
        self._method, self._wanted = method, wanted

    def __get__(self, owner: Any, kind: Any = None) -> Callable[..., Any]:
        if not self._wanted():
            raise AttributeError("new_group")
        return self._method


class _Transfer(dist.Work):
    """A tensor under way between two ranks; a received one is there once this has been waited for."""

    def __init__(self, job: Job, message: UnderWay) -> None:
        super().__init__()
        self._job, self._message = job, message

    def is_completed(self) -> bool:
        return self._message.done

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._job.arrive(self._message)
        return True


class _All(dist.Work):
    """Several works as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait()
        return True


def _position(group: Group, rank: int | None, position: int | None) -> int:
    return position if position is not None else group.ranks.index(rank or 0)
