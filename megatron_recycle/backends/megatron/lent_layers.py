"""The transformer layers of a Megatron stage, as neighbouring stages may run some of them.

A `TransformerBlock` looks its layers up when it runs. Embedding, final norm, output layer and loss stay at home: a
micro-batch crosses between two layers, with the same hidden states as between any two stages.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_block import TransformerBlock, get_transformer_layer_offset
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_pg_rank
from torch import nn

from megatron_recycle.backends.patching import replaced
from megatron_recycle.errors import UnsupportedError
from megatron_recycle.runtime.lent.layers import hooked, lendable, likeness

_PASSED = ("hidden_states", "attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin",
           "rotary_pos_cos_sin")
"""A block's arguments to lent layers: other stages make the same, from nothing or from the configuration."""
_PARTS = ("forward", "_preprocess", "_postprocess")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OWN_NUMBER = {"layer_number"}


class BlockLayers:
    """The layers of one stage of a `GPTModel` (`runtime.lent.layers.Lending`).

    All layers of the stage come from one specification and configuration. A neighbour's layers are built from them too,
    and compared with their home's.

    Args:
        model: the stage's, without Megatron's wrappers.
        most: layers that each neighbour may run.
        gradient_dtype: of gradients' sums.
        adopt: called with each layer that is built.
    """

    def __init__(self, model: nn.Module, most: int, gradient_dtype: torch.dtype | None,
                 adopt: Callable[[nn.Module], None]) -> None:
        self._model, self._most, self._gradient_dtype, self._adopt = model, most, gradient_dtype, adopt
        block: Any = getattr(model, "decoder", None)
        self._block = block
        self.layers: Sequence[nn.Module] = list(block.layers) if isinstance(block, TransformerBlock) else []
        self.first = _offset(block) if isinstance(block, TransformerBlock) else 0
        output = getattr(model, "output_layer", None)
        self.beside: Sequence[nn.Module] = [output] if isinstance(output, nn.Module) else []
        self.why = self._why_not()
        self.refused = ""
        if any(self.lendable):
            self._masks: dict[tuple[int, torch.device], torch.Tensor] = {}
            block.register_forward_pre_hook(self._check, with_kwargs=True)

    @cached_property
    def lendable(self) -> tuple[int, int]:
        if self.why:
            return 0, 0
        return lendable([True] * len(self.layers), self._model.pre_process, self._model.post_process, self._most)

    @property
    def like(self) -> int:
        """Equal on stages with layers of the same kind."""
        return likeness(self.layers[0], _OWN_NUMBER)

    def _why_not(self) -> str:
        """The reason why the stage's layers cannot be lent; empty: they can."""
        model, block = self._model, self._block
        if type(block) is not TransformerBlock or any(
                getattr(type(model), name, None) is not getattr(GPTModel, name) for name in _PARTS):
            return f"of a model of one's own ({type(model).__name__}) nobody knows where a stage's layers end"
        if any(vars(module).get(hooks) for module in (model, block) for hooks in _HOOKS):
            return "there are hooks on the model, which would meet other layers"
        config = block.config
        for name in ("heterogeneous_block_specs", "apply_query_key_layer_scaling"):
            if getattr(config, name, False):
                return f"with {name} layers differ"
        if any(spec != block.submodules.layer_specs[0] for spec in block.submodules.layer_specs):
            return "the stage has layers of several kinds"
        kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
        if len(kinds) > 1:
            return f"the stage's parameters are of several types ({', '.join(sorted(map(str, kinds)))})"
        for layer in self.layers:
            if not isinstance(layer, TransformerLayer) or not isinstance(layer.cross_attention, IdentityOp) or (
                    getattr(layer.self_attention, "attn_mask_type", None) is not AttnMaskType.causal):
                return f"a layer is lent that attends to what is before alone; {type(layer).__name__} may do otherwise"
            if hooked(layer):
                return "there are hooks on its layers (leave overlap_param_gather out, if they are Megatron's)"
        return "" if len(self.layers) > 1 else "one layer of a stage stays, and it has no more"

    def build(self, number: int) -> nn.Module:
        block = self._block
        made: nn.Module = build_module(
            block.submodules.layer_specs[0], config=block.config, layer_number=number + 1 - self.first,
            pg_collection=block.pg_collection, vp_stage=block.vp_stage)
        home = next(self.layers[0].parameters())
        made = made.to(home.device, home.dtype)
        for parameter in made.parameters():
            # Megatron's linear layers form gradients only for parameters with a place for them.
            parameter.main_grad = torch.empty(
                parameter.shape, dtype=self._gradient_dtype or parameter.dtype, device="meta")
        self._adopt(made)
        return made

    @contextmanager
    def running(self, layers: Sequence[Callable[..., Any]]) -> Iterator[None]:
        block, config = self._block, self._block.config
        recomputed = config.recompute_num_layers
        if config.recompute_granularity == "full" and config.recompute_method == "uniform":
            recomputed = math.gcd(len(layers), recomputed)  # the block goes through in whole steps
        # The block finds these layers before the modules; the stage's parameters stay as they are.
        with (replaced(block, layers=layers, num_layers_per_pipeline_rank=len(layers)),
              replaced(config, recompute_num_layers=recomputed)):
            yield

    def _check(self, block: nn.Module, positional: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Check that a borrower gives a layer the same arguments; otherwise none are lent from now on. Raises
        UnsupportedError if some are lent now."""
        if not torch.is_grad_enabled():
            return  # an evaluation lends nothing
        given = {**dict(zip(("hidden_states", "attention_mask"), positional, strict=False)), **keywords}
        odd = sorted(name for name, value in given.items() if value is not None and name not in _PASSED)
        mask = given.get("attention_mask")
        if len(positional) > 2 or odd:
            self._refuse(f"layers get more than hidden states of their stage ({', '.join(odd)}), and other "
                         "stages' workers cannot give it to them")
        elif mask is not None and not self._causal(mask):
            self._refuse("forward_step gives this stage an attention mask of its own, which other stages' workers do "
                         "not have for its layers (they are lent where it gives None, or what hides all that comes "
                         "later and nothing else)")

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        running = vars(self._block).get("layers", self.layers)
        if len(running) != len(self.layers) or any(map(operator.is_not, running, self.layers)):
            raise UnsupportedError(reason)

    def _causal(self, mask: torch.Tensor) -> bool:
        size = mask.shape[-1]
        if mask.dtype != torch.bool or mask.shape[-2:] != (size, size):
            return False
        later = self._masks.get((size, mask.device))
        if later is None:
            later = torch.ones(size, size, dtype=torch.bool, device=mask.device).triu(1)
            self._masks = {(size, mask.device): later}
        return bool((mask == later).all())


def _offset(block: TransformerBlock) -> int:
    """The number of layers of the stages before."""
    return int(get_transformer_layer_offset(block.config, block.vp_stage, get_pg_rank(block.pg_collection.pp)))
