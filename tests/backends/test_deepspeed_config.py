"""Configurations in every form that DeepSpeed takes, and what is said about them before DeepSpeed is at work."""

from __future__ import annotations

import base64
import inspect
import json
import os
import time
from argparse import Namespace
from types import SimpleNamespace

import deepspeed
import pytest
import torch
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from megatron_recycle.backends.deepspeed import topology as order
from megatron_recycle.backends.deepspeed.config import keep_batch, read_config, say_before_compiling, with_config
from megatron_recycle.errors import ConfigError
from megatron_recycle.plan import Worker

SETTINGS = {"recycle": {"reduction": "exact"}, "note": "x" * 300}
TEXT = json.dumps(SETTINGS)


def by_name(*arguments, **keywords):
    return inspect.signature(deepspeed.initialize).bind_partial(*arguments, **keywords).arguments


def as_base64(folder):
    return base64.urlsafe_b64encode(TEXT.encode()).decode()


def as_file(folder):
    (folder / "config.json").write_text(TEXT)
    return folder / "config.json"


def as_hjson(folder):
    (folder / "config.hjson").write_text("# a remark\n" + TEXT)
    return str(folder / "config.hjson")


@pytest.mark.parametrize("written", [as_base64, as_file, as_hjson, lambda folder: SETTINGS])
@pytest.mark.parametrize("given", ["config", "config_params", "args", "by place"])
def test_a_configuration_is_read_as_deepspeed_reads_it(written, given, tmp_path):
    config = written(tmp_path)
    arguments, keywords = (), {}
    if given == "args":
        keywords = {"args": Namespace(deepspeed_config=config)}
    elif given == "by place":
        arguments = (*[None] * 10, config)
    else:
        keywords = {given: config}
    assert read_config(by_name(*arguments, **keywords)) == SETTINGS


@pytest.mark.parametrize("config", [
    {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3},
    {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3},
    {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4},
    {"train_batch_size": 24, "gradient_accumulation_steps": 3},
])
def test_a_job_that_starts_again_with_half_its_pipelines_keeps_its_batch(config, tmp_path):
    """Two pipelines with 3 micro-batches of 4 samples have become one. The configuration may be anywhere."""
    kept = keep_batch(config, microbatches=6, pipelines=1)
    assert (kept["gradient_accumulation_steps"], kept["train_micro_batch_size_per_gpu"]) == (6, 4)
    assert kept.get("train_batch_size", 24) == 24
    args = Namespace(deepspeed_config=str(tmp_path))
    call = with_config(by_name(args, "model", config_params=config, training_data="data"), kept)
    assert (call["config"], call["config_params"], call["args"].deepspeed_config) == (kept, None, None)
    assert (call["model"], call["training_data"], args.deepspeed_config) == ("model", "data", str(tmp_path))
    with pytest.raises(ConfigError, match="makes 4 pipelines, which cannot share the 6 micro-batches"):
        keep_batch(config, microbatches=6, pipelines=4)


@pytest.mark.parametrize("config", [None, "no/such/file.json", "x" * 5000, b"\xff".decode("latin1"), 7])
def test_what_cannot_be_read_is_left_to_deepspeed(config):
    assert read_config({"config": config}) == {}


@pytest.mark.parametrize(("config", "client", "said"), [
    ({"type": "Adam"}, None, "compiles its FusedAdam on this machine"),
    ({"type": "AdamW", "params": {"torch_adam": True}}, None, ""),
    ({"type": "Lion", "params": {}}, None, "compiles its FusedLion"),
    ({"type": "SGD"}, None, ""),
    ({"type": "Adam"}, torch.optim.SGD, ""),
])
def test_that_deepspeed_will_compile_is_said_before(config, client, said, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    say_before_compiling({"optimizer": config}, client)
    printed = capsys.readouterr().out
    assert said in printed and bool(printed) == bool(said)
    assert "torch_adam" in printed or "Fused" not in printed or config["type"] == "Lion"


@pytest.mark.parametrize(("age", "said"), [(3600.0, "60 minutes ago"), (5.0, "")])
def test_a_lock_of_a_build_that_was_ended_is_named_before_the_start_waits_for_it_for_ever(
        age, said, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "fused_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (time.time() - age,) * 2)
    say_before_compiling({"optimizer": {"type": "Adam"}}, None)
    printed = capsys.readouterr().out
    assert (str(lock) in printed) == bool(said) and said in printed


def test_a_topology_with_a_model_axis_of_one_is_a_grid_of_pipelines_and_stages(monkeypatch):
    monkeypatch.setattr(order, "backend_for", lambda device: "gloo")
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=1, num_dp=3)
    grid = SimpleNamespace(topology=lambda: topology, data_parallel_size=3, pipe_parallel_size=2,
                           get_data_parallel_id=lambda: 2, get_stage_id=lambda: 1,
                           get_slice_parallel_rank=lambda: 0)
    place = order.place_of(SimpleNamespace(grid=grid, micro_batches=4, device=torch.device("cpu"), module=None))
    assert place.me == Worker(2, 1) and place.ranks[Worker(2, 1)] == (5,)
    assert sorted(rank for ranks in place.ranks.values() for rank in ranks) == list(range(6))


@pytest.mark.parametrize(("prescale", "factor", "stage", "said"), [
    (False, 1.0, 0, ""), (True, 1.0, 0, ""), (True, 4.0, 0, ""), (False, 4.0, 0, ""), (False, 4.0, 1, ""),
    (True, 1.0, 1, "with ZeRO-1")])
def test_where_gradients_are_divided_is_taken_or_refused_by_name(prescale, factor, stage, said):
    from megatron_recycle.backends.deepspeed.support import _scaled_gradients

    engine = SimpleNamespace(postscale_gradients=lambda: not prescale, gradient_predivide_factor=lambda: factor,
                             zero_optimization_stage=lambda: stage)
    found = [message for unsupported, message in _scaled_gradients(engine) if unsupported]
    assert len(found) == bool(said) and all(said in message for message in found)


def test_sections_that_deepspeed_has_given_up_are_refused_by_name_where_they_are_on():
    from megatron_recycle.backends.deepspeed.support import _GIVEN_UP, given_up

    on = {name: {"enabled": True} for name in _GIVEN_UP}
    assert [line.partition(":")[0] for line in given_up(on)] == [*_GIVEN_UP]
    assert given_up({"amp": {"enabled": False}, "fp16": {"enabled": True}}) == []
    assert len(given_up({"compression_training": {"weight_quantization": {"shared_parameters": {}}}})) == 1
