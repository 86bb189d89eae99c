"""The order of ranks decides how many copies of a stage the loss of a host takes along."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_recycle.errors import ConfigError
from megatron_recycle.membership.failure_domains import judge
from megatron_recycle.membership.placement import Placement, placement

few = st.integers(1, 5)
placements = st.builds(Placement, stages=few, pipelines=few, parts=st.integers(1, 3), per_host=st.integers(1, 16))


@given(placements)
def test_every_process_has_one_place_and_the_judgement_of_a_running_job_is_that_of_the_plan(grid: Placement) -> None:
    for spread in (False, True):
        hosts = grid.hosts(spread)
        assert len(hosts) == grid.size and sorted(hosts.values()) == list(hosts.values())
        judged = judge({name: str(host) for name, host in hosts.items()})
        several = len(set(hosts.values())) > 1 and grid.pipelines > 1
        assert bool(judged.fatal) == (several and grid.fatal(spread))


@given(placements)
def test_ranks_are_counted_through_a_pipeline_first_only_where_that_saves_copies(grid: Placement) -> None:
    chosen = grid.spreads(None)
    assert grid.most(chosen) == min(grid.most(False), grid.most(True))
    assert not chosen or grid.most(True) < grid.most(False)
    assert grid.spreads("spread") and not grid.spreads("framework")


@given(st.builds(Placement, stages=few, pipelines=few, parts=st.just(1), per_host=st.integers(1, 16)))
def test_no_host_has_more_copies_than_it_must(grid: Placement) -> None:
    """Through a pipeline first, a host has pieces of as few pipelines as its size allows."""
    assert grid.most(True) <= min(grid.pipelines, math.ceil((grid.per_host - 1) / grid.stages) + 1)


def test_a_job_as_bloomz_loses_a_quarter_with_a_host_and_not_a_stage() -> None:
    """72 stages of BLOOMZ-176B, 4 pipelines, 36 hosts of 8: all 36 are fatal as DeepSpeed counts."""
    grid = placement(stages=72, parts=1, size=288, per_host=8)
    assert grid.fatal(False) and grid.most(True) == 1 and grid.spreads(None)


@pytest.mark.parametrize(("numbers", "words"), [
    ((3, 1, 8, 4), "8 processes are no whole pipelines of 3 stages: start a multiple of 3"),
    ((2, 2, 6, 4), "no whole pipelines of 2 stages x 2 parts"), ((0, 1, 8, 4), "0 stages")])
def test_numbers_that_make_up_no_grid_are_refused(numbers: tuple[int, int, int, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        placement(*numbers)
