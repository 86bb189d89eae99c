"""What of Transformer Engine is not kept correct is refused at the start, by name and with what to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

pytest.importorskip("megatron.core")


def layer(name: str, **attributes: Any) -> nn.Module:
    """One that says that it is Transformer Engine's."""
    module = type(name, (nn.Module,), {"__module__": "transformer_engine.pytorch.module"})()
    vars(module).update(attributes)
    assert isinstance(module, nn.Module)
    return module


def said(monkeypatch: pytest.MonkeyPatch, *layers: nn.Module, version: str = "2.9.0", **config: Any) -> list[str]:
    from megatron_recycle.backends.megatron import te

    monkeypatch.setattr(te, "get_te_version", lambda: version)
    return te.wrong([nn.Sequential(*layers)], SimpleNamespace(**config))


def test_layers_and_versions_that_were_tried_are_taken_without_a_word(monkeypatch):
    for version in ("2.9.0", "2.9.1", "2.11.0+f31a"):
        assert not said(monkeypatch, layer("TELinear"), layer("RMSNorm"), version=version, tp_comm_overlap=False)


def test_models_of_other_layers_are_asked_nothing(monkeypatch):
    assert not said(monkeypatch, nn.Linear(1, 1), version="9.9.9", tp_comm_overlap=True)


@pytest.mark.parametrize("version", ["2.8.0", "2.21.0", "3.0", ""])
def test_a_version_that_was_not_tried_is_named_with_those_that_were(version, monkeypatch):
    line, = said(monkeypatch, layer("TELinear"), version=version)
    assert line.startswith(f"Transformer Engine {version}: ") and "2.9.0" in line and "2.11.0" in line


def test_layers_that_were_not_tried_are_named(monkeypatch):
    line, = said(monkeypatch, layer("TELinear"), layer("TransformerLayer"), layer("LayerNormMLP"))
    assert "LayerNormMLP, TransformerLayer" in line and "--transformer-impl local" in line


@pytest.mark.parametrize("name", [
    "tp_comm_overlap", "delay_wgrad_compute", "cpu_offloading", "symmetric_ar_type", "quant_recipe",
    "use_transformer_engine_op_fuser"])
def test_options_that_were_not_tried_with_these_layers_are_named(name, monkeypatch):
    line, = said(monkeypatch, layer("TELinear"), **{name: True})
    assert line.startswith(f"{name} ") and len(line.partition(": ")[2]) > 5


def test_a_precision_of_single_layers_is_refused(monkeypatch):
    line, = said(monkeypatch, layer("TELinear", te_quant_params=object()))
    assert "use bf16" in line


def test_its_tracker_of_random_numbers_is_refused(monkeypatch):
    from megatron_recycle.backends.megatron import te

    monkeypatch.setattr(te, "get_cuda_rng_tracker", lambda: layer("TECudaRNGStatesTracker"))
    line, = said(monkeypatch, layer("TELinear"))
    assert "--te-rng-tracker" in line


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
def test_recipes_that_keep_nothing_are_taken_without_a_word(recipe):
    from megatron_recycle.backends.megatron.options import with_history

    assert not with_history(SimpleNamespace(fp8="hybrid", fp8_recipe=recipe))
    assert not with_history(SimpleNamespace(fp8=None, fp8_recipe="delayed"))  # which is what it is by default


@pytest.mark.parametrize("recipe", ["delayed", "custom"])
def test_a_recipe_whose_scales_come_from_before_is_named_with_those_that_are_taken(recipe):
    from megatron_recycle.backends.megatron.options import with_history

    line, = with_history(SimpleNamespace(fp8="e4m3", fp8_recipe=recipe))
    assert line.startswith(f"fp8 e4m3 with fp8_recipe {recipe}: ") and "tensorwise, blockwise, mxfp8" in line


def test_what_makes_tensors_of_8_bits_asks_the_group_of_its_generation():
    from megatron_recycle.backends.megatron import te

    quantizer = SimpleNamespace(amax_reduction_group="old")
    made = layer("TELinear", quantizers={"scaling_fwd": [quantizer], "scaling_bwd": {}})
    assert te.quantizers_of(made) == [quantizer]
    assert te.quantizers_of(layer("RMSNorm")) == te.quantizers_of(nn.Linear(1, 1)) == []
