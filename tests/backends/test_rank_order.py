"""Frameworks count the ranks through a pipeline first where a host then has fewer copies of a stage."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from megatron_recycle.backends import rank_order
from megatron_recycle.backends.deepspeed import topology
from megatron_recycle.backends.megatron import hook
from megatron_recycle.backends.options import Options
from megatron_recycle.backends.patching import stock_of
from megatron_recycle.config import RecycleConfig
from megatron_recycle.errors import ConfigError
from megatron_recycle.runtime.setup_record import SetUpRecorder, SetUpReplay

EIGHT_ON_TWO_HOSTS = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
BUILT: list[Any] = []


@pytest.fixture(autouse=True)
def a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in EIGHT_ON_TWO_HOSTS.items():
        monkeypatch.setenv(name, value)
    for module in (topology, hook):
        monkeypatch.setattr(module.dist, "get_world_size", lambda: 8)
    BUILT.clear()


def options(**settings: Any) -> Options:
    return Options(RecycleConfig(**settings))


class Module:
    """Stands for DeepSpeed's PipelineModule: tells the axes of its topology."""

    def __init__(self, layers: Any, num_stages: int | None = None, topology: Any = None, loss_fn: Any = None,
                 partition_method: str = "parameters") -> None:
        BUILT.append((topology and (topology.get_axis_names(), topology.get_dim("data"), topology.get_dim("pipe")),
                      loss_fn))


@pytest.mark.parametrize(("settings", "given", "environ", "expected"), [
    ({}, {"num_stages": 4}, {}, (["data", "pipe"], 2, 4)),
    ({"placement": "framework"}, {"num_stages": 4}, {}, None),
    ({"enabled": False}, {"num_stages": 4}, {}, None),
    ({}, {"num_stages": 4}, {"LOCAL_WORLD_SIZE": "8"}, None),
    ({}, {"num_stages": 3}, {}, None)], ids=["auto", "framework", "off", "one host", "no grid"])
def test_a_pipeline_module_without_a_topology(monkeypatch: pytest.MonkeyPatch, settings: Mapping[str, Any],
                                              given: Mapping[str, Any], environ: Mapping[str, str],
                                              expected: Any) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(topology, "PipelineModule", Kind := type("Kind", (Module,), {"__init__": Module.__init__}))
    topology.place(options(**settings))
    topology.place(options(**settings))  # as a script that calls enable() again
    Kind([], loss_fn="loss", **given)
    assert [(expected, "loss")] == BUILT


def test_a_topology_of_the_script_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "PipelineModule", Kind := type("Kind", (Module,), {"__init__": Module.__init__}))
    topology.place(options())
    Kind([], topology=topology.ProcessTopology(["pipe", "data"], [4, 2]))
    assert BUILT == [((["pipe", "data"], 2, 4), None)]


def test_an_order_in_deepspeeds_json_comes_too_late() -> None:
    topology.check_not_too_late(RecycleConfig.resolve({}, environ={"RECYCLE_PLACEMENT": "spread"}))
    with pytest.raises(ConfigError, match="comes too late"):
        topology.check_not_too_late(RecycleConfig.resolve({"placement": "spread"}, environ={}))


def initialized(monkeypatch: pytest.MonkeyPatch, made: Options) -> Callable[..., str]:
    """Megatron's function, which tells the order that it has come to, with our hook before it."""
    from megatron.core import parallel_state

    now = parallel_state.initialize_model_parallel
    signature = inspect.signature(stock_of(now))

    def stock(*arguments: Any, **keywords: Any) -> str:
        given = signature.bind(*arguments, **keywords)
        given.apply_defaults()
        return str(given.arguments["order"])

    stock.__signature__ = signature  # type: ignore[attr-defined]
    monkeypatch.setattr(parallel_state, "initialize_model_parallel", stock)
    hook.watch_groups(made)
    found: Callable[..., str] = parallel_state.initialize_model_parallel
    return found


def test_megatrons_usual_order_only_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    order = initialized(monkeypatch, options())
    assert order(1, 4) == order(pipeline_model_parallel_size=4, order="tp-cp-ep-dp-pp") == "tp-cp-ep-pp-dp"
    assert order(pipeline_model_parallel_size=4, order="tp-dp-pp") == "tp-dp-pp", "the script's own"
    assert order(1, 4, expert_model_parallel_size=2) == order(2, 4) == "tp-cp-ep-dp-pp", "experts; one pipeline"
    assert initialized(monkeypatch, options(placement="framework"))(1, 4) == "tp-cp-ep-dp-pp"


def test_one_that_joins_from_a_host_of_another_size_counts_as_the_job_did(monkeypatch: pytest.MonkeyPatch) -> None:
    began = SetUpRecorder()
    assert rank_order.spreads(Options(setup=began), RecycleConfig(), 4, 1, 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert not rank_order.spreads(Options(), RecycleConfig(), 4, 1, 8), "a host of one worker has one copy anyway"
    assert rank_order.spreads(Options(setup=SetUpReplay(began.close())), RecycleConfig(), 4, 1, 8)
