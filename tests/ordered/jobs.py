"""Bodies of test jobs whose tensors travel over the ordered backend; numbers for decisions stay on gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_recycle.backends.deepspeed import engine as deepspeed_engine
from megatron_recycle.backends.megatron import schedule as megatron_schedule
from megatron_recycle.runtime.comm.backend import BACKENDS
from tests.ordered.backend import Ordered
from tests.ordered.group import NAME, register
from tests.ordered.rules import Rules


def train(observer_of: Callable[[str], Any], rank: int, *, body: Callable[..., Any], rules: Rules,
          **arguments: Any) -> Any:
    """``body`` with its arguments, on the ordered backend under ``rules``."""
    register(rules)
    BACKENDS[NAME] = Ordered()
    for module in (deepspeed_engine, megatron_schedule):
        module.backend_for = lambda device: NAME  # type: ignore[attr-defined]
    return body(observer_of, rank, **arguments)
