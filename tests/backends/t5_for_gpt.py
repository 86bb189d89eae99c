"""Megatron-LM's pretrain_t5.py in the place of pretrain_gpt.py, its first argument, with a tokenizer that needs no
file."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

checkout = Path(sys.argv[1]).parent
sys.path.insert(0, str(checkout))

from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer  # noqa: E402

tokenizer: Any = NullTokenizer
tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id, tokenizer.bos_id, tokenizer.eos_id = range(6)
tokenizer.additional_special_tokens_ids = list(range(6, 26))
tokenizer.inv_vocab = {number: f"word {number}" for number in range(128)}
sys.argv = [str(checkout / "pretrain_t5.py"), *sys.argv[2:]]
runpy.run_path(sys.argv[0], run_name="__main__")
