#!/usr/bin/env python3
"""What a backward in two parts costs: B and W of one transformer block against its full backward.

    python scripts/gpu/split_cost.py                                                   # bf16, hidden 1024 to 8192
    python scripts/gpu/split_cost.py --device cpu --hidden 64 --length 16 --repeats 3  # that it runs, no more

The ways: `stock`, autograd's full backward; `split`, the runtime's; `split+apex`, with apex's kernel that adds a weight
gradient to its sum without forming it; `te`, Transformer Engine's own layers with a full backward; `te+delayed`, with
their own delayed weight gradients (the plugin does not use those yet). A way that is not there is named with the
reason. All add their gradients to sums, as from an iteration's second micro-batch on. Each time is the median over the
repeats; ratios are to the full backward of the same layers. Held memory is what the allocator says that F leaves for B,
and B for W, beside parameters and sums; `counted` is the runtime's own count of the same, by which it plans.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # other scripts
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the project need not be installed

import check_report

from gpt_deepspeed import Block, Shape
from megatron_recycle.runtime.compute.accumulate import WHOLE, Accumulators, Layout
from megatron_recycle.runtime.compute.apex_kernel import fused_kernel
from megatron_recycle.runtime.compute.device import device_of
from megatron_recycle.runtime.compute.memory import ActivationMemory
from megatron_recycle.runtime.compute.split import Splitter, WeightQueue

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WAYS = ("stock", "split", "split+apex", "te", "te+delayed")
_HEAD_SIZE = 128
_MIB = 2**20
_WARM_UP = 3

Row = dict[str, Any]


class NotThere(Exception):
    """A way that this machine has no library for; the message says which."""


class Way(Protocol):
    """One way to make a micro-batch's backward.

    Attributes:
        layers: (batch, length, hidden) -> the same shape.
        sums: where gradients are added up.
        queue: what B has left for W.
    """

    layers: nn.Module
    sums: Sums
    queue: WeightQueue

    def backward(self, result: torch.Tensor, gradient: torch.Tensor) -> None: ...

    def weights(self) -> None: ...


class Sums:
    """Where the gradients of a block's parameters are added up, as in the runtime."""

    def __init__(self, layers: nn.Module, dtype: torch.dtype) -> None:
        self.layout = Layout(list(layers.parameters()), dtype)
        self._sums = self._new()

    def by_autograd(self) -> Any:
        """Inside the block autograd adds to the sums itself, as far as they have its type."""
        return self._sums.lent(0, 0)

    @torch.no_grad()
    def add(self, contributions: Iterable[Any]) -> None:
        self._sums.add(0, 0, contributions)

    def take_formed(self, queue: WeightQueue | None = None) -> None:
        """Add what a backward has left on the parameters; what W adds to goes into ``queue``."""
        later, now = set() if queue is None else queue.identities(), []
        for parameter in self.layout.parameters:
            if parameter.grad is not None:
                into = queue.formed if queue is not None and id(parameter) in later else now
                into.append((parameter, parameter.grad))
                parameter.grad = None
        self.add(now)

    def take(self) -> torch.Tensor:
        """All sums, flat; they start anew."""
        flat, self._sums = self._sums.sum(WHOLE), self._new()
        return flat

    def _new(self) -> Accumulators:
        return Accumulators(self.layout, lambda pipeline, microbatch: (WHOLE, 0))


class Stock:
    """A full backward."""

    def __init__(self, layers: nn.Module, sums: torch.dtype) -> None:
        self.layers, self.sums, self.queue = layers, Sums(layers, sums), WeightQueue()

    def backward(self, result: torch.Tensor, gradient: torch.Tensor) -> None:
        if self.sums.layout.sums_in_place:
            with self.sums.by_autograd():
                result.backward(gradient)
        else:
            result.backward(gradient)
        self.sums.take_formed()

    def weights(self) -> None:
        """Nothing is left."""


class Split(Stock):
    """The runtime's."""

    def __init__(self, layers: nn.Module, sums: torch.dtype, kernel: Any = None) -> None:
        super().__init__(layers, sums)
        self._splitter = Splitter(layers, kernel)

    def backward(self, result: torch.Tensor, gradient: torch.Tensor) -> None:
        self.queue = WeightQueue()
        with self._splitter.into(self.queue, [result]):
            result.backward(gradient)
        self.sums.take_formed(self.queue)

    def weights(self) -> None:
        self.sums.add(self.queue.contributions())
        self.queue = WeightQueue()


class Delayed(Stock):
    """Transformer Engine's."""

    def weights(self) -> None:
        for layer in self.layers.modules():
            if hasattr(layer, "backward_dw"):
                layer.backward_dw()
        self.sums.take_formed()


class TransformerEngineBlock(nn.Module):
    """The block of `gpt_deepspeed` out of Transformer Engine's layers."""

    def __init__(self, shape: Shape, dtype: torch.dtype, delayed: bool) -> None:
        super().__init__()
        try:
            import transformer_engine.pytorch as te
        except (ImportError, OSError) as error:  # OSError: it is there, but not for this torch
            raise NotThere(f"Transformer Engine: {error}") from error
        options: dict[str, Any] = {"params_dtype": dtype, **({"delay_wgrad_compute": True} if delayed else {})}
        try:
            self.attention = te.LayerNormLinear(shape.width, 3 * shape.width, **options)
            self.projection = te.Linear(shape.width, shape.width, **options)
            self.feed_forward = te.LayerNormMLP(shape.width, 4 * shape.width, **options)
        except TypeError as error:
            raise NotThere(f"this version of Transformer Engine: {error}") from error
        self.heads = shape.heads

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        parts = self.attention(hidden).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.feed_forward(hidden)


def way_of(name: str, shape: Shape, dtype: torch.dtype, sums: torch.dtype, device: torch.device) -> Way:
    """Raises NotThere."""
    if name.startswith("te"):
        if device.type != "cuda":
            raise NotThere("Transformer Engine needs a GPU")
        kind = Delayed if name == "te+delayed" else Stock
        return kind(TransformerEngineBlock(shape, dtype, kind is Delayed).to(device), sums)
    kernel = fused_kernel(sums, device) if name == "split+apex" else None
    if name == "split+apex" and kernel is None:
        raise NotThere("apex's fused_weight_gradient_mlp_cuda is not installed, or there is no GPU")
    torch.manual_seed(0)
    block = Block(shape).to(device, dtype)
    return Stock(block, sums) if name == "stock" else Split(block, sums, kernel)


class Clock:
    """Moments on the device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._cuda:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def spans(self) -> list[float]:
        """Milliseconds between each two marks."""
        if self._cuda:
            torch.cuda.synchronize()
            return [one.elapsed_time(other) for one, other in zip(self._marks, self._marks[1:])]
        return [1000 * (other - one) for one, other in zip(self._marks, self._marks[1:])]


def times(way: Way, inputs: torch.Tensor, gradient: torch.Tensor, repeats: int) -> Row:
    """Medians of F, B (the full backward, where nothing is left for W) and W, in milliseconds."""
    taken = []
    for _ in range(_WARM_UP + repeats):
        clock = Clock(inputs.device)
        clock.mark()
        result = way.layers(inputs)
        clock.mark()
        way.backward(result, gradient)
        clock.mark()
        way.weights()
        clock.mark()
        taken.append(clock.spans())
        inputs.grad = None
    return {name: round(statistics.median(spans), 4) for name, spans in zip("FBW", zip(*taken[_WARM_UP:]))}


def memory(way: Way, inputs: torch.Tensor, gradient: torch.Tensor) -> Row:
    """MiB that one micro-batch holds: by the allocator, where the device has one that counts, and by the runtime."""
    counts, held = ActivationMemory(device_of(inputs.device)), dict[str, float]()
    cuda = inputs.device.type == "cuda"

    def allocated() -> float:
        return torch.cuda.memory_allocated() / _MIB if cuda else 0.0

    for number in range(3):  # it measures the second and the third
        before = allocated()
        with counts.forward((0, number), None):
            result = way.layers(inputs)
        held["after_F"] = allocated() - before
        counts.begin_backward((0, number), ())
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        way.backward(result, gradient)
        del result
        inputs.grad = None
        held["after_B"] = allocated() - before
        held["peak_in_B"] = torch.cuda.max_memory_allocated() / _MIB - before if cuda else 0.0
        counts.end_backward((0, number), way.queue)
        way.weights()
        counts.weight((0, number))
    return {**({f"{name}_mib": round(value, 2) for name, value in held.items()} if cuda else {}),
            "counted_after_F_mib": round(counts.held().before_b / _MIB, 2),
            "counted_after_B_mib": round(counts.held().after_b / _MIB, 2)}


def first_sum(way: Way, inputs: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The sums of one micro-batch's gradients."""
    way.backward(way.layers(inputs), gradient)
    way.weights()
    inputs.grad = None
    return way.sums.take()


def rows_of(args: argparse.Namespace, hidden: int, say: Callable[[str], None]) -> list[Row]:
    """All ways at one size."""
    device = torch.device(args.device)
    shape = Shape(length=args.length, width=hidden, heads=max(1, hidden // _HEAD_SIZE), dropout=0.0)
    torch.manual_seed(1)
    inputs, gradient = (torch.randn(args.batch, args.length, hidden, device=device).to(TYPES[args.dtype])
                        for _ in range(2))
    inputs.requires_grad_()  # a stage in the middle
    rows: list[Row] = []
    expected: torch.Tensor | None = None
    for name in args.ways:
        row: Row = {"hidden": hidden, "way": name}
        try:
            way = way_of(name, shape, TYPES[args.dtype], TYPES[args.sums], device)
            if not name.startswith("te"):
                found = first_sum(way, inputs, gradient)
                expected = found if name == "stock" else expected
                if expected is not None and name != "stock":
                    row["largest_difference"] = float((found - expected).abs().max() / expected.abs().max())
                del found
            row |= times(way, inputs, gradient, args.repeats) | memory(way, inputs, gradient)
            full = next((one["B"] for one in rows if one["way"] == name.partition("+")[0].replace("split", "stock")
                         and "B" in one), row["B"])
            row |= {"split_to_full": round((row["B"] + row["W"]) / full, 4), "B_to_full": round(row["B"] / full, 4)}
            del way
        except NotThere as error:
            row["not_there"] = str(error)
        except torch.cuda.OutOfMemoryError:
            row["not_there"] = "the GPU's memory is too small for this size"
        if device.type == "cuda":
            torch.cuda.empty_cache()
        say(line_of(row))
        rows.append(row)
    return rows


def line_of(row: Row) -> str:
    head = f"{row['hidden']:6} {row['way']:12}"
    if "not_there" in row:
        return f"{head} not there: {row['not_there']}"
    times_ = " ".join(f"{row[name]:9.3f}" for name in "FBW")
    held = [row.get(f"after_{action}_mib", row[f"counted_after_{action}_mib"]) for action in "FB"]
    return f"{head} {times_} {row['split_to_full']:9.3f} {held[0]:12.1f} {held[1]:12.1f}"


HEADER = f"hidden {'way':12} {'F ms':>9} {'B ms':>9} {'W ms':>9} {'B+W/full':>9} {'MiB for B':>12} {'MiB for W':>12}"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a micro-batch")
    parser.add_argument("--dtype", choices=TYPES, default="bf16", help="of parameters and activations")
    parser.add_argument("--sums", choices=TYPES, default="fp32", help="of sums of gradients")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path, metavar="JSON", help="the report, whose part c is written")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> list[Row]:
    args = parse(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("split_cost.py: there is no GPU that torch can use; --device cpu shows that it runs")
    print(HEADER)
    rows: list[Row] = []
    for hidden in args.hidden:
        rows += rows_of(args, hidden, print)
        check_report.write(args.out, "c: split backward", {"arguments": {**vars(args), "out": None}, "rows": rows})
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
