#!/usr/bin/env python3
"""Several workers on one GPU, each of which takes the others for workers of other hosts.

    python scripts/gpu/one_gpu.py python scripts/quickstart.py
    python scripts/gpu/one_gpu.py recycle run --nproc 4 scripts/gpt_deepspeed.py --stages 2

NCCL refuses two ranks on one device ("Duplicate GPU detected"), and knows a device by its host and its place on the
bus. The host's name it takes from NCCL_HOSTID (misc/utils.cc of NCCL 2.28), so every worker gets one of its own. Then
all traffic goes through sockets of the loopback interface, and workers share the GPU by slices of time: what is right
and in which order things happen can be seen, how fast they are cannot. (`nvidia-cuda-mps-control -d`, where it is
allowed, lets them run at once.) From NCCL 2.30 on NCCL_MULTI_RANK_GPU_ENABLE=1 is the official way.

A worker is a process of the command with the variable RANK. The folder `site` beside this file, on PYTHONPATH, gives
it the variables as it starts, in place of any `sitecustomize` of the machine's own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

SITE = Path(__file__).resolve().parent / "site"

SOCKETS = {
    "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0", "NCCL_RAS_ENABLE": "0", "NCCL_NET_PLUGIN": "none",
    "NCCL_TUNER_PLUGIN": "none",
}
"""Nothing but sockets: other ways would find out that the hosts are one."""
SMALL = {"NCCL_MAX_CTAS": "2", "NCCL_MAX_P2P_NCHANNELS": "2", "NCCL_BUFFSIZE": str(1 << 20)}
"""Little of the GPU's memory, and few of its multiprocessors, for each of many communicators."""
QUIET = {
    "NCCL_DEBUG": "WARN", "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN": "0",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """What to set in a worker that has ``environ`` and the number RANK; what a user has set is left alone, but the
    device is the first of those that are visible."""
    wanted = {**SOCKETS, **SMALL, **QUIET, "NCCL_HOSTID": f"worker-{environ['RANK']}"}
    return {**{name: value for name, value in wanted.items() if name not in environ}, "LOCAL_RANK": "0",
            "CUDA_VISIBLE_DEVICES": environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}


def for_command(environ: Mapping[str, str]) -> dict[str, str]:
    """What to set for a command that starts such workers."""
    path = [str(SITE), *([environ["PYTHONPATH"]] if environ.get("PYTHONPATH") else [])]
    return {"PYTHONPATH": os.pathsep.join(path), "DS_ACCELERATOR": environ.get("DS_ACCELERATOR", "cuda")}


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: one_gpu.py COMMAND [ARGUMENT ...]")
    os.execvpe(sys.argv[1], sys.argv[1:], {**os.environ, **for_command(os.environ)})
