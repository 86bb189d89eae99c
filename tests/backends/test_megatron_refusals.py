"""What the Megatron backend does not keep correct is refused at the start, by name and with the remedy."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.processes

SETTINGS: dict[str, Any] = {
    "virtual_pipeline_model_parallel_size": None, "sequence_parallel": False, "num_moe_experts": None, "fp16": False,
    "fp8": None, "fp4": None, "mtp_num_layers": None, "cuda_graph_impl": "none", "enable_cuda_graph": False,
    "overlap_p2p_comm": False, "variable_seq_lengths": False, "defer_embedding_wgrad_compute": False,
    "num_microbatches_with_partial_activation_checkpoints": None, "fine_grained_activation_offloading": False,
    "enable_autocast": False, "qk_layernorm": False, "finalize_model_grads_func": None}


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Sizes of the parallel groups, as Megatron would tell them."""
    from megatron.core import parallel_state

    found = {"tensor_model": 1, "context": 1, "expert_model": 1, "pipeline_model": 2}
    for name in found:
        monkeypatch.setattr(parallel_state, f"get_{name}_parallel_world_size", lambda name=name: found[name])
    return found


def refusal(*, reduction: dict[str, bool] | None = None, offload: bool = False, **changes: Any) -> str:
    """What is said to a job like this; "" if nothing is wrong with it."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer.optimizer import FP32Optimizer
    from torch import nn

    from megatron_recycle.backends.megatron_support import check_supported
    from megatron_recycle.errors import UnsupportedError

    model = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(model)
    model.ddp_config = SimpleNamespace(**{"use_distributed_optimizer": False, "overlap_grad_reduce": False,
                                          "average_in_collective": False, **(reduction or {})})
    optimizer: Any = FP32Optimizer.__new__(FP32Optimizer)
    optimizer.config = SimpleNamespace(optimizer_cpu_offload=offload)
    try:
        check_supported([model], SimpleNamespace(**{**SETTINGS, **changes}), optimizer)
    except UnsupportedError as error:
        return str(error)
    return ""


def test_a_plain_job_is_taken(sizes):
    assert refusal() == ""


def test_tensor_parallelism_is_taken_but_not_with_norms_of_queries_and_keys(sizes):
    assert "qk_layernorm" not in refusal(qk_layernorm=True)
    sizes["tensor_model"] = 2
    assert refusal() == ""
    assert "qk_layernorm with tensor parallelism" in refusal(qk_layernorm=True)


@pytest.mark.parametrize("name", ["context", "expert_model"])
def test_other_kinds_of_parallelism(name, sizes):
    sizes[name] = 2
    assert f"{name}_parallel_size to 1" in refusal() or "dense layers" in refusal()


@pytest.mark.parametrize("name", ["use_distributed_optimizer", "overlap_grad_reduce", "average_in_collective"])
def test_ways_of_reducing_that_count_on_all_ranks(name, sizes):
    assert name in refusal(reduction={name: True})


@pytest.mark.parametrize(("changes", "word"), [
    ({"fp16": True}, "use bf16"), ({"cuda_graph_impl": "local"}, "CUDA graphs"),
    ({"num_moe_experts": 4}, "dense layers"),
    ({"sequence_parallel": True}, "sequence_parallel off"), ({"virtual_pipeline_model_parallel_size": 2}, "virtual")])
def test_options(changes, word, sizes):
    assert word in refusal(**changes)


def test_an_optimizer_in_several_places(sizes):
    assert "optimizer_cpu_offload" in refusal(offload=True)


def test_another_version_is_named(sizes, monkeypatch):
    from megatron.core.pipeline_parallel import schedules

    from megatron_recycle.backends import Options, megatron_hook, megatron_version
    from megatron_recycle.config import RecycleConfig
    from megatron_recycle.errors import UnsupportedError

    monkeypatch.setattr(megatron_version, "version", "0.13.0")
    # The backend must not be loaded for that: it builds on names that another version may lack.
    monkeypatch.setitem(sys.modules, "megatron_recycle.backends.megatron", None)
    megatron_hook.install(Options(RecycleConfig()))
    try:
        with pytest.raises(UnsupportedError, match=r"megatron-core 0\.13\.0 is not supported"):
            schedules.get_forward_backward_func()
    finally:
        megatron_hook.install(Options(RecycleConfig(enabled=False)))


LOOP_ARGUMENTS = {"rerun_mode": "disabled", "dataloader_type": "single"}


@pytest.mark.parametrize(("name", "value"), [
    ("exit_signal_handler", True), ("exit_duration_in_mins", 5), ("log_params_norm", True), ("async_save", True),
    ("rampup_batch_size", [8, 8, 100]), ("log_progress", True), ("log_energy", True), ("iterations_to_skip", [3]),
    ("distributed_timeout_seconds_after_init", 60), ("dsa_indexer_loss_coeff", 0.1),
    ("check_weight_hash_across_dp_replicas_interval", 1), ("rerun_mode", "validate_results"),
    ("dataloader_type", "cyclic")])
def test_options_of_megatrons_loop_that_wait_for_all_ranks(name, value, monkeypatch):
    from megatron_recycle.backends import megatron_training
    from megatron_recycle.errors import UnsupportedError

    arguments = SimpleNamespace(**LOOP_ARGUMENTS, iterations_to_skip=[])
    monkeypatch.setitem(sys.modules, megatron_training.LOOP, SimpleNamespace(get_args=lambda: arguments))
    megatron_training.check_arguments()
    setattr(arguments, name, value)
    with pytest.raises(UnsupportedError, match=f"{name}.*: (leave|give) --{name.replace('_', '-')}"):
        megatron_training.check_arguments()


class Sampler:
    def __init__(self, rank: int) -> None:
        self.data_parallel_rank = rank

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(6):
            yield [10 * number + self.data_parallel_rank]


def test_every_pipelines_samples_are_found_from_the_iterator_of_one():
    from megatron_recycle.backends.megatron_data import source_of

    source = source_of(iter(DataLoader(list(range(100)), batch_sampler=Sampler(1))))
    assert source.batch(2, 3).tolist() == [32]
    assert source.batch(0, 5).tolist() == [50]
    source.forget(2, 4)
    assert source.batch(2, 4).tolist() == [42]


@pytest.mark.parametrize("number", [6, 100])
def test_data_that_ends_too_early_is_said_to(number):
    from megatron_recycle.backends.megatron_data import source_of
    from megatron_recycle.errors import DataError

    with pytest.raises(DataError, match="--train-iters"):
        source_of(iter(DataLoader(list(range(100)), batch_sampler=Sampler(0)))).batch(1, number)


def test_an_iterator_without_places_is_refused():
    from megatron_recycle.backends.megatron_data import source_of
    from megatron_recycle.errors import DataError

    with pytest.raises(DataError, match="data_parallel_rank"):
        source_of(iter([1, 2, 3]))
