"""The core stands alone: a job that does not ask for a feature is decided upon in the same way without it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, get_args

import pytest

from megatron_recycle.membership import inputs, machine
from megatron_recycle.membership import state as st
from megatron_recycle.membership.extension import IN_FORCE, Extension
from megatron_recycle.membership.extensions import EXTENSIONS
from megatron_recycle.membership.report import ShardsReport
from tests.extensions import EACH_GONE, only
from tests.membership import test_machine_random as base
from tests.membership import test_machine_random_errors as errors
from tests.membership import test_machine_random_joins as joins
from tests.membership.cluster import Cluster, endings, report
from tests.seeds import by_day
from tests.test_imports import ROOT, dotted, imports_of

TOLD_ANYWAY = ("last_copy", "last_host", "left_out")
"""Events of extensions that a job has not asked for: the last one says of no pipeline that it is left out."""
CAMPAIGNS: dict[str, Callable[[int], base.Protocol]] = {
    "failures": lambda seed: base.campaign(base.Protocol, seed),
    "joins": lambda seed: base.campaign(joins.Joins, seed, joins.ACTS, 120),
    "errors": lambda seed: base.campaign(errors.Errors, seed, (*base.ACTS, *errors.RAISES)),
}


def decided(job: base.Protocol) -> tuple[list[Any], Any]:
    """What was written down, but for whether moves are due, and the end."""
    kept = [{**record, "events": [each for each in record.get("events", ()) if each["event"] not in TOLD_ANYWAY],
             "moves_due": None} for record in job.journal]
    return kept, job.end


@functools.cache
def with_all(name: str, seed: int) -> tuple[list[Any], Any]:
    assert tuple(IN_FORCE) == EXTENSIONS
    return decided(CAMPAIGNS[name](seed))


@pytest.mark.parametrize("seed", by_day(1, range(3)))
@pytest.mark.parametrize("name", CAMPAIGNS)
@pytest.mark.parametrize("left", EACH_GONE)
def test_random_interleavings_are_decided_as_with_all_extensions(
        name: str, left: Sequence[Extension], seed: int) -> None:
    wanted = with_all(name, seed)
    with only(left):
        assert decided(CAMPAIGNS[name](seed)) == wanted


@pytest.mark.parametrize("left", EACH_GONE)
def test_a_stage_that_has_lost_its_last_worker_ends_the_job(left: Sequence[Extension]) -> None:
    with only(left):
        cluster = Cluster(2, 2).train()
        cluster.exit("0:1")
        decisions = cluster.exit("1:1")
    (end,) = endings(decisions)
    assert end.status == 1 and "stage 1 has lost its last worker" in end.message and end.again


def test_a_shard_that_nobody_has_ends_the_job() -> None:
    with only([]):
        cluster = Cluster(2, 1).train()
        cluster.exit("0:0")
        cluster.plan()
        shards = ShardsReport(of=2, copies=1, held={1: 0})
        (end,) = endings(cluster.feed(inputs.Reported("1:0/0", cluster.state.generation, report(shards=shards))))
    assert "stage 0 has lost shard 0 of its optimizer state: nobody who is left has it" in end.message


def test_inputs_of_an_extension_that_is_not_there_change_nothing() -> None:
    kinds = [kind for each in EXTENSIONS for kind in each.handlers if kind is not inputs.Saved]
    assert inputs.Unreadable in kinds and inputs.MovesFound in kinds
    with only([]):
        cluster = Cluster().train()
        before = cluster.state
        assert cluster.feed(inputs.MovesFound(1, {"0:1": "1:0"})) == []
        assert cluster.feed(inputs.Unlent("0:0/0", 1, 0, "changed")) == []
    assert cluster.state == before and before.phase is st.Phase.TRAINING


def test_a_rank_that_no_launcher_starts_again_is_given_up_without_moves() -> None:
    """A stage that comes back is then asked of the coordinator, and not waited for."""
    with only([]):
        cluster = Cluster().train()
        cluster.exit("0:1")
        cluster.feed(inputs.StaysOut(cluster.state.forming.ranks["0:1"]))
    assert cluster.state.absent.given_up == {"0:1"}


def test_the_core_imports_no_extension() -> None:
    modules = {type(each).__module__.rpartition(".")[2] for each in EXTENSIONS}
    core = [path for path in (ROOT / "membership").glob("*.py") if path.stem not in {*modules, "extensions"}]
    targets = {(path.stem, found.target.removeprefix("megatron_recycle.membership.").partition(".")[0])
               for path in core for found in imports_of(path.read_text(encoding="utf-8"), dotted(path), False)}
    assert not {(path, target) for path, target in targets if target in modules}


def test_every_input_is_handled_with_all_extensions() -> None:
    """One that nobody handles changes nothing, so that a forgotten one would be waited for in silence."""
    kinds = {*get_args(inputs.Input)}
    assert kinds and not [kind for kind in kinds if machine._handler(kind) is machine._nothing]
