#!/usr/bin/env python3
"""Replay of the public trace of GCP A100 machines (27 h, up to 64 machines of one GPU), GPT-3 3.35 B and 6.7 B.

The trace counts machines; which ones go is drawn (seed 0). Machines that come back take empty places; there are spares
where fewer than 64 are used. Needs the trace in the folder that RECYCLE_TRACES names.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import STALLS, job_of, picture, ratios, short, tell, trace_file, write

from megatron_recycle.tools.simulate.charts import over_time
from megatron_recycle.tools.simulate.cluster import Cluster
from megatron_recycle.tools.simulate.compare import ORDER, compare, makers
from megatron_recycle.tools.simulate.reading import read

GRIDS = (("gpt3-3.35b", 12, 4, 16), ("gpt3-6.7b", 6, 8, 16), ("gpt3-6.7b", 8, 8, 16))
SHOWN = ("ours", "oobleck", "checkpoint-restart", "fault-scaled")
"""Further policies are in the table."""


def main() -> None:
    trace = read(trace_file("gcp-a100x1-east1b-2021.csv"))
    found = []
    for model, pipelines, stages, microbatches in GRIDS:
        job = job_of(model, pipelines, stages, microbatches)
        rows, _ = compare(makers(ORDER, STALLS), job, Cluster(64, 1), [trace], work=0)
        tell(rows, f"GCP A100, {model}, {pipelines} pipelines x {stages} stages")
        found.append({"grid": [pipelines, stages, microbatches], "model": model, "claims": ratios(rows),
                      "policies": short(rows)})
        if (pipelines, stages) == (6, 8):
            over_time([row for row in rows if row.name in SHOWN], picture("gcp_replay"),
                      f"GCP A100 trace of 2021, {model}, 6 pipelines x 8 stages on up to 64 GPUs")
    write("gcp_replay", {"trace": "gcp-a100x1-east1b-2021.csv", "hours": trace.duration / 3600,
                         "cleaned": [note.rpartition(": ")[0] for note in trace.cleaned], "results": found})


if __name__ == "__main__":
    main()
