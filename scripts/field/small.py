#!/usr/bin/env python3
"""Megatron-LM's own test configurations on CPUs, made small: by stock, and by the plugin with a worker killed.

    python scripts/field/small.py CHECKOUT gpt/gpt3_mcore_te_tp1_pp4_swiglu ...      # cases, by folder and name
    python scripts/field/small.py CHECKOUT --all                                     # each that starts, by its options

Each has two pipelines of at most two stages and two tensor-parallel parts, mock data and core's local layers, which
need no GPU; all else is the case's own. The last rank dies in its third iteration. Prints a line for each: how far
losses and gradient norms are from stock's, or what stock says.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml
from matrix import CASES, ROOT, SCRIPTS, of_megatron, words

ITERATIONS, PIPELINES, LIMIT = 6, 2, 420
_OWN = ("data_path", "data_cache_path", "vocab_file", "merge_file", "tokenizer_type", "tokenizer_model", "save", "load",
        "save_interval", "tensorboard_dir", "exit_interval", "exit_duration_in_mins", "async_save", "log_progress",
        "timing_log_level", "timing_log_option", "num_layers_per_virtual_pipeline_stage", "train_samples",
        "lr_decay_samples", "lr_warmup_samples", "lr_decay_iters", "lr_warmup_fraction", "lr_warmup_iters",
        "rampup_batch_size", "dist_ckpt_format", "use_checkpoint_args", "ckpt_format", "transformer_impl", "split",
        "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "attention_backend", "log_memory")
"""Options of a case that are left out, with their values: what a small job has otherwise, or is not about training."""
_SMALL = f"""--hidden-size 64 --num-attention-heads 8 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2
    --global-batch-size 16 --train-iters {ITERATIONS} --mock-data --tokenizer-type NullTokenizer --vocab-size 255
    --distributed-backend gloo --transformer-impl local --attention-backend unfused --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
    --no-persist-layer-norm --use-cpu-initialization --eval-iters 1 --eval-interval 100 --log-interval 1 --num-workers 0
    --distributed-timeout-minutes 5 --split 98,1,1 --attention-dropout 0 --hidden-dropout 0""".split()


def arguments(case: Path) -> tuple[list[str], int, str]:
    """The command line of ``case``, made small, how many processes it takes, and who is the last of them."""
    given = yaml.safe_load(case.read_text())["MODEL_ARGS"]
    kept = {name: value for name, value in given.items()
            if name.lstrip("-").replace("-", "_") not in _OWN and not str(name).startswith("--ckpt")}

    def size(what: str, most: int) -> int:
        return min(int(kept.get(f"--{what}-model-parallel-size", 1)), most)

    stages, parts = size("pipeline", 2), size("tensor", 2)
    chunks = 2 if "--num-layers-per-virtual-pipeline-stage" in given and stages > 1 else 1
    line = [*words(kept), *_SMALL, "--num-layers", str(4 * chunks), "--pipeline-model-parallel-size", str(stages),
            "--tensor-model-parallel-size", str(parts)]
    line += ["--num-layers-per-virtual-pipeline-stage", "2"] if chunks > 1 else []
    last = f"{PIPELINES - 1}:{stages - 1}" + (f".{parts - 1}" if parts > 1 else "")
    return line, PIPELINES * stages * parts, last


def run(launcher: Sequence[str], script: Path, line: Sequence[str]) -> tuple[int, str]:
    """Exit status, and what was printed."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCHDYNAMO_DISABLE": "1",
               "RECYCLE_REDUCTION": "exact",
               "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-W", "ignore", "-m", *launcher, str(ROOT / "scripts" / "megatron_cpu.py"), str(script),
               *line]
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


def compare(checkout: Path, name: str) -> str:
    """What comes of the case ``name``."""
    line, processes, last = arguments(checkout / CASES / name / "model_config.yaml")
    script = checkout / SCRIPTS.get(name.split("/")[0], "pretrain_gpt.py")
    status, printed = run(("torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)), script, line)
    expected = numbers(printed)
    if status or not expected:
        errors = [found for found in printed.splitlines() if re.search(r"\b\w*(Error|Exception)\b: ", found)]
        return f"stock fails: {errors[0].strip() if errors else printed.splitlines()[-1:]}"
    with tempfile.TemporaryDirectory() as folder:
        chaos = Path(folder, "script.chaos")
        chaos.write_text(f"kill {last} --at-iteration 2 --phase forward\n")
        status, printed = run(("megatron_recycle.cli", "run", "--nproc", str(processes), "--run-dir", f"{folder}/run",
                               "--chaos", str(chaos)), script, line)
        found = numbers("".join(log.read_text() for log in sorted(Path(folder, "run").glob("worker-*.log"))))
    if status or found.keys() != expected.keys():
        return f"WRONG: status {status}, {len(found)} of {len(expected)} lines: {printed[-300:]!r}"
    far = [max(abs(found[key][at] / expected[key][at] - 1) for key in expected) for at in (0, 1)]
    return f"survived; of stock's losses and norms at most {far[0]:.1e} and {far[1]:.1e} off"


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
    bad = False
    for name in cases:
        said = compare(checkout, name)
        bad = bad or said.startswith("WRONG")
        print(f"{name}: {said}", flush=True)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
