#!/usr/bin/env python3
"""What a generation costs in communicators, by number of workers; processes on this machine, over gloo.

    python scripts/bench/connecting.py                      # 4, 8, 16 and 32 workers in two stages
    python scripts/bench/connecting.py --workers 64 --repeat 5

For each size: the communicators of one worker, the time until the last worker has all of a generation's (``connect``,
all members; ``one dies``, one less, who go on with what they have of the last one; ``one out``, the same with all made
anew), and that of a first and of a later transfer of 4 bytes there and back between two workers: their difference is
what a new partner costs. Of `repeat` generations the quickest and the median.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from megatron_recycle.plan import Grid, Worker
from megatron_recycle.runtime.comm.handles import Groups, Limits
from megatron_recycle.runtime.comm.network import TorchNetwork
from megatron_recycle.runtime.comm.tags import ACTIVATIONS
from megatron_recycle.runtime.place import Place

STAGES = 2
KINDS = 3
LIMITS = Limits(operation=600.0, connect=120.0, meet=120.0)


def exchange(groups: Groups, number: int) -> float:
    """Seconds of a transfer from the first worker to the second and back; 0 for others."""
    world = groups.world
    if world.rank > 1:
        return 0.0
    tensor, begun = torch.zeros(1), time.perf_counter()
    for sender in (0, 1):
        one = (world.send if world.rank == sender else world.receive)(tensor, 1 - world.rank, ACTIVATIONS[number])
        one.wait()
    return time.perf_counter() - begun


def worker(rank: int, size: int, file: str, repeat: int, pipe: Connection) -> None:
    """Sends one row for each generation: how many communicators, and seconds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(file, size), rank=rank, world_size=size)
    grid, pipelines = Grid(STAGES, (1,) * (size // STAGES)), size // STAGES
    ranks = {place: (place.stage * pipelines + place.pipeline,) for place in grid.workers()}
    me = next(place for place, (number,) in ranks.items() if number == rank)
    network, last, reusable = TorchNetwork(), Worker(pipelines - 1, STAGES - 1), None
    for generation in range(KINDS * repeat):
        members = [place for place in ranks if generation % KINDS == 0 or place != last]
        dist.barrier()
        row: dict[str, Any] = {}
        takes_part = me in members
        if takes_part:
            begun = time.perf_counter()
            # As the first of a job: one with all positions filled again has one more communicator.
            groups = network.connect(generation=1, prefix=str(generation), place=Place(me, grid, ranks, "gloo"),
                                     members=members, limits=LIMITS, interrupted=lambda: False,
                                     before=reusable)
            reusable = None
            row = {"seconds": time.perf_counter() - begun, "count": len(groups.all())}
        dist.barrier()
        if takes_part:
            row |= {"first": exchange(groups, 0), "later": min(exchange(groups, number) for number in range(1, 6))}
        dist.barrier()
        if takes_part and generation % KINDS == 0 and me != last:
            groups.abort()
            reusable = groups.park()
        elif takes_part:
            groups.retire()
        pipe.send(row)
    network.close()
    dist.destroy_process_group()


def measure(size: int, repeat: int) -> list[dict[str, Any]]:
    """One row for each generation: the slowest worker's time. Of each three the first has all members."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = rank, size, f"{folder}/store", repeat, theirs
            processes.append(context.Process(target=worker, args=arguments, daemon=True))
            processes[-1].start()
            pipes.append(ours)
        rows = []
        for _ in range(KINDS * repeat):
            found = [row for pipe in pipes if (row := pipe.recv())]
            rows.append({name: max(row[name] for row in found) for name in ("seconds", "count", "first", "later")})
        for process in processes:
            process.join()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--repeat", type=int, default=10)
    options = parser.parse_args()
    print("workers  communicators  connect ms (best, median)  one dies ms  one out ms  first transfer ms  later ms")
    for size in options.workers:
        rows = measure(size, options.repeat)

        def ms(name: str, rows: list[dict[str, Any]]) -> str:
            values = [1000 * row[name] for row in rows]
            return f"{min(values):.1f}, {statistics.median(values):.1f}"

        print(f"{size:7}  {rows[0]['count']:13}  {ms('seconds', rows[::KINDS]):>25}  "
              f"{ms('seconds', rows[1::KINDS]):>11}  {ms('seconds', rows[2::KINDS]):>10}  "
              f"{ms('first', rows):>17}  {ms('later', rows):>8}", flush=True)


if __name__ == "__main__":
    main()
