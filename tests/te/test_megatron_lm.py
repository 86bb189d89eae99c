"""`pretrain_gpt.py` of Megatron-LM itself with its default layers and options, on Transformer Engine's own Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends import test_megatron_lm as lm
from tests.backends.test_megatron_lm import checkout, text
from tests.backends.test_megatron_lm_kinds import TWO_PARTS, sentences, t5_through_a_failure
from tests.te import stand_in
from tests.te.versions import newest

__all__ = ["checkout", "sentences", "text"]  # fixtures
pytestmark = lm.pytestmark

TAKEN_OUT = ("--transformer-impl", "local", "--no-gradient-accumulation-fusion")


@pytest.fixture(autouse=True)
def with_default_layers(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts find this Transformer Engine; what asks for other layers than the default is left out."""
    monkeypatch.setattr(lm, "FIRST", [str(Path(stand_in.__file__)), str(engine)])
    monkeypatch.setattr(lm, "ARGUMENTS", [word for word in lm.ARGUMENTS if word not in TAKEN_OUT])


def compare(found: dict[str, tuple[float, float]], expected: dict[str, tuple[float, float]]) -> None:
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, rel=1e-4), key


PRECISION_AWARE = ("--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16")
FP8 = ("--bf16", "--fp8-format", "hybrid", "--fp8-recipe")


@newest
@pytest.mark.parametrize(("more", "victim", "processes"), [
    ((), "1:1", 4),
    pytest.param((*FP8, "tensorwise", *lm.SHARDED[:1]), "1:1", 4, marks=pytest.mark.night),
    pytest.param((*FP8, "mxfp8", "--recompute-granularity", "full", "--recompute-method", "uniform",
                  "--recompute-num-layers", "1"), "1:1", 4, marks=pytest.mark.night),
    pytest.param(("--bf16", "--tensor-model-parallel-size", "2", "--normalization", "RMSNorm", "--swiglu",
                  "--position-embedding-type", "rope", "--disable-bias-linear"), "0:1.0", 8, marks=pytest.mark.night),
    pytest.param(("--bf16", "--tensor-model-parallel-size", "2", "--sequence-parallel", "--qk-layernorm",
                  "--normalization", "RMSNorm", "--swiglu", "--position-embedding-type", "rope",
                  "--disable-bias-linear", "--use-distributed-optimizer"), "0:1.0", 8, marks=pytest.mark.night)])
def test_numbers_through_a_kill_are_those_of_a_run_without_the_plugin(
        engine, more, victim, processes, checkout, text, tmp_path):
    options = ("--data-path", str(text), *more)
    expected = lm.losses(lm.stock(checkout, *options, processes=processes))
    printed = lm.recycled(tmp_path, checkout, *options, kill=(victim, 2), processes=processes)
    found = lm.losses(printed)
    compare({key: found[key] for key in expected if key in found}, {
        key: values for key, values in expected.items() if key in found})
    assert {*expected} - {*found} <= lm.UNWRITTEN
    assert "| live: 3/4 | rerouted: 4 |" in printed


@newest
@pytest.mark.night
def test_chunks_and_shards_through_a_kill_have_the_numbers_of_a_run_without_the_plugin_reduced_exactly(
        engine, checkout, text, tmp_path, monkeypatch):
    monkeypatch.setenv("RECYCLE_REDUCTION", "exact")
    options = ("--data-path", str(text), "--num-virtual-stages-per-pipeline-rank", "2", *lm.SHARDED)
    expected = lm.losses(lm.stock(checkout, *options))
    found = lm.losses(lm.recycled(tmp_path, checkout, *options, kill=("0:1", 2)))
    assert found.keys() == expected.keys()
    compare(found, expected)


@newest
@pytest.mark.night
@pytest.mark.parametrize("more", [(), (*FP8, "tensorwise"), (*lm.SHARDED, *PRECISION_AWARE)], ids=str)
def test_a_killed_worker_comes_back(engine, more, checkout, tmp_path, monkeypatch):
    for name, value in (("MAX_RESTARTS", "2"), ("VERIFY_EVERY", "1"), ("REDUCTION", "exact")):
        monkeypatch.setenv(f"RECYCLE_{name}", value)
    lm.come_back(tmp_path, checkout, "1:1", 2, *more, processes=4)


@newest
@pytest.mark.night
@pytest.mark.parametrize("more", [(), (*FP8, "blockwise")], ids=str)
def test_a_run_of_stock_s_goes_on_under_the_plugin_loses_a_worker_and_stock_goes_on_again(
        engine, more, checkout, text, tmp_path):
    """Each of the layers has its own extra state in there; of 8 bits that is which recipe it had."""
    options = ("--data-path", str(text), "--ckpt-format", "torch_dist", *lm.SHARDED, *more)
    saved = ("--save", str(tmp_path / "saved"), "--load", str(tmp_path / "saved"), "--save-interval", "2")
    expected = lm.losses(lm.stock(checkout, *options))
    compare_some(lm.losses(lm.stock(checkout, *options, *saved, "--exit-interval", "2")), expected, "2")
    compare_some(lm.losses(lm.recycled(tmp_path / "run", checkout, *options, *saved, "--exit-interval", "4",
                                       kill=("1:1", 0))), expected, "4")
    compare_some(lm.losses(lm.stock(checkout, *options, *saved)), expected, "6")


def compare_some(found: dict[str, tuple[float, float]], expected: dict[str, tuple[float, float]], last: str) -> None:
    """Of a run that begins with a checkpoint; Megatron-LM's second line has the mean loss of its first two
    iterations."""
    assert last in found
    first = min(found.keys() & expected.keys(), key=lambda key: (len(key), key))
    assert found[first] == pytest.approx(expected[first], rel=2e-4)
    for key in found.keys() & expected.keys():
        assert found[key][1] == pytest.approx(expected[key][1], rel=2e-4), key


@newest
@pytest.mark.night
@pytest.mark.parametrize("kind", ["torch", "torch_dist"])
def test_stock_goes_on_from_a_checkpoint_of_a_run_that_lost_a_worker(engine, kind, checkout, text, tmp_path):
    """Each of the layers has its own extra state in there, empty as stock's is."""
    options = ("--data-path", str(text), "--ckpt-format", kind, *lm.SHARDED)
    expected, saved = lm.losses(lm.stock(checkout, *options)), tmp_path / "checkpoints"
    script = tmp_path / "script.chaos"
    script.write_text("kill 1:1 --at-iteration 2 --phase backward\n")
    printed = lm.recycled(tmp_path / "killed", checkout, *options, "--save", str(saved), "--save-interval", "4",
                          chaos=script)
    compare(lm.losses(printed), expected)
    (saved / "latest_checkpointed_iteration.txt").write_text("4")
    found = lm.losses(lm.stock(checkout, *options, "--load", str(saved)))
    for iteration in "56":
        assert found[iteration][1] == pytest.approx(expected[iteration][1], rel=1e-4)


SHARDED = (*lm.SHARDED, *PRECISION_AWARE)


@newest
@pytest.mark.night
@pytest.mark.parametrize("form", [
    ("torch",), ("torch", *lm.SHARDED), ("torch", *SHARDED), ("torch_dist", *SHARDED),
    ("torch_dist", *SHARDED, "--dist-ckpt-optim-fully-reshardable")], ids=str)
def test_a_stage_whose_last_worker_is_lost_comes_back_from_the_newest_checkpoint(
        engine, form, checkout, text, tmp_path, monkeypatch):
    """The optimizer counts its steps for each group. Of masters that it keeps inside, checkpoints have the lower 16
    bits, which Megatron-LM 0.16 itself does not load."""
    lm.test_a_stage_whose_last_worker_is_lost_comes_back_from_the_newest_checkpoint_in_the_same_job(
        ("--ckpt-format", *form), 2, checkout, text, tmp_path, monkeypatch)


@newest
@pytest.mark.night
@pytest.mark.parametrize(("processes", "victim", "more"), [
    (2, "1:0", ()), (4, "0:0.1", (*TWO_PARTS, "--sequence-parallel"))])
def test_t5_trains_through_a_failure_as_stock(engine, processes, victim, more, checkout, sentences, tmp_path,
                                              monkeypatch):
    monkeypatch.setenv("RECYCLE_REDUCTION", "exact")
    t5_through_a_failure(processes, victim, more, checkout, sentences, tmp_path)
