"""Where the plugin stays off, torch's groups are stock's: what a joiner would need is recorded no longer."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from megatron_recycle.backends.deepspeed import engine
from megatron_recycle.backends.megatron import hook
from megatron_recycle.backends.options import Options
from megatron_recycle.config import RecycleConfig
from megatron_recycle.runtime.setup_record import SetUpRecorder


def test_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    def stock(args: Any = None, model: Any = None, config: Any = None) -> str:
        return "stock's engine"

    receive = dist.ProcessGroup.recv
    monkeypatch.setattr(engine.deepspeed, "initialize", stock)
    monkeypatch.setattr(engine, "watch_loaders", lambda: None)
    monkeypatch.setattr(engine, "place", lambda options: None)
    engine.install(Options(RecycleConfig(enabled=False), setup=SetUpRecorder().begin()))
    assert dist.ProcessGroup.recv is not receive
    assert engine.deepspeed.initialize(model="module", config={}) == "stock's engine"
    assert dist.ProcessGroup.recv is receive


def test_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    receive = dist.ProcessGroup.recv
    monkeypatch.setattr(hook, "rebind", lambda module, name, wrapped: made.append(wrapped))
    hook.install(Options(RecycleConfig(enabled=False), setup=SetUpRecorder().begin()))
    assert dist.ProcessGroup.recv is not receive
    assert made[0](lambda: "stock's schedule") == "stock's schedule"
    assert dist.ProcessGroup.recv is receive
