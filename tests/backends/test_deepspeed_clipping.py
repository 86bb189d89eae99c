"""Which parameters count in the norm that DeepSpeed clips by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.runtime.pipe.module import LayerSpec, TiedLayerSpec
from torch import nn

from megatron_recycle.backends.deepspeed.chunks import Chunks
from megatron_recycle.backends.deepspeed.clipping import Clipping

SPECS = [TiedLayerSpec("words", nn.Linear, 1, 1), LayerSpec(nn.Linear, 1, 1), LayerSpec(nn.Linear, 1, 1),
         TiedLayerSpec("words", nn.Linear, 1, 1)]


def square(stage: int, names: list[str], chunks: Chunks | None) -> float:
    """What ``stage`` gives of fp32 parameters with these ``names``; the gradient of layer n is 10 to the power of n."""
    module = SimpleNamespace(_layer_specs=SPECS, recycle_chunks=chunks)
    engine: Any = SimpleNamespace(module=module, stage_id=stage, gradient_clipping=lambda: 1.0,
                                  grid=SimpleNamespace(get_slice_parallel_rank=lambda: 0))
    layers = [0 if name.startswith("tied") else int(name[0]) for name in names]
    return Clipping(engine, None, everywhere=False).norm_square(
        {name: nn.Parameter(torch.zeros(1)) for name in names}, [torch.tensor([10.0**layer]) for layer in layers])


def test_with_two_chunks_the_layers_count_that_stocks_first_stage_has():
    flat = [["tied_modules.words.weight", "1.weight"], ["2.weight"]]
    bent = [["tied_modules.words.weight"], ["1.weight", "2.weight"]]
    chunks = Chunks(parts=(0, 1, 2, 3, 4), placement=(0, 1, 1, 0), stock=(0, 2, 4))
    assert [square(stage, names, None) for stage, names in enumerate(flat)] == [101.0, 0.0]
    assert [square(stage, names, chunks) for stage, names in enumerate(bent)] == [1.0, 100.0]
