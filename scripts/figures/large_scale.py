#!/usr/bin/env python3
"""256 to 1,536 GPUs, of which 1, 5 and 10 % are lost for good right after the start, in hosts of 8 GPUs (TP 8).

One worker is one host, so that a lost host is a lost worker. 145 B parameters; hosts are drawn, 3 seeds, an hour.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import STALLS, job_of, ratios, short, tell, write
from draw import draw

from megatron_recycle.tools.simulate.cluster import Cluster
from megatron_recycle.tools.simulate.compare import compare, makers
from megatron_recycle.tools.simulate.trace import HOST, Outage, Trace

GRIDS = ((256, 8, 4), (512, 8, 8), (1024, 16, 8), (1536, 16, 12))
SHARES = (0.01, 0.05, 0.10)
POLICIES = ("ours", "ours-no-moves", "lent-and-moves", "lent-layers", "recycle-published", "moved-layers", "drop",
            "oobleck", "bamboo", "torchft", "fault-scaled")


def lost(hosts: int, count: int, seed: int, seconds: float = 3600.0) -> Trace:
    """These many drawn hosts fail one after the other in the first minute."""
    names = [f"host{number}" for number in range(hosts)]
    gone = random.Random(seed).sample(names, count)
    outages = [Outage(60.0 * (number + 1) / (count + 1), float("inf"), name, HOST) for number, name in enumerate(gone)]
    return Trace(tuple(names), tuple(outages), seconds)


def main() -> None:
    found = []
    for gpus, pipelines, stages in GRIDS:
        job, cluster = job_of("gpt3-145b", pipelines, stages, 4 * stages, 8), Cluster(gpus // 8, 8, 8)
        for share in SHARES:
            count = max(1, round(share * cluster.hosts))
            traces = [lost(cluster.hosts, count, seed) for seed in range(3)]
            rows, _ = compare(makers(POLICIES, STALLS), job, cluster, traces, work=0)
            tell(rows, f"{gpus} GPUs ({pipelines}x{stages}, TP 8), {count} of {cluster.hosts} hosts lost")
            found.append({"gpus": gpus, "grid": [pipelines, stages, 4 * stages], "tp": 8, "hosts_lost": count,
                          "share": share, "claims": ratios(rows), "policies": short(rows)})
    write("large_scale", {"results": found})
    draw("large_scale")


if __name__ == "__main__":
    main()
