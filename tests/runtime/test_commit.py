"""What the commit compares: the data that the first and the last stage read."""

from __future__ import annotations

import pytest
import torch

from megatron_recycle.errors import DataError
from megatron_recycle.membership import Verdict
from megatron_recycle.plan import Grid
from megatron_recycle.runtime.commit import Held, _compare

GRID = Grid(2, (2, 2))


def test_stages_that_read_different_data_are_told_which_micro_batch():
    _compare(3, GRID, [1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0])
    with pytest.raises(DataError, match="iteration 3: .* pipeline 1, micro-batch 0"):
        _compare(3, GRID, [1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 5.0, 4.0])


def test_data_that_only_a_dead_worker_has_read_is_not_compared():
    _compare(3, GRID, [1.0, 2.0, 0.0, 4.0], [1.0, 0.0, 3.0, 4.0])


def test_a_verdict_survives_the_wire_bit_for_bit():
    verdict = Verdict(7, 0.1 + 0.2, 12.0, (1e-45, 3.0), (1.0, 0.3), 41.0)
    assert Verdict.from_json(verdict.to_json()) == verdict


def test_what_a_peer_holds_can_be_copied_whole_but_for_what_it_has_read_itself():
    held = Held(4, torch.ones(3), 2.5, 0.75, 6.0, {(0, 1): 77}, torch.arange(8.0, dtype=torch.float64).view(4, 2), 9.0)
    assert held.numbers().numel() == Held.count(4, 2)
    copy = Held.from_numbers(4, torch.ones(3), held.numbers(), 4)
    assert (copy.norm_square, copy.loss, copy.weight, copy.zeros) == (2.5, 0.75, 6.0, 9.0)
    assert torch.equal(copy.reports, held.reports)
    assert copy.digests == {}, "the one that it is copied from tells its own"
