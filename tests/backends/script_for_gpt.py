"""Another of Megatron-LM's scripts in the place of pretrain_gpt.py, its second argument: pretrain_bert.py or
pretrain_t5.py, as the first one says. BERT gets local layers, which it cannot import without Transformer Engine, and
both a tokenizer that needs no file."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

kind, checkout = sys.argv[1], Path(sys.argv[2]).parent
sys.path.insert(0, str(checkout))

from megatron.core.models.bert import bert_layer_specs  # noqa: E402
from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer  # noqa: E402

bert_layer_specs.bert_layer_with_transformer_engine_spec = None
tokenizer: Any = NullTokenizer
tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id = range(4)
tokenizer.bos_id, tokenizer.eos_id = tokenizer.cls_id, tokenizer.sep_id
tokenizer.additional_special_tokens_ids = list(range(112, 128))
tokenizer.inv_vocab = {number: f"word {number}" for number in range(128)}
sys.argv = [str(checkout / f"pretrain_{kind}.py"), *sys.argv[3:]]
runpy.run_path(sys.argv[0], run_name="__main__")
