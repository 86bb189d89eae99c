"""Megatron-Bridge's training loop, which replaces Megatron-LM's in its recipes, and in NeMo's, which call it.

The loop asks core for a schedule as Megatron-LM's does (`hook`). It passes groups and a communicator of its own making:
these are the standard ones, or are refused (`support.check_call`). Its queries to other ranks during an iteration are
answered here; the live workers decide which rank logs and writes. Its configuration has Megatron-LM's options under the
same names, in several parts (`options`).

The functions that `schedule` calls are those of `training`. Nothing of Megatron is imported here.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_recycle.backends.megatron.atomic_checkpoint import place_of, remove_parts, renamed
from megatron_recycle.backends.megatron.checkpoint_hooks import folder_of, forget_old_groups, writing
from megatron_recycle.backends.megatron.final_checkpoint import Beginning, LastCheckpoint
from megatron_recycle.backends.megatron.option_report import refuse_or_tell
from megatron_recycle.backends.megatron.options import ANYWHERE, OF_BRIDGE, OF_THE_LOOP, apply, message
from megatron_recycle.backends.megatron.skipped_iterations import Gaps
from megatron_recycle.backends.megatron.training import keep_timers_apart, load_once, print_line
from megatron_recycle.backends.megatron.version import check_version, release
from megatron_recycle.backends.options import Options
from megatron_recycle.backends.patching import rebind, replaced
from megatron_recycle.backends.releases import Release, release_of
from megatron_recycle.backends.session import Session
from megatron_recycle.backends.tries import Try
from megatron_recycle.config import RecycleConfig
from megatron_recycle.errors import UnsupportedError
from megatron_recycle.observe.log import get_logger
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.saving import Save
from megatron_recycle.runtime.setup_record import SetUp

if TYPE_CHECKING:  # it imports Megatron
    from megatron_recycle.backends.megatron.groups import Kept

BRIDGE_TESTED: Mapping[Release, tuple[str, Release]] = {(0, 6): ("0.6.2", (0, 19))}
"""First two numbers of each supported Megatron-Bridge -> the tested release, and its core."""
TRAIN = "megatron.bridge.training.train"
SETUP = "megatron.bridge.training.setup"
CHECKPOINTS = "megatron.bridge.training.checkpointing"
PARTS = ("model", "ddp", "optimizer", "scheduler", "train", "validation", "checkpoint", "logger", "rng", "dist",
         "dataset", "rerun_state_machine", "profiling", "ft", "inprocess_restart", "nvrx_straggler", "straggler",
         "tensor_inspect")
"""The parts of Bridge's configuration with options."""
_ALIKE = (("train", "train_iters global_batch_size micro_batch_size exit_interval"),
          ("validation", "eval_interval eval_iters"), ("rng", "seed"),
          ("dataset", "seq_length split dataloader_type random_seed reset_position_ids reset_attention_mask "
                      "eod_mask_loss"),
          ("optimizer", "optimizer lr min_lr decoupled_lr weight_decay clip_grad adam_beta1 adam_beta2 adam_eps"),
          ("scheduler", "lr_decay_style lr_decay_iters lr_warmup_iters lr_warmup_fraction start_weight_decay "
                        "end_weight_decay"),
          ("model", "attention_dropout hidden_dropout calculate_per_token_loss"))
"""Options that decide the results of an iteration. Not here: the model's, which its parameters show."""
_COUNTERS = ("step", "consumed_train_samples", "skipped_train_samples", "consumed_valid_samples",
             "floating_point_operations_so_far")


_SAVED = "  successfully saved checkpoint from iteration"
"""The line that the checkpoint-naming rank prints when a checkpoint is complete."""


@dataclass
class _Job:
    """This process's training with Bridge's loop.

    Attributes:
        told: lines on changed options.
        parts: arguments of the loop's `train`, by name; None before.
        counters: of its state, when training began.
        steps: of the learning rate's scheduler then, in samples.
        kept: Megatron's groups, once training has begun.
    """

    told: tuple[str, ...] = ()
    parts: Mapping[str, Any] | None = None
    counters: Mapping[str, float] | None = None
    steps: int = 0
    kept: Kept | None = None


_job = _Job()


def trains() -> bool:
    """Whether Bridge's loop trains in this process."""
    return _job.parts is not None


def watch_setup(options: Options) -> None:
    """Judge a configuration before Bridge builds anything of it, and give joiners the same set-up as the job's first
    processes. Call it when Bridge's set-up module has just been loaded; again: with other options."""

    def setup(stock: Callable[..., Any], state: Any, *rest: Any, **keywords: Any) -> Any:
        settings = options.resolve({})
        if settings.enabled:
            refuse_or_tell(lambda: _judge(state.cfg, settings))
        return stock(state, *rest, **keywords)

    rebind(SETUP, "setup", setup)
    if options.setup is None or not is_supported():
        return
    record = options.setup
    rebind(SETUP, "_should_load_checkpoint", lambda stock, *given: record.note(
        "should_load_checkpoint", lambda: bool(stock(*given))))
    rebind(CHECKPOINTS, "load_checkpoint", lambda stock, *given, **keywords: _loading(
        record, stock, inspect.signature(stock).bind(*given, **keywords)))
    keep_timers_apart(record)


def watch_training(options: Options) -> None:
    """Rebind functions that Bridge's loop calls, right after its import; again: with other options."""
    if not is_supported():
        return  # its set-up refuses it

    def training(stock: Callable[..., Any], *given: Any, **keywords: Any) -> Any:
        if options.resolve({}).enabled:
            _job.parts = inspect.signature(stock).bind(*given, **keywords).arguments
            state = _job.parts["global_state"].train_state
            _job.counters = {name: getattr(state, name) for name in _COUNTERS}
            _job.steps = _job.parts["scheduler"].num_steps
        return stock(*given, **keywords)

    def train_step(stock: Callable[..., Any], *given: Any, **keywords: Any) -> Any:
        # All answers of other ranks are known here, so that stages need not wait for each other.
        with nullcontext() if _job.kept is None else _job.kept.alone():
            returned = stock(*given, **keywords)
        if _job.kept is not None and _job.parts is not None:
            _count_nominal(_job.parts["global_state"])
        return returned

    rebind(TRAIN, "train", training)
    rebind(TRAIN, "train_step", train_step)


def is_supported() -> bool:
    """Whether this backend supports the loaded Bridge together with its core."""
    version = release_of(_version())
    return BRIDGE_TESTED.get(version[:2], ("", ()))[1] == release()[:2]


def _version() -> str:
    try:
        return str(import_module("megatron.bridge.package_info").__version__)
    except (ImportError, AttributeError):
        return ""


def _judge(configuration: Any, settings: RecycleConfig) -> list[str]:
    """Judge the whole ``configuration``, and change options in it where needed; returns a line for each change. Raises
    UnsupportedError."""
    check_version()
    if not is_supported():
        raise UnsupportedError(
            f"Megatron-Bridge {_version() or '(without a version)'} with megatron-core {'.'.join(map(str, release()))} "
            "is not supported; install " + " or ".join(
                f"megatron-bridge {tested} with megatron-core {'.'.join(map(str, core))}"
                for tested, core in BRIDGE_TESTED.values()))
    parts = [part for name in PARTS if (part := getattr(configuration, name, None)) is not None]
    model = configuration.model
    parts += [model.transformer] if hasattr(model, "transformer") else []
    refused, changed = apply((*ANYWHERE, *OF_THE_LOOP, *OF_BRIDGE), parts)
    if getattr(configuration, "peft", None) is not None:
        refused.append("peft: frozen parameters are not supported under Bridge yet; train all of them")
    train, validation = configuration.train, configuration.validation
    refused += [f"eval_{name} {given} where {name} is {getattr(train, name)}: an evaluation has training's batches; "
                "leave it out" for name in ("global_batch_size", "micro_batch_size")
                if (given := getattr(validation, f"eval_{name}", None)) not in (None, getattr(train, name))]
    if settings.chunks > 1:
        refused.append("chunks 2 under Megatron-Bridge: use its virtual pipelines "
                       "(model.virtual_pipeline_model_parallel_size)")
    if refused:
        raise UnsupportedError(message(refused))
    _job.told = tuple(changed)
    return changed


def _loading(record: SetUp, stock: Callable[..., Any], given: inspect.BoundArguments) -> tuple[int, Any]:
    """Replacement of `load_checkpoint`."""
    state = given.arguments["state"].train_state

    def take(noted: Mapping[str, Any]) -> None:
        for name, value in noted.items():
            setattr(state, name, value)
        checkpoints: Any = sys.modules[CHECKPOINTS]
        checkpoints.update_num_microbatches(consumed_samples=state.consumed_train_samples, verbose=False)

    return load_once(record, given.arguments["optimizer"], given.arguments["opt_param_scheduler"],
                     lambda: stock(*given.args, **given.kwargs),
                     lambda: {name: getattr(state, name) for name in _COUNTERS}, take)


def _count_nominal(state: Any) -> None:
    """Count nominal sequence lengths, as each pipeline has them, for the floating-point figures. The loop counts where
    they are computed; so all workers report the same."""
    train: Any = sys.modules[TRAIN]
    samples = state.cfg.train.micro_batch_size * train.get_num_microbatches()
    length = state.cfg.dataset.seq_length
    state._flops_seqlen_sum, state._flops_seqlen_sq_sum = samples * length, samples * length ** 2


# ---- the schedule's queries to its loop, as `training` answers them


def told() -> list[str]:
    """Lines that the user has read."""
    return list(_job.told)


def largest(microbatches: int) -> int:
    """The micro-batches of a pipeline in the largest iteration: batches do not grow under Bridge (`options`)."""
    return microbatches


def backend() -> str | None:
    """The process groups' backend that the configuration asks for."""
    return str(_configuration().dist.distributed_backend)


def settings() -> dict[str, Any]:
    """The options that all workers must have alike, by their names in the configuration."""
    found = {f"{part}.{name}": getattr(getattr(_configuration(), part), name, None)
             for part, names in _ALIKE for name in names.split()}
    assert _job.counters is not None
    return found | {f"{name} when training began": value for name, value in _job.counters.items()
                    if name != "floating_point_operations_so_far"}


def last_checkpoint(wanted: str | None, among: Callable[[Groups], AbstractContextManager[None]],
                    microbatches: Callable[[int], int], gaps: Gaps,
                    skipped: Callable[[], Collection[int]]) -> LastCheckpoint:
    """As `training.last_checkpoint`."""
    assert _job.parts is not None and _job.counters is not None
    return LastBridgeCheckpoint(sys.modules[TRAIN], sys.modules[CHECKPOINTS], _job.parts, _job.counters, _job.steps,
                                wanted, among, microbatches, gaps, skipped)


def way_back() -> None:
    """None, as not supported yet: a lost stage ends the job with a last checkpoint."""
    return


def collections() -> Iterator[Any]:
    """The process-group collections that the loop keeps."""
    assert _job.parts is not None
    yield _job.parts["pg_collection"]


def take_over(session: Session, kept: Kept, last: LastCheckpoint | None, is_logging_rank: Callable[[], bool],
              part: Callable[[], str]) -> None:
    """Rebind the loop's names; arguments as those of `training.take_over`."""
    _job.kept = kept
    rebind(CHECKPOINTS, "save_checkpoint", partial(save_checkpoint, sys.modules[CHECKPOINTS], session, kept, last))
    rebind("megatron.bridge.utils.common_utils", "print_rank_last",
           lambda _, text: print_line(text, is_logging_rank, part))
    # The value is the same on all stages.
    rebind("megatron.bridge.training.utils.train_utils", "reduce_max_stat_across_model_parallel_group",
                lambda _, stat, mp_group=None: stat)
    rebind("megatron.bridge.training.utils.train_utils", "training_log", _log_of_training(session))


def _log_of_training(session: Session) -> Callable[..., bool]:
    """Replacement of the loop's `training_log`: writes nothing about iterations that other workers have logged."""

    def training_log(stock: Callable[..., bool], *given: Any, **keywords: Any) -> bool:
        if not session.catches_up:
            return stock(*given, **keywords)
        arguments = inspect.signature(stock).bind(*given, **keywords).arguments
        logger, state = arguments["config"].logger, arguments["global_state"]
        with replaced(logger, log_interval=sys.maxsize, tensorboard_log_interval=sys.maxsize):
            stock(*given, **keywords)  # adds up an iteration's numbers for the line of its interval
        if state.train_state.step % logger.log_interval == 0:
            arguments["total_loss_dict"].clear()
        state.timers("interval-time").elapsed(reset=True)
        return bool(arguments["report_memory_flag"])

    return training_log


def _configuration() -> Any:
    assert _job.parts is not None
    return _job.parts["global_state"].cfg


# ---- checkpoints: Bridge's own function writes them, in the way of `checkpoint_hooks` and `final_checkpoint`


@contextmanager
def beside(stock: Any, folder: str, iteration: int, name: str, whole: Callable[[str], None]) -> Iterator[None]:
    """Inside the block Bridge's `save_checkpoint` writes ``iteration`` into ``folder`` as `atomic_checkpoint.aside`
    does; same arguments. Bridge's two files that name the newest checkpoint are renamed with it."""
    written = Try(place_of(folder, iteration), name)
    tells: list[str] = []
    later: list[Callable[[], None]] = []

    def of_newest(stock_name: Callable[..., str], directory: str, *given: Any, **keywords: Any) -> str:
        found = stock_name(directory, *given, **keywords)
        if directory != folder:
            return found  # a file of one checkpoint
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

    def report_saved(succeed: Callable[..., Any], path: Any, *given: Any, **keywords: Any) -> Any:
        return succeed(str(path).replace(written.part.name, written.place.name), *given, **keywords)

    with (renamed(stock, folder, iteration, written.part.name),
          _with(stock, get_checkpoint_train_state_filename=of_newest, get_checkpoint_tracker_filename=of_newest,
                print_rank_0=print_rank_0, cleanup_old_non_persistent_checkpoint=cleanup),
          _with(stock.wandb_utils, on_save_checkpoint_success=report_saved),
          _with(stock.mlflow_utils, on_save_checkpoint_success=report_saved),
          _with(stock.comet_utils, on_save_checkpoint_success=report_saved)):
        yield
        while later:
            later.pop()()


def _with(module: Any, **functions: Callable[..., Any]) -> AbstractContextManager[None]:
    """Inside the block ``functions`` replace ``module``'s; each gets the original as first argument."""
    return replaced(module, **{name: partial(function, getattr(module, name)) for name, function in functions.items()})


def save_checkpoint(module: Any, session: Session, kept: Kept, last: LastCheckpoint | None, stock: Callable[..., None],
                    state: Any, *given: Any, **keywords: Any) -> None:
    """Replacement of Bridge's function ``stock``, in its ``module`` of checkpoints; the rest as in `LoopSaves`."""
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
        scheduler, train = begun.parts["scheduler"], self._train
        size = configuration.train.micro_batch_size * configuration.data_parallel_size
        configuration.checkpoint.save, configuration.checkpoint.async_save = folder, False
        samples, operations = self._rewind(
            scheduler, train.get_rerun_state_machine(), size, done,
            lambda batch: train.flop_utils.num_floating_point_operations(configuration, batch_size=batch))
        state.step, state.floating_point_operations_so_far = iteration, operations
        state.consumed_train_samples = begun.samples + samples
        state.consumed_valid_samples = begun.validation_samples + self._read(configuration, iteration)
        get_logger().info("megatron-recycle: saves iteration %d to %s", iteration, folder)
        self._stock_save(self._state, begun.parts["model"], begun.parts["optimizer"], scheduler, operations,
                         checkpointing_context={}, train_data_iterator=begun.parts["train_data_iterator"],
                         pg_collection=begun.parts["pg_collection"])

    def _read(self, configuration: Any, iteration: int) -> int:
        """Samples that the evaluations up to ``iteration`` read, including the one after it."""
        every, each = configuration.validation.eval_interval, configuration.validation.eval_iters
        if not (every and each and self._state.train_state.do_valid):
            return 0
        times = iteration // every - self._begun.iteration // every
        return int(times * configuration.train.global_batch_size * each)
