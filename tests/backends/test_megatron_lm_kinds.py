"""Kinds of jobs of Megatron-LM's own `pretrain_gpt.py`, each beside stock: through a failure, and on from a checkpoint.

MEGATRON_LM names a checkout, as in test_megatron_lm.py.
"""

from __future__ import annotations

import random
import re
import runpy
from collections.abc import Sequence
from pathlib import Path

import numpy
import pytest
import torch

from tests.backends import test_megatron_lm as gpt

pytestmark = gpt.pytestmark
checkout, text, comes_back = gpt.checkout, gpt.text, gpt.comes_back

ONE = ("--pipeline-model-parallel-size", "1")
FP16 = ("--fp16", "--initial-loss-scale", str(2**19), "--loss-scale-window", "2",
        "--accumulate-allreduce-grads-in-fp32")
TWO_PARTS = ("--tensor-model-parallel-size", "2")
CYCLIC = ("--dataloader-type", "cyclic")
UNTIED = ("--untie-embeddings-and-output-weights",)  # stock saves no torch_dist checkpoint of tied ones, if predicting
T5 = ("--decoder-seq-length", "32", "--vocab-size", "127", "--vocab-extra-ids", "20", *ONE)
WITHOUT_FILES = str(gpt.ROOT / "scripts" / "field" / "without_files.py")
T5_SCRIPT = [WITHOUT_FILES, "pretrain_t5.py"]
PREDICTING = ("--mtp-num-layers", "2", "--position-embedding-type", "rope")
KINDS: dict[str, tuple[str, int, Sequence[str]]] = {
    "one stage, fp16, cyclic": ("1:0", 2, (*ONE, *FP16, *CYCLIC)),
    "one stage": ("0:0", 3, (*ONE, "--global-batch-size", "24")),
    "one stage, shards": ("1:0", 2, (*ONE, *gpt.SHARDED)),
    "fp16": ("1:1", 4, FP16),
    "fp16, shards": ("0:1", 4, (*FP16, *gpt.SHARDED[:-1])),
    "constant scale": ("1:1", 4, ("--fp16", "--loss-scale", "1024")),
    "sequence parallel": ("0:1.0", 8, (*TWO_PARTS, "--sequence-parallel", "--qk-layernorm")),
    "norms of queries and keys": ("1:0.1", 8, (*TWO_PARTS, "--qk-layernorm")),
    "one stage, sequence parallel": ("1:0.1", 4, (*ONE, *TWO_PARTS, "--sequence-parallel", "--bf16")),
    "multi-token prediction": ("1:1", 4, (*PREDICTING, *UNTIED)),
    "multi-token prediction, shards, chunks": (
        "0:1", 4, (*PREDICTING, *UNTIED, "--num-virtual-stages-per-pipeline-rank", "2", "--calculate-per-token-loss",
                   *gpt.SHARDED)),
}
"""Who is killed, of how many processes."""
BY_DAY = next(iter(KINDS))


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind == BY_DAY else pytest.mark.night)
                                  for kind in KINDS])
def test_trains_through_a_failure_as_stock_which_goes_on_from_its_checkpoint(
        kind: str, checkout: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECYCLE_REDUCTION", "exact")
    victim, processes, more = KINDS[kind]
    through_a_failure(("--data-path", str(text), *more), victim, processes, checkout, tmp_path)


def through_a_failure(options: Sequence[str], victim: str, processes: int, checkout: Path, tmp_path: Path,
                      saved_after: int = 4, again: Sequence[str] = ("5", "6"),
                      through: Sequence[str] = ()) -> tuple[str, str]:
    """A job whose ``victim`` dies in its third iteration prints what stock prints, and stock goes on from what it has
    saved after so many iterations: with those of ``again``. Returns what both print."""
    options, saved = (*options, "--ckpt-format", "torch_dist"), tmp_path / "checkpoints"
    stock = gpt.stock(checkout, *options, processes=processes, through=through)
    expected = gpt.losses(stock)
    script = tmp_path / "script.chaos"
    script.write_text(f"kill {victim} --at-iteration 2 --phase backward\n")
    printed = gpt.recycled(tmp_path / "killed", checkout, *options, "--save", str(saved), "--save-interval",
                           str(saved_after), processes=processes, chaos=script, through=through)
    alive = processes // (2 if "--tensor-model-parallel-size" in options else 1)
    assert f"| live: {alive - 1}/{alive} |" in printed
    found = gpt.losses(printed)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, rel=1e-4), key
    assert left_out(printed) == left_out(stock) and len(left_out(stock)) == gpt.ITERATIONS
    assert predicted(printed) == pytest.approx(predicted(stock), rel=1e-4)
    assert len(predicted(stock)) == (2 * gpt.ITERATIONS if "--mtp-num-layers" in options else 0)
    (saved / "latest_checkpointed_iteration.txt").write_text(str(saved_after))
    restarted = gpt.stock(checkout, *options, "--load", str(saved), processes=processes, through=through)
    rates = {iteration: left_out(stock)[iteration][:2] for iteration in again}  # its first line counts for two
    assert {iteration: numbers[:2] for iteration, numbers in left_out(restarted).items()} == rates
    losses = gpt.losses(restarted)
    for iteration in {*again} & {*expected}:  # not the loss: Megatron's first one is left to the second
        assert losses[iteration][1] == pytest.approx(expected[iteration][1], rel=1e-3, abs=1.1e-3)  # as printed
    return stock, printed


def texts(folder: Path, counts: Sequence[int]) -> list[str]:
    """Of so many words each, in Megatron's indexed format; their paths without endings."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    draw, found = random.Random(0), []
    for number, count in enumerate(counts):
        found.append(str(folder / f"text{number}"))
        builder = IndexedDatasetBuilder(found[-1] + ".bin", dtype=numpy.uint16)
        for _ in range(count // 50):
            builder.add_item(torch.tensor([draw.randint(0, 254) for _ in range(50)], dtype=torch.int32))
            builder.end_document()
        builder.finalize(found[-1] + ".idx")
    return found


@pytest.mark.night
def test_iterations_are_passed_over_and_all_of_several_validation_sets_is_read_as_in_stock(
        checkout, tmp_path, monkeypatch):
    """The first rank dies, which tells the others in stock how long a validation takes."""
    monkeypatch.setenv("RECYCLE_REDUCTION", "exact")
    at = gpt.ARGUMENTS.index("--split")
    monkeypatch.setattr(gpt, "ARGUMENTS", [*gpt.ARGUMENTS[:at], *gpt.ARGUMENTS[at + 2:]])
    train, *valid = texts(tmp_path, (20_000, 300, 200))
    # Without data for a test, which stock cannot evaluate beside several validation sets.
    options = ("--train-data-path", train, "--valid-data-path", *valid, "--full-validation",
               "--multiple-validation-sets", "--iterations-to-skip", "0", "3", "--train-iters", str(gpt.ITERATIONS + 2))
    printed = [re.findall(r"validation-(\d) loss at (iteration \d+) .*?lm loss value: (\S+)", one) for one in
               through_a_failure(options, "0:0", 4, checkout, tmp_path, saved_after=5, again=("6", "7", "8"))]
    expected, found = ({(number, when): float(loss) for number, when, loss in one} for one in printed)
    assert found == pytest.approx(expected, rel=1e-4) and len(expected) >= 4


def left_out(printed: str) -> dict[str, tuple[str, ...]]:
    """Iteration -> (learning rate, loss scale, steps left out)."""
    lines = re.findall(r" iteration +(\d+)/.*?learning rate: (\S+) \|.*?loss scale: (\S+) \|"
                       r".*?number of skipped iterations: +(\d+)", printed)
    return {iteration: (f"{float(rate):.4e}", *numbers) for iteration, rate, *numbers in lines}  # stock's has 32 bits


def predicted(printed: str) -> dict[str, float]:
    """Iteration and layer of multi-token prediction -> its loss."""
    lines = {match[1]: match[0] for match in re.finditer(r" iteration +(\d+)/.*", printed)}
    return {f"{iteration}.{match[1]}": float(match[2]) for iteration, line in lines.items()
            for match in re.finditer(r"mtp_(\d+) loss: (\S+)", line)}


@pytest.mark.night
@pytest.mark.parametrize(("worker", "processes", "more"), [
    ("1:0", 2, (*ONE, *FP16, *CYCLIC)), ("1:1", 4, (*PREDICTING, "--iterations-to-skip", "1", "5")),
    ("0:0", 2, (*ONE, *gpt.SHARDED)), ("1:1", 4, FP16),
    ("1:1.1", 8, (*TWO_PARTS, "--sequence-parallel", "--qk-layernorm"))])
def test_a_killed_worker_comes_back(worker, processes, more, checkout, tmp_path, comes_back):
    gpt.come_back(tmp_path, checkout, worker, 3, *more, processes=processes)


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of several sentences, as BERT reads them; the path without its endings."""
    prefix = tmp_path_factory.mktemp("sentences") / "document"
    runpy.run_path(WITHOUT_FILES)["write_sentences"](prefix)
    return prefix


@pytest.mark.night
@pytest.mark.parametrize(("processes", "victim", "more"), [
    (4, "1:1", ()), (8, "0:1", ("--pipeline-model-parallel-size", "4")), (2, "1:0", ONE)])
def test_bert_trains_through_a_failure_as_stock(processes, victim, more, checkout, sentences, tmp_path, monkeypatch):
    """Its losses are means over pipelines, and all of its stages read masks, those in the middle too."""
    monkeypatch.setenv("RECYCLE_REDUCTION", "exact")
    through = [WITHOUT_FILES, "pretrain_bert.py"]
    options = ("--data-path", str(sentences), "--attention-backend", "local", "--vocab-size", "127", "--spec", "local",
               *more)
    expected = means(gpt.stock(checkout, *options, processes=processes, through=through))
    script = tmp_path / "script.chaos"
    script.write_text(f"kill {victim} --at-iteration 2 --phase backward\n")
    printed = gpt.recycled(tmp_path / "killed", checkout, *options, processes=processes, chaos=script, through=through)
    assert f"| live: {processes - 1}/{processes} |" in printed
    assert means(printed).keys() == expected.keys() and len(expected) == gpt.ITERATIONS
    for iteration, values in expected.items():
        assert means(printed)[iteration] == pytest.approx(values, rel=1e-4)


@pytest.mark.night
@pytest.mark.parametrize(("processes", "victim", "more"), [
    (2, "1:0", ()), (2, "0:0", gpt.SHARDED), (4, "1:0.1", (*TWO_PARTS, "--calculate-per-token-loss")),
    (4, "0:0.1", (*TWO_PARTS, "--sequence-parallel", "--bf16")),
    (2, "0:0", FP16)])
def test_t5_trains_through_a_failure_as_stock_which_goes_on_from_its_checkpoint(
        processes, victim, more, checkout, sentences, tmp_path, monkeypatch):
    """Its encoder and decoder lie in one stage: Megatron-LM has no pipelines of T5."""
    monkeypatch.setenv("RECYCLE_REDUCTION", "exact")
    t5_through_a_failure(processes, victim, more, checkout, sentences, tmp_path)


def t5_through_a_failure(processes: int, victim: str, more: Sequence[str], checkout: Path, sentences: Path,
                         tmp_path: Path) -> None:
    through_a_failure(("--data-path", str(sentences), *T5, *more), victim, processes, checkout, tmp_path,
                      through=T5_SCRIPT)


@pytest.mark.night
def test_a_killed_worker_of_t5_comes_back(checkout, sentences, tmp_path, comes_back):
    gpt.come_back(tmp_path, checkout, "1:0", 3, *T5, processes=2, through=T5_SCRIPT,
                  forever=("--data-path", str(sentences), "--train-iters", "2000"))


def means(printed: str) -> dict[str, list[float]]:
    """Iteration -> losses of words and of the order of sentences, gradient norm."""
    lines = re.findall(r" iteration +(\d+)/.* lm loss: (\S+) \| sop loss: (\S+) \|.* grad norm: (\S+) \|", printed)
    return {iteration: [*map(float, numbers)] for iteration, *numbers in lines}
