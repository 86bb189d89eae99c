"""Checkpoints of Megatron-Bridge's loop, once workers may be missing: its own function writes them, beside their place
until they are whole, as `saves` and `last` have Megatron-LM's write.

Nothing of Megatron is imported here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_recycle.backends.megatron.aside import place_of, remove_parts
from megatron_recycle.backends.megatron.last import Beginning, LastCheckpoint
from megatron_recycle.backends.megatron.passed import Gaps
from megatron_recycle.backends.megatron.saves import folder_of, forget_old_groups, writing
from megatron_recycle.backends.replacing import replaced
from megatron_recycle.backends.session import Session
from megatron_recycle.backends.tries import Try
from megatron_recycle.observe.log import get_logger
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.saving import Save

if TYPE_CHECKING:  # which imports Megatron
    from megatron_recycle.backends.megatron.groups import Kept

_SAVED = "  successfully saved checkpoint from iteration"
"""What the rank that names a checkpoint prints when all of it is there."""


@contextmanager
def beside(stock: Any, folder: str, iteration: int, name: str, whole: Callable[[str], None]) -> Iterator[None]:
    """Inside the block Bridge's `save_checkpoint` writes ``iteration`` into ``folder`` as `aside.aside` says; arguments
    as there. It names a checkpoint in two files: they get their names with it."""
    written = Try(place_of(folder, iteration), name)
    tells: list[str] = []
    later: list[Callable[[], None]] = []

    def get_checkpoint_name(stock_name: Callable[..., str], directory: str, number: int, *given: Any,
                            **keywords: Any) -> str:
        return str(written.part) if (directory, number) == (folder, iteration) else stock_name(
            directory, number, *given, **keywords)

    def of_newest(stock_name: Callable[..., str], directory: str, *given: Any, **keywords: Any) -> str:
        found = stock_name(directory, *given, **keywords)
        if directory != folder:
            return found  # of one checkpoint
        tells.append(found)
        return f"{found}.part"

    def print_rank_0(say: Callable[[str], None], text: str) -> None:
        if text.startswith(_SAVED):
            name_it()
        say(text)

    def name_it() -> None:
        written.finish(whole)
        while tells:
            os.replace(f"{tells[0]}.part", tells.pop(0))
        while later:
            later.pop()()

    def cleanup(clean: Callable[..., None], *given: Any, **keywords: Any) -> None:
        later.append(partial(clean, *given, **keywords))  # it counts checkpoints by their names

    def told(succeed: Callable[..., Any], path: Any, *given: Any, **keywords: Any) -> Any:
        return succeed(str(path).replace(written.part.name, written.place.name), *given, **keywords)

    with (_with(stock, get_checkpoint_name=get_checkpoint_name, get_checkpoint_train_state_filename=of_newest,
                get_checkpoint_tracker_filename=of_newest, print_rank_0=print_rank_0,
                cleanup_old_non_persistent_checkpoint=cleanup),
          _with(stock.wandb_utils, on_save_checkpoint_success=told),
          _with(stock.mlflow_utils, on_save_checkpoint_success=told),
          _with(stock.comet_utils, on_save_checkpoint_success=told)):
        yield
        while later:
            later.pop()()


def _with(module: Any, **functions: Callable[..., Any]) -> AbstractContextManager[None]:
    """Inside the block these are ``module``'s functions; each is given the one that it replaces."""
    return replaced(module, **{name: partial(function, getattr(module, name)) for name, function in functions.items()})


def save_checkpoint(module: Any, session: Session, kept: Kept, last: LastCheckpoint | None, stock: Callable[..., None],
                    state: Any, *given: Any, **keywords: Any) -> None:
    """In place of Bridge's function, ``stock`` of its ``module`` of checkpoints; the rest as in `LoopSaves`."""
    iteration, passing = int(state.train_state.step), bool(keywords.get("non_persistent_ckpt", False))
    folder = folder_of(state.cfg.checkpoint, passing, module)

    def write(save: Save) -> bool:
        with (writing(save, kept, None if passing else last, folder, iteration),
              beside(module, folder, iteration, save.name, save.whole)):
            forget_old_groups(keywords.values())
            stock(state, *given, **{name: kept.now(value) for name, value in keywords.items()})
        return True

    session.save(f"the checkpoint of iteration {iteration}", write, lambda: remove_parts(place_of(folder, iteration)),
                 otherwise=lambda: stock(state, *given, **keywords))


class LastBridgeCheckpoint(LastCheckpoint):
    """The last checkpoint of a job with Bridge's loop.

    Args:
        train: Bridge's module of its loop.
        checkpoints: Bridge's module of checkpoints.
        parts: arguments of its `train`, by name.
        counters: of its state, when training began.
        steps: of the learning rate's scheduler then.
        wanted, among, microbatches, gaps, skipped: as those of `LastCheckpoint`.
    """

    def __init__(self, train: Any, checkpoints: Any, parts: Mapping[str, Any], counters: Mapping[str, float],
                 steps: int, wanted: str | None, among: Callable[[Groups], AbstractContextManager[None]],
                 microbatches: Callable[[int], int], gaps: Gaps, skipped: Callable[[], Collection[int]]) -> None:
        self._state: Any = parts["global_state"]
        configuration = self._state.cfg
        loop = SimpleNamespace(save_checkpoint=checkpoints.save_checkpoint, get_args=lambda: SimpleNamespace(
            save=configuration.checkpoint.save, data_parallel_random_init=configuration.rng.data_parallel_random_init,
            world_size=dist.get_world_size(), iterations_to_skip=()))
        begun = Beginning(parts, int(counters["step"]), int(counters["consumed_train_samples"]),
                          int(counters["consumed_valid_samples"]), counters["floating_point_operations_so_far"], steps)
        super().__init__(loop, begun, wanted, among, lambda folder, iteration: beside(
            checkpoints, folder, iteration, "last", lambda place: None), microbatches, gaps, skipped)
        self._train = train

    def _save(self, arguments: Any, folder: str, iteration: int, done: int) -> None:
        begun, configuration, state = self._begun, self._state.cfg, self._state.train_state
        scheduler, machine = begun.parts["scheduler"], self._train.get_rerun_state_machine()
        size = configuration.train.micro_batch_size * configuration.data_parallel_size
        before = [size * self._microbatches(number) for number in range(done + 1)]
        configuration.checkpoint.save, configuration.checkpoint.async_save = folder, False
        state.step = iteration
        state.consumed_train_samples = begun.samples + before[done]
        state.consumed_valid_samples = begun.validation_samples + self._read(configuration, iteration)
        scheduler.num_steps = begun.steps + before[done] - sum(
            before[number + 1] - before[number] for number in self._skipped() if number < done)
        scheduler.step(increment=0)
        machine.state = type(machine.state).NOT_RUNNING_YET  # it would save the iteration under way
        operations = begun.operations
        for begin, end in pairwise(before):  # as the loop adds them up
            operations += self._train.flop_utils.num_floating_point_operations(configuration, batch_size=end - begin)
        state.floating_point_operations_so_far = operations
        get_logger().info("megatron-recycle: saves iteration %d to %s", iteration, folder)
        self._stock_save(self._state, begun.parts["model"], begun.parts["optimizer"], scheduler, operations,
                         checkpointing_context={}, train_data_iterator=begun.parts["train_data_iterator"],
                         pg_collection=begun.parts["pg_collection"])

    def _read(self, configuration: Any, iteration: int) -> int:
        """Samples that the evaluations up to ``iteration`` read, that after it included."""
        every, each = configuration.validation.eval_interval, configuration.validation.eval_iters
        if not (every and each and self._state.train_state.do_valid):
            return 0
        times = iteration // every - self._begun.iteration // every
        return int(times * configuration.train.global_batch_size * each)
