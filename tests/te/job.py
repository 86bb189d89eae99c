"""Megatron training jobs on Transformer Engine's own Python layers, on the CPU: as `tests.backends.megatron_job`,
forked from a server of their own that has imported Megatron after the stand-in for the compiled module."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from multiprocessing import popen_forkserver
from multiprocessing.forkserver import ForkServer
from pathlib import Path
from typing import Any
from unittest import mock

from tests.harness import Job, Moment, Result
from tests.once import once

FOLDER = "TRANSFORMER_ENGINE_FOLDER"
"""Variable by which a server knows what it preloads."""


def train(observer_of: Callable[[str], Any], rank: int, *, options: tuple[str, ...] = (), **arguments: Any) -> Any:
    """As `megatron_job.train`, on Transformer Engine's layers."""
    from tests.backends import megatron_job

    sys.path.insert(0, megatron_job.SCRIPTS)
    import pretrain_gpt_megatron as script
    import torch.distributed as dist

    import megatron_cpu

    def main(argv: list[str]) -> dict[str, Any]:
        script.compute_the_same_bits()
        megatron_cpu.install(pretend=True)  # its modules ask when they are built
        dist.init_process_group("gloo")
        return script.train(script.parse(argv))

    script.main = main
    return megatron_job.train(observer_of, rank, options=(*options, "--transformer-engine"), **arguments)


@cache
def _server(folder: Path) -> ForkServer:
    """What has imported Megatron on the Transformer Engine in ``folder``."""
    server = ForkServer()
    server.set_forkserver_preload(["tests.te.preload", "tests.backends.megatron_job", "megatron.core.optimizer",
                                   "megatron.core.models.gpt.gpt_layer_specs", "tests.preload"])
    os.environ[FOLDER] = str(folder)
    server.ensure_running()
    del os.environ[FOLDER]
    return server


class TEJob(Job):
    """A job of `train` on the Transformer Engine in ``folder``."""

    def __init__(self, folder: Path, size: int, arguments: Mapping[str, Any], holds: Any = (),
                 body: Callable[..., Any] = train, **more: Any) -> None:
        super().__init__(body, size, arguments, holds, **more)
        self._server = _server(folder)

    def _start(self, rank: int, holds: Any, arguments: Mapping[str, Any], joining: bool = False) -> Any:
        with mock.patch.object(popen_forkserver.forkserver, "connect_to_new_process",
                               self._server.connect_to_new_process):
            return super()._start(rank, holds, arguments, joining)


def calm(folder: Path, size: int, arguments: Mapping[str, Any]) -> dict[int, Result]:
    """What ``size`` workers end with without failures, all of them well; nobody changes it."""
    def run() -> dict[int, Result]:
        with TEJob(folder, size, arguments, rules=None) as job:
            results = job.wait()
            assert all(result.status == 0 for result in results.values()), job.where()
        return results

    return once(f"te {folder} {size} {sorted(arguments.items())!r}", run)


def stock(folder: Path, size: int, arguments: Mapping[str, Any]) -> dict[int, Result]:
    """Likewise, by core's own schedule."""
    with TEJob(folder, size, {**arguments, "plugin": False}, coordinated=False) as job:
        results = job.wait()
        assert all(result.status == 0 for result in results.values()), job.where()
    return results


__all__ = ["Moment", "TEJob", "calm", "stock", "train"]
