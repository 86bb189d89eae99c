#!/usr/bin/env python3
"""Trains a small byte-level GPT with DeepSpeed's pipeline engine, as any user's script would.

    torchrun --nproc-per-node 6 scripts/gpt_deepspeed.py --dump runs/stock  # stock DeepSpeed, 3 x 2 workers
    recycle run --nproc 6 scripts/gpt_deepspeed.py --dump runs/mine         # the same, surviving failures
    python scripts/gpt_deepspeed.py --validate runs/mine                    # validation loss before and after

The text is the source code of the running interpreter's standard library, or any file or folder by `--data`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

VALIDATION_SHARE = 20
"""Every 20th window of the text is kept for validation."""

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


@dataclass(frozen=True)
class Shape:
    """Size of the model; `length` is the number of bytes it looks at."""

    length: int = 64
    width: int = 96
    heads: int = 4
    blocks: int = 4
    dropout: float = 0.1


class Embedding(nn.Module):
    """Bytes (batch, length) -> hidden states (batch, length, width)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = nn.Embedding(256, shape.width)
        self.position = nn.Embedding(shape.length, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        return self.dropout(self.token(text) + self.position.weight[: text.shape[1]])


class Block(nn.Module):
    """One pre-norm transformer block with causal attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1 = nn.LayerNorm(shape.width)
        self.attention = nn.Linear(shape.width, 3 * shape.width)
        self.projection = nn.Linear(shape.width, shape.width)
        self.norm2 = nn.LayerNorm(shape.width)
        self.expand = nn.Linear(shape.width, 4 * shape.width)
        self.contract = nn.Linear(4 * shape.width, shape.width)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        parts = self.attention(self.norm1(hidden)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.dropout(self.projection(mixed.transpose(1, 2).reshape(batch, length, width)))
        return hidden + self.dropout(self.contract(functional.gelu(self.expand(self.norm2(hidden)))))


class Head(nn.Module):
    """Hidden states -> logits (batch, length, 256); not tied to the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width)
        self.logits = nn.Linear(shape.width, 256, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.logits(self.norm(hidden))


def layers(shape: Shape) -> list[tuple[type[nn.Module], Shape]]:
    """The model as a list of (class, argument)."""
    return [(Embedding, shape), *[(Block, shape)] * shape.blocks, (Head, shape)]


def loss_function(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of the next byte, in nats."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def read_text(source: Path | None) -> Tensor:
    """All bytes of a file, or of a folder's files in order of name; by default the standard library."""
    root = Path(sysconfig.get_paths()["stdlib"]) if source is None else source
    files = [root] if root.is_file() else []
    for folder, inner, names in os.walk(root):
        inner[:] = set(inner) - SKIPPED_FOLDERS
        files += [Path(folder, name) for name in names if source is not None or name.endswith(".py")]
    text = b"".join(path.read_bytes() for path in sorted(files) if path.is_file())
    if not text:
        raise SystemExit(f"--data: no text in {root}; name a file or a folder with files")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of `length` bytes with the bytes that follow each, in a fixed shuffled order.

    Every `VALIDATION_SHARE`-th window belongs to the validation set, the others to the training set.
    """

    def __init__(self, text: Tensor, length: int, validation: bool) -> None:
        self.text, self.length = text, length
        every = torch.arange((len(text) - 1) // length)
        chosen = every[(every % VALIDATION_SHARE == VALIDATION_SHARE - 1) == validation]
        if not len(chosen):
            raise SystemExit(f"--data: {len(text)} bytes are too few for windows of {length} bytes")
        order = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(0))
        self.starts = chosen[order] * length

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = int(self.starts[index])
        window = self.text[start : start + self.length + 1].long()
        return window[:-1], window[1:]


def train(args: argparse.Namespace) -> None:
    """Train `args.iterations` iterations on this worker; with `args.dump`, leave its state behind."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.pipe import LayerSpec, PipelineModule

    torch.set_num_threads(args.threads)
    compute_the_same_bits()
    if get_accelerator().device_name() == "cpu":
        # Or DeepSpeed compiles a shared-memory operator when communication starts: most of a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    shape = shape_of(args)
    torch.manual_seed(args.seed)
    model = PipelineModule(
        [LayerSpec(kind, argument) for kind, argument in layers(shape)],
        num_stages=args.stages,
        loss_fn=loss_function,
        partition_method="uniform",
    )
    windows = Windows(read_text(args.data), shape.length, validation=False)
    engine, _, _, _ = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
        training_data=None if args.in_process_data else windows,
        config=None if args.deepspeed_config else deepspeed_config(args),
    )
    if args.in_process_data:
        read_in_process(engine, windows)
    initial = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
    losses, times = [], []
    if args.checkpoints is not None:
        engine.load_checkpoint(str(args.checkpoints))  # the latest one; DeepSpeed warns if there is none yet
    for iteration in range(engine.global_steps, args.iterations):
        if args.checkpoints is not None and iteration and iteration % args.save_every == 0:
            engine.save_checkpoint(str(args.checkpoints))
        wall, processor = time.perf_counter(), time.process_time()
        losses.append(float(engine.train_batch()))
        times.append((time.perf_counter() - wall, time.process_time() - processor))
    if args.dump is not None:
        args.dump.mkdir(parents=True, exist_ok=True)
        state = {
            "pipeline": engine.grid.get_data_parallel_id(),
            "stage": engine.grid.get_stage_id(),
            "shape": asdict(shape),
            "initial": initial,
            "parameters": dict(engine.module.state_dict()),
            "optimizer": engine.optimizer.state_dict(),
            "losses": losses,
            "times": times,  # of each iteration: seconds, and processor seconds of this process
        }
        torch.save(state, args.dump / f"worker-{state['pipeline']}-{state['stage']}.pt")


def compute_the_same_bits() -> None:
    """On a GPU, ask for kernels that give the same bits each time: without them no two runs can be compared."""
    if torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first use
        torch.use_deterministic_algorithms(True)


def read_in_process(engine: Any, windows: Windows) -> None:
    """Give the stock engine the order of its own loader, without that loader's two processes per worker.

    The plugin reads its batches in the training process as well: a comparison of the two should not hang on this.
    """
    from deepspeed.runtime.dataloader import RepeatingLoader
    from torch.utils.data import DistributedSampler

    pipeline, pipelines = engine.grid.get_data_parallel_id(), engine.grid.get_data_parallel_world_size()
    sampler = DistributedSampler(windows, pipelines, pipeline, shuffle=False)
    loader = engine.deepspeed_io(windows, data_sampler=sampler, num_local_io_workers=0)
    engine.set_dataloader(RepeatingLoader(loader))


def deepspeed_config(args: argparse.Namespace) -> dict[str, Any]:
    """The DeepSpeed configuration used without `--deepspeed_config`."""
    options: dict[str, Any] = {"lr": args.lr}
    if args.optimizer == "Adam":
        options["torch_adam"] = True  # torch's own: DeepSpeed's fused one would be compiled first
    return {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_accumulation_steps": args.microbatches,
        "gradient_clipping": args.clip,
        "optimizer": {"type": args.optimizer, "params": options},
        "steps_per_print": args.log_every,
    }


def validate(folder: Path, data: Path | None = None, windows: int = 256) -> dict[str, float]:
    """Validation loss, in nats per byte, of the model that the workers left in `folder`.

    One worker per stage is enough; layers carry their number in the whole model, so the stages' parameters
    join to the whole model's.

    Returns:
        "first_validation_loss" before and "final_validation_loss" after training.
    """
    dumps = [torch.load(path, weights_only=True) for path in sorted(folder.glob("worker-*.pt"))]
    if not dumps:
        raise SystemExit(f"--validate: no worker-*.pt in {folder}; train with --dump {folder} first")
    shape = Shape(**dumps[0]["shape"])
    dataset = Windows(read_text(data), shape.length, validation=True)
    text, labels = zip(*(dataset[index] for index in range(min(windows, len(dataset)))))
    found = {}
    for name, key in (("first_validation_loss", "initial"), ("final_validation_loss", "parameters")):
        model = nn.Sequential(*(kind(argument) for kind, argument in layers(shape))).eval()
        model.load_state_dict({name: value for dump in dumps for name, value in dump[key].items()})
        with torch.no_grad():
            found[name] = float(loss_function(model(torch.stack(text)), torch.stack(labels)))
    return found


def shape_of(args: argparse.Namespace) -> Shape:
    """The model's size from the command line."""
    return Shape(args.length, args.width, args.heads, args.blocks, args.dropout)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--data", type=Path, help="a text file or a folder of them (default: the standard library)"
    )
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument(
        "--stages", type=int, default=2, help="pipeline stages; pipelines are workers / stages"
    )
    parser.add_argument(
        "--microbatches", type=int, default=4, help="micro-batches per pipeline and iteration"
    )
    parser.add_argument("--batch", type=int, default=4, help="windows per micro-batch")
    shape = Shape()
    parser.add_argument("--length", type=int, default=shape.length, help="bytes per window")
    parser.add_argument("--width", type=int, default=shape.width)
    parser.add_argument("--heads", type=int, default=shape.heads)
    parser.add_argument("--blocks", type=int, default=shape.blocks)
    parser.add_argument("--dropout", type=float, default=shape.dropout)
    parser.add_argument("--optimizer", choices=("Adam", "SGD"), default="Adam")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--clip", type=float, default=1.0, help="gradient clipping by norm; 0 is none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="threads per worker")
    parser.add_argument("--log-every", type=int, default=5, help="iterations between two log lines")
    parser.add_argument(
        "--in-process-data", action="store_true", help="stock engine only: no loader processes"
    )
    parser.add_argument("--dump", type=Path, help="folder for each worker's final state")
    parser.add_argument(
        "--checkpoints", type=Path, metavar="DIR", help="take up the latest checkpoint in it, if any, and save there"
    )
    parser.add_argument("--save-every", type=int, default=10, help="iterations between two checkpoints")
    parser.add_argument(
        "--validate", type=Path, metavar="DIR", help="only print the validation loss of a dump"
    )
    parser.add_argument("--local_rank", type=int, default=-1, help="given by some launchers")
    parser.add_argument("--deepspeed", action="store_true", help="accepted for DeepSpeed's launcher")
    parser.add_argument("--deepspeed_config", help="DeepSpeed JSON in place of the built-in configuration")
    return parser.parse_args(argv)


def main() -> None:
    """Train, or print the validation loss of an earlier training."""
    args = parse(sys.argv[1:])
    if args.validate is None:
        train(args)
        return
    torch.set_num_threads(args.threads)
    found = validate(args.validate, args.data)
    print(json.dumps({**found, "uniform": math.log(256)}))


if __name__ == "__main__":
    main()
