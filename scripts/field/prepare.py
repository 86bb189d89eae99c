"""Makes a script's data and arguments, with the tools of its own repository, in a process of its own.

    python prepare.py KIND CHECKOUT FOLDER

The text is the repository's README, byte by byte. Writes FOLDER/arguments.json, the script's command line.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ITERATIONS, EVALUATE_EVERY, EVALUATE, SAVE_EVERY = 12, 4, 2, 4
SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "max_position_embeddings": 64}


def deepspeed_examples(checkout: Path, folder: Path) -> list[str]:
    """Its ds_config.json with a smaller batch, and torch's Adam: DeepSpeed's own would be compiled first."""
    config = json.loads((checkout / "training/pipeline_parallelism/ds_config.json").read_text())
    config.update(train_batch_size=32, train_micro_batch_size_per_gpu=4, steps_per_print=1)
    config["optimizer"]["params"]["torch_adam"] = True
    (folder / "ds.json").write_text(json.dumps(config))
    return ["--deepspeed_config", "ds.json", "-p", "2", "--steps", "6", "--backend", "gloo"]


def gpt_neox(checkout: Path, folder: Path) -> list[str]:
    """configs/19M.yml with two stages and smaller sizes, fp32, ZeRO 0, and dropout, which goes through its RNG
    tracker."""
    import torch
    import yaml

    torch.cuda.device_count = lambda: 4
    _write_text(checkout, folder, lambda tokens: tokens.astype("uint16"))
    settings: dict[str, Any] = yaml.full_load((checkout / "configs/19M.yml").read_text())
    settings["optimizer"]["params"].pop("torch_adam", None)
    settings.update(SIZES, data_path="text", tokenizer_type="CharLevelTokenizer", vocab_file="none", merge_file="none",
                    make_vocab_size_divisible_by=4, pipe_parallel_size=2, train_micro_batch_size_per_gpu=2,
                    gradient_accumulation_steps=4, zero_optimization={"stage": 0}, fp16={"enabled": False},
                    precision="fp32", partition_activations=False, synchronize_each_layer=False, hidden_dropout=0.1,
                    attention_dropout=0.1, distributed_backend="gloo", train_iters=ITERATIONS,
                    lr_decay_iters=ITERATIONS, eval_interval=EVALUATE_EVERY, eval_iters=EVALUATE, log_interval=1,
                    steps_per_print=1, checkpoint_factor=SAVE_EVERY, save="checkpoints", load="none", hostfile="None",
                    use_wandb=False, global_num_gpus=4, tensorboard_dir="tensorboard", deepspeed_extra_args={})
    made = importlib.import_module("megatron.neox_arguments").NeoXArgs(**settings)
    return made.get_deepspeed_main_args()[3:]  # the rest is for DeepSpeed's launcher


def megatron_deepspeed(checkout: Path, folder: Path) -> list[str]:
    """A micro-batch is one sample: with more its attention calls view() on what torch has not made contiguous."""
    import torch

    _write_text(checkout, folder, torch.tensor)
    config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "steps_per_print": 4,
              "gradient_clipping": 1.0, "zero_optimization": {"stage": 0}}
    (folder / "ds.json").write_text(json.dumps(config))
    options = {"tensor-model-parallel-size": 1, "pipeline-model-parallel-size": 2,
               **{name.replace("_", "-"): value for name, value in SIZES.items()}, "micro-batch-size": 1,
               "global-batch-size": 8, "train-iters": ITERATIONS, "lr": 1e-3, "min-lr": 1e-4,
               "lr-decay-style": "cosine", "log-interval": 1, "eval-iters": EVALUATE, "eval-interval": EVALUATE_EVERY,
               "data-path": "text", "tokenizer-type": "NullTokenizer", "vocab-size": 255, "data-impl": "mmap",
               "make-vocab-size-divisible-by": 4, "save-interval": SAVE_EVERY, "split": "90,10,0", "clip-grad": 1.0,
               "weight-decay": 0.1, "save": "checkpoints", "tensorboard-dir": "tensorboard", "num-workers": 1,
               "deepspeed_config": "ds.json", "zero-stage": 0, "distributed-backend": "gloo"}
    switches = ["deepspeed", "no-masked-softmax-fusion", "no-bias-gelu-fusion", "no-bias-dropout-fusion",
                "no-gradient-accumulation-fusion"]
    return [*(word for name, value in options.items() for word in (f"--{name}", str(value))),
            *(f"--{name}" for name in switches)]


def _write_text(checkout: Path, folder: Path, kind: Callable[[Any], Any]) -> None:
    """``kind``: what the repository's builder takes of an array of tokens."""
    import numpy

    sys.path.insert(0, str(checkout))
    datasets = importlib.import_module("megatron.data.indexed_dataset")
    builder = datasets.make_builder(str(folder / "text.bin"), impl="mmap", vocab_size=512)
    text = (checkout / "README.md").read_bytes()
    for start in range(0, len(text) - 2000, 2000):
        builder.add_item(kind(numpy.frombuffer(text[start:start + 2000], dtype=numpy.uint8)))
        builder.end_document()
    builder.finalize(str(folder / "text.idx"))


KINDS = {"deepspeed-examples": deepspeed_examples, "gpt-neox": gpt_neox, "megatron-deepspeed": megatron_deepspeed}


if __name__ == "__main__":
    kind, checkout, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    (folder / "arguments.json").write_text(json.dumps(KINDS[kind](checkout, folder)))
