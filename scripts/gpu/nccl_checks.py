#!/usr/bin/env python3
"""What NCCL and torch do in the cases on which a job rests that aborts its communicators and goes on.

    python scripts/gpu/nccl_checks.py                     # all checks, on one GPU
    python scripts/gpu/nccl_checks.py --only abort batch
    python scripts/gpu/nccl_checks.py --list
    python scripts/gpu/nccl_checks.py --cpu               # the same programs on the tests' ordered backend, on CPUs

Every rank is a process on the same GPU (see one_gpu.py). A check ends, hangs beyond its limit, fails or tells
something wrong, and is expected to do one of these, by what torch's and NCCL's sources say. Another outcome is news:
exit status 1. With --cpu it is the programs that are tried, not NCCL.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the project need not be installed

import check_report
import nccl_ends as ends
import nccl_order as order
from nccl_runner import Check, Facts, run_check, run_rank

_PLANNED = "all transfers are posted in one planned order (plan/transfers.py)"
_ABORT = "an abort frees whoever waits, and its result never counts (runtime/comm)"
_WATCHDOG = "the settings that the launcher makes (megatron_recycle/nccl_settings.py)"
_CONNECT = "communicators are connected where nobody waits for them, in a thread that can be left behind"
_PAIRS = "pairs are connected before anything depends on them (runtime/p2p_warmup.py)"
_OPEN = "what a transfer that raised has left open is ended at once (`unwind` in runtime/comm/backend.py)"
_UNBOUND = "a default group that is bound to a device does not keep ours back (runtime/comm/rendezvous.py)"
_SLOW = 60.0

CHECKS = (
    Check(order.several_ranks, "ends", "everything below: one GPU is enough to look", size=4, limit=_SLOW, apart=True),
    Check(order.planned_order, "ends", _PLANNED, size=3, limit=30),
    Check(order.planned_order_unconnected, "ends", _PLANNED, size=3, limit=30),
    Check(order.ahead_one_group, "hangs", _PLANNED),
    Check(order.not_ahead_one_group, "ends", "small messages fit the buffers: a small trial proves nothing"),
    Check(order.not_ahead_one_group_large, "hangs", _PLANNED),
    Check(order.ahead_group_per_direction, "ends", "a group per direction would do without guests"),
    Check(order.ahead_group_per_direction_unconnected, "ends", "the same at first uses, for two stages"),
    Check(order.first_operations_cross, "fails", "exchanges of pieces go in batches"),
    Check(order.first_transfer_of_a_pair, "ends", _PAIRS, size=3, limit=45, judged=(0, 1)),
    Check(order.batch, "ends", "exchanges of pieces go in batches"),
    Check(order.wait_returns_early, "ends", "a gradient counts once the device has it, not when wait() returns"),
    Check(order.receive_on_side_stream, "ends", "what is posted ahead is posted under a side stream", on_cpu=False),
    Check(order.bounded_transfers, "ends", "a transfer that waits leaves multiprocessors to those that compute",
          on_cpu=False),
    Check(order.moments_of_the_device, "ends", "durations are the device's, and a thread is one action ahead of it",
          size=1, on_cpu=False),
    Check(order.receive_blocks_device_calls, "ends", "room is left, so that the allocator need not give memory back",
          on_cpu=False),
    Check(order.bound_default_group, "hangs", _UNBOUND, size=3, judged=(0, 1), bound=True, on_cpu=False),
    Check(order.unbound_default_group, "ends", _UNBOUND, size=3, judged=(0, 1), bound=True, on_cpu=False),
    Check(ends.abort, "ends", _ABORT),
    Check(ends.abort_frees_who_waits, "ends", _ABORT),
    Check(ends.abort_with_short_limit, "ends", "an abort gets a limit of its own", limit=30),
    Check(ends.abort_and_rebuild, "ends", "what a generation costs", limit=_SLOW, apart=True),
    Check(ends.abort_one_after_the_other, "hangs", "one thread per group aborts", limit=30),
    Check(ends.abort_together, "ends", "one thread per group aborts", limit=45),
    Check(ends.abort_first_use, "hangs", _CONNECT, judged=(0,)),
    Check(ends.abort_first_use_nonblocking, "ends", "an alternative to " + _CONNECT, judged=(0,),
          settings={"TORCH_NCCL_NONBLOCKING_TIMEOUT": "8"}, on_cpu=False),
    Check(ends.first_use_store_limit, "ends", _CONNECT),
    Check(ends.connecting_is_left_behind, "ends", _CONNECT, size=3, limit=30, judged=(0, 1)),
    Check(ends.abort_while_enqueuing_locked, "ends", "a lock around what is enqueued", limit=_SLOW),
    Check(ends.abort_while_enqueuing, "ends", "whether that lock is needed", limit=_SLOW, on_cpu=False),
    Check(ends.left_and_drained, "ends", "a wrong guess aborts nothing (runtime/quiesce.py)"),
    Check(ends.dead_peer, "ends", _WATCHDOG, limit=40, judged=(1,)),
    Check(ends.transfer_after_an_error, "ends", _OPEN, size=3, limit=40, judged=(1, 2), on_cpu=False),
    Check(ends.transfer_after_an_error_left_open, "wrong", _OPEN, size=3, limit=40, judged=(1,), on_cpu=False),
    Check(ends.dead_peer_torchs_settings, "fails", _WATCHDOG, limit=110, judged=(1,), torchs_settings=True,
          on_cpu=False),
    Check(ends.long_wait, "ends", _WATCHDOG, limit=40, judged=(1,)),
    Check(ends.long_wait_torchs_settings, "fails", _WATCHDOG, limit=100, judged=(1,), torchs_settings=True,
          on_cpu=False),
)


def run_all(checks: Sequence[Check], cpu: bool, at_a_time: int, budget: float) -> Iterator[Facts]:
    """Results as they come: long checks first, those that run apart before all others. None is begun whose limit lies
    beyond ``budget`` seconds from now."""
    deadline = time.monotonic() + budget

    def run(check: Check) -> Facts:
        if time.monotonic() + check.limit > deadline:
            return {"check": check.name, "expected": check.expected, "found": "not run: out of time",
                    "as_expected": False, "ranks": []}
        return run_check(check, cpu)

    yield from (run(check) for check in checks if check.apart)
    with ThreadPoolExecutor(at_a_time) as pool:
        others = sorted((check for check in checks if not check.apart), key=lambda check: -check.limit)
        futures = [pool.submit(run, check) for check in others]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # interrupted: no others are begun


def line_of(result: Facts) -> str:
    mark = "ok  " if result["as_expected"] else "NEWS"
    return f"{mark} {result['check']}: {result['found']} (expected: {result['expected']}) {json.dumps(result['ranks'])}"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    names = [check.name for check in CHECKS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="CHECK", choices=names, default=names)
    parser.add_argument("--list", action="store_true", help="names, expected outcomes and what happens")
    parser.add_argument("--cpu", action="store_true", help="on the tests' ordered backend instead of NCCL")
    parser.add_argument("--at-a-time", type=int, default=5, help="checks that run side by side")
    parser.add_argument("--budget", type=float, default=540.0, metavar="SECONDS", help="for all of them")
    parser.add_argument("--out", type=Path, metavar="JSON", help="the report, whose part a is written")
    for name, kind in (("--rank", int), ("--port", int), ("--facts", Path)):  # for a rank's process
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    checks = [check for check in CHECKS if check.name in args.only and (check.on_cpu or not args.cpu)]
    if args.rank is not None:
        run_rank(checks[0], args.rank, args.port, args.facts, args.cpu)
    if args.list:
        for check in checks:
            print(f"{check.name:40} {check.expected:6} {check.what} For: {check.means}.")
        return 0
    if not args.cpu and check_report.machine()["gpu"] is None:
        print("nccl_checks.py: there is no GPU that torch can use; --cpu tries the programs without", file=sys.stderr)
        return 2
    results: list[Facts] = []
    for result in run_all(checks, args.cpu, args.at_a_time, args.budget):
        results.append(result)
        print(line_of(result), flush=True)
        for rank, lines in enumerate(result.get("logs", ())):
            print("\n".join(f"      {rank}| {line}" for line in lines), flush=True)
        check_report.write(args.out, "a: NCCL", results)
    news = [result["check"] for result in results if not result["as_expected"]]
    print(f"{len(results)} checks; news: {', '.join(news) or 'none'}")
    return 1 if news else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
