"""Megatron-LM's pretrain_bert.py in the place of pretrain_gpt.py, its first argument: with local layers, which it
cannot import without Transformer Engine, and a tokenizer that needs no file."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

checkout = Path(sys.argv[1]).parent
sys.path.insert(0, str(checkout))

from megatron.core.models.bert import bert_layer_specs  # noqa: E402
from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer  # noqa: E402

bert_layer_specs.bert_layer_with_transformer_engine_spec = None
tokenizer: Any = NullTokenizer
tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id = range(4)
tokenizer.inv_vocab = {number: f"word {number}" for number in range(128)}
sys.argv = [str(checkout / "pretrain_bert.py"), *sys.argv[2:]]
runpy.run_path(sys.argv[0], run_name="__main__")
