"""Randomness by place: the same numbers wherever and whenever a micro-batch's forward runs."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.nn import functional

from megatron_recycle.runtime.random_state import seed_of, seeded

CPU = torch.device("cpu")


def test_every_place_has_its_own_seed_that_torch_accepts():
    places = list(product((0, 1), range(3), range(3), range(3), (0, 1)))
    seeds = {seed_of(*place) for place in places}
    assert len(seeds) == len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_forward_draws_the_same_numbers_again_and_what_is_outside_does_not_notice():
    torch.manual_seed(3)
    undisturbed = torch.rand(4)
    torch.manual_seed(3)
    with seeded(seed_of(0, 5, 1, 2, 0), CPU):
        first = functional.dropout(torch.ones(100))
    assert torch.equal(torch.rand(4), undisturbed)
    with seeded(seed_of(0, 5, 1, 2, 0), CPU):
        assert torch.equal(functional.dropout(torch.ones(100)), first)
    torch.manual_seed(seed_of(0, 5, 1, 2, 0))
    assert torch.equal(functional.dropout(torch.ones(100)), first)


def test_the_state_comes_back_when_the_forward_fails():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with pytest.raises(ValueError), seeded(1, CPU):
        torch.rand(1)
        raise ValueError
    assert torch.equal(torch.get_rng_state(), before)
