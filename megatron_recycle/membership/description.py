"""A worker's description of its job, which all must have alike; and the job as the coordinator plans by it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import field

from megatron_recycle.plan.grid import Grid
from megatron_recycle.plan.value import Value
from megatron_recycle.policy import DEFAULT, POLICIES, Policy, PolicyName


class Lendable(Value, frozen=True):
    """Layers of one chunk that may be lent: how many of its first (`head`) and of its last (`tail`) ones; how many are
    alike (`layers`, with a number in `like` that is the same for all of these); of one of them the `share` of the
    chunk's work and its `bytes` of parameters."""

    head: int = 0
    tail: int = 0
    layers: int = 0
    share: float = 0.0
    bytes: int = 0
    like: int = 0


class Lending(Value, frozen=True):
    """Layers that a job may lend: by chunk how many are alike, the share of the chunk's work that one of them takes,
    its bytes of parameters; by boundary how many may be lent (to the later chunk's stage, to the earlier one's)."""

    lend: tuple[tuple[int, int], ...]
    layers: tuple[int, ...]
    share: tuple[float, ...]
    bytes: tuple[int, ...]


class Shared(Value, frozen=True, kw_only=True):
    """Facts that all workers must have alike: settings, by their names in `RecycleConfig`, and what follows from the
    framework and its grid. Defaults are what older workers, and tests, leave out.

    Attributes:
        grid: stages and micro-batches.
        parts: processes of a worker (tensor parallelism).
        placement: the stage of each chunk, where stages have several.
        block: micro-batches of a block; 0: their order does not count.
        cap: micro-batches that each worker may hold, or each by name; nothing: twice as many as with 1F1B.
        tied: stages that step together.
        compared: whether peers are compared after a recovery: those of a closed stage before the next iteration.
        costs: as the user gives them, in the form of a plan file; None: they are measured.
        objective: "period" or "makespan".
        partner_cost: seconds that a new pair of workers takes.
        emergency: whether a last checkpoint is written; None: nobody can.
        survivors: whether survivors save what they hold of a job that has lost a stage.
        settings: of the framework's loop, by the names that its users know.
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
    """Facts that processes with the same part of the model must have alike.

    Attributes:
        model: a digest of its parameters' shapes.
        full_backward: whether it may run B and W in one.
        lendable: by chunk the layers that may be lent; None: that chunk lends none, or none does.
        ties: of parameters that several stages keep copies of, the number and these stages.
    """

    model: str = ""
    full_backward: bool = False
    lendable: tuple[Lendable | None, ...] | None = None
    ties: tuple[tuple[int, tuple[int, ...]], ...] = ()


class Description(Shared, frozen=True, kw_only=True):
    """A process's own: what all have alike, and what processes with the same part of the model have (`Model`)."""

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
    """As the coordinator knows it: what all have alike, and what follows from all.

    Attributes:
        full_backward: stages, all of whose processes may run B and W in one.
        lending: layers that may be lent, if some may.
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
    """The first fact, with both values, in which two descriptions differ."""
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
