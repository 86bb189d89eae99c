"""A worker's description of its job, which must be the same on all; and the job as the coordinator plans by it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import field

from megatron_recycle.plan.grid import Grid
from megatron_recycle.plan.value import Value
from megatron_recycle.policy import DEFAULT, POLICIES, Policy, PolicyName


class Lendable(Value, frozen=True):
    """Lendable layers of one chunk: how many of its first (`head`) and last (`tail`) layers; the number of
    interchangeable `layers`, with a number in `like` that is the same for all of these; for one of them the `share` of
    the chunk's work and its `bytes` of parameters."""

    head: int = 0
    tail: int = 0
    layers: int = 0
    share: float = 0.0
    bytes: int = 0
    like: int = 0


class Lending(Value, frozen=True):
    """Lendable layers of a job: by chunk the number of interchangeable ones, one's share of the chunk's work, its bytes
    of parameters; by boundary how many may be lent (to the later chunk's stage, to the earlier one's)."""

    lend: tuple[tuple[int, int], ...]
    layers: tuple[int, ...]
    share: tuple[float, ...]
    bytes: tuple[int, ...]


class Shared(Value, frozen=True, kw_only=True):
    """Facts that must be equal on all workers: settings, by their names in `RecycleConfig`, and facts of the framework
    and its grid. Defaults stand for fields that older workers, and tests, leave out.

    Attributes:
        grid: stages and micro-batches.
        parts: processes of a worker (tensor parallelism).
        placement: the stage of each chunk, where stages have several.
        block: micro-batches of a block; 0: their order does not count.
        cap: micro-batches that each worker may hold, or each by name; nothing: twice as many as with 1F1B.
        tied: stages that step together.
        compared: whether peers are compared after a recovery; those of a closed stage are before the next iteration.
        costs: the user's, in the form of a plan file; None: they are measured.
        objective: "period" or "makespan".
        partner_cost: seconds that a new pair of workers takes.
        emergency: whether a last checkpoint is written; None: no worker can.
        survivors: whether survivors of a job that has lost a stage save their state.
        settings: of the framework's loop, by its users' names.
    """

    grid: Grid
    parts: int = 1
    placement: tuple[int, ...] = ()
    block: int = 0
    cap: int | Mapping[str, int] | None = None
    tied: tuple[tuple[int, ...], ...] = ()
    costs: Mapping[str, Any] | None = None
    split_backward: bool = True
    step: str = ""
    policy: PolicyName = DEFAULT.name
    clip_norm: str = ""
    check_forward: bool = False
    compared: bool = False
    objective: str = "period"
    reduction: str = ""
    keep_messages: str = ""
    planner_budget: float = 0.0
    slow_factor_out: float = 0.0
    heartbeat_interval: float | None = None
    heartbeat_timeout: float | None = None
    report_timeout: float | None = None
    lend: str = "off"
    lend_layers: int = 2
    seed: int = 0
    max_restarts: int = 0
    max_failures_per_host: int = 0
    moves: bool = False
    move_cost: float = 1.0
    horizon: float = 100.0
    partner_cost: float = 0.0
    on_leave: str = ""
    leave_timeout: float | None = None
    emergency: bool | None = False
    survivors: bool = False
    poison: str = ""
    guard: str = "checkpoint"
    state_copies: int | None = None
    backend: str = ""
    torch: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def chosen(self) -> Policy:
        """The policy."""
        return POLICIES[self.policy]


class Model(Value, frozen=True, kw_only=True):
    """Facts that must be equal on processes with the same part of the model.

    Attributes:
        model: a digest of its parameters' shapes.
        full_backward: whether it may run B and W in one.
        lendable: lendable layers by chunk; None: that chunk lends none, or none does.
        ties: the number of each tied parameter, and the stages that keep copies of it.
    """

    model: str = ""
    full_backward: bool = False
    lendable: tuple[Lendable | None, ...] | None = None
    ties: tuple[tuple[int, tuple[int, ...]], ...] = ()


class Description(Shared, frozen=True, kw_only=True):
    """A process's description: the job's facts, and those of its part of the model (`Model`)."""

    model: str = ""
    full_backward: bool = False
    lendable: tuple[Lendable | None, ...] | None = None
    ties: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @property
    def of_model(self) -> Model:
        return Model(**_fields(Model, self))

    @property
    def of_job(self) -> Shared:
        return Shared(**_fields(Shared, self))


class Job(Shared, frozen=True, kw_only=True):
    """The job as the coordinator knows it: the shared facts, and conclusions from all descriptions.

    Attributes:
        full_backward: stages, all of whose processes may run B and W in one.
        lending: lendable layers, if any.
    """

    full_backward: tuple[int, ...] = ()
    lending: Lending | None = None

    @classmethod
    def of(cls, one: Shared, full_backward: tuple[int, ...]) -> Job:
        """The job that ``one`` worker describes."""
        return cls(**_fields(Shared, one), full_backward=full_backward)

    def told(self, model: Model) -> Description:
        """The description of a process with this model."""
        return Description(**_fields(Shared, self), **_fields(Model, model))


def _fields(kind: type[Value], of: Value) -> dict[str, Any]:
    return {name: getattr(of, name) for name in kind.__struct_fields__}


def difference(one: Value, other: Value) -> tuple[str, str, str] | None:
    """The first fact in which two descriptions differ, with both values."""
    ours, theirs = dict(_facts(one)), dict(_facts(other))
    for key in sorted({*ours, *theirs}):
        if (mine := ours.get(key, "null")) != (its := theirs.get(key, "null")):
            return key, mine, its
    return None


def _facts(of: Value) -> Iterator[tuple[str, str]]:
    """Each fact, and its value as text; framework settings under their own names."""
    values = of.to_json()
    for name, value in {**values, **values.pop("settings", {})}.items():
        yield name, json.dumps(value, sort_keys=True)
