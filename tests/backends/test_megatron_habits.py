"""What scripts do between and inside iterations beside calling Megatron's functions: as stock, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.backends import habits_job
from tests.backends.comparing import differences
from tests.harness import Job

pytest.importorskip("megatron.core")


@pytest.mark.processes
@pytest.mark.parametrize(("habits", "options"), [
    (("freezes_later", "sets_groups", "hooks_parameters", "takes_a_batch_first", "evaluates_averages"), ()),
    *[pytest.param(*case, marks=pytest.mark.night) for case in [
        (("freezes_first", "clamps_parameters", "reports_a_mean"), ("--bf16",)),
        (("trains_biases_only", "sets_groups"), ()), (("unfreezes_later", "masks_tokens"), ("--untied",)),
        (("masks_tokens",), ("--per-token-loss",))]]], ids=" ".join)
def test_habits_that_end_with_the_bits_of_stock(habits, options):
    arguments = {"habits": habits, "options": options}
    with Job(habits_job.train, 2, {**arguments, "plugin": False}, coordinated=False) as job:
        stock = job.wait()
    with Job(habits_job.train, 2, {**arguments, "plugin": True}) as job:
        ours = job.wait()
    for rank in stock:
        assert stock[rank].status == ours[rank].status == 0, (stock[rank].error, ours[rank].error)
        assert not differences(stock[rank], ours[rank])


@pytest.mark.processes
@pytest.mark.slow
def test_a_loss_that_communicates_with_other_pipelines_is_refused():
    """Its group has one member here: it would get back what it gave, and train with another loss."""
    with Job(habits_job.train, 4, {"habits": ("adds_up_over_pipelines",), "plugin": True, "pipelines": 2}) as job:
        results = job.wait()
    assert any("communicates in Megatron's data- or model-parallel group" in str(result.error)
               for result in results.values()), results


def world() -> SimpleNamespace:
    """A script and what it calls, without any training behind it."""
    from megatron_recycle.backends.megatron.script import Script

    gradients = torch.zeros(4)
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = SimpleNamespace(groups=[weight])
    model = SimpleNamespace()
    script = Script([model], lambda: [id(each) for each in optimizer.groups], lambda: [gradients._version])
    data, validation = (SimpleNamespace(_num_yielded=0) for _ in range(2))

    def call(forward_only: bool = False, *, of: Any = model, by: Any = None) -> None:
        script.calls([of], by or (validation if forward_only else data), forward_only)
        if not forward_only:
            gradients.add_(1.0)
            script.made_step()

    return SimpleNamespace(script=script, call=call, step=script.takes_step, weight=weight, optimizer=optimizer,
                           main_grad=gradients[1:3], data=data)


def test_a_plain_script_is_never_stopped():
    job = world()
    for _ in range(3):
        job.call()
        job.script.stepped()  # once more, after a failure
        job.step()
        job.main_grad.zero_()
        job.call(forward_only=True)


@pytest.mark.parametrize(("habit", "words"), [
    (lambda job: (job.main_grad.mul_(0.5), job.step()), "gradients .* were changed"),
    (lambda job: (job.call()), "left out"),
    (lambda job: (job.step(), job.step()), "called twice"),
    (lambda job: (job.step(), job.call(of=object())), "another model"),
    (lambda job: job.call(forward_only=True, of=object()), "another model"),
    (lambda job: (job.step(), job.call(by=iter([]))), "another data iterator"),
    (lambda job: (job.step(), job.call(by=[job.data, None])), "2 data iterators for 1 models"),
    (lambda job: job.call(forward_only=True, by=job.data), "use one data iterator"),
    (lambda job: (job.step(), setattr(job.data, "_num_yielded", 1), job.call()), "taken batches"),
    (lambda job: (job.step(), job.optimizer.groups.append(torch.zeros(1)), job.call()), "optimizer's parameters")])
def test_habits_that_would_train_something_else_are_refused_at_that_moment(habit: Callable[[Any], Any], words: str):
    from megatron_recycle.errors import UnsupportedError

    job = world()
    job.call()
    with pytest.raises(UnsupportedError, match=words):
        habit(job)


def stage() -> Any:
    from megatron_recycle.backends.megatron.mtp_losses import Predictions
    from megatron_recycle.backends.megatron.stage import MegatronStage

    found: Any = object.__new__(MegatronStage)
    found._keys, found.device = {}, torch.device("cpu")
    found._predictions, found.report_width, found.microbatches = Predictions(None), 10, 1
    return found


def test_another_limit_on_the_norm_counts_from_the_next_iteration_on():
    """Until then the verdict on the last step may be out, and the thread of the commit asks by which it was made."""
    one = stage()
    one._single = SimpleNamespace(config=SimpleNamespace(clip_grad=1.0))
    one.scaling = SimpleNamespace(any_overflow=lambda norms: False, scales=False)
    one._main_grads, one.shards = SimpleNamespace(forget=lambda: None), object()
    one.look()
    before = one.references
    one._single.config.clip_grad = 0.0
    assert one.coefficient([16.0], 1.0) == pytest.approx(0.25) and one.may_guess_wrong
    assert one.references != before, "the script's change is found, and the last step made final first"
    one.refer(before)
    assert one._single.config.clip_grad == 1.0, "set aside meanwhile"
    one._single.config.clip_grad = 0.0
    one.look()
    assert one.coefficient([16.0], 1.0) == 1.0 and not one.may_guess_wrong


def test_what_loss_functions_report_is_told_of_training_and_evaluation_apart():
    one = stage()
    trained = one._report({"loss": torch.tensor([3.0, 2.0]), "aux": 1}, 2.0, {})
    with torch.no_grad():
        evaluated = one._report({"accuracy": torch.tensor(0.5)}, 0.0, {})
    told = one.reports(torch.tensor([trained], dtype=torch.float64), False)
    assert {key: value.tolist() for key, value in told[0].items()} == {"loss": [3.0, 2.0], "aux": [1.0]}
    told = one.reports(torch.tensor([evaluated], dtype=torch.float64), True)
    assert {key: value.tolist() for key, value in told[0].items()} == {"accuracy": [0.5]}


def test_a_micro_batch_that_is_left_out_does_not_pull_the_mean_of_a_reported_number_down():
    one = stage()
    row = one._report({"loss": 3.0}, 0.0, {})
    told = one.reports(torch.tensor([row, [0.0] * len(row), row], dtype=torch.float64), False)
    assert [report["loss"].item() for report in told] == [3.0, 3.0] and len(row) == one.report_width
    nothing, = one.reports(torch.zeros(1, len(row), dtype=torch.float64), False)
    assert nothing["loss"].isnan()


@pytest.mark.parametrize(("values", "words"), [
    ({"loss": 1.0}, "report the same values"), ({"loss": torch.zeros(3), "aux": 1.0}, "at most 4 values"),
    ({str(index): 1.0 for index in range(5)}, "at most 4 values"), (torch.zeros(2), "reports a Tensor"),
    ([1.0], "reports a list")])
def test_reports_that_could_be_mixed_up_are_refused(values, words):
    from megatron_recycle.errors import UnsupportedError

    one = stage()
    one._report({"loss": 1.0, "aux": 1.0}, 0.0, {})
    with pytest.raises(UnsupportedError, match=words):
        one._report(values, 0.0, {})


@pytest.mark.parametrize("own", [True, False])
def test_functions_for_synchronisation_are_megatrons_or_refused(own):
    from megatron_recycle.backends.megatron.script import foreign_synchronisation

    model = torch.nn.Linear(1, 1)
    config = SimpleNamespace(no_sync_func=[model.zero_grad] if own else [lambda: None], grad_sync_func=None)
    assert foreign_synchronisation(config, [model]) == ([] if own else ["no_sync_func"])
