"""Which layers of a Megatron stage may be lent, and why no others; what forwards must not be given then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    from megatron.core import parallel_state

    torch.distributed.init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1, backend="gloo")
    parallel_state.initialize_model_parallel(1, 1)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def stage(spec: Any = None, kind: type | None = None, layers: int = 4, **options: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(num_layers=layers, hidden_size=8, num_attention_heads=2, use_cpu_initialization=True,
                               masked_softmax_fusion=False, gradient_accumulation_fusion=False,
                               persist_layer_norm=False, **options)
    return (kind or GPTModel)(config, spec or get_gpt_layer_local_spec(normalization="LayerNorm"), 16, 8,
                              pre_process=False, post_process=True)


def lending(model: Any) -> Any:
    from megatron_recycle.backends.megatron.lent_layers import BlockLayers

    return BlockLayers(model, 2, torch.float32, lambda module: None)


def test_a_layer_is_built_as_it_is_at_home():
    from megatron_recycle.runtime.lent.layers import offer, packed, unpack

    model = stage()
    layers = lending(model)
    told = offer(layers, 2)
    assert told is not None and (told.head, told.tail, told.layers) == (2, 0, 4)
    assert told.share < 0.25  # the output layer takes time too
    for number in (-1, 4):  # of the stages before and behind
        made = layers.build(number)
        assert made.layer_number == number + 1
        unpack([made], packed([model.decoder.layers[0]], b""))
        assert all(torch.equal(one, other) for one, other in zip(
            made.parameters(), model.decoder.layers[0].parameters(), strict=True))
        assert all(parameter.main_grad.dtype is torch.float32 for parameter in made.parameters())


def mixed() -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    return stage(TransformerBlockSubmodules(layer_specs=[
        get_gpt_layer_local_spec(normalization="LayerNorm", qk_layernorm=bool(number)) for number in range(2)]),
        layers=2, qk_layernorm=True)


def hooked(inner: bool) -> Any:
    model = stage()
    (model.decoder.layers[1].mlp if inner else model.decoder).register_forward_hook(lambda *given: None)
    return model


def own() -> Any:
    from megatron.core.models.gpt.gpt_model import GPTModel

    return stage(kind=type("Own", (GPTModel,), {"forward": lambda self, *given: None}))


def bidirectional() -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.enums import AttnMaskType

    spec = get_gpt_layer_local_spec(normalization="LayerNorm")
    spec.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.padding
    return stage(spec)


@pytest.mark.parametrize(("made", "why"), [
    (mixed, "several kinds"), (lambda: hooked(False), "hooks on the model"), (lambda: hooked(True), "hooks on its"),
    (own, "model of one's own"), (bidirectional, "attends"), (lambda: stage(layers=1), "one layer of a stage stays"),
    (lambda: stage(apply_query_key_layer_scaling=True, fp16=True), "apply_query_key_layer_scaling")])
def test_a_stage_that_lends_nothing_says_why(made, why):
    from megatron_recycle.runtime.lent.layers import said

    layers = lending(made())
    assert layers.lendable == (0, 0)
    assert said(layers, 2).startswith("lends no layers") and why in said(layers, 2)


@pytest.mark.parametrize(("given", "said"), [
    ({"attention_mask": torch.eye(3, dtype=torch.bool)[None, None]}, "attention mask of its own"),
    ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "attention mask of its own"),
    ({"attention_mask": None, "attention_bias": torch.zeros(1)}, "attention_bias"),
    ({"attention_mask": torch.ones(3, 3).triu(1).bool()[None, None]}, "")])
def test_what_a_layer_is_given_at_home_alone_keeps_it_there(given, said):
    """An iteration in which layers are lent already is begun again, without."""
    from megatron_recycle.errors import UnsupportedError
    from megatron_recycle.runtime.lent.layers import Neighbours

    model = stage()
    layers = lending(model)
    neighbours = Neighbours(layers, lambda module: None, True)
    model.decoder.layers = torch.nn.ModuleList()
    model.set_input_tensor(torch.zeros(3, 1, 8))
    assert model.decoder(None, **given).shape == (3, 1, 8)
    assert bool(said) == bool(layers.refused)
    if not said:
        neighbours.check((2, 0), borrowed=True)
        return
    for lent, borrowed in (((2, 0), False), ((0, 0), True)):
        with pytest.raises(UnsupportedError, match=said):
            neighbours.check(lent, borrowed)
    with pytest.raises(UnsupportedError, match=said), layers.running([]):
        model.decoder(None, **given)
