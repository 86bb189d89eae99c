"""Connects a training process to its job's coordinator."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Callable

from megatron_recycle.config import RecycleConfig
from megatron_recycle.control import Agent, End
from megatron_recycle.control.host_memory import HostMemory
from megatron_recycle.control.wire import GUEST
from megatron_recycle.environment import Launched
from megatron_recycle.errors import UnsupportedError
from megatron_recycle.observe.log import get_logger
from megatron_recycle.observe.stacks import write_stacks
from megatron_recycle.runtime.comm.job_store import tell_again
from megatron_recycle.runtime.comm.rendezvous import told_by_first
from megatron_recycle.runtime.place import Place
from megatron_recycle.runtime.preemption import leave_on_sigterm

_KEY = "recycle/coordinator"

Embed = Callable[[RecycleConfig], tuple[str, str]]
"""Starts a coordinator as a child of this process; returns its address and the job's token."""


def connect(place: Place, config: RecycleConfig, embed: Embed | None, on_stop: Callable[[int], None]) -> Agent:
    """Start this process's agent.

    ``on_stop`` gets the new generation's number in the agent's thread, or a number above all of them at the
    end of the job. Under `recycle run` the launcher's coordinator is used. Under any other launcher rank 0
    starts one and the others learn its address from torch's store.
    """
    launched = Launched.read()
    _check_moves(place, config, launched)
    address, token = _find_coordinator(config, embed, launched)

    def ended(end: End) -> None:
        took_part = agent.generation > 0 or not launched.joining
        if end.status == 1 and took_part and launched.run_dir is not None:  # before anything moves on
            write_stacks(launched.run_dir, place.ranks[place.me][place.part])
        on_stop(sys.maxsize)

    agent = Agent(address=address, token=token, worker=place.name, rank=place.ranks[place.me][place.part],
                  incarnation=GUEST * token.startswith(GUEST) + uuid.uuid4().hex[:12],
                  heartbeat_interval=config.heartbeat_interval,
                  on_stop=lambda stop: on_stop(stop.generation), on_end=ended,
                  joining=launched.joining, host=launched.host,
                  patience=config.heartbeat_timeout + 2 * config.heartbeat_interval + config.report_timeout,
                  on_connect=lambda: tell_again(launched), memory=HostMemory.given(launched.memory))
    agent.start()
    if launched.by_recycle_run:
        leave_on_sigterm(agent)
    return agent


def _check_moves(place: Place, config: RecycleConfig, launched: Launched) -> None:
    """Raises UnsupportedError if the job wants moves that cannot be made."""
    if config.moves and place.parts > 1:
        raise UnsupportedError("with tensor parallelism no worker can move to another stage: leave `moves` out")
    if config.moves and not launched.by_recycle_run:
        raise UnsupportedError("this job was not started by `recycle run`, so that nobody starts the process of a "
                               "worker that moves to another stage: start it so, or leave `moves` out")


def _find_coordinator(config: RecycleConfig, embed: Embed | None, launched: Launched) -> tuple[str, str]:
    if launched.control is not None:
        return launched.control, launched.token
    assert embed is not None
    start = embed

    def found() -> str:
        text = json.dumps(start(config))
        get_logger().warning("megatron-recycle: this launcher ends the other workers when one dies, so that nothing "
                             "is left to go on; start the job with `recycle run` to survive failures")
        return text

    address, token = json.loads(told_by_first(_KEY, found))
    return address, token
