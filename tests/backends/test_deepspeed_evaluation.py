"""What becomes of the script's iterator in an evaluation that is left out or cut short."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_recycle.backends.deepspeed import engine as engines
from megatron_recycle.backends.deepspeed.engine import RecyclePipelineEngine

BATCHES = 3  # micro-batches of an iteration


def stock(engine: Any, data_iter: Iterator[int], return_logits: bool = False, compute_loss: bool = True,
          reduce_output: str = "avg", bcast_loss: bool = True, num_micro_batches: int | None = None,
          dies_after: int = 100) -> int:
    """Takes micro-batches as DeepSpeed's does; a peer dies after some of them."""
    wanted = BATCHES if num_micro_batches is None else num_micro_batches
    return [next(data_iter) for _ in range(min(wanted, dies_after))][-1]


def engine(together: Callable[..., Any], first: bool = True) -> Any:
    return SimpleNamespace(is_first_stage=lambda: first, is_last_stage=lambda: False, micro_batches=BATCHES,
                           device="cpu", reset_activation_shape=lambda: None,
                           session=SimpleNamespace(together=together, in_script=False))


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines.PipelineEngine, "eval_batch", stock)


def left_out(what: str, run: Callable[[], Any], otherwise: Any) -> Any:
    return otherwise


def whole(what: str, run: Callable[[], Any], otherwise: Any) -> Any:
    return run()


def cut_short(what: str, run: Callable[[], Any], otherwise: Any) -> Any:
    run()
    return otherwise


def test_an_iterator_that_is_kept_goes_on_alike_through_every_evaluation():
    """Or the stage of a worker that comes back reads other labels than those of the first stage's inputs."""
    data = iter(range(100))
    evaluate = RecyclePipelineEngine.eval_batch
    assert evaluate(engine(whole), data) == 2
    assert evaluate(engine(left_out), data).isnan()
    assert evaluate(engine(cut_short), data, dies_after=1).isnan()
    assert evaluate(engine(left_out), data, num_micro_batches=1).isnan()
    assert evaluate(engine(whole), data) == 3 * BATCHES + 1 + BATCHES - 1
    evaluate(engine(left_out, first=False), data)
    assert next(data) == 4 * BATCHES + 1, "a stage between first and last reads nothing"
    assert evaluate(engine(left_out, first=False), None).isnan()
    assert evaluate(engine(left_out), iter(range(1))).isnan(), "data that ends is no error before it is evaluated"


def test_a_script_that_asks_for_logits_gets_two_values_also_of_an_evaluation_that_is_left_out():
    loss, logits = RecyclePipelineEngine.eval_batch(engine(left_out), iter(range(9)), return_logits=True)
    assert torch.isnan(loss) and logits is None
