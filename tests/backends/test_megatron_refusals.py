"""What the Megatron backend does not keep correct is refused at the start, by name and with the remedy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from megatron_recycle.backends.megatron import hook
from megatron_recycle.backends.options import Options
from megatron_recycle.config import RecycleConfig
from megatron_recycle.runtime.compute.random_state import Generators, Seeds

pytest.importorskip("megatron.core")

SEEDS = Seeds(Generators(torch.device("cpu")), 0)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Sizes of the parallel groups, as Megatron would tell them."""
    from megatron.core import parallel_state

    found = {"tensor_model": 1, "context": 1, "expert_model": 1, "pipeline_model": 2, "virtual_pipeline_model": 0}
    for name in found:
        monkeypatch.setattr(parallel_state, f"get_{name}_parallel_world_size", lambda name=name: found[name])
    return found


def refusal(*, reduction: dict[str, bool] | None = None, offload: bool = False, models: int = 1,
            chunks: int = 1, module: nn.Module | None = None, **changes: Any) -> str:
    """What is said to a job like this; "" if nothing is wrong with it."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import FP32Optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_recycle.backends.megatron.support import check_supported
    from megatron_recycle.errors import UnsupportedError

    model = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(model)
    model.module = nn.Module() if module is None else module
    model.ddp_config = DistributedDataParallelConfig(**(reduction or {}))
    optimizer: Any = FP32Optimizer.__new__(FP32Optimizer)
    optimizer.config = OptimizerConfig(optimizer="adam", optimizer_cpu_offload=offload)
    config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, pipeline_model_parallel_size=2,
                               pipeline_dtype=torch.float32)
    for name, value in changes.items():  # after its own checks, some of which want a GPU
        assert hasattr(config, name)
        setattr(config, name, value)
    try:
        check_supported([model] * models, config, optimizer, chunks)
    except UnsupportedError as error:
        return str(error)
    return ""


def test_a_plain_job_is_taken(sizes):
    assert refusal() == ""


def test_tensor_parallelism_is_taken_with_sequence_parallelism_and_norms_of_queries_and_keys(sizes):
    sizes["tensor_model"] = 2
    assert refusal() == refusal(qk_layernorm=True) == refusal(sequence_parallel=True) == ""


def test_means_over_tensor_parallel_ranks_are_refused(sizes):
    def marked() -> nn.Module:
        module = nn.Linear(2, 2)
        module.weight.average_gradients_across_tp_domain = True
        return module

    assert refusal(module=marked()) == ""
    sizes["tensor_model"] = 2
    assert "average_gradients_across_tp_domain" in refusal(module=marked())


@pytest.mark.parametrize("changes", [{"fp16": True}, {"pipeline_model_parallel_size": 1}], ids=str)
def test_a_loss_scale_and_one_stage_are_taken(changes, sizes):
    sizes["pipeline_model"] = changes.get("pipeline_model_parallel_size", 2)
    assert refusal(**changes) == ""


def test_a_virtual_pipeline_is_taken_with_one_model_for_each_of_its_chunks(sizes):
    assert "2 models of a worker where the virtual pipeline has 1 chunks" in refusal(models=2)
    sizes["virtual_pipeline_model"] = 2
    assert refusal(models=2, virtual_pipeline_model_parallel_size=2, overlap_p2p_comm=True) == ""
    assert "1 models of a worker where the virtual pipeline has 2 chunks" in refusal()


def test_this_plugins_own_chunks_want_two_that_were_built_as_such(sizes):
    sizes["virtual_pipeline_model"] = 2
    several = {"models": 2, "virtual_pipeline_model_parallel_size": 2, "overlap_p2p_comm": True}
    assert refusal(**several) == ""
    assert "not built as its chunks" in refusal(chunks=2, **several)


@pytest.mark.parametrize(("given", "said"), [
    ({}, ""), ({"virtual_pipeline_model_parallel_size": 2}, ""),
    ({"num_layers": 6, "pipeline_model_parallel_layout": "Ett|t|t|ttL", "virtual_pipeline_model_parallel_size": 2}, ""),
    ({"virtual_pipeline_model_parallel_size": 4}, "--num-virtual-stages-per-pipeline-rank 2"),
    ({"pipeline_model_parallel_layout": "Ett|ttL"}, "twice as many parts"),
    ({"num_layers": 6}, "multiple of 4"), ({"ckpt_format": "torch"}, "--ckpt-format torch_dist"),
    ({"non_persistent_ckpt_type": "local"}, "use global"), ({"tensorboard_dir": "runs"}, "no loss with chunks 2")])
def test_this_plugins_own_chunks_are_refused_where_they_do_not_fit(given, said):
    from megatron_recycle.backends.megatron.options import v_shaped

    arguments = SimpleNamespace(**{
        "virtual_pipeline_model_parallel_size": None, "pipeline_model_parallel_size": 2, "num_layers": 4,
        "pipeline_model_parallel_layout": None, "ckpt_format": "torch_dist", "use_distributed_optimizer": True,
        "dist_ckpt_optim_fully_reshardable": False, **given})
    refused, changed = v_shaped(arguments)
    assert (said in refused[0] and not changed) if said else not refused
    assert bool(said) != (arguments.dist_ckpt_optim_fully_reshardable
                          and arguments.virtual_pipeline_model_parallel_size == 2)


@pytest.mark.parametrize("name", ["context", "expert_model"])
def test_other_kinds_of_parallelism(name, sizes):
    sizes[name] = 2
    assert f"{name}_parallel_size to 1" in refusal() or "dense layers" in refusal()


def test_with_the_distributed_optimizer_gradients_are_summed_in_the_type_that_they_have():
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from megatron_recycle.backends.megatron.distributed import check

    optimizer: Any = DistributedOptimizer.__new__(DistributedOptimizer)
    optimizer.ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    assert not check([optimizer])
    optimizer.ddp_config.reduce_scatter_with_fp32_accumulation = True
    assert any("grad_reduce_in_fp32" in line for line in check([optimizer]))


@pytest.mark.parametrize("name", ["use_megatron_fsdp"])
def test_ways_of_reducing_that_spread_the_state(name, sizes):
    assert name in refusal(reduction={name: True})


@pytest.mark.parametrize("name", ["overlap_grad_reduce", "average_in_collective", "check_for_large_grads"])
def test_ways_of_reducing_that_change_no_result(name, sizes):
    assert refusal(reduction={name: True}) == ""


@pytest.mark.parametrize(("changes", "word"), [
    ({"cuda_graph_impl": "local"}, "CUDA graphs"), ({"num_moe_experts": 4}, "dense layers")])
def test_options(changes, word, sizes):
    assert word in refusal(**changes)


def test_an_optimizer_in_several_places(sizes):
    assert "optimizer_cpu_offload" in refusal(offload=True)


@pytest.mark.parametrize(("version", "taken"), [
    ("0.16.1", True), ("0.16.0", True), ("0.16.1+g55ac.d2026", True), ("0.16.2rc0.dev5", True), ("v0.16", True),
    ("0.17.0+0.16.1", True), ("0.18.2+571370c829", True), ("0.19.2", True), ("0.15.9", False), ("0.20.0", False),
    ("0.160.1", False), ("1.16.1", False), ("nightly", False), ("", False)])
def test_a_version_is_known_by_its_first_two_numbers_whoever_has_built_it(version, taken, monkeypatch):
    from megatron_recycle.backends.megatron import version as megatron_version
    from megatron_recycle.errors import UnsupportedError

    monkeypatch.setattr(megatron_version, "installed", lambda: version)
    with nullcontext() if taken else pytest.raises(UnsupportedError, match="is not supported"):
        megatron_version.check_version()


def test_another_version_is_named(sizes, monkeypatch):
    from megatron.core.pipeline_parallel import schedules

    from megatron_recycle.backends import Options
    from megatron_recycle.backends.megatron import hook as megatron_hook
    from megatron_recycle.backends.megatron import version as megatron_version
    from megatron_recycle.config import RecycleConfig
    from megatron_recycle.errors import UnsupportedError

    monkeypatch.setattr(megatron_version, "installed", lambda: "0.13.0")
    # The backend must not be loaded for that: it builds on names that another version may lack.
    monkeypatch.setitem(sys.modules, "megatron_recycle.backends.megatron.schedule", None)
    megatron_hook.install(Options(RecycleConfig()))
    try:
        with pytest.raises(UnsupportedError, match=r"megatron-core 0\.13\.0 is not supported"):
            schedules.get_forward_backward_func()
    finally:
        megatron_hook.install(Options(RecycleConfig(enabled=False)))


@pytest.mark.parametrize(("core", "beside", "said"), [
    ("0.17.1+g1", (0, 17, 0), ""), ("0.17.1", (0, 19, 1), "with Megatron-LM 0.19.1 is not supported: .*core_v0.17.1"),
    ("0.17.1", None, "")])
def test_megatron_lm_is_of_the_version_of_its_core(core, beside, said, tmp_path, monkeypatch):
    from megatron_recycle.backends.megatron import version as megatron_version
    from megatron_recycle.errors import UnsupportedError

    loop = ModuleType("megatron.training")
    loop.__path__ = [str(tmp_path / "megatron" / "training")]
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    if beside is not None:
        (tmp_path / "megatron" / "core" / "package_info.py").write_text(
            "MAJOR = {}\nMINOR = {}\nPATCH = {}\nPRE_RELEASE = ''\n".format(*beside))
    monkeypatch.setitem(sys.modules, "megatron.training", loop)
    monkeypatch.setattr(megatron_version, "installed", lambda: core)
    with pytest.raises(UnsupportedError, match=said) if said else nullcontext():
        megatron_version.check_version()
    assert megatron_version.is_supported() == (not said)


@pytest.mark.parametrize("core", ["0.15.0", "0.17.1"])
def test_nothing_of_an_unknown_version_or_of_a_mixture_is_touched_before_it_is_refused(core, tmp_path, monkeypatch):
    """The modules have none of the names that this plugin replaces."""
    from megatron_recycle.backends import Options
    from megatron_recycle.backends.megatron import hook as megatron_hook
    from megatron_recycle.backends.megatron import optimizer_groups, training
    from megatron_recycle.backends.megatron import version as megatron_version
    from megatron_recycle.config import RecycleConfig

    package, loop = ModuleType("megatron.training"), ModuleType("megatron.training.training")
    package.__path__ = [str(tmp_path / "megatron" / "training")]
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\nMINOR = 19\nPATCH = 2\n")
    for module in (package, loop, ModuleType("megatron.core.parallel_state"),
                   ModuleType("megatron.core.optimizer.distrib_optimizer")):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(megatron_version, "installed", lambda: core)
    for install in (training.install, megatron_hook.watch_groups, optimizer_groups.watch):
        install(Options(RecycleConfig()))
    judged: list[Any] = []
    variables: Any = ModuleType("megatron.training.global_vars")
    variables.set_global_variables = judged.append
    monkeypatch.setitem(sys.modules, variables.__name__, variables)
    megatron_hook.watch_arguments(Options(RecycleConfig()))
    monkeypatch.setattr("megatron_recycle.backends.megatron.option_report._HEARD", 0.0)
    with pytest.raises(SystemExit) as end:
        variables.set_global_variables(object())  # of which nothing is read
    assert (end.value.code, judged) == (2, [])


@pytest.mark.parametrize("module", ["megatron.core.optimizer.distrib_optimizer", "megatron.training.training"])
def test_a_version_that_is_not_supported_is_left_as_it_is(module, monkeypatch):
    """Nothing of it is touched, or looked for, before it is refused."""
    from megatron_recycle.backends.megatron import optimizer_groups, training
    from megatron_recycle.backends.megatron import version as megatron_version

    monkeypatch.setattr(megatron_version, "installed", lambda: "0.13.0")
    monkeypatch.setitem(sys.modules, module, ModuleType(module))  # without any of the names
    training.install(Options(RecycleConfig()))
    optimizer_groups.watch(Options(RecycleConfig()))
    hook.watch_groups(Options(RecycleConfig()))


def arguments(**changes: Any) -> SimpleNamespace:
    """Megatron-LM's, as far as anything is said of them."""
    from megatron_recycle.backends.megatron.options import ANYWHERE, OF_THE_LOOP

    unset = {name: None for option in (*ANYWHERE, *OF_THE_LOOP) for name in option.names.split()}
    plain: dict[str, Any] = {
        "pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 1, "data_parallel_size": 2,
        "optimizer": "adam", "global_batch_size": 8, "micro_batch_size": 2, "rerun_mode": "disabled",
        "transformer_impl": "local", "dataloader_type": "single", "iterations_to_skip": []}
    return SimpleNamespace(**{**unset, **plain, **changes})


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., SimpleNamespace]]:
    """Megatron-LM parses its arguments with the plugin on; returns them as the script gets them."""
    from megatron_recycle.backends import Options
    from megatron_recycle.backends.megatron import hook as megatron_hook
    from megatron_recycle.config import RecycleConfig

    kept: list[SimpleNamespace] = []
    module = SimpleNamespace(set_global_variables=kept.append)
    monkeypatch.setitem(sys.modules, megatron_hook.ARGUMENTS, module)
    monkeypatch.setattr("megatron_recycle.backends.megatron.option_report.is_joining", lambda: False)
    megatron_hook.watch_arguments(Options(RecycleConfig()))

    def parse(**changes: Any) -> SimpleNamespace:
        module.set_global_variables(arguments(**changes))
        return kept[-1]

    return parse


def test_plain_arguments_are_taken_without_a_word(parsed, capfd):
    assert vars(parsed()) == vars(arguments())
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("name", "value"), [
    ("use_pytorch_profiler", True), ("dsa_indexer_loss_coeff", 0.1),
    ("qk_clip", True), ("logits_save_dir", "logits"), ("multi_latent_attention", True),
    ("experimental_attention_variant", "dsa"), ("qk_l2_norm", True), ("fp8", "hybrid"), ("fp4", "e2m1"),
    ("fp8_param_gather", True), ("fp8_multi_head_attention", True),
    ("rerun_mode", "report_determinism_stats"),
    ("skip_train", True), ("num_experts", 8), ("optimizer", "muon"),
    ("eval_global_batch_size", 4), ("grad_norm_skip_threshold", 3.0), ("gtp_weight_remat_size", 2)])
def test_options_of_megatrons_loop_that_are_refused(name, value, parsed, capfd):
    with pytest.raises(SystemExit) as end:
        parsed(**{name: value})
    assert end.value.code == 2
    line = next(line for line in capfd.readouterr().err.splitlines() if line.startswith("- "))
    assert name in line or "experts" in line or "GTP" in line
    assert len(line.partition(": ")[2]) > 10  # what to do


@pytest.mark.parametrize(("spec", "said"), [
    (["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"], "- Mamba layers: "),
    (["local"], ""), (["my.layers", "mamba"], "")])
def test_layers_that_core_builds_of_transformer_engines_alone_are_known_by_their_specification(
        spec, said, parsed, capfd):
    with pytest.raises(SystemExit) if said else nullcontext():
        parsed(spec=spec)
    assert said in capfd.readouterr().err


def test_means_over_pipelines_are_a_micro_batchs_own_and_have_no_place_in_a_gradient(monkeypatch):
    """As pretrain_bert.py reports them; whoever has imported the function gets the other one."""
    from megatron_recycle.backends.megatron import training
    from megatron_recycle.errors import UnsupportedError

    def stock(losses: Any) -> Any:
        raise AssertionError("it would wait for others")

    script = ModuleType("script_of_its_own")
    for module in (ModuleType(training.UTILITIES), script):
        monkeypatch.setattr(module, training.MEANS, stock, raising=False)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    training.report_own_losses()
    loss = torch.tensor(3.0, requires_grad=True)
    means = getattr(script, training.MEANS)([loss * 2, loss])
    assert means.tolist() == [6.0, 3.0]
    (loss * 2).backward()
    assert loss.grad == 2.0
    with pytest.raises(UnsupportedError, match="part of the loss"):
        (loss * means[0]).backward()
    with torch.no_grad():
        assert training.own_losses([loss]).item() == 3.0


def test_all_that_is_refused_is_said_at_once_and_by_one_of_several_ranks_at_one_terminal(parsed, capfd, monkeypatch):

    monkeypatch.delenv("RECYCLE_RUN_DIR", raising=False)
    wrong = {"qk_clip": True, "exp_avg_dtype": "fp8", "transformer_impl": "inference_optimized",
             "skip_train": True, "context_parallel_size": 2}
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(SystemExit):
        parsed(**wrong)
    assert capfd.readouterr().err.count("\n- ") == len(wrong)
    monkeypatch.setenv("LOCAL_RANK", "1")
    waited: list[float] = []
    monkeypatch.setattr("megatron_recycle.backends.megatron.option_report.time.sleep", waited.append)
    with pytest.raises(SystemExit):
        parsed(**wrong)
    assert capfd.readouterr().err == "" and waited  # torchrun would end the other one too


@pytest.mark.parametrize(("name", "value", "then"), [
    ("rerun_mode", "validate_results", "disabled"), ("overlap_grad_reduce", True, True), ("async_save", True, False),
    ("overlap_param_gather", True, False),
    ("defer_embedding_wgrad_compute", True, False), ("check_for_large_grads", True, False),
    ("test_mode", True, False), ("log_energy", True, False),
    ("log_params_norm", True, False), ("error_injection_rate", 1000, 0), ("log_max_attention_logit", True, False),
    ("save_wgrads_interval", 10, None), ("save_dgrads_interval", 10, None), ("log_straggler", True, False),
    ("check_weight_hash_across_dp_replicas_interval", 10, None), ("distributed_timeout_seconds_after_init", 60, None)])
def test_options_that_change_no_result_are_set_otherwise_with_a_line_each(name, value, then, parsed, capfd):
    assert vars(parsed(**{name: value})) == vars(arguments(**{name: then}))
    assert f"megatron-recycle: {name}" in capfd.readouterr().out


def test_options_that_no_tested_release_has_are_named_where_they_are_not_at_their_default(parsed, capfd, monkeypatch):
    from megatron_recycle.backends.megatron import option_report

    def add_megatron_arguments(parser: Any) -> Any:
        parser.add_argument("--micro-batch-size", type=int, default=1)
        parser.add_argument("--xielu", action="store_true")
        parser.add_argument("--goldfish-loss", type=int, default=0)
        return parser

    parser = SimpleNamespace(add_megatron_arguments=add_megatron_arguments)
    monkeypatch.setitem(sys.modules, option_report.PARSER, parser)
    parsed(micro_batch_size=2, xielu=False, goldfish_loss=50)
    (line,) = capfd.readouterr().out.splitlines()
    assert "--goldfish-loss (50)" in line and "xielu" not in line and "micro" not in line


def test_the_line_on_an_option_that_keeps_its_value_is_not_written_again_for_the_model(parsed, capfd, monkeypatch):
    from megatron_recycle.backends.megatron import training

    given = parsed(overlap_grad_reduce=True, overlap_param_gather=True)
    monkeypatch.setitem(sys.modules, training.LOOP, SimpleNamespace(get_args=lambda: given))
    written, (told,) = capfd.readouterr().out, training.told()
    assert told.startswith("overlap_grad_reduce is off") and told in written


def test_with_the_plugin_off_no_option_is_looked_at(parsed, monkeypatch):
    from megatron_recycle.backends import Options
    from megatron_recycle.backends.megatron import hook as megatron_hook
    from megatron_recycle.config import RecycleConfig

    megatron_hook.watch_arguments(Options(RecycleConfig(enabled=False)))
    assert parsed(skip_train=True, async_save=True).async_save


class Sampler:
    def __init__(self, rank: int) -> None:
        self.data_parallel_rank = rank

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(6):
            yield [10 * number + self.data_parallel_rank]


def test_every_pipelines_samples_are_found_from_the_iterator_of_one():
    from megatron_recycle.backends.megatron.data import source_of

    source = source_of(iter(DataLoader(list(range(100)), batch_sampler=Sampler(1))), 0, SEEDS)
    assert source.batch(2, 3).tolist() == [32]
    assert source.batch(0, 5).tolist() == [50]
    source.forget(2, 4)
    assert source.batch(2, 4).tolist() == [42]


class Epochs(Sampler):
    """As Megatron's random sampler, of two micro-batches per epoch: it counts epochs by what it has given."""

    epoch = 0

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(2):
            yield [50 * self.epoch + 10 * number + self.data_parallel_rank]
        self.epoch += 1


def cyclic_iter(iter: Any) -> Iterator[Any]:
    """Megatron-LM's, by its own names."""
    while True:
        yield from iter


def test_nemos_own_loop_is_refused_and_a_script_that_uses_its_tokenizers_is_not(monkeypatch):
    from megatron_recycle.backends.megatron.schedule import RecycleSchedule
    from megatron_recycle.errors import UnsupportedError

    monkeypatch.setattr(RecycleSchedule, "_start", lambda *given: (_ for _ in ()).throw(InterruptedError))
    monkeypatch.setitem(sys.modules, "nemo.lightning", ModuleType("nemo.lightning"))
    call = RecycleSchedule(RecycleConfig(), Options())
    given = {"forward_step_func": None, "data_iterator": None, "model": None, "num_microbatches": 2}
    loop = {"__name__": "nemo.lightning.megatron_parallel", "call": lambda: call(**given)}
    with pytest.raises(UnsupportedError, match="NeMo 2's own loop .* was never run .* Megatron-Bridge"):
        exec("call()", loop)
    with pytest.raises(InterruptedError):
        call(**given)


def test_a_cyclic_iterator_gives_every_pipelines_samples_of_all_epochs_in_any_order():
    from megatron_recycle.backends.megatron.data import source_of

    loader = DataLoader(list(range(500)), batch_sampler=Epochs(1))
    source = source_of(SimpleNamespace(iterable=cyclic_iter(loader)), 0, SEEDS)
    assert source.batch(0, 5).tolist() == [110] and source.batch(2, 2).tolist() == [52]
    assert source.batch(0, 3).tolist() == [60]  # once more, after a failure
    ours = cyclic_iter(DataLoader(list(range(500)), batch_sampler=Epochs(1)))
    assert [int(next(ours)) for _ in range(6)] == [source.batch(1, number).item() for number in range(6)]


def test_cyclic_iterators_that_cannot_be_followed_are_refused():
    from megatron_recycle.backends.megatron.data import source_of
    from megatron_recycle.errors import DataError

    class Drawn(list[int]):
        def set_epoch(self, epoch: int) -> None:
            """As RandomSeedDataset's."""

    begun = cyclic_iter(DataLoader(list(range(100)), batch_sampler=Epochs(0)))
    next(begun)
    for wrong, said in [(begun, "has taken micro-batches"), (cyclic_iter([1, 2]), "goes through a list"),
                        (cyclic_iter(DataLoader(Drawn([1]), batch_sampler=Epochs(0))), "by the epoch")]:
        with pytest.raises(DataError, match=said):
            source_of(wrong, 0, SEEDS)


@pytest.mark.parametrize("number", [6, 100])
def test_data_that_ends_too_early_is_said_to(number):
    from megatron_recycle.backends.megatron.data import source_of
    from megatron_recycle.errors import DataError

    with pytest.raises(DataError, match="--train-iters"):
        source_of(iter(DataLoader(list(range(100)), batch_sampler=Sampler(0))), 0, SEEDS).batch(1, number)


def test_an_iterator_without_places_is_refused():
    from megatron_recycle.backends.megatron.data import source_of
    from megatron_recycle.errors import DataError

    with pytest.raises(DataError, match="data_parallel_rank"):
        source_of(iter([1, 2, 3]), 0, SEEDS)


def test_a_job_that_starts_again_with_fewer_pipelines_keeps_megatrons_global_batch():
    """Without --global-batch-size Megatron takes one micro-batch of each pipeline."""
    from megatron_recycle.backends.megatron.training import keep_batch

    arguments = SimpleNamespace(micro_batch_size=2, global_batch_size=2)
    assert keep_batch(arguments, None) == [] and arguments.global_batch_size == 2
    (line,) = keep_batch(arguments, 4)
    assert arguments.global_batch_size == 8 and "is 8 and not 2" in line
    assert keep_batch(arguments, 4) == []


def test_the_fork_of_core_that_a_deepspeed_script_brings_along_keeps_its_own_schedules(monkeypatch):
    """Megatron-DeepSpeed's loop asks for a schedule before it evaluates, and uses DeepSpeed's engine."""
    fork, schedules = ModuleType("megatron.core"), ModuleType(hook.SCHEDULES)
    fork.__file__ = "megatron/core/__init__.py"
    schedules.get_forward_backward_func = lambda: "its own"
    monkeypatch.setitem(sys.modules, "megatron.core", fork)
    monkeypatch.setitem(sys.modules, hook.SCHEDULES, schedules)
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    hook.is_deepspeeds_fork.cache_clear()
    hook.install(Options(config=RecycleConfig()))
    try:
        assert schedules.get_forward_backward_func() == "its own"
    finally:
        hook.is_deepspeeds_fork.cache_clear()


def test_a_batch_that_a_forward_step_empties_can_be_run_again():
    """As pretrain_gpt.py of newer cores does where a stage needs no tokens."""
    from megatron_recycle.backends.megatron.data import read_from

    assert read_from(None) is None and [*read_from("batch")] == ["batch"]
    batch = {"tokens": 1}
    next(read_from(batch)).clear()
    assert batch == {"tokens": 1}


def test_stages_in_the_middle_read_only_what_they_are_given():
    from megatron_recycle.backends.megatron.data import NoData, Shifted, source_of
    from megatron_recycle.runtime.compute.data import read_everywhere

    late = Shifted(NoData(), lambda number: 0)
    assert not read_everywhere(late) and not read_everywhere(source_of(None, 0, SEEDS))
    late.source = source_of(iter(DataLoader(list(range(100)), batch_sampler=Sampler(1))), 0, SEEDS)
    assert read_everywhere(late) and read_everywhere(Shifted(late, lambda number: 2))
