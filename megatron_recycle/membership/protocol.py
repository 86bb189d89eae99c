"""The coordinator's messages, by receiver, and the messages of processes that change no state (`inputs` has the rest).

Each message is a type. Incoming data is read as one of the types allowed on its connection (`Kinds`), or refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Generic, TypeVar

from msgspec import Meta, field

from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.next_life import NextLife
from megatron_recycle.membership.resume import Resume
from megatron_recycle.membership.worker_events import WorkerEvent
from megatron_recycle.plan.plan_file import PlanFile
from megatron_recycle.plan.value import Value, read_as

MOST_BYTES = 128 * 1024 * 1024
"""Limit of an unpacked message with a plan: some 14 million actions."""
_MOST = 1e18
"""Limit in seconds or bytes, far above any measurement."""
Amount = Annotated[float, Meta(ge=0, lt=_MOST)]
Moment = Annotated[float, Meta(ge=-_MOST, lt=_MOST)]
Size = Annotated[int, Meta(ge=0, lt=int(_MOST))]
MessageText = Annotated[str, Meta(pattern=r"^[FB]\d+\.\d+\Z")]
Mark = tuple[int, int, str]
"""The number of a request, the number that answered it, and its key."""
Kind = TypeVar("Kind")


class WireError(ValueError):
    """A frame or message that is malformed, too large, of another version, replayed, or made without the token."""


class TooLarge(WireError):
    """A message that can never be sent."""


class Message(Value, frozen=True, tag_field="type"):
    """A message; field ``type`` names its type."""

    @property
    def type(self) -> str:
        """Its type's name on the wire."""
        return str(self.__struct_config__.tag)


class _Named(Value, frozen=True):
    """A message's type as it stands there, whatever else is wrong."""

    type: Any = None


class Kinds(Generic[Kind]):
    """The messages allowed on a connection: the ``union`` of their types."""

    def __init__(self, union: Any) -> None:
        self._union = union

    def read(self, data: Any) -> Kind:
        """The message in this decoded JSON. Raises WireError."""
        try:
            found: Kind = read_as(self._union, data)
        except (ValueError, RecursionError) as error:  # also text that is not Unicode
            named = _Named.from_json(data).type if isinstance(data, Mapping) else type(data).__name__
            raise WireError(f"{named!r:.60}: {error}") from error
        return found


class Lives(Message, frozen=True, tag="lives"):
    """The coordinator's heartbeat."""


class End(Message, frozen=True, tag="end", omit_defaults=True):
    """The job is over, or goes on without this process. To launchers: whether all scripts ended well (`finished`), and
    the job's next life."""

    status: int
    message: str
    finished: bool = False
    next_life: NextLife | None = None


class FirstHello(Message, frozen=True, tag="hello"):
    """The part that the first messages of all connections have in common."""

    role: str


# To workers


class Stop(Message, frozen=True, tag="stop"):
    """Generations below `generation` are over. `role` is the receiver's in it: "member" or "outside". `missing`
    positions are empty."""

    generation: int
    role: str
    missing: int


class Carry(Value, frozen=True):
    """The kept part of the iteration that is begun: by process the number of actions ``done``, the ``plan`` that they
    belong to, and its ``chain``: the attempt in which the first of them were done.

    Attributes:
        provisional: whether some were done before that worker had committed the iteration before.
        loss: the iteration's loss and weight, if some script has received them already.
    """

    iteration: int
    chain: int
    plan: PlanFile
    done: Mapping[str, int]
    provisional: bool
    loss: tuple[float, float] | None = None


class Go(Message, frozen=True, tag="go"):
    """The go of `generation`. `prefix` is the store prefix of its groups. With `closing` it does not train: the job
    ends with this message, once its members have said `saved`.

    Attributes:
        tries: consecutive generations with the same members before this one, without progress.
        left_out: iterations and their micro-batches (``1.3``) that the job goes on without.
        keepers: by stage with one worker, the worker of another stage that keeps a copy of it.
        without: pipelines whose micro-batches are not run.
        carried: the kept part of the iteration that is begun; `ahead`: of the one after it.
        closes: whether scripts may leave an iteration before all workers have committed it.
        writers: the job ends without the stages ``missing``: these processes save their state, and no groups are built.
    """

    generation: int
    attempt: int
    members: Mapping[str, str]
    plan: PlanFile
    resume: Resume
    prefix: str
    tries: int = 0
    closing: str | None = None
    left_out: tuple[tuple[int, str], ...] = ()
    keepers: Mapping[str, str] = field(default_factory=dict)
    without: tuple[int, ...] = ()
    carried: Carry | None = None
    ahead: Carry | None = None
    closes: bool = True
    writers: tuple[str, ...] = ()
    missing: tuple[int, ...] = ()


class Offer(Message, frozen=True, tag="offer"):
    """A better plan for `generation`; all members adopt it together at a boundary. Without a plan: a switch, for which
    all members wait at that boundary until the next generation is decided."""

    generation: int
    number: int
    plan: PlanFile | None


class Answer(Message, frozen=True, tag="answer"):
    """To a worker that waits in its error: it goes on in the generation last announced to it."""

    number: int


class Noted(Message, frozen=True, tag="noted"):
    """The job may go back to the checkpoint at ``place``."""

    generation: int
    place: str


class Parcel(Message, frozen=True, tag="parcel"):
    """A parcel of this digest is ready; ``data`` holds it if it is short (see `control.parcels`)."""

    generation: int
    digest: str
    data: str


class Part(Message, frozen=True, tag="part"):
    """Part ``part`` of ``parts`` of a parcel. With 0 parts: the parcel is unknown, or no longer kept."""

    digest: str
    part: int
    parts: int
    data: str


class There(Message, frozen=True, tag="there"):
    """The parcel is in the host's memory."""

    digest: str


class AskedToLeave(Message, frozen=True, tag="leave"):
    """The job's owner wants this worker to leave at the next boundary."""


class AskedForStacks(Message, frozen=True, tag="stacks"):
    """The job's owner wants stack traces of this worker's threads."""

    number: int


ToWorker = (Stop | Go | Offer | Answer | Lives | Noted | End | Parcel | Part | There | AskedToLeave | AskedForStacks)
TO_WORKER: Kinds[ToWorker] = Kinds(ToWorker)


# To launchers


class Begun(Message, frozen=True, tag="begun"):
    """Training has begun. Limits on restarts of a failed process and on failures of a host, and the seconds that the
    whole job has to save and end once asked to leave (None: it ends at once)."""

    max_restarts: int
    leave_timeout: float | None
    max_failures_per_host: int = 0


class Terminate(Message, frozen=True, tag="terminate"):
    """SIGTERM for all workers, which have ``seconds`` to end: their scripts handle the signal themselves."""

    seconds: float


class Out(Message, frozen=True, tag="out"):
    """A process was declared out: it must end, and its launcher may start another one."""

    rank: int
    pid: int
    kind: FailureKind
    error: str


class Joined(Message, frozen=True, tag="joined"):
    """A joiner takes part in training: earlier failures of its rank are forgotten."""

    rank: int
    pid: int


class Start(Message, frozen=True, tag="start"):
    """Start a process for this rank on the device of the mover (process ``pid`` of rank ``beside``)."""

    rank: int
    beside: int
    pid: int
    move: int


class Drop(Message, frozen=True, tag="drop"):
    """End the process that was started for this move."""

    rank: int
    move: int


class Progress(Message, frozen=True, tag="progress"):
    """An iteration was committed: services regain their restarts."""


class LoggingRank(Message, frozen=True, tag="speaks"):
    """This process is the logging rank from now on; its own log has ``offset`` bytes already."""

    rank: int
    pid: int
    offset: int


class EventTold(Message, frozen=True, tag="event"):
    """An event, as events.jsonl has it."""

    event: dict[str, Any]


class Places(Message, frozen=True, tag="places"):
    """The answer to a host that wants to join: ranks without a worker, the job's size, and the settings of its first
    host; or a ``refusal``. ``again_s``: seconds after which to ask again; 0: never."""

    ranks: tuple[int, ...] = ()
    size: int = 0
    environ: Mapping[str, str] = field(default_factory=dict)
    refusal: str = ""
    again_s: float = 0.0


Ordered = Begun | Terminate | Out | Joined | Start | Drop | Progress | LoggingRank
"""Commands; see `commands`."""
ToLauncher = Ordered | EventTold | Lives | Places | End
TO_LAUNCHER: Kinds[ToLauncher] = Kinds(ToLauncher)


# From processes


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """A heartbeat, with the training thread's activity (`detectors.Doing`)."""

    progress: Mapping[str, Any] | None = None


class Said(Message, frozen=True, tag="event"):
    """A worker's own event."""

    said: WorkerEvent


class Lags(Value, frozen=True):
    """When messages of attempt ``of`` (iteration, attempt) left, and came."""

    of: tuple[int, int]
    sent: Mapping[MessageText, Moment]
    came: Mapping[MessageText, Moment]


class Profiled(Value, frozen=True):
    """Bytes that each micro-batch holds, and bytes kept besides; ``room``: bytes left for activations."""

    held: Mapping[str, Size]
    kept: Mapping[str, Size]
    room: Size | None


class Measured(Message, frozen=True, tag="measured"):
    """Measurements: seconds by kind of work of each iteration; lags; bytes, if measured anew."""

    iterations: tuple[Mapping[str, Amount], ...]
    lags: tuple[Lags, ...]
    memory: Profiled | None


class LogsNow(Message, frozen=True, tag="speaks"):
    """This process is the logging rank from now on; its own log has ``offset`` bytes already."""

    offset: int


class Fetch(Message, frozen=True, tag="fetch"):
    """A process asks for a part of a parcel; ``memory``: its host memory."""

    digest: str
    part: int
    memory: str


class Fetched(Message, frozen=True, tag="fetched"):
    """The process has put the parcel into host memory."""

    digest: str
    memory: str


class Stacks(Message, frozen=True, tag="stacks"):
    """Stack traces of a worker's threads."""

    number: int
    text: str


class LauncherHello(Message, frozen=True, tag="hello", omit_defaults=True):
    """A launcher presents itself: its host, its ranks, and how many processes its host can start in the job's next
    life. A joining launcher has none of these, and names the ranks that it starts."""

    host: str
    ranks: tuple[int, ...]
    places: int
    size: int | None = None
    role: str = ""


class Interrupt(Message, frozen=True, tag="interrupt", omit_defaults=True):
    """The job is ended from outside; ``handled``: scripts handle the signal themselves."""

    status: int
    message: str
    handled: bool = False


class Explains(Message, frozen=True, tag="explains"):
    """A host's explanation of a failure: the ``causes``, its ``gpu``, and the command that takes a broken node out
    (``repair``)."""

    rank: int
    pid: int
    causes: tuple[str, ...]
    gpu: str
    repair: str


class Join(Message, frozen=True, tag="join"):
    """A host asks for ``count`` positions."""

    count: int


# A process that is to join, before its script begins


class NewcomerHello(Message, frozen=True, tag="hello", omit_defaults=True):
    rank: int
    role: str = ""


class Learnt(Message, frozen=True, tag="learnt"):
    """The set-up record of the newcomer's rank."""

    record: tuple[dict[str, Any], ...]


FromNewcomer = NewcomerHello | Heartbeat
FROM_NEWCOMER: Kinds[FromNewcomer] = Kinds(FromNewcomer)
TO_NEWCOMER: Kinds[Learnt] = Kinds(Learnt)


# The job's store: one request at a time (`control.rendezvous_store`)


class StoreHello(Message, frozen=True, tag="hello", omit_defaults=True):
    role: str = ""


class Ask(Message, frozen=True, tag="ask"):
    """A request to the store: an operation on keys. ``once`` is its idempotency key; ``stamps`` and ``marks`` are a
    process's knowledge, for a store that follows another one."""

    op: str
    keys: tuple[str, ...] = ()
    values: tuple[str | None, ...] = ()
    stamps: tuple[int, ...] = ()
    number: int = 0
    once: str = ""
    marks: Mapping[str, Mark] = field(default_factory=dict)


class Welcome(Message, frozen=True, tag="welcome"):
    """The name of the store that answers."""

    store: str


class Found(Message, frozen=True, tag="answer"):
    """The store's answer."""

    keys: tuple[str, ...] = ()
    values: tuple[str | None, ...] = ()
    number: int = 0
    stamp: int = 0
    marks: Mapping[str, Mark] = field(default_factory=dict)
    error: str = ""


FromStore = StoreHello | Ask
FROM_STORE: Kinds[FromStore] = Kinds(FromStore)
ToStore = Welcome | Found | Lives
TO_STORE: Kinds[ToStore] = Kinds(ToStore)


# The job's owner (`control.operators`)


class OperatorHello(Message, frozen=True, tag="hello", omit_defaults=True):
    role: str = ""


class Order(Message, frozen=True, tag="ask"):
    """A question or an order about these workers, or this host; with neither: about all."""

    what: str
    workers: tuple[str, ...]
    host: str
    by: str


class Facts(Message, frozen=True, tag="answer"):
    """The answer, or a refusal."""

    refusal: str
    facts: dict[str, Any]


class StacksOf(Message, frozen=True, tag="stacks"):
    worker: str
    text: str


FromOperator = OperatorHello | Order
FROM_OPERATOR: Kinds[FromOperator] = Kinds(FromOperator)
ToOperator = Facts | StacksOf | Lives
TO_OPERATOR: Kinds[ToOperator] = Kinds(ToOperator)
