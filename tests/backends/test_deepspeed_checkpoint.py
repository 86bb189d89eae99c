"""Checkpoints that could not be gone on from are refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_recycle.backends.deepspeed import RecyclePipelineEngine
from megatron_recycle.errors import UnsupportedError


@pytest.mark.parametrize(("engine", "reason"), [
    (SimpleNamespace(_worker=object(), _masters={}), "after the first train_batch"),
    (SimpleNamespace(_worker=None, _masters={"parameter": "master"}), "no fp32 master weights"),
], ids=["in the middle of training", "bf16"])
def test_loading_is_refused(engine, reason):
    with pytest.raises(UnsupportedError, match=reason):
        RecyclePipelineEngine.load_checkpoint(engine, "folder")
