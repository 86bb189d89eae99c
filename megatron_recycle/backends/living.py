"""The script's own process groups in a job: how they reach the session's worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch.overrides import _get_current_function_mode_stack

from megatron_recycle.runtime.comm.living.calls import Call
from megatron_recycle.runtime.comm.living.exchange import Group
from megatron_recycle.runtime.comm.living.script_groups import Asks, UnderWay
from megatron_recycle.runtime.transfers import Message
from megatron_recycle.runtime.worker import StageWorker


class ScriptSession(Protocol):
    """A session, as seen from here."""

    iteration: int
    shares: bool

    @property
    def started(self) -> bool: ...

    @property
    def in_thread(self) -> bool: ...

    @property
    def in_script(self) -> bool: ...

    @property
    def catches_up(self) -> bool: ...

    @property
    def worker(self) -> StageWorker: ...


class LivingGroups:
    """Carries out what the script asks of its groups, from its first iteration on.

    Args:
        session: this process's.
        at_work: a block in which the runtime is.
    """

    def __init__(self, session: ScriptSession, at_work: Callable[[], AbstractContextManager[None]]) -> None:
        self._session, self._at_work = session, at_work
        self._modes = tuple(_get_current_function_mode_stack())

    @contextmanager
    def _as_in_training(self) -> Iterator[None]:
        """torch takes a function mode of the script away while that handles the call of a collective, and the runtime
        may train in it: a step or an iteration is made again with all modes."""
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

    def inside(self) -> tuple[tuple[int, ...], dist.ProcessGroup] | None:
        """As in `script_groups.Job`."""
        site = self._session.worker.site
        last = site.current.last
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
        once = not self._session.in_script  # else it is waited for in the midst of an iteration, say
        with self._at_work(), self._as_in_training():
            assert isinstance(message, Message)
            self._session.worker.arrive(message, once)
