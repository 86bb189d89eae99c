"""Standalone set-up: a process that joins a running job builds its model and engine while the others train."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_recycle.control import ask_record
from megatron_recycle.environment import JOINING, Launched
from megatron_recycle.errors import ConfigError, UnsupportedError
from megatron_recycle.runtime.comm.backend import BACKENDS
from megatron_recycle.runtime.comm.rendezvous import OWN
from megatron_recycle.runtime.setup_record import ALONE, Alone, SetUp, SetUpReplay, answer_from, recorder


def is_joining() -> bool:
    """Whether this process is to join a running job."""
    return Launched.read().joining


def set_up() -> SetUp:
    """Record others' answers to this process until training begins, for a process that joins later. A joiner of a
    running job gets the recorded answers of its rank instead."""
    return stand_alone() if is_joining() else recorder()


def stand_alone() -> SetUpReplay:
    """Let this process build its model and its engine without peers, which are in the middle of training.

    torch's default group becomes one without communication, and so do all groups of the script. They have the names of
    the backends that it asks for, on which scripts and libraries branch. The script's own `init_process_group()` only
    gives that name, and turns `is_initialized()` to true. The record of the job's start, which the coordinator keeps,
    answers their collectives. Needs `recycle run` as launcher, and RANK and WORLD_SIZE in the environment.

    Raises:
        JobEnded: the job is over, or its coordinator does not answer.
        ConfigError: this process was not started by `recycle run`.
    """
    if isinstance(dist.init_process_group, _AlreadyThere):
        return dist.init_process_group.replay
    launched = Launched.read()
    if launched.control is None or launched.rank is None or launched.size is None:
        raise ConfigError(f"{JOINING} is set, but not by `recycle run`, which alone starts processes that join a "
                          "running job: unset it")
    replay = SetUpReplay(ask_record(launched.control, launched.token, launched.rank))
    answer_from(replay)
    os.environ.pop("TORCH_DIST_INIT_BARRIER", None)  # torch's groups would wait for the others at their store
    dist.init_process_group(ALONE, store=dist.HashStore(), rank=launched.rank, world_size=launched.size)
    dist.init_process_group = begun = _AlreadyThere(replay)
    dist.is_initialized = begun.is_initialized  # a script may branch on it, before and after its own call
    c10d._new_process_group_helper = functools.partial(_stand_in, c10d._new_process_group_helper)
    dist.broadcast_object_list = c10d.broadcast_object_list = functools.partial(_receive_objects,
                                                                               dist.broadcast_object_list)
    return replay


def came_to_nothing() -> str | None:
    """The error message for a script that has ended before its process, started to join a running job, asked to be
    admitted; None if all is well."""
    begun = dist.init_process_group
    if not isinstance(begun, _AlreadyThere) or begun.replay.closed:
        return None
    return ("this process was to join a running job, but its script has come to its end without training: it must "
            "reach its first iteration as the job's own workers did, with the same arguments. The job goes on without "
            "it")


class _AlreadyThere:
    """In place of `torch.distributed.init_process_group`."""

    def __init__(self, replay: SetUpReplay) -> None:
        self.replay = replay
        self._called = False

    def __call__(self, backend: str | None = None, *args: Any, device_id: torch.device | int | None = None,
                 **keywords: Any) -> None:
        if backend is None and isinstance(device_id, torch.device):
            backend = c10d.Backend.default_device_backend_map.get(device_id.type)
        _name(c10d._get_default_group(), backend or c10d.Backend.UNDEFINED)
        self._called = True

    def is_initialized(self) -> bool:
        """In place of `torch.distributed.is_initialized`."""
        return self._called and c10d.is_initialized()


def _stand_in(stock: Callable[..., Any], size: int, rank: int, ranks: Any, backend: str, store: dist.Store,
              group_name: Any, **keywords: Any) -> Any:
    """In place of torch's own maker of groups: a real backend would look for peers, which come only once this process
    has been admitted."""
    if str(group_name).startswith(OWN):
        return stock(size, rank, ranks, backend, store, group_name, **keywords)
    group, store = stock(size, rank, ranks, ALONE, store, group_name, **{**keywords, "backend_options": None})
    if isinstance(group, Alone):
        _name(group, backend)
    return group, store


def _name(group: dist.ProcessGroup, backend: str) -> None:
    """Let torch know ``group`` by the name of this ``backend``."""
    name = c10d.Backend(backend)
    c10d._world.pg_map[group] = (name, c10d._world.pg_map[group][1])
    c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(name))


def _receive_objects(stock: Callable[..., Any], object_list: list[Any], src: int | None = None, group: Any = None,
                     device: Any = None, group_src: int | None = None, **keywords: Any) -> None:
    """In place of `torch.distributed.broadcast_object_list`. A joiner of the sender's rank receives: a sender would
    keep its own objects, and the joiner needs those of the job's start (another run's name would be wrong)."""
    used_group = group or dist.group.WORLD
    others = [rank for rank in dist.get_process_group_ranks(used_group) if rank != dist.get_rank()]
    if isinstance(used_group, Alone) and others and not used_group.replay.closed:
        src, group_src = others[0], None
    stock(object_list, src=src, group=group, device=device, group_src=group_src, **keywords)


def backend_for(device: torch.device) -> str:
    """Name of the library of the training's groups: that of torch's default group for ``device``. Raises
    UnsupportedError if this plugin cannot speak to it."""
    backend = dist.get_backend()
    # A default group made without a backend name, or with several, has one for each kind of device.
    name = backend if backend in BACKENDS else c10d.BackendConfig(backend).get_device_backend_map().get(device.type)
    if name not in BACKENDS:
        raise UnsupportedError(f"torch's default group has {name or 'no library'} for tensors on a {device.type} "
                               f"device ({backend}); this plugin can talk to {' and '.join(BACKENDS)}: name one of "
                               "them in init_process_group()")
    return name
