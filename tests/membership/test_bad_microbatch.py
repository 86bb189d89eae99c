"""Errors of scripts and data, on paper: who is out for one, and when the job ends with what it says."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_recycle.control.wire import WireError
from megatron_recycle.errors import DataError, GenerationOver, JobEnded, UnsupportedError
from megatron_recycle.membership import decisions as do
from megatron_recycle.membership import inputs
from megatron_recycle.membership.fault import Fault
from megatron_recycle.membership.inputs import FROM_WORKER
from megatron_recycle.membership.protocol import Answer
from megatron_recycle.membership.records import restore
from tests.membership.cluster import Cluster, endings, events, told

CORRUPT = Fault("ValueError", "sample 31 is corrupt", 6, "F1.3", whole=True)
MISSING = Fault("KeyError", "'x'", 5)


def raised(cluster: Cluster, name: str, fault: Fault, life: int = 0) -> list[do.Decision]:
    return cluster.feed(inputs.Raised(f"{name}/{life}", fault, cluster.now))


# What an exception says


def test_a_fault_says_what_a_traceback_ends_with_on_one_short_line():
    assert str(Fault.of(KeyError("x"))) == "KeyError: 'x'"
    assert str(Fault.of(RuntimeError())) == "RuntimeError"
    fault = Fault.of(RuntimeError("CUDA error\n\x1b[31mdevice-side  assert\x07 " + "x" * 9999), 3, "B0.1")
    assert fault.text.startswith("CUDA error device-side assert x") and len(fault.text) == 300
    assert "\x1b" not in fault.text and fault.where == "in B0.1 of iteration 3" and fault.microbatch == "0.1"
    assert Fault.of(SystemExit("no data")).text == "no data"
    assert Fault.from_json(fault.to_json()) == fault


def test_a_text_that_cannot_be_made_does_not_hide_the_error():
    class Broken(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    assert "Broken" in Fault.of(Broken()).error and "ZeroDivisionError" in Fault.of(Broken()).text


@pytest.mark.parametrize(("error", "refused"), [(UnsupportedError("a"), True), (DataError("a"), True),
                                                (GenerationOver("a"), False), (JobEnded("a"), False),
                                                (ValueError("a"), False)])
def test_refusals_of_this_package_are_known_from_errors_of_the_script(error: Exception, refused: bool):
    assert Fault.of(error).refused == refused


@pytest.mark.parametrize("wrong", [{"text": "two\nlines"}, {"text": "x" * 1501}, {"iteration": True}, {"whole": 1},
                                   {"error": None}, {"action": 7}])
def test_a_malformed_fault_is_refused_at_the_door(wrong: dict[str, Any]):
    message = inputs.Raised("a", CORRUPT, 1.0, 1).to_json()
    assert FROM_WORKER.read(message) == inputs.Raised("a", CORRUPT, 1.0, 1)
    assert FROM_WORKER.read({"type": "ending", "incarnation": "a", "t": 1.0, "fault": None})
    with pytest.raises(WireError, match="raised"):
        FROM_WORKER.read({**message, "fault": {**CORRUPT.to_json(), **wrong}})


def test_texts_that_differ_in_numbers_only_are_the_same():
    here = Fault("ValueError", "loss is nan on rank 3 (0x7f00)", 6, "F1.3")
    assert here.same(Fault("ValueError", "loss is nan on rank 14 (0x7fabc)", 6, "F1.3"))
    assert not here.same(Fault("ValueError", "loss is inf on rank 3 (0x7f00)", 6, "F1.3"))
    assert not here.same(Fault("TypeError", here.text, 6, "F1.3"))
    assert not here.same(Fault("ValueError", here.text, 7, "F1.3"))
    assert not here.same(Fault("ValueError", here.text, 6, "F1.2"))


# What is decided


def test_one_worker_that_raises_is_out_and_its_error_is_told():
    cluster = Cluster().train()
    decisions = raised(cluster, "1:0", CORRUPT)
    (suspected,) = events(decisions, "suspected")
    assert (suspected["kind"], suspected["error"]) == ("exit", "ValueError: sample 31 is corrupt")
    assert suspected["where"] == "in F1.3 of iteration 6"
    assert "1:0" not in cluster.state.members and not endings(cluster.log)
    assert told(decisions, "end")[0][0] == {"1:0"}, "it waits for this"
    assert cluster.exit("1:0", 1) == [], "the launcher sees its end a second later"


@pytest.mark.parametrize("second", ["2:0", "0:1"])
def test_the_same_error_in_the_same_work_on_a_second_worker_ends_the_job_with_its_text(second: str):
    cluster = Cluster().train()
    cluster.commit_all(5)
    raised(cluster, "1:0", CORRUPT)
    (end,) = endings(raised(cluster, second, CORRUPT))
    assert end.status == 1 and end.message.startswith(
        "micro-batch 1.3 of iteration 6 fails on every worker: ValueError: sample 31 is corrupt")
    assert f"1:0 and {second}" in end.message and end.message.endswith("Last committed iteration: 5.")
    (both,) = [decision.event for decision in cluster.log if isinstance(decision, do.Emit)
               and decision.event.get("removed") is False]
    assert both["worker"] == second and both["error"] == "ValueError: sample 31 is corrupt"


def test_a_full_backward_is_the_backward_that_another_worker_splits():
    """A guest's backward may be another kind of action than it was at home."""
    full, split = (Fault("ValueError", "no", 6, action) for action in ("FB1.3", "B1.3"))
    assert full.same(split) and split.same(full) and full.microbatch == split.microbatch == "1.3"
    assert not full.same(Fault("ValueError", "no", 6, "W1.3")) and full.where == "in FB1.3 of iteration 6"


def test_another_error_or_other_work_on_a_second_worker_is_a_second_failure():
    cluster = Cluster(4).train()
    raised(cluster, "1:0", CORRUPT)
    raised(cluster, "2:0", Fault("ValueError", CORRUPT.text, 6, "F2.3"))
    raised(cluster, "3:0", Fault("MemoryError", "", 6, "F1.3"))
    assert not endings(cluster.log) and cluster.state.generation == 4


def test_a_guest_s_want_of_memory_says_nothing_of_its_micro_batch():
    """Where that one is at home there may be none either then; a job with fewer guests may have enough."""
    cluster = Cluster(2).train()
    cluster.exit("1:0"), cluster.plan(), cluster.reports()
    full = Fault("torch.OutOfMemoryError", "CUDA out of memory", 0, "F1.3", whole=True, recovery=True)
    assert events(raised(cluster, "0:0", full), "retried")
    assert not endings(raised(cluster, "1:1", Fault("torch.OutOfMemoryError", full.text, 0, "F1.3", whole=True)))


def test_in_the_script_s_own_code_a_second_worker_of_the_same_stage_counts():
    cluster = Cluster().train()
    raised(cluster, "1:0", MISSING)
    assert not endings(raised(cluster, "1:1", MISSING)), "each stage may do something else there"
    (end,) = endings(raised(cluster, "2:0", Fault("KeyError", "'x'", 6)))
    assert "1:0 and 2:0 have failed alike after iteration 6: KeyError: 'x'" in end.message
    later = Cluster().train()
    raised(later, "1:0", MISSING)
    assert not endings(raised(later, "2:0", Fault("KeyError", "'x'", 8)))


@pytest.mark.parametrize(("fault", "status"), [
    (Fault("OSError", "no space left", 6, whole=True), 1),
    (Fault("SystemExit", "3", 6, whole=True), 1),
    (Fault("OSError", "no space left", 5, whole=True), 0),
    (Fault("OSError", "no space left", 6, "S"), 0),
    (Fault("OutOfMemoryError", "", 6, recovery=True), 0),
])
def test_a_script_that_fails_behind_its_last_iteration_fails_the_job_once_the_others_have_ended(fault, status):
    cluster = Cluster().train()
    cluster.commit_all(6)
    assert not endings(raised(cluster, "0:0", fault))
    cluster.plan()
    cluster.reports(holds=6)
    cluster.resume_all()
    for name in tuple(cluster.state.members):
        decisions = cluster.feed(inputs.Finished(f"{name}/0", 2))
    ((end, text),) = [(one.status, one.message) for one in endings(decisions)]
    assert end == status
    assert status == 0 or f"has come to its end, but 0:0 has failed after iteration 6: {fault}." in text


def test_whoever_would_leave_a_stage_empty_ends_the_job_with_its_text_and_with_those_of_the_others():
    cluster = Cluster(2).train()
    raised(cluster, "0:0", MISSING)
    (end,) = endings(raised(cluster, "1:0", CORRUPT))
    assert end.message.startswith("1:0, the last worker of stage 0, has failed in F1.3 of iteration 6: ValueError")
    assert "out before: 0:0 exit (KeyError: 'x')" in end.message


def test_a_last_worker_that_is_killed_is_told_with_what_the_others_had_said():
    cluster = Cluster(2).train()
    raised(cluster, "0:0", MISSING)
    (end,) = endings(cluster.exit("1:0"))
    assert "stage 0 has lost its last worker (0:0 exit (KeyError: 'x'), 1:0 exit)" in end.message


def test_workers_that_were_without_a_coordinator_for_too_long_are_told_so():
    cluster = Cluster(2).train()
    cluster.commit_all(4)
    for name in ("0:0", "1:0"):
        member, said = cluster.member(name), "its host was without a coordinator for 83 s"
        decisions = cluster.feed(inputs.Exited(member.rank, member.pid, 1, cluster.now, "worker.log", said=said))
        (suspected,) = events(decisions, "suspected")
        assert (suspected["error"], suspected["where"]) == (said, "after iteration 4")
    (end,) = endings(decisions)
    assert "stage 0 has lost its last worker (0:0 exit (its host was without a coordinator for 83 s)" in end.message


def test_a_refusal_of_ours_ends_the_job_at_once_with_its_text_alone():
    cluster = Cluster().train()
    (end,) = endings(raised(cluster, "1:0", Fault.of(UnsupportedError("all micro-batches must have the same shapes"))))
    assert end.message == "all micro-batches must have the same shapes"
    assert not events(cluster.log, "suspected") and told(cluster.log, "end")[0][0] == set(cluster.names)
    assert raised(cluster, "1:1", Fault.of(UnsupportedError("the same again"))) == [], "told once"


def test_an_error_before_training_ends_the_job_with_its_text():
    cluster = Cluster()
    for name in cluster.names:
        cluster.hello(name)
    (end,) = endings(raised(cluster, "1:0", Fault("KeyError", "'x'")))
    assert end.message == "rank 2 has failed before training began: KeyError: 'x' before its first iteration"
    refused = Cluster()
    refused.hello("1:0")
    (end,) = endings(raised(refused, "1:0", Fault.of(DataError("there is no training data"))))
    assert end.message == "there is no training data"


def test_an_error_during_a_recovery_counts_as_any_other():
    cluster = Cluster().train()
    raised(cluster, "1:0", CORRUPT)
    cluster.reports("0:0", "0:1")
    (end,) = endings(raised(cluster, "2:0", CORRUPT))
    assert "fails on every worker" in end.message


def test_who_was_declared_out_says_nothing_any_more():
    cluster = Cluster().train()
    cluster.exit("1:0")
    assert raised(cluster, "1:0", CORRUPT) == [] and not cluster.state.script.faults


def test_a_joiner_that_raises_does_not_join_and_its_error_is_told():
    cluster = Cluster().train()
    cluster.exit("1:0")
    cluster.plan(), cluster.reports(), cluster.resume_all()
    cluster.hello("1:0", 1)
    decisions = raised(cluster, "1:0", Fault("KeyError", "'x'"), 1)
    assert "KeyError: 'x'" in events(decisions, "join_failed")[0]["reason"] and told(decisions, "end")


def test_a_coordinator_that_comes_back_knows_which_work_has_failed():
    cluster = Cluster().train()
    raised(cluster, "1:0", CORRUPT)
    records = [decision.record.to_json() for decision in cluster.log if isinstance(decision, do.Record)]
    cluster.state = restore(6, records)
    cluster.feed(inputs.Restarted())
    (end,) = endings(raised(cluster, "2:0", CORRUPT))
    assert "1:0 and 2:0" in end.message


def test_only_the_latest_errors_are_remembered():
    cluster = Cluster(80, 1).train()
    for pipeline in range(70):
        raised(cluster, f"{pipeline}:0", Fault("ValueError", "x", 1, f"F{pipeline}.0"))
    assert len(cluster.state.script.faults) == 64 and not endings(cluster.log)


# What the job goes on without


def skipping(pipelines: int = 3) -> Cluster:
    cluster = Cluster(pipelines)
    for name in cluster.names:
        cluster.hello(name)
    for name in cluster.names:
        cluster.ready(name, poison="skip", emergency=True)
    cluster.plan(), cluster.resume_all(), cluster.commit_all(5)
    return cluster


def fails(cluster: Cluster, name: str, fault: Fault, number: int = 1) -> list[do.Decision]:
    return cluster.feed(inputs.Raised(f"{name}/0", fault, cluster.now, number))


def test_the_second_failure_of_a_micro_batch_makes_the_job_go_on_without_it():
    cluster = skipping()
    assert "1:0" not in told(fails(cluster, "1:0", CORRUPT), "stop")[0][0]
    decisions = fails(cluster, "2:0", CORRUPT, 4)
    assert told(decisions, "stop")[0][0] == {"0:0", "0:1", "1:1", "2:0", "2:1"}
    assert told(decisions, "answer") == [({"2:0"}, Answer(4))]
    (skipped,) = events(decisions, "skipped")
    assert (skipped["iteration"], skipped["microbatch"]) == (6, "1.3")
    assert skipped["error"] == "ValueError: sample 31 is corrupt"
    assert told(fails(cluster, "1:1", CORRUPT), "answer"), "it had read the same sample, for its labels"
    cluster.plan()
    ((_, go),) = told(cluster.reports(iteration=6, holds=5), "go")
    assert go.left_out == ((6, "1.3"),) and go.closing is None and not endings(cluster.log)


def test_the_last_worker_of_a_stage_leaves_out_what_it_cannot_do():
    cluster = skipping(2)
    fails(cluster, "1:0", CORRUPT)
    assert events(fails(cluster, "0:0", Fault("MemoryError", "", 6, "B0.1", whole=True)), "skipped")


def test_what_is_no_micro_batch_s_fault_ends_the_job_all_the_same():
    for fault in (Fault("ValueError", "x", 6, "S"), Fault("ValueError", "x", 6, whole=True),
                  Fault("DataError", "x", 6, "F1.3", refused=True, whole=True)):
        cluster = skipping()
        fails(cluster, "1:0", fault)
        fails(cluster, "2:0", fault)
        assert cluster.state.closing and not events(cluster.log, "skipped")


def test_only_ten_are_left_out_within_a_hundred_iterations():
    cluster = skipping(1)
    for iteration in range(10):
        fails(cluster, "0:0", Fault("ValueError", "x", 10 * iteration, "F0.3", whole=True), iteration + 1)
    assert len(events(cluster.log, "skipped")) == 10
    fails(cluster, "0:0", Fault("ValueError", "x", 99, "F0.3", whole=True), 11)
    assert cluster.state.closing
    assert "10 micro-batches were left out within 100 iterations; more are not" in cluster.state.closing.message
    later = skipping(1)
    for iteration in range(12):
        fails(later, "0:0", Fault("ValueError", "x", 11 * iteration, "F0.3", whole=True), iteration + 1)
    assert len(events(later.log, "skipped")) == 12 and len(later.state.script.left_out) <= 10


def test_the_second_failure_may_come_while_the_coordinator_comes_back():
    cluster = skipping()
    fails(cluster, "1:0", CORRUPT)
    cluster.plan(), cluster.reports(iteration=6, holds=5), cluster.resume_all()
    cluster.state = restore(6, cluster.journal)
    cluster.feed(inputs.Restarted())
    cluster.feed(inputs.Hello(cluster.member("2:0"), 2))
    decisions = fails(cluster, "2:0", CORRUPT, 4)
    assert events(decisions, "skipped") and told(decisions, "answer") == [({"2:0"}, Answer(4))]
    cluster.plan()
    ((_, go),) = told(cluster.reports(iteration=6, holds=5), "go")
    assert go.left_out == ((6, "1.3"),) and not endings(cluster.log)


def test_a_restarted_coordinator_leaves_out_the_same():
    cluster = skipping()
    fails(cluster, "1:0", CORRUPT)
    fails(cluster, "2:0", CORRUPT)
    records = [decision.record.to_json() for decision in cluster.log if isinstance(decision, do.Record)]
    assert restore(6, records).script.left_out == ((6, "1.3"),)
