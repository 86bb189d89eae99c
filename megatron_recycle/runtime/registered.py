"""Registered state: state that a script keeps beside the model, such as an average of the weights.

A joiner's script passes over the iterations that the job has behind it, with weights that stay the same. So its own
state is wrong by then, and it gets a peer's. Such a state belongs to a place in the script. A peer that has updated it
for an iteration already, or is updating it, must not give it to a worker whose script still has that update to do. So
it is given where both scripts are inside the same call. The first iteration that the joiner trains is such a call,
since no worker trains it alone. Where a failure has left scripts at different places, it waits for the next such
call.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from megatron_recycle.errors import ConfigError, TransferError, UnsupportedError
from megatron_recycle.observe.log import get_logger
from megatron_recycle.plan.value import Value
from megatron_recycle.runtime.comm.comm import Comm
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.reduction import count
from megatron_recycle.runtime.copies import StateCopy, receive, send

Place = tuple[int, int]
"""A joint call of all workers' scripts: the iteration that it trains, or precedes, and the number of the pass
(`Standing.passes`), 0 where it trains."""
_BETWEEN = (-1, -1)


@runtime_checkable
class Stateful(Protocol):
    """An object that can be registered, such as a torch module."""

    def state_dict(self) -> Any:
        """Numbers, text, None, lists, tuples, dicts and tensors."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take over the `state_dict` of another object."""


THINGS: dict[str, Stateful] = {}
"""Objects that this process's script has registered, by name."""


def register(name: str, stateful: Any, things: MutableMapping[str, Stateful] = THINGS) -> None:
    """Register ``stateful``. Raises ConfigError, and UnsupportedError if its state cannot be sent."""
    if not isinstance(stateful, Stateful):
        raise ConfigError(f"register_state({name!r}): a {type(stateful).__qualname__} has no state_dict() and "
                          "load_state_dict(); give an object that has both")
    if things.get(name, stateful) is not stateful:
        raise ConfigError(f"register_state({name!r}): another object is registered by that name; give each its own")
    if found := _unsendable(stateful.state_dict(), "state_dict()"):
        raise UnsupportedError(f"register_state({name!r}): {found}, which cannot be sent to a worker that comes in: "
                               "keep numbers, text, None, lists, tuples, dicts and tensors in it")
    things[name] = stateful


class _ObjectState(Value, frozen=True):
    """The state of an object, or why it cannot be sent."""

    why: str | None
    state: Any


@dataclass
class Registered:
    """One worker's part in giving registered state to joiners.

    Attributes:
        things: its own script's objects, by name.
        lacks: whether it has come in, and has no peer's state yet.
        owed: whether a worker of its stage lacks that.
    """

    things: MutableMapping[str, Stateful] = field(default_factory=dict)
    lacks: bool = False
    owed: bool = False
    _place: Place = _BETWEEN

    @contextmanager
    def inside(self, place: Place) -> Iterator[None]:
        """A block in which the script is inside this call."""
        self._place = place
        try:
            yield
        finally:
            self._place = _BETWEEN

    def look(self, groups: Groups) -> None:
        """Find out whether any peer lacks registered state; all peers together. Raises GenerationOver."""
        (lacking,) = count(groups.stage_control, self.lacks)
        self.owed = lacking > 0

    def share(self, groups: Groups, device: torch.device) -> str | None:
        """Give registered state to peers that lack it, or get it, where scripts are at the same place; all peers
        together, perhaps inside different calls. Returns why this worker cannot take it. Raises GenerationOver.

        Args:
            device: of this worker, for tensors that are not in a peer's CPU memory.
        """
        if not self.owed:
            return None
        comm = groups.stage_control
        table = torch.zeros(comm.size, 3, dtype=torch.float64)
        table[comm.rank] = torch.tensor([self.lacks, *self._place], dtype=torch.float64)
        comm.sum(table).wait()
        rows: list[tuple[int, ...]] = [tuple(map(int, row)) for row in table.tolist()]
        have = [rank for rank, (lacks, *_) in enumerate(rows) if not lacks]
        taking = {rank: next((one for one in have if rows[one][1:] == row[1:]), None)
                  for rank, row in enumerate(rows) if row[0] and row[1:] != _BETWEEN}
        self.owed = bool(have) and len([one for one in taking.values() if one is not None]) < len(rows) - len(have)
        if not have:
            self._lost()
        reason, peers = None, groups.peers(groups.me.stage)
        for taker, giver in taking.items():
            if giver == comm.rank:
                send(groups.control, groups.control_ranks[peers[taker]], self._copy())
            elif giver is not None and taker == comm.rank:
                reason = self._take(groups.control, groups.control_ranks[peers[giver]], device)
        return reason

    def _copy(self) -> StateCopy:
        """The copy to send. The giver does not fail: the copy tells the taker why a state is missing."""
        found: dict[str, _ObjectState] = {}
        for name, stateful in self.things.items():
            try:
                state = stateful.state_dict()
                reason = _unsendable(state, "its state_dict()")
            except Exception as error:  # noqa: BLE001 - of the script's own code
                state, reason = None, f"its state_dict() fails with {type(error).__name__}: {error}"
            found[name] = _ObjectState(reason, None if reason else _plain(state))
        return StateCopy.of({}, found)

    def _take(self, comm: Comm, giver: int, device: torch.device) -> str | None:
        try:
            _, found = receive(comm, giver).open(device)
        except TransferError as error:
            return str(error)
        if found.keys() != self.things.keys():
            return (f"its script has registered {_names(self.things)}, and its peers' {_names(found)} "
                    "(register_state): what is registered must not depend on when a worker was started")
        for name, one in found.items():
            received = _ObjectState.from_json(one)
            if received.why:
                return f"what its peers' scripts have registered as {name!r} cannot be sent: {received.why}"
            try:
                self.things[name].load_state_dict(received.state)
            except Exception as error:  # noqa: BLE001 - of the script's own code
                return (f"load_state_dict() of what its script has registered as {name!r} fails with "
                        f"{type(error).__name__}: {error}")
        self.lacks = False
        if found:
            get_logger().info("megatron-recycle: this worker has its peers' registered state now: %s", _names(found))
        return None

    def _lost(self) -> None:
        """All workers of the stage have come in: no worker has the state."""
        self.lacks = False
        if self.things:
            get_logger().error(
                "megatron-recycle: REGISTERED STATE IS LOST: all workers of this stage are new, and nobody has what "
                "their scripts had registered (%s). It is what the script has made here of weights that stayed the "
                "same: load it from a checkpoint of your own, or begin it anew", _names(self.things))


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _plain(value: Any) -> Any:
    """``value`` with plain dicts in place of the OrderedDicts of torch's modules: plain dicts keep an order, too."""
    if isinstance(value, dict) and type(value) in (dict, OrderedDict):
        return {key: _plain(item) for key, item in value.items()}
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


def _unsendable(value: Any, path: str) -> str | None:
    """The first part of ``value`` that cannot be sent, with its place (``path``); None: all of it can."""
    if isinstance(value, torch.Tensor):
        plain = type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided
        return None if plain and not (value.is_quantized or value.is_meta or value.is_complex()) else (
            f"{path} is a {'quantized ' * value.is_quantized}tensor of a kind of its own "
            f"({type(value).__qualname__}, {value.dtype}, {value.layout}, {value.device})")
    if type(value) in (dict, OrderedDict, Counter):
        keys = (found for key in value if (found := _unsendable(key, f"a key of {path}")))
        return next(keys, None) or next((found for key, item in value.items()
                                         if (found := _unsendable(item, f"{path}[{key!r}]"))), None)
    if type(value) in (list, tuple):
        return next((found for number, item in enumerate(value)
                     if (found := _unsendable(item, f"{path}[{number}]"))), None)
    if value is None or type(value) in (bool, int, float, str):
        return None
    return f"{path} is a {type(value).__module__}.{type(value).__qualname__}"
