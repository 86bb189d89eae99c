"""A worker that holds other parameters than its peers is brought back by them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from megatron_recycle.plan import Grid, Worker
from megatron_recycle.runtime import replica_check as verify
from megatron_recycle.runtime.activity import WAITING, WORKING, Activity
from tests.fakes.site import PlainStage, site_of

PEERS = [Worker(0, 0), Worker(1, 0), Worker(2, 0)]


@pytest.mark.parametrize("me", PEERS[:2])
def test_a_copy_that_takes_long_is_no_lost_message_though_all_others_wait(me, monkeypatch):
    states: list[str] = []
    activity = Activity(10.0)

    def copied(*_: Any) -> Any:
        states.append(activity.told()["state"])
        return {}, {}, SimpleNamespace(bytes=1)

    monkeypatch.setattr(verify, "Facts", SimpleNamespace(from_json=dict))
    for name in ("give", "take"):
        monkeypatch.setattr(verify, name, copied)
    monkeypatch.setattr(verify, "stage_tensors", lambda stage: {})
    site = site_of(PlainStage(nn.Linear(1, 1)), me=me, grid=Grid(1, (1, 1, 1)), activity=activity)
    stepper: Any = SimpleNamespace(facts=dict, enter=lambda *_: None, standing=SimpleNamespace(committed=3))
    generation: Any = SimpleNamespace(groups=None)
    with activity.during(WAITING, "a check"):
        verify._heal(site, stepper, generation, [PEERS[1]], dict.fromkeys(PEERS, 7))
    assert states == [WORKING]
