"""What trains inside of a script's collective finds torch as the script's iterations do."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from megatron_recycle.backends.session import LivingGroups


class Means(TorchFunctionMode):
    living: LivingGroups

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.sum:  # stands for a collective: the mode is not there while it is handled
            assert not _get_current_function_mode_stack()
            self.living.make(None, None)  # type: ignore[arg-type]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shares", [False, True])
def test_a_function_mode_that_handles_a_collective_is_there_for_what_is_trained_in_it(shares: bool):
    found: list[Any] = []

    def collective(*given: Any) -> None:
        found.append(_get_current_function_mode_stack())

    worker = SimpleNamespace(collective=collective, collective_once=collective)
    with Means() as mode:
        session: Any = SimpleNamespace(worker=worker, shares=shares, iteration=0)
        mode.living = LivingGroups(session, nullcontext)
        torch.sum(torch.ones(1))
        assert found == [[mode]] and _get_current_function_mode_stack() == [mode]
