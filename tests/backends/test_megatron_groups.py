"""Megatron's groups over all workers, made again for what all of them do between iterations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron_recycle.backends import megatron_groups
from megatron_recycle.errors import TransportAborted


def test_who_learns_of_a_failure_when_the_new_groups_stand_does_not_go_on_with_them(monkeypatch):
    """They were not there yet when those that wait for the dead were freed, so nothing would end a wait in them."""
    detached = object.__new__(megatron_groups.Detached)
    vars(detached).update(_place=None, _first=False, _prefix="", _spanning={}, _alone={})
    stopped: list[bool] = []

    def stand(place: Any, prefix: str, interrupted: Callable[[], bool]) -> dict[str, Any]:
        detached.abort()
        stopped.append(True)
        return {}

    monkeypatch.setattr(megatron_groups, "_spanning", stand)
    with pytest.raises(TransportAborted), detached.attached("g2", lambda: bool(stopped)):
        pytest.fail("waits for the dead")
