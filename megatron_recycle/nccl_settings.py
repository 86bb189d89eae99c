"""Variables of torch and NCCL under which a worker outlives the death of another worker.

torch's own watchdog ends processes whose peers have died: it writes to the job's store that all are to dump their
traces, and minutes later ends processes that have long recovered. A job under the plugin has other detectors. torch
reads the variables when a process makes its first group on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping

SETTINGS: Mapping[str, tuple[str, str]] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("0", "torch ends the process when a peer has died"),
    "TORCH_NCCL_ENABLE_MONITORING": ("0", "torch ends a process whose watchdog waits for an abort"),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": ("0", "one worker's timeout makes all others dump and end"),
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": ("1", "an abort waits a minute for a dump"),
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": ("0", "an error that an abort causes ends the process"),
    "TORCH_NCCL_BLOCKING_WAIT": ("0", "a receive that is posted ahead keeps its thread until it is over"),
    "TORCH_NCCL_PROPAGATE_ERROR": ("0", "one worker's error is made everybody's through the store"),
    "NCCL_RUNTIME_CONNECT": ("0", "a first reduction connects its members while nothing can free who waits"),
    "NCCL_NVLS_ENABLE": ("0", "an abort can hang in NVLink SHARP"),
    "CUDA_MODULE_LOADING": ("EAGER", "a kernel that is loaded while a receive is pending waits for it"),
}
"""Name -> the value that a job needs, and the effect of another one. Sources: ProcessGroupNCCL.cpp of torch 2.13;
NCCL's init.cc (transports of collectives are connected with their communicator, or at their first use); the last two
from NVIDIA's resiliency extension and NCCL's documentation of CUDA module loading."""


def defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings that ``environ`` lacks: the user's own values stay, and `unsafe` reports them."""
    return {name: value for name, (value, _) in SETTINGS.items() if name not in environ}


def unsafe(environ: Mapping[str, str]) -> list[str]:
    """One sentence for each variable with a value that ends or hangs survivors."""
    return [f"{name}={environ[name]}: {consequence}; set it to {value} or leave it out"
            for name, (value, consequence) in SETTINGS.items() if environ.get(name, value) != value]
