"""Weight gradients of Transformer Engine's linear layers, left for W: in any order, each into its micro-batch's sum."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.te.job import TEJob
from tests.te.versions import engines

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.processes


def deferred(observer_of: Callable[[str], Any], rank: int) -> list[dict[str, Any]]:
    """What scripts/gpu/te_layers.py finds here, case by case."""
    import sys

    from tests.backends.megatron_job import SCRIPTS

    sys.path[:0] = [SCRIPTS, f"{SCRIPTS}/gpu"]
    import te_layers

    import megatron_cpu

    megatron_cpu.install(pretend=True)
    return [te_layers.judge(case, "cpu") for case in te_layers.cases(list(te_layers.RECIPES))]


@engines
def test_sums_are_those_of_layers_that_defer_nothing_in_any_precision_and_for_experts(engine: Path):
    with TEJob(engine, 1, {}, body=deferred, coordinated=False) as job:
        result = job.wait()[0]
        assert result.status == 0, job.where()
    assert len(result.value) == 32
    assert not [case for case in result.value if not case["well"]]


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


def again(observer_of: Callable[[str], Any], rank: int) -> dict[str, Any]:
    """A layer that Transformer Engine's own checkpoint runs again in B."""
    import sys

    from torch import float32, nn

    from tests.backends.megatron_job import SCRIPTS

    sys.path[:0] = [SCRIPTS, f"{SCRIPTS}/gpu"]
    import te_layers

    import megatron_cpu

    megatron_cpu.install(pretend=True)
    te: Any = sys.modules["transformer_engine.pytorch"]

    class Again(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Any) -> Any:
            return te.checkpoint(self.layer, x)

    plain = te_layers._layers

    def layers(*arguments: Any) -> nn.Module:
        model = plain(*arguments)
        model[1] = Again(model[1])
        return model

    te_layers._layers = layers
    return te_layers.judge({"fused": False, "uses": 1, "backwards": False, "dtype": float32}, "cpu")


@engines
def test_layers_that_its_own_checkpoint_runs_again_defer_as_well(engine: Path):
    with TEJob(engine, 1, {}, body=again, coordinated=False) as job:
        result = job.wait()[0]
        assert result.status == 0, job.where()
    assert result.value["well"], result.value
