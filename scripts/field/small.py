#!/usr/bin/env python3
"""Megatron-LM's own test configurations on CPUs, made small: by stock, and by the plugin with a worker killed.

    python scripts/field/small.py CHECKOUT gpt/gpt3_mcore_te_tp1_pp4_swiglu ...      # cases, by folder and name
    python scripts/field/small.py CHECKOUT --all                                     # each that starts, by its options

Each has two pipelines of at most two stages and two tensor-parallel parts, data without files and core's local layers,
which need no GPU; all else is the case's own, but what is about checkpoints. Cases that are alike then are run once.
The last rank dies in its third iteration. Prints a line for each: how far losses and gradient norms are from stock's,
or what stock says; and how many there are of each kind.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from matrix import CASES, ROOT, SCRIPTS, of_megatron, words  # beside this script
from without_files import write_sentences

ITERATIONS, PIPELINES, LIMIT = 6, 2, 420
_OWN = ("data_path", "data_cache_path", "vocab_file", "merge_file", "tokenizer_type", "tokenizer_model", "save", "load",
        "save_interval", "tensorboard_dir", "exit_interval", "exit_duration_in_mins", "async_save", "log_progress",
        "timing_log_level", "timing_log_option", "num_layers_per_virtual_pipeline_stage", "train_samples",
        "lr_decay_samples", "lr_warmup_samples", "lr_decay_iters", "lr_warmup_fraction", "lr_warmup_iters",
        "rampup_batch_size", "dist_ckpt_format", "use_checkpoint_args", "ckpt_format", "transformer_impl", "split",
        "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "attention_backend", "log_memory",
        "encoder_num_layers", "decoder_num_layers", "encoder_seq_length", "decoder_seq_length", "vocab_extra_ids",
        "spec", "use_mcore_models", "legacy_tokenizer", "auto_detect_ckpt_format", "save_retain_interval",
        "use_checkpoint_opt_param_scheduler", "use_persistent_ckpt_worker", "num_virtual_stages_per_pipeline_rank",
        "ffn_hidden_size", "log_throughput", "no_mmap_bin_files", "mock_data", "vocab_size", "num_layers")
_ABOUT_FILES = ("ckpt", "dist_ckpt", "no_ckpt", "wandb", "tensorboard")
"""What names of further ones begin with."""
_KINDS = {
    "bert": "--data-path {sentences} --vocab-size 127 --spec local --attention-backend local",
    "t5": "--data-path {sentences} --vocab-size 127 --vocab-extra-ids 20 --decoder-seq-length 32",
}
"""By folder of a case, what it has besides, in place of `_WITHOUT_WORDS`."""
_WITHOUT_WORDS = "--mock-data --vocab-size 255"
_ELSEWHERE = ("mimo", "multimodal-llava")
"""Folders of cases that are for no script in the checkout's own folder."""
"""Options of a case that are left out, with their values: what a small job has otherwise, or is not about training."""
_SMALL = f"""--hidden-size 64 --num-attention-heads 8 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2
    --global-batch-size 16 --train-iters {ITERATIONS} --tokenizer-type NullTokenizer
    --distributed-backend gloo --transformer-impl local --attention-backend unfused --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
    --no-persist-layer-norm --use-cpu-initialization --eval-iters 1 --eval-interval 100 --log-interval 1 --num-workers 0
    --distributed-timeout-minutes 5 --initial-loss-scale 1024 --split 98,1,1 --attention-dropout 0
    --hidden-dropout 0""".split()


@dataclass(frozen=True)
class Small:
    """A case made small: its command line and variables, the ``script`` and whatever runs that, how many processes it
    takes, and who is the ``last`` of them."""

    line: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]
    script: tuple[str, ...]
    processes: int
    last: str


def smaller(checkout: Path, name: str, sentences: Path) -> Small:
    """The case ``name``, made small; ``sentences``: where those of `write_sentences` are."""
    case = yaml.safe_load((checkout / CASES / name / "model_config.yaml").read_text())
    given, variables = case["MODEL_ARGS"], case.get("ENV_VARS") or {}
    kept: dict[str, Any] = {}
    for option in sorted(map(str, given)):
        plain = option.lstrip("-").replace("-", "_")
        if plain not in _OWN and not plain.startswith(_ABOUT_FILES) and option not in _SMALL:
            kept[option] = given[option]

    def size(what: str, most: int) -> int:
        return min(int(kept.pop(f"--{what}-model-parallel-size", 1)), most)

    stages, parts = size("pipeline", 2), size("tensor", 2)
    chunks = 2 if "--num-layers-per-virtual-pipeline-stage" in given and stages > 1 else 1
    kind = name.partition("/")[0]
    line = [*words(kept), *_SMALL, *_KINDS.get(kind, _WITHOUT_WORDS).format(sentences=sentences).split(),
            "--num-layers", str(4 * chunks), "--pipeline-model-parallel-size", str(stages),
            "--tensor-model-parallel-size", str(parts)]
    line += ["--num-layers-per-virtual-pipeline-stage", "2"] if chunks > 1 else []
    last = f"{PIPELINES - 1}:{stages - 1}" + (f".{parts - 1}" if parts > 1 else "")
    script = str(checkout / "pretrain_gpt.py")
    through = [str(Path(__file__).with_name("without_files.py")), SCRIPTS[kind]] if kind in _KINDS else []
    environ = tuple(sorted((key, str(value)) for key, value in variables.items()))
    return Small(tuple(line), environ, (*through, script), PIPELINES * stages * parts, last)


def run(launcher: Sequence[str], small: Small) -> tuple[int, str]:
    """Exit status, and what was printed."""
    environ = {**os.environ, **dict(small.variables), "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1",
               "TORCHDYNAMO_DISABLE": "1", "RECYCLE_REDUCTION": "exact",
               "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-W", "ignore", "-m", *launcher, str(ROOT / "scripts" / "megatron_cpu.py"),
               *small.script, *small.line]
    try:
        done = subprocess.run(command, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return 124, "takes too long"
    return done.returncode, done.stdout


def numbers(printed: str) -> dict[int, tuple[float, float]]:
    """Iteration -> loss, gradient norm."""
    return {int(iteration): (float(loss), float(norm)) for iteration, loss, norm in re.findall(
        r" iteration +(\d+)/.* lm loss: (\S+) \|.* grad norm: (\S+) \|", printed)}


def compare(small: Small) -> tuple[str, str]:
    """What comes of a case: in a word, and in a sentence."""
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(small.processes))
    status, printed = run(launcher, small)
    expected = numbers(printed)
    if not status and not expected:
        return "stock fails", "no iteration is trained"
    if status:
        errors = [found for found in printed.splitlines() if re.search(r"\b\w*(Error|Exception)\b: ", found)]
        return "stock fails", errors[0].strip() if errors else str(printed.splitlines()[-1:])
    with tempfile.TemporaryDirectory() as folder:
        chaos = Path(folder, "script.chaos")
        chaos.write_text(f"kill {small.last} --at-iteration 2 --phase forward\n")
        status, printed = run(("megatron_recycle.cli", "run", "--nproc", str(small.processes), "--run-dir",
                               f"{folder}/run", "--chaos", str(chaos)), small)
        found = numbers("".join(log.read_text() for log in sorted(Path(folder, "run").glob("worker-*.log"))))
    if status or found.keys() != expected.keys():
        return "WRONG", f"status {status}, {len(found)} of {len(expected)} lines: {printed[-300:]!r}"
    far = [max(abs(found[key][at] / expected[key][at] - 1) for key in expected) for at in (0, 1)]
    return "survived", f"of stock's losses and norms at most {far[0]:.1e} and {far[1]:.1e} off"


def main() -> int:
    """Command line; 1 if a case is not as stock's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="of NVIDIA/Megatron-LM, at the tag of the core that is installed")
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--all", action="store_true", help="all that start, by their options")
    chosen = parser.parse_args()
    checkout = chosen.checkout.resolve()
    cases = list(chosen.cases)
    if chosen.all:
        sys.path[:0] = [str(ROOT / "scripts"), str(ROOT)]
        cases += [one.name for one in of_megatron(checkout, ()) if not one.stock and not one.refused]
    found = Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        sentences = Path(folder, "sentences")
        write_sentences(sentences)
        alike = defaultdict[Small, list[str]](list)
        for name in cases:
            if name.partition("/")[0] in _ELSEWHERE:
                found["not run"] += 1
                print(f"{name}: not run, it has a script of its own", flush=True)
            else:
                alike[smaller(checkout, name, sentences)].append(name)
        for small, names in alike.items():
            word, sentence = compare(small)
            found[word] += len(names)
            print(f"{', '.join(names)}: {word}; {sentence}", flush=True)
    print(", ".join(f"{word} {count}" for word, count in found.most_common()))
    return int("WRONG" in found)


if __name__ == "__main__":
    sys.exit(main())
