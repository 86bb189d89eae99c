"""Settings of the plugin: the one source of JSON keys, flags, environment variables and their documentation.

A setting is a field of `RecycleConfig`; `option` reads it from each source. Impossible values are refused at the start,
with the remedy in the message. `scripts/settings.py` writes the documentation's part.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

from megatron_recycle.errors import ConfigError
from megatron_recycle.option import (
    SECTION,
    Option,
    add_flags,
    attribute,
    flag,
    refuse_unknown,
    resolved,
    shown,
    variable,
)
from megatron_recycle.policy import POLICIES, PolicyName

__all__ = ["SECTION", "Option", "RecycleConfig", "add_arguments", "flag", "options", "variable"]

GROUP = "megatron-recycle"
"""Title of the settings' group in a script's `--help`."""
_COSTS = re.compile(r"TRIPLE(;TRIPLE)*".replace("TRIPLE", r" *\d+ *, *\d+ *, *\d+ *"))


_POLICIES = "; ".join(("what a failure leads to", *(f"{each.name}: {each.summary}" for each in POLICIES.values())))


def _option(default: Any, help: str, *, choices: tuple[str, ...] = (), unit: str = "", least: int | None = None) -> Any:
    """A dataclass field whose metadata feeds flags, messages and the documentation table."""
    return field(default=default, metadata={"help": help, "choices": choices, "unit": unit, "least": least})


@dataclass(frozen=True, kw_only=True)
class RecycleConfig:
    """All settings of one job. Build it with `resolve`, or directly with keywords.

    Raises:
        ConfigError: a value of the wrong type or range, or an impossible order of timeouts.
    """

    enabled: bool = _option(True, "whether the plugin takes part; false leaves the stock engine as it is")
    reduction: Literal["fast", "exact"] = _option(
        "fast",
        "results after failures; fast: equal to rounding; exact: equal bit for bit, by a fixed order of sums",
    )
    block: int | None = _option(
        None,
        "micro-batches per block, the unit that exact re-routes; auto: ceil(M / (D - 1)); fast has none",
        least=1,
    )
    step: Literal["staggered", "barrier"] = _option(
        "staggered",
        "staggered: each stage steps when its own gradient is complete, and begins the next iteration then; barrier: "
        "when all of them are, which is Megatron's default",
    )
    split_backward: bool = _option(
        True, "whether weight gradients of linear layers are computed later, in bubbles; false: with the input's"
    )
    policy: PolicyName = _option("reroute", _POLICIES)  # noqa: RUF009  (a field, as all of them)
    keep_messages: Literal["auto", "all", "none"] = _option(
        "auto",
        "whether a worker keeps the messages and sums of an iteration until it is committed, so that a failure costs "
        "the dead worker's share of it only; none: the iteration is made again; auto: all on CPUs, none on GPUs",
    )
    mtbf: float | None = _option(
        None,
        "seconds from one failure that ends a life of the job to the next, on average: with it the log says how often "
        "to write a checkpoint, from what one is seen to cost (Young, Daly), and DeepSpeed's engine.checkpoint_due() "
        "tells when; auto: unknown",
        unit="s",
    )
    placement: Literal["spread", "framework"] | None = _option(
        None,
        "order of ranks, and so the workers of a host; spread: through a pipeline first, so that a host has few copies "
        "of a stage; framework: as the framework counts, all copies of a stage first; auto: spread where a host then "
        "has fewer copies. It is needed before DeepSpeed's JSON is read: flag or variable. A topology of the script's "
        "own stays",
    )
    chunks: int = _option(
        1,
        "parts of the model that each stage holds; 2: V-shaped, the first half of the layers down the stages and the "
        "second half up again, so that the first stage has the first layers and the loss: a worker waits less at the "
        "ends of an iteration, and activations cross twice as many stage boundaries; 1: as the framework cuts it",
    )
    clip_norm: Literal["stock", "global"] = _option(
        "stock",
        "gradient norm for clipping; stock: as the framework counts it (DeepSpeed in fp32: the first stage only); "
        "global: over all stages",
    )
    cap: int | None = _option(
        None,
        "most micro-batches whose activations a worker keeps at a time; auto: twice the number of stages, or as many "
        "as there is memory for",
        least=1,
    )
    memory: float | None = _option(
        None,
        "memory in GiB that a worker may use in all, parameters included; what is left for activations limits the plan "
        "(unless cap does); auto: on a GPU what it has, on a CPU no limit but cap's",
        unit="GiB",
    )
    costs: str | None = _option(
        None,
        "what the planner takes a micro-batch's forward, input-gradient and weight-gradient backward to cost, in any "
        "integer unit, e.g. 20,22,18, or one such triple per stage with semicolons between them; auto: all the same, "
        "until they are measured",
    )
    planner_budget: float = _option(2.0, "time for the background search after a change; 0: none", unit="s", least=0)
    verify: Literal["none", "peers"] = _option(
        "none", "peers: compare digests of peers' parameters after a recovery",
    )
    verify_every: int = _option(
        0,
        "compare the digests of peers' parameters every so many iterations, and after recoveries; an odd one out among "
        "three or more is brought back from its peers; 0: as verify says",
        least=0,
    )
    check_forward: bool = _option(
        True,
        "whether each worker runs its first micro-batch's forward twice, once, and compares the outputs bit for bit: a "
        "layer that draws from a generator out of sight is refused by name with exact, and named in a warning with "
        "fast; it costs that forward",
    )
    seed: int = _option(0, "seed of dropout and the like, with iteration, pipeline, micro-batch, stage", least=0)
    poison: Literal["stop", "skip"] = _option(
        "stop",
        "what follows when a second worker fails on a micro-batch as the first one did; stop: the job ends with what "
        "they say; skip: the iteration goes on without it, at most 10 times in 100 iterations",
    )
    emergency_checkpoint: str | None = _option(
        None,
        "folder for a last checkpoint of a job that an error of the script or its data ends; auto: where the script "
        "has saved before, if it has (DeepSpeed), or --save (Megatron-LM); none: no such checkpoint",
    )
    on_leave: Literal["end", "checkpoint"] = _option(
        "end",
        "what SIGTERM to the whole job leads to (scancel, a time limit, a pre-emption); end: all workers end at once, "
        "or within 30 s where the script handles SIGTERM itself; checkpoint: first what is committed is saved where "
        "emergency_checkpoint says",
    )
    on_failed_save: Literal["continue", "end"] = _option(
        "continue",
        "what a checkpoint leads to that cannot be written (a full disk, a folder that is gone); continue: training "
        "goes on without it, with an error line each time, and the one before stays the newest; end: the job ends",
    )
    leave_timeout: float = _option(
        60.0, "time that a checkpoint of on_leave may take; then all workers are ended", unit="s"
    )
    guard: Literal["none", "checkpoint", "memory"] = _option(
        "checkpoint",
        "where a stage that has lost its last worker comes back from, under recycle run; checkpoint: the newest whole "
        "checkpoint of this run; memory: a copy in the memory of another stage's worker, on another host if there is "
        "one, made while a stage has one worker (every worker keeps two copies of its own state then), or the "
        "checkpoint, whichever is newer; none: it does not",
    )
    guard_interval: int = _option(
        10, "iterations between two copies of guard: as many can be lost with a last copy", least=1
    )
    state_copies: int = _option(
        2,
        "how many workers of a stage hold each shard of its optimizer state, where that is cut into shards "
        "(DeepSpeed's ZeRO-1, Megatron's distributed optimizer); all: each holds all of it",
        choices=("all",),
        least=0,
    )
    max_restarts: int = _option(0, "how often the launcher starts a dead worker again", least=0)
    max_failures_per_host: int = _option(
        0,
        "after so many failures of its workers a host gets no more places: none of its workers is started again, and "
        "it may not join; workers of it that fail at the same time count as one; 0: no limit",
        least=0,
    )
    moves: bool = _option(
        False,
        "whether a healthy worker takes an empty position of a stage that has lost much more than its own; until it "
        "has left the old one, its device holds both stages",
    )
    lend: Literal["auto", "off"] = _option(
        "off",
        "whether workers next to a hit stage run some of its layers, for micro-batches that the plan picks; off: only "
        "its own workers do. With auto each layer draws random numbers of its own, also while nobody has failed, so "
        "that dropout does not depend on who runs it. A job goes on with its own layers at once, and lends some where "
        "the search of `planner_budget` seconds finds that this pays within the `horizon`",
    )
    lend_layers: int = _option(2, "how many layers of a stage each neighbouring stage may run, at most", least=1)
    move_cost: float = _option(1.0, "iterations that one move is taken to cost", unit="iterations", least=0)
    horizon: float = _option(
        100.0, "iterations over which moves, and new partners on NCCL, must pay off", unit="iterations", least=0
    )
    heartbeat_interval: float = _option(0.5, "time between two signs of life of a worker", unit="s")
    heartbeat_timeout: float = _option(10.0, "silence after which a worker counts as failed", unit="s")
    stall_floor: float = _option(
        10.0,
        "a training thread is stuck when it has been inside one action for longer than this plus three times its "
        "longest such action of late; waiting for others and the script's own code do not count",
        unit="s",
    )
    slow_factor_out: float = _option(
        0.0,
        "a worker that takes more than so many times as long for a micro-batch as its peers is removed; 0: never, slow "
        "workers are reported and get less work",
    )
    report_timeout: float = _option(30.0, "time that a survivor has to report after a failure", unit="s")
    connect_timeout: float | None = _option(
        None,
        "time that one group of workers may take to connect after a failure, doubled after each try in a row that took "
        "longer; auto: heartbeat_timeout and 0.05 s for each rank",
        unit="s",
    )
    transport_timeout: float = _option(
        1800.0,
        "limit of one transfer; failures are found by the coordinator, so that this need not be short: a worker may "
        "pause that long in the script's own code",
        unit="s",
    )
    run_dir: str | None = _option(
        None,
        "folder for events, logs and plans; auto: runs/ and the time of the start, under Slurm on several nodes the "
        "job's number. `recycle run` makes it before JSON and the script's flags are read: there its own --run-dir or "
        "the variable counts",
    )
    interface: str = _option(
        "127.0.0.1",
        "address that the control services listen on, and no other. `recycle run` listens before JSON and the script's "
        "flags are read: there its own --master-addr or the variable counts, and under Slurm on several nodes by "
        "default the address that the others reach",
    )

    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Where each value came from, e.g. `{"seed": "RECYCLE_SEED"}`; defaults are not in it."""

    def __post_init__(self) -> None:
        for option in options():
            object.__setattr__(self, option.name, option.check(getattr(self, option.name), option.name))
        self._check_timeouts()
        if self.chunks not in (1, 2):
            raise ConfigError(f"{_where(self, 'chunks')} is {self.chunks}; give 1, or 2 for V-shaped stages")
        if self.costs is not None and not _COSTS.fullmatch(self.costs):
            raise ConfigError(f"{_where(self, 'costs')} is {self.costs!r}; give three integers, e.g. 20,22,18, or such "
                              "a triple for each stage with semicolons between them")
        if not self.interface:
            raise ConfigError(f"{_where(self, 'interface')} is empty, which would mean every address; name one")
        if self.slow_factor_out and not self.slow_factor_out > 1:
            raise ConfigError(f"{_where(self, 'slow_factor_out')} is {self.slow_factor_out:g}: a worker may not be "
                              "removed for being as fast as its peers; give more than 1, or 0 for never")
        if self.on_leave == "checkpoint" and self.emergency_checkpoint == "none":
            raise ConfigError("on_leave checkpoint has nowhere to save with emergency_checkpoint none; give a folder, "
                              "or auto for where the script saves")
        if self.reduction == "exact" and POLICIES[self.policy].not_exact:
            raise ConfigError(f"policy {self.policy} {POLICIES[self.policy].not_exact}")
        if POLICIES[self.policy].leaves_out:
            self._check_leaving_out()

    @classmethod
    def resolve(
        cls,
        section: Mapping[str, Any] | None = None,
        flags: argparse.Namespace | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> RecycleConfig:
        """Settings from all sources: flag before variable before JSON before default.

        Args:
            section: the JSON section `"recycle"` (None: absent).
            flags: the namespace of a parser that `add_arguments` was applied to (None: no flags); attributes
                that are missing or None count as not given.
            environ: environment variables (None: `os.environ`).

        Raises:
            ConfigError: an unknown key (the message names the nearest known one), a bad value, or an
                impossible order of timeouts.
        """
        environ = os.environ if environ is None else environ
        refuse_unknown(options(), section, environ)
        values, sources = resolved(options(), section, flags, environ)
        return cls(**values, sources=sources)

    def block_size(self, pipelines: int, microbatches: int) -> int:
        """Micro-batches per block for `plan.Problem.block`: 0 (not tracked) with `fast`.

        Args:
            pipelines: D, the number of pipelines of the grid.
            microbatches: M, the (largest) number of micro-batches of a pipeline.
        """
        if self.reduction == "fast":
            return 0
        return self.block if self.block is not None else math.ceil(microbatches / max(1, pipelines - 1))

    def to_json(self) -> dict[str, Any]:
        """All settings as a JSON object, without their sources."""
        return {option.name: getattr(self, option.name) for option in options()}

    def describe(self) -> str:
        """The text printed once at the start: one line per setting, with its source."""
        lines = ["megatron-recycle settings:"]
        for option in options():
            source = self.sources.get(option.name, "default")
            lines.append(f"  {option.name + ' ':.<22} {shown(getattr(self, option.name)):<12} {source}")
        return "\n".join(lines)

    def _check_leaving_out(self) -> None:
        """Policies that leave micro-batches out need `step: barrier`: a staggered step may be undone for one without
        the hit pipelines, after its loss was reported to the script."""
        if self.step == "staggered" and "step" in self.sources:
            raise ConfigError(f"{_where(self, 'step')} is staggered, and policy {self.policy} may make an iteration "
                              "again with fewer micro-batches after its loss was told; leave step out, or give barrier")
        if self.step == "staggered":
            object.__setattr__(self, "step", "barrier")
            object.__setattr__(self, "sources", {**self.sources, "step": f"policy {self.policy}"})

    def _check_timeouts(self) -> None:
        beat, silence, transport = self.heartbeat_interval, self.heartbeat_timeout, self.transport_timeout
        if silence < 2 * beat:
            raise ConfigError(
                f"{_where(self, 'heartbeat_timeout')} is {silence:g} s with a sign of life every {beat:g} s "
                f"(heartbeat_interval): one late sign would count as a failure; give heartbeat_timeout at "
                f"least {2 * beat:g}, or a smaller heartbeat_interval"
            )
        if transport <= silence:
            raise ConfigError(
                f"{_where(self, 'transport_timeout')} is {transport:g} s, not above heartbeat_timeout "
                f"({silence:g} s): transfers would give up before the failed worker is known; give "
                f"transport_timeout more than {silence:g}, or a smaller heartbeat_timeout"
            )
        if self.report_timeout <= beat:
            raise ConfigError(
                f"{_where(self, 'report_timeout')} is {self.report_timeout:g} s, not above "
                f"heartbeat_interval ({beat:g} s): survivors could not report in time; give report_timeout "
                f"more than {beat:g}"
            )


@functools.cache
def options() -> tuple[Option, ...]:
    """All settings in the order of their declaration."""
    hints = get_type_hints(RecycleConfig)
    found = []
    for item in dataclasses.fields(RecycleConfig):
        if "help" not in item.metadata:
            continue
        hint = hints[item.name]
        kinds = (hint,) if get_origin(hint) is Literal else get_args(hint) or (hint,)
        words = get_args(kinds[0]) if get_origin(kinds[0]) is Literal else ()
        facts = {**item.metadata, **({"choices": words} if words else {})}
        found.append(Option(item.name, str if words else kinds[0], type(None) in kinds, item.default, **facts))
    return tuple(found)


def add_arguments(
    parser: argparse.ArgumentParser, when_given: Callable[[argparse.Namespace], None] | None = None
) -> None:
    """Add `--recycle` (switches the plugin on) and one flag per setting to `parser`, in a group of their own.

    Args:
        parser: any argparse parser, also one that the framework has added to already.
        when_given: called with the namespace as soon as `--recycle` is read. The namespace is still being
            filled then: keep it and read the other flags later.
    """

    class Switch(argparse.Action):
        def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
            setattr(namespace, self.dest, True)
            setattr(namespace, attribute("enabled"), "true")
            if when_given is not None:
                when_given(namespace)

    group = parser.add_argument_group(GROUP, "keep training when workers fail")
    group.add_argument(
        "--recycle",
        action=Switch,
        nargs=0,
        default=False,
        help="switch the plugin on; same as --recycle-enabled true",
    )
    add_flags(group, options())


def _where(config: RecycleConfig, name: str) -> str:
    source = config.sources.get(name)
    return name if source is None else f"{name} (from {source})"
