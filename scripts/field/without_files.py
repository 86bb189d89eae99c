"""Megatron-LM's pretrain_bert.py or pretrain_t5.py without files of words: `without_files.py NAME SCRIPT ARGUMENTS`.

NAME is one of the two, in the folder of SCRIPT, which is not run. The tokenizer needs no file. BERT gets local layers,
since its script imports no others than Transformer Engine's.
"""

from __future__ import annotations

import random
import runpy
import sys
from pathlib import Path
from typing import Any


def write_sentences(prefix: Path) -> None:
    """Documents of several sentences, in Megatron's indexed format; ``prefix``: the path without its endings."""
    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    draw = random.Random(0)
    builder = IndexedDatasetBuilder(str(prefix) + ".bin", dtype=numpy.uint16)
    for _ in range(300):
        for _ in range(draw.randint(3, 6)):
            words = [draw.randint(5, 124) for _ in range(draw.randint(4, 10))]
            builder.add_item(torch.tensor(words, dtype=torch.int32))
        builder.end_document()
    builder.finalize(str(prefix) + ".idx")


def main(arguments: list[str]) -> None:
    """Run the script."""
    name, beside, *rest = arguments
    checkout = Path(beside).parent
    sys.path.insert(0, str(checkout))

    from megatron.core.models.bert import bert_layer_specs
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

    bert_layer_specs.bert_layer_with_transformer_engine_spec = None  # else its import fails without the engine
    tokenizer: Any = NullTokenizer
    (tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id, tokenizer.bos_id,
     tokenizer.eos_id) = range(6)
    tokenizer.additional_special_tokens_ids = list(range(6, 26))
    tokenizer.inv_vocab = {number: f"word {number}" for number in range(128)}
    sys.argv = [str(checkout / name), *rest]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
