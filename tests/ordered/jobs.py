"""A process of a test job whose tensors travel over the ordered backend; numbers for decisions stay on gloo."""

from __future__ import annotations

from megatron_recycle.backends.deepspeed import engine as deepspeed_engine
from megatron_recycle.backends.megatron import schedule as megatron_schedule
from megatron_recycle.runtime.comm.backend import BACKENDS
from tests.ordered.backend import Ordered
from tests.ordered.group import NAME, register
from tests.ordered.rules import Rules


def install(rules: Rules) -> None:
    """From now on the runtime of this process takes the ordered backend, under ``rules``, for the device's."""
    register(rules)
    BACKENDS[NAME] = Ordered()
    for module in (deepspeed_engine, megatron_schedule):
        module.backend_for = lambda device: NAME  # type: ignore[attr-defined]
