"""Evaluations with workers missing: who reads what, and what becomes of the script's iterator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from megatron_recycle.backends.deepspeed import engine as engines
from megatron_recycle.backends.deepspeed import evaluation_data
from megatron_recycle.backends.deepspeed.engine import RecyclePipelineEngine
from megatron_recycle.backends.deepspeed.evaluation_data import EvaluationData
from megatron_recycle.plan import Grid, Worker
from megatron_recycle.runtime.compute.data import digest
from megatron_recycle.runtime.compute.loader_passes import watch_loaders
from megatron_recycle.runtime.compute.random_state import Generators, Seeds
from megatron_recycle.runtime.evaluation import passes
from megatron_recycle.runtime.place import Place

BATCHES = 3  # micro-batches of an iteration


def stock(engine: Any, data_iter: Iterator[int], return_logits: bool = False, compute_loss: bool = True,
          reduce_output: str = "avg", bcast_loss: bool = True, num_micro_batches: int | None = None,
          dies_after: int = 100) -> int:
    """Takes micro-batches as DeepSpeed's does; a peer dies after some of them."""
    wanted = BATCHES if num_micro_batches is None else num_micro_batches
    return [next(data_iter) for _ in range(min(wanted, dies_after))][-1]


def engine(together: Callable[..., Any], first: bool = True) -> Any:
    return SimpleNamespace(is_first_stage=lambda: first, is_last_stage=lambda: False, micro_batches=BATCHES,
                           device="cpu", reset_activation_shape=lambda: None, monitor=SimpleNamespace(enabled=False),
                           session=SimpleNamespace(together=together, in_script=False,
                                                   place=SimpleNamespace(placement=())))


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


GRID = Grid(2, (2, 2, 2))


class Left:
    """Workers that are left; the first of pipeline 0 takes the micro-batches of pipelines that are gone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, me: Worker, *members: Worker) -> None:
        self.me, self.members, self.control = me, sorted(members), SimpleNamespace(size=len(members), group=None)
        self.others: list[Any] = []
        """What the others tell."""
        monkeypatch.setattr(evaluation_data, "count", lambda comm, *flags: [int(flag) for flag in flags])
        monkeypatch.setattr(evaluation_data.dist, "all_gather_object", self._gather)

    def _gather(self, told: list[Any], own: Any, group: Any) -> None:
        told[:] = [own, *self.others]

    def route(self) -> dict[tuple[int, int, int], Worker]:
        return {(pipeline, number, stage): Worker(pipeline, stage) if Worker(pipeline, stage) in self.members
                else next(worker for worker in self.members if worker.stage == stage)
                for pipeline, number in GRID.items() for stage in range(2)}

    def share(self, data: EvaluationData) -> bool:
        plan: Any = self
        groups: Any = self
        return data.share(plan, [*GRID.items()], 0, groups)


def batches(pipeline: int) -> list[torch.Tensor]:
    return [torch.tensor([10 * pipeline + number]) for number in range(2)]


def told(pipeline: int, own: list[torch.Tensor], handed_out: bool = False) -> Any:
    return evaluation_data._Message(pipeline, tuple(map(digest, own)), {
        (pipeline, number): batch for number, batch in enumerate(own) if handed_out})


def begun(given: Iterator[Any]) -> EvaluationData:
    me = Worker(0, 0)
    ranks = {worker: (rank,) for rank, worker in enumerate(GRID.workers())}
    seeds = Seeds(Generators(torch.device("cpu")), 0, "evaluation")
    data = EvaluationData(Place(me, GRID, ranks, "gloo"), seeds)
    data.begin(given, 2)
    return data


def test_the_other_end_of_a_pipeline_hands_out_what_its_first_worker_would_have_read(monkeypatch):
    left = Left(monkeypatch, Worker(0, 0), Worker(0, 0), Worker(0, 1), Worker(1, 1), Worker(2, 0), Worker(2, 1))
    left.others = [told(1, batches(1), handed_out=True), told(2, batches(2))]
    data = begun(iter(batches(0)))
    assert left.share(data)
    assert [[int(data.batch(pipeline, number)) for number in range(2)] for pipeline in (0, 1)] == [[0, 1], [10, 11]]


def test_a_pipeline_that_is_gone_had_what_all_others_have_and_if_they_differ_nobody_guesses(monkeypatch):
    left = Left(monkeypatch, Worker(0, 0), Worker(0, 0), Worker(0, 1), Worker(2, 0), Worker(2, 1))
    left.others = [told(2, batches(0))]
    data = begun(iter(batches(0)))
    assert left.share(data) and [int(data.batch(1, number)) for number in range(2)] == [0, 1]
    left.others = [told(2, batches(2))]
    data = begun(iter(batches(0)))
    assert not left.share(data) and "nobody but this worker can read" in data.failed
    watch_loaders()
    share = [DistributedSampler(range(12), 3, pipeline, shuffle=False) for pipeline in range(3)]  # type: ignore[arg-type]
    loaders = [DataLoader(torch.arange(12), batch_size=2, sampler=sampler) for sampler in share]  # type: ignore[arg-type]
    left.others = [told(2, [*loaders[2]])]
    data = begun(iter(loaders[0]))
    assert left.share(data) and [data.batch(1, number).tolist() for number in range(2)] == [[1, 4], [7, 10]]
    left.others = [told(2, [torch.tensor([3, 3]), torch.tensor([4, 4])])]
    data = begun(iter(loaders[0]))
    assert not left.share(data), "the other pipeline's loader is another one: this one cannot be believed"


def test_data_that_ends_is_told_to_all_and_the_next_evaluation_has_its_own(monkeypatch):
    left = Left(monkeypatch, Worker(0, 0), *GRID.workers())
    data = begun(iter(batches(0)[:1]))
    assert not left.share(data) and not data.failed
    data.begin(iter(batches(5)), 2)
    left.others = [told(1, batches(1)), told(2, batches(2))]
    assert left.share(data) and int(data.batch(0, 1)) == 51


def test_the_mean_is_over_micro_batches_and_then_over_pipelines():
    tables = [torch.tensor([[float(pipeline + number), 0.0] for pipeline, number in GRID.items()]),
              torch.tensor([[float(10 * pipeline), 0.0] for pipeline, _ in GRID.items()])]
    own = evaluation_data.by_pipeline(tables, GRID, 3)
    assert [one.tolist() for one in own] == [[0, 1, 0], [1, 2, 10], [2, 3, 20]]
    assert evaluation_data.mean(own).item() == pytest.approx((1 / 3 + 13 / 3 + 25 / 3) / 3)
    assert passes(GRID, 3) == 2 and passes(GRID, 2) == 1


def test_who_comes_in_after_an_evaluation_of_fewer_micro_batches_is_told_no_smaller_loss():
    """It asks for as many as its script does at that place, which has set another batch size since."""
    places = list(GRID.items())
    table = torch.tensor([[1.0 + pipeline, 0.0] if number == 0 else [0.0, 0.0] for pipeline, number in places],
                         dtype=torch.float64)
    asked = evaluation_data.by_pipeline([evaluation_data.filled(table, GRID)], GRID, max(GRID.microbatches))
    once = evaluation_data.by_pipeline([table], GRID, 1)
    assert evaluation_data.mean(asked) == evaluation_data.mean(once) > 0
