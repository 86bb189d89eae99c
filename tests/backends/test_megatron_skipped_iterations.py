"""Iterations that Megatron-LM's loop passes over: where others' micro-batches lie, and how both count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron_recycle.backends.megatron.data import Shifted
from megatron_recycle.backends.megatron.skipped_iterations import Gaps, PassedOver


def test_micro_batches_are_those_of_a_loop_that_reads_and_drops_what_it_passes_over():
    """Three iterations of two micro-batches, before the first and the third of which one is passed over."""
    read: list[int] = []
    source: Any = SimpleNamespace(since=0, batch=lambda pipeline, number: number,
                                  forget=lambda pipeline, before: read.append(before))
    gaps = Gaps()
    given = Shifted(source, gaps.before)
    gaps.add(0, 2)
    assert [given.batch(1, number) for number in range(4)] == [2, 3, 4, 5]
    gaps.add(4, 2)
    gaps.add(4, 3)  # of another size, right behind it
    assert [given.batch(0, number) for number in range(6)] == [2, 3, 4, 5, 11, 12]
    given.forget(0, 3)
    given.forget(0, 4)
    assert read == [5, 11]


def test_the_loop_counts_all_iterations_and_the_runtime_those_that_are_trained():
    passed = PassedOver([0, 4, 6, 7], 4)  # the first was passed over by an earlier job
    assert [passed.after(trained) for trained in range(5)] == [4, 6, 9, 10, 11]
    assert [passed.trained(iteration) for iteration in (4, 5, 6, 8, 9, 11)] == [0, 0, 1, 1, 2, 4]
    assert all(passed.trained(passed.after(trained)) == trained for trained in range(20))
    assert PassedOver([], 4).after(3) == 7
