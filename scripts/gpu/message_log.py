#!/usr/bin/env python3
"""The log of messages (`keep_messages: all`) on a GPU: copies in pinned host memory, made beside computing.

    python scripts/gpu/message_log.py
    python scripts/gpu/message_log.py --cpu    # that it runs: a CPU's log is no copy

Each check says whether all is "well", and its figures:

- `bits`: a message that was logged comes back with its bits, although its tensors were written to after the copy.
- `beside`: products of matrices take as long with a log after every fourth as without.
- `room`: the device has its memory back once a message is copied, and the host gives what the budget counts.
- `speed`: of the first log, which asks for pinned memory, and of later ones, there and back.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the project need not be installed

import check_report
import torch

from megatron_recycle.runtime.compute.device import Device, device_of

_MESSAGE = 2**22  # elements of a message in bf16: 8 MiB, as of 2,048 tokens and a hidden size of 2,048
_PRODUCTS = 50
_SLOWER = 1.1
_GIB = 2**30

Found = dict[str, Any]


def bits(device: Device, at: torch.device, size: int) -> Found:
    one = torch.randn(64, size // 64, device=at, dtype=torch.bfloat16).t()  # not contiguous
    message = [one, torch.arange(1000, device=at), torch.zeros(0, device=at)]
    before = [tensor.clone() for tensor in message]
    logged = device.log(message)
    well = all(map(torch.equal, logged.back(), before))  # the copies are over then
    if at.type == "cuda":
        for tensor in message:
            tensor.zero_()
    return {"well": well and all(map(torch.equal, logged.back(), before))}


def beside(device: Device, at: torch.device, size: int) -> Found:
    matrix = torch.randn(int(size**0.5), int(size**0.5), device=at, dtype=torch.bfloat16)

    def products(log: bool) -> float:
        """The device's seconds."""
        begun, logs = device.moment(), []
        for _ in range(_PRODUCTS):
            for _ in range(4):
                made = matrix @ matrix
            logs += [device.log([made])] if log else []
        ended = device.moment()
        ended.wait()
        return ended.since(begun)

    products(True)
    without, with_log = (sorted(products(log) for _ in range(5))[2] for log in (False, True))
    return {"well": with_log < _SLOWER * without or at.type == "cpu", "ms_without": round(1000 * without, 2),
            "ms_with": round(1000 * with_log, 2)}


def room(device: Device, at: torch.device, size: int) -> Found:
    if at.type == "cpu":
        return {"well": True}
    torch.cuda.synchronize()
    before, logs = torch.cuda.memory_allocated(), []
    for number in range(8):
        logs.append(device.log([torch.full((size,), float(number), device=at, dtype=torch.bfloat16)]))
    for logged in logs:
        logged.back()
    torch.cuda.synchronize()
    torch.empty(1, device=at)  # the allocator looks which copies are over when it is asked
    left = torch.cuda.memory_allocated() - before
    stats = getattr(torch.cuda, "host_memory_stats", dict)()
    host = stats.get("allocated_bytes.current", stats.get("active_bytes.current"))
    counted = device.log_bytes([2 * size] * len(logs)).host
    return {"well": left <= 512 and all(float(logged.tensors[0][0]) == number for number, logged in enumerate(logs)),
            "bytes_left": left, "host_bytes": host, "counted": counted}


def speed(device: Device, at: torch.device, size: int) -> Found:
    message = torch.randn(4 * size, device=at, dtype=torch.bfloat16)

    def seconds(run: Callable[[], object]) -> float:
        begun = time.perf_counter()
        run()
        if at.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    first = seconds(lambda: device.log([message]))
    there = min(seconds(lambda: device.log([message])) for _ in range(5))
    logged = device.log([message])
    back = min(seconds(logged.back) for _ in range(5))
    return {"well": True, "first_ms": round(1000 * first, 2), "gib_per_s": round(message.nbytes / _GIB / there, 1),
            "back_gib_per_s": round(message.nbytes / _GIB / back, 1)}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="on a CPU, with small messages; nothing is written")
    parser.add_argument("--out", type=Path, metavar="JSON", help="the report, whose part e is written")
    args = parser.parse_args(argv)
    if not args.cpu and check_report.machine()["gpu"] is None:
        print("message_log.py: there is no GPU that torch can use; --cpu asks for none", file=sys.stderr)
        return 2
    at = torch.device("cpu") if args.cpu else torch.device("cuda", torch.cuda.current_device())
    results: list[Found] = []
    for check in (bits, beside, room, speed):
        results.append({"check": check.__name__, **check(device_of(at), at, 2**10 if args.cpu else _MESSAGE)})
        print(f"{'well' if results[-1]['well'] else 'BAD '} {results[-1]}", flush=True)
        if not args.cpu:
            check_report.write(args.out, "e: the log of messages", results)
    return 0 if all(result["well"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
