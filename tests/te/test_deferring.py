"""Weight gradients of Transformer Engine's linear layers, left for W: in any order, each into its micro-batch's sum."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.te.job import TEJob
from tests.te.versions import engines

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.processes


def deferred(observer_of: Callable[[str], Any], rank: int) -> list[tuple[Any, ...]]:
    """What scripts/gpu/te_layers.py finds here, case by case, and whether it is well."""
    import sys

    import torch

    from tests.backends.megatron_job import SCRIPTS

    sys.path[:0] = [SCRIPTS, f"{SCRIPTS}/gpu"]
    import te_layers

    import megatron_cpu

    megatron_cpu.install(pretend=True)
    found: list[tuple[Any, ...]] = []
    for dtype, *case in itertools.product((torch.float32, torch.bfloat16), (False, True), (1, 2), (False, True)):
        fused, uses, backwards = case
        result = te_layers.compare(bool(fused), int(uses), bool(backwards), dtype)
        found.append((str(dtype), *case, result, te_layers.is_well(result, int(uses), bool(backwards), dtype)))
    return found


@engines
def test_sums_are_those_of_layers_that_defer_nothing(engine: Path):
    with TEJob(engine, 1, {}, body=deferred, coordinated=False) as job:
        result = job.wait()[0]
        assert result.status == 0, job.where()
    assert len(result.value) == 16
    assert not [case for case in result.value if not case[-1]]


def first(observer_of: Callable[[str], Any], rank: int) -> dict[str, Any]:
    """Layers that know of a first micro-batch, as core's do, whose W runs last."""
    import sys

    from torch import float32, nn

    from tests.backends.megatron_job import SCRIPTS

    sys.path[:0] = [SCRIPTS, f"{SCRIPTS}/gpu"]
    import te_layers

    import megatron_cpu

    megatron_cpu.install(pretend=True)
    linear: Any = sys.modules["transformer_engine.pytorch"].Linear

    class Knowing(linear):
        is_first_microbatch, disable_parameter_transpose_cache = True, False

        def forward(self, x: Any) -> Any:
            known = None if self.disable_parameter_transpose_cache else self.is_first_microbatch
            self.is_first_microbatch = False
            return super().forward(x, is_first_microbatch=known)

    plain = te_layers._layers

    def layers(*arguments: Any) -> nn.Module:
        model = plain(*arguments)
        model[1].__class__ = Knowing
        return model

    te_layers._layers = layers
    return te_layers.compare(True, 1, True, float32)


@engines
def test_the_first_micro_batch_overwrites_no_sum(engine: Path):
    with TEJob(engine, 1, {}, body=first, coordinated=False) as job:
        result = job.wait()[0]
        assert result.status == 0, job.where()
    assert result.value["far"] < 1e-5
