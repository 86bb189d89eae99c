"""Megatron's groups over all workers, made again for what all of them do between iterations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_recycle.errors import VerificationError


@pytest.mark.parametrize("check", [True, False])
def test_a_gradient_that_is_no_number_ends_training_as_in_stock_if_it_is_to_be_looked_for(check, monkeypatch):
    from megatron_recycle.backends.megatron import stage as megatron_stage

    # Megatron's own computes on a GPU.
    monkeypatch.setattr(megatron_stage, "multi_tensor_applier",
                        lambda kernel, overflow, tensors, each: (torch.cat(tensors[0]).norm(), None))
    stage: Any = object.__new__(megatron_stage.MegatronStage)
    stage.device, stage._counted = torch.device("cpu"), list
    stage.scaling = SimpleNamespace(share=lambda square, counted: square)
    stage._chunks = SimpleNamespace(models=[SimpleNamespace(ddp_config=SimpleNamespace(check_for_nan_in_grad=check))])
    assert stage.norm_square([torch.tensor([3.0, 4.0])]) == 25.0
    for wrong in (float("nan"), float("inf")):
        if check:
            with pytest.raises(VerificationError, match="no-check-for-nan-in-loss-and-grad"):
                stage.norm_square([torch.tensor([1.0, wrong])])
        else:
            stage.norm_square([torch.tensor([1.0, wrong])])
