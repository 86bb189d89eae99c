"""Runs a script of somebody else's, unchanged, on CPUs, under `recycle run` or without it.

    recycle run --nproc 4 scripts/field/script.py PATH/train.py ARGUMENTS

What these scripts ask of a GPU means the CPU here (`cuda_means_cpu`, and what `run.py` says of each script). In the
folder `FIELD_RECORD` each rank writes the losses that the script gets, bit for bit. `FIELD_FAULT`, as
MOMENT:RANK:COUNT, ends that rank by SIGKILL when it is at that moment for the COUNT-th time (from 1) since training
began; MOMENT is one of `MOMENTS`. With "comeback" it ends in a forward, and the others wait before iteration
`RESUMED` until its successor is ready to come in.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.megatron_cpu import CudaMeansCpu, pretend_gpus

MOMENTS = ("forward", "barrier", "save", "evaluation", "log", "comeback")
RESUMED, LONGEST = 3, 300.0


def cuda_means_cpu() -> None:
    """torch's CUDA is the CPU in this process; fused kernels are compiled for nothing."""
    size = os.environ.get("LOCAL_WORLD_SIZE", "1")
    os.environ.update({"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": size, "TORCHDYNAMO_DISABLE": "1"})
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    for name in ("synchronize", "set_device", "empty_cache", "reset_peak_memory_stats", "manual_seed_all"):
        setattr(cuda, name, lambda *arguments, **keywords: None)
    cuda.get_rng_state = lambda *arguments, **keywords: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *arguments, **keywords: torch.set_rng_state(state)
    cuda._lazy_call = lambda function, **keywords: function()
    cuda.default_generators = (torch.default_generator,)
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.memory_summary = lambda *arguments, **keywords: ""
    for kind, dtype in (("Long", torch.long), ("Int", torch.int), ("Float", torch.float), ("Byte", torch.uint8)):
        setattr(cuda, f"{kind}Tensor", _maker(dtype))
    pretend_gpus(cuda)
    cuda.device_count = lambda: int(size)
    contextlib.ExitStack().enter_context(CudaMeansCpu())  # for good: there is no block to leave


def _maker(dtype: torch.dtype) -> Callable[[Any], torch.Tensor]:
    return lambda *data: torch.tensor(data[0], dtype=dtype) if isinstance(data[0], list) else torch.empty(
        *data, dtype=dtype)


# ---- what single scripts need


def stand_in_torchvision(checkout: Path) -> None:
    """DeepSpeedExamples: random images of 64x64 for CIFAR-10, and the example's own AlexNet. Its data would be
    downloaded, and torchvision is made for one build of torch."""
    from torch.utils.data import TensorDataset

    draw = torch.Generator().manual_seed(0)
    images = TensorDataset(torch.randn(512, 3, 64, 64, generator=draw),
                           torch.randint(10, (512,), generator=draw))
    found = runpy.run_path(str(checkout / "training/pipeline_parallelism/alexnet.py"))
    made = {"torchvision": ModuleType("torchvision"), "torchvision.transforms": ModuleType("transforms"),
            "torchvision.models": ModuleType("models"), "torchvision.datasets": ModuleType("datasets")}
    for name in ("Compose", "Resize", "CenterCrop", "ToTensor", "Normalize"):
        setattr(made["torchvision.transforms"], name, lambda *arguments, **keywords: None)
    vars(made["torchvision.models"]).update(AlexNet=found["AlexNet"], vgg19=None)
    vars(made["torchvision.datasets"]).update(CIFAR10=lambda **keywords: images)
    for name, module in made.items():
        sys.modules[name] = module
        if "." in name:
            setattr(made["torchvision"], name.partition(".")[2], module)


def without_compiling() -> None:
    """gpt-neox and Megatron-DeepSpeed: nothing is compiled at the start; the datasets' helpers are there already."""
    import subprocess

    stock = subprocess.run

    def run(command: Any, *arguments: Any, **keywords: Any) -> Any:
        if isinstance(command, list) and command and command[0] == "make":
            return SimpleNamespace(returncode=0)
        return stock(command, *arguments, **keywords)
    subprocess.run = run


def without_vision() -> None:
    """Megatron-DeepSpeed: its training loop imports its vision models, which a GPT does not use, and these
    torchvision; and a part of DeepSpeed that newer ones do not have, for `--compression-training`."""
    for name in ("torchvision", "torchvision.transforms", "torchvision.datasets", "torchvision.models",
                 "deepspeed.compression.compress"):
        sys.modules[name] = module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__getattr__ = _something  # type: ignore[method-assign]


def _something(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return object


def megatron_deepspeed(checkout: Path) -> None:
    without_compiling()
    without_vision()


SHIMS: dict[str, Callable[[Path], None]] = {
    "deepspeed-examples": stand_in_torchvision,
    "gpt-neox": lambda checkout: without_compiling(),
    "megatron-deepspeed": megatron_deepspeed,
}


# ---- what is recorded, and where the process dies


class Fault:
    """The end of this process, at one moment."""

    def __init__(self, text: str, rank: int) -> None:
        moment, victim, count = text.split(":") if text else ("", "-1", "0")
        self.comeback = moment == "comeback"
        self.moment = ("forward" if self.comeback else moment) if int(victim) == rank else ""
        self._left = int(count)
        self.armed = False
        """Whether training has begun."""

    def due(self, moment: str) -> bool:
        """The process is at ``moment``: whether it ends there."""
        if not self.armed or moment != self.moment:
            return False
        self._left -= 1
        return self._left == 0

    def at(self, moment: str) -> None:
        if self.due(moment):
            die()


def await_successor() -> None:
    """Wait until a process is ready to come in."""
    end, events = time.monotonic() + LONGEST, Path(os.environ["RECYCLE_RUN_DIR"]) / "events.jsonl"
    while '"event": "waiting"' not in events.read_text():
        assert time.monotonic() < end, "nobody comes back"
        time.sleep(0.1)


def die() -> None:
    """As the kernel's out-of-memory killer does it."""
    os.kill(os.getpid(), signal.SIGKILL)


def watch(fault: Fault, folder: Path, rank: int, gives_metrics: bool) -> None:
    """Record losses in ``folder``, and let ``fault`` happen. ``gives_metrics``: `eval_batch()` gives a pair, as in
    gpt-neox's own fork of DeepSpeed; with DeepSpeed itself gpt-neox fails in its first evaluation."""
    import deepspeed
    from deepspeed.runtime.pipe.engine import PipelineEngine

    folder.mkdir(parents=True, exist_ok=True)
    if list(folder.glob(f"{rank}.*")):
        fault.moment = ""  # it has come back
    record = (folder / f"{rank}.{time.time_ns()}.jsonl").open("w", buffering=1)
    initialize = deepspeed.initialize

    def watched(*arguments: Any, **keywords: Any) -> Any:
        engine, *others = initialize(*arguments, **keywords)
        if isinstance(engine, PipelineEngine):
            train, evaluate = engine.train_batch, engine.eval_batch

            def train_batch(*arguments: Any, **keywords: Any) -> Any:
                fault.armed = True
                if fault.comeback and engine.global_steps == RESUMED:
                    await_successor()
                loss = train(*arguments, **keywords)
                record.write(json.dumps({"train": engine.global_steps, "loss": float(loss).hex()}) + "\n")
                return loss

            def eval_batch(*arguments: Any, **keywords: Any) -> Any:
                fault.at("evaluation")
                result = evaluate(*arguments, **keywords)
                loss = result[0] if isinstance(result, tuple) else result
                record.write(json.dumps({"evaluate": engine.global_steps, "loss": float(loss.mean()).hex()}) + "\n")
                return (result, {}) if gives_metrics else result
            engine.train_batch, engine.eval_batch = train_batch, eval_batch
        return (engine, *others)
    deepspeed.initialize = watched

    forward, save, barrier, write = (deepspeed.PipelineModule.forward, torch.save, torch.distributed.barrier,
                                     sys.stdout.write)

    def dying_forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if torch.is_grad_enabled():
            fault.at("forward")
        return forward(self, *arguments, **keywords)

    def dying_save(thing: Any, file: Any, *arguments: Any, **keywords: Any) -> Any:
        if fault.due("save"):
            if isinstance(file, (str, os.PathLike)):
                Path(file).write_bytes(b"half")
            die()
        return save(thing, file, *arguments, **keywords)

    def dying_barrier(*arguments: Any, **keywords: Any) -> Any:
        fault.at("barrier")
        return barrier(*arguments, **keywords)

    def dying_write(text: str) -> int:
        if "loss" in text:
            fault.at("log")
        return write(text)

    deepspeed.PipelineModule.forward = dying_forward
    torch.save, torch.distributed.barrier, sys.stdout.write = dying_save, dying_barrier, dying_write


def main(arguments: list[str]) -> None:
    """Run the script ``arguments[0]``; `FIELD_KIND` is a name in `SHIMS`, `FIELD_CHECKOUT` its repository's folder."""
    kind, checkout = os.environ["FIELD_KIND"], Path(os.environ["FIELD_CHECKOUT"])
    rank = int(os.environ["RANK"])
    cuda_means_cpu()
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(os.path.realpath(arguments[0])))
    SHIMS[kind](checkout)
    watch(Fault(os.environ.get("FIELD_FAULT", ""), rank), Path(os.environ["FIELD_RECORD"]), rank,
          gives_metrics=kind == "gpt-neox")
    if kind == "megatron-deepspeed":  # as DeepSpeed's launcher does
        sys.argv.append(f"--local_rank={os.environ['LOCAL_RANK']}")
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
