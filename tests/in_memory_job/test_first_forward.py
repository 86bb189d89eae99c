"""Jobs in memory whose layers draw from a generator out of sight, or from one that their first forward makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.in_memory_job.job import Job, Shape, differences
from tests.in_memory_job.model import Block, Part
from tests.moments import Moment

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # a death is one

SHAPE = Shape(2, 3, 2, 3)
TEXT = "the same micro-batch, run twice with the same random seeds, has given different outputs on worker"


def before_each(monkeypatch: pytest.MonkeyPatch, kind: type[Block], run: Callable[[Block], None]) -> None:
    """What a layer does before each of its forwards."""
    stock = kind.forward

    def forward(self: Block, x: torch.Tensor) -> torch.Tensor:
        run(self)
        return stock(self, x)

    monkeypatch.setattr(kind, "forward", forward)


def draw_at_random(layer: Block) -> None:
    layer.draw.seed()


def make_late(layer: Block) -> None:
    if not hasattr(layer, "made"):
        layer.made = layer.draw = torch.Generator()
        layer.draw.seed()


@pytest.mark.parametrize("shape", [SHAPE, replace(SHAPE, stages=2, blocks=6, chunks=2)], ids=["flat", "V"])
def test_exact_ends_on_all_ranks_before_anything_is_stepped(shape, monkeypatch):
    before_each(monkeypatch, Block, draw_at_random)
    job = Job(shape)
    results = job.run()
    assert all(TEXT in result.error and "(Block)" in result.error for result in results.values())
    assert not any(event["event"] == "committed" for event in job.control.events)
    assert all(process.worker.standing.stepped == -1 for process in job.processes.values())


def test_a_part_that_draws_alone_is_named_and_its_siblings_do_not_wait_for_it(monkeypatch):
    before_each(monkeypatch, Part, lambda layer: draw_at_random(layer) if layer.columns.start else None)
    results = Job(replace(SHAPE, pipelines=1, stages=2, parts=2)).run()
    assert all(f"{TEXT} 0:0." in result.error or f"{TEXT} 0:1." in result.error for result in results.values())


@pytest.mark.parametrize("shape", [SHAPE, replace(SHAPE, stages=2, blocks=6, chunks=2)], ids=["flat", "V"])
def test_fast_says_so_once_for_each_chunk_of_a_worker_and_trains(shape, monkeypatch):
    before_each(monkeypatch, Block, draw_at_random)
    said: list[str] = []
    monkeypatch.setattr("megatron_recycle.runtime.first_forward.get_logger", lambda: SimpleNamespace(
        warning=lambda text, *values: said.append(text % values)))
    results = Job(shape.with_settings(reduction="fast")).run()
    assert all(result.status == 0 and len(result.losses) == 3 for result in results.values())
    assert len(said) == len(set(said)) == (2 if shape.chunks == 1 else 8)


def test_without_the_check_nothing_is_said(monkeypatch):
    before_each(monkeypatch, Block, draw_at_random)
    results = Job(SHAPE.with_settings(check_forward=False)).run()
    assert all(result.status == 0 for result in results.values())


@pytest.mark.parametrize("parts", [1, pytest.param(2, marks=pytest.mark.night)])
def test_who_comes_in_draws_its_first_numbers_from_generators_that_its_first_forward_makes(parts, monkeypatch):
    """It has the numbers of the one that is gone because its first forward is run twice, too."""
    before_each(monkeypatch, Part if parts > 1 else Block, make_late)
    shape, end = replace(SHAPE, iterations=6, parts=parts), ".0" if parts > 1 else ""
    late = Moment(f"0:1{end}", "reduce", 1)
    calm = Job(shape).run()
    with Job(shape, [Moment(f"1:1{end}", "forward", 0)], holds=[late], seed=2) as job:
        job.comes_back(f"1:1{end}", late)
        results = job.wait()
    assert any(event["event"] == "joined" for event in job.control.events)
    for rank, result in results.items():
        assert result.status == 0 and not differences(result, calm[rank]) - {"losses"}, job.processes[rank].name
