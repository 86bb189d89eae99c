"""`pretrain_gpt.py` of Megatron-LM itself with its default layers and options, on Transformer Engine's own Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends import test_megatron_lm as lm
from tests.backends.test_megatron_lm import checkout, text
from tests.te import stand_in
from tests.te.versions import newest

__all__ = ["checkout", "text"]  # fixtures
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


@newest
@pytest.mark.parametrize(("more", "victim", "processes"), [
    ((), "1:1", 4),
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
    assert {*expected} - {*found} <= {"3"}  # the line that the victim may have been about to write
    assert "| live: 3/4 | rerouted: 4 |" in printed


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
