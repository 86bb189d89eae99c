"""A process of a test job whose tensors travel over the ordered backend; numbers for decisions stay on gloo."""

from __future__ import annotations

from types import ModuleType

from megatron_recycle.runtime.comm.backend import BACKENDS
from tests.nccl_rules.backend import Ordered
from tests.nccl_rules.group import NAME, register
from tests.nccl_rules.rules import Rules


def install(rules: Rules) -> None:
    """From now on the runtime of this process takes the ordered backend, under ``rules``, for the device's."""
    import deepspeed  # noqa: F401  (first: where the plugin waits for it, it then loads what is next)

    from megatron_recycle.backends.deepspeed import topology
    from tests import toy

    _install(rules, topology, toy)
    install_for_megatron(rules)


def install_for_megatron(rules: Rules) -> None:
    """The same in a process that has no other framework."""
    from megatron_recycle.backends.megatron import schedule, training

    training.backend = lambda: NAME
    _install(rules, schedule)


def _install(rules: Rules, *modules: ModuleType) -> None:
    register(rules)
    BACKENDS[NAME] = Ordered()
    for module in modules:
        module.backend_for = lambda device: NAME  # type: ignore[attr-defined]
