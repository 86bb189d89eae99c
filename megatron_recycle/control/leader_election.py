"""Leader election: a journal in a store that several hosts share, and the right to write it. Others stand by.

The leader holds a key with a lease, which ends when its holder is silent for a few seconds. Each record is written in a
transaction that requires this very key: a leader that has lost its lease unawares writes nothing, and decides nothing.
Terms and records are numbered, and no number is used twice. The store may be open to others: all values carry a MAC
made with the job's token, and values without it are rejected.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec import field

from megatron_recycle.control.etcd import Etcd, StoreUnreachable
from megatron_recycle.control.journal import JournalError
from megatron_recycle.membership.resume import RESTART
from megatron_recycle.plan import Plan, PlanError
from megatron_recycle.plan.plan_file import PlanFile
from megatron_recycle.plan.value import Value

LEASE_S = 3
"""Seconds of silence after which another coordinator may lead. etcd grants no lease much shorter."""
_PIECE = 512 * 1024
"""Bytes of a value; etcd takes 1.5 MiB in a request."""
_NOTE_S = 0.25
_SLOW_S = LEASE_S / 4
"""Seconds for an answer at which no leader could hold its lease for long: a decision takes several answers."""
_TRIES = 5

log = logging.getLogger(__name__)


class LeadLost(JournalError):
    """Another coordinator leads by now, or may: the pending decision is not made."""


class _Came(Value, frozen=True):
    """A host that stands by: its future address, an id of this start of it, and the starts that it has seen."""

    control: str
    came: str
    seen: Mapping[str, str]


class _Lead(Value, frozen=True):
    """The leader of a term."""

    me: str
    control: str
    nonce: str
    term: int


class _Written(Value, frozen=True, omit_defaults=True):
    """A decision: its record, or if large the keys of its parts."""

    term: int
    record: dict[str, Any] = field(default_factory=dict)
    parts: tuple[str, ...] = ()


class Sealed:
    """The keys of one job. Their values are JSON behind a MAC that requires the token. A request that raises
    StoreUnreachable may have been carried out all the same."""

    def __init__(self, store: Etcd, job: str, token: str) -> None:
        self.store = store
        self.folder = f"recycle/{job}/"
        self._secret = hmac.new(token.encode(), b"recycle store", hashlib.sha256).digest()

    def seal(self, name: str, content: Any) -> bytes:
        text = json.dumps(content, separators=(",", ":")).encode()
        return self._code(name, text) + b" " + text

    def read(self, name: str) -> dict[str, tuple[Any, int]]:
        """Contents of all keys whose names begin with ``name``, with the revision at which each key was created.

        Raises JournalError if one was not written by this job.
        """
        found = {}
        for entry in self.store.range(self.folder + name):
            own = entry.key.removeprefix(self.folder)
            code, _, text = entry.value.partition(b" ")
            if not hmac.compare_digest(code, self._code(own, text)):
                raise JournalError(f"{entry.key} in the store was written without this job's token: by another job of "
                                   f"this name, or by a stranger. A coordinator refuses to lead by it. {RESTART}")
            found[own] = json.loads(text), entry.created
        return found

    def one(self, name: str) -> tuple[Any, int] | None:
        """The content and revision of this key, as from `read`; None if it is absent."""
        return self.read(name).get(name)

    def put_if(self, created: Mapping[str, int], contents: Mapping[str, Any], lease: int = 0,
               leased: tuple[str, ...] = ()) -> int:
        """As `Etcd.put_if`, with this job's names."""
        return self.store.put_if({self.folder + name: revision for name, revision in created.items()},
                                 {self.folder + name: self.seal(name, each) for name, each in contents.items()},
                                 lease, tuple(self.folder + name for name in leased))

    def _code(self, name: str, text: bytes) -> bytes:
        return hmac.new(self._secret, (self.folder + name).encode() + b"\0" + text, hashlib.sha256).hexdigest().encode()


class Candidate:
    """A coordinator that may lead the job.

    Args:
        me: its name among the job's hosts.
        control: the address where it will listen.
    """

    def __init__(self, keys: Sealed, me: str, control: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._keys = keys
        self._me, self._control, self._nonce = me, control, secrets.token_hex(8)
        self._came = secrets.token_hex(8)
        self._announced = False
        self._clock = clock
        self._lease = 0
        self._kept = 0.0
        self._seen = 0
        """The latest term seen of another leader."""

    def announce(self) -> None:
        """Announce where this coordinator will listen, in a job that has not begun yet.

        Raises:
            JournalError: a job of this name exists, or has existed; or the store is too slow.
            StoreUnreachable.
        """
        if not self._announced:
            self._check_new()
        self._announced = True  # it may happen although the answer is lost, and then the others begin
        took: list[float] = []
        while not took or (took[-1] > _SLOW_S and len(took) < _TRIES):
            begun = self._clock()
            self._say({})
            took.append(self._clock() - begun)
        if took[-1] > _SLOW_S:
            raise JournalError(f"the store takes {min(took):.1f} s and more to write a key, and who leads must do so "
                               f"several times in {LEASE_S} s: give etcd faster disks, or a network and machines that "
                               "have time for it")

    def _check_new(self) -> None:
        """Raises JournalError, and StoreUnreachable."""
        if not self._keys.read("journal/"):
            return
        if self._keys.read("leader"):
            hosts = ",".join(_Came.from_json(one).control for _, (one, _)
                             in sorted(self._keys.read("candidate/").items()))
            raise JournalError(f"the job {self._keys.folder} runs already, and goes on without this host: bring it in "
                               f"again with `recycle run --join {hosts}`, the job's token, --nproc, script and "
                               "arguments; a new job needs another --job")
        raise JournalError(f"a job has been run under {self._keys.folder} in this store: choose another --job, or "
                           f"remove it (etcdctl del --prefix {self._keys.folder})")

    def meet(self, hosts: int) -> list[str]:
        """Addresses of the coordinators of hosts "0", "1", ..., once each has seen all others; empty until then.
        Entries of an earlier start have seen none of these.

        Raises:
            JournalError: another host has come in this one's name.
            StoreUnreachable.
        """
        read = self._keys.read("candidate/")
        candidates = {name: _Came.from_json(read[f"candidate/{name}"][0]) for name in map(str, range(hosts))
                      if f"candidate/{name}" in read}
        own, seen = candidates[self._me], {name: each.came for name, each in candidates.items()}
        if own.came != self._came:
            raise JournalError(f"two hosts have come to {self._keys.folder} as --node-rank {self._me}, at "
                               f"{self._control} and {own.control}: give each host a number of its own")
        if own.seen != seen:
            self._say(seen)
        elif len(candidates) == hosts and all(each.seen == seen for each in candidates.values()):
            return [each.control for each in candidates.values()]
        return []

    def _say(self, seen: Mapping[str, str]) -> None:
        self._keys.put_if({}, {f"candidate/{self._me}": _Came(self._control, self._came, seen).to_json()})

    def try_lead(self) -> ElectedJournal | None:
        """The job's journal, if no other coordinator leads. Raises StoreUnreachable, and JournalError."""
        held = self._keys.one("leader")
        leader, revision = (None, 0) if held is None else (_Lead.from_json(held[0]), held[1])
        if leader is not None and leader.nonce != self._nonce:
            self._seen = max(self._seen, leader.term)
            return None
        now = self._clock()
        if not self._lease or not self._keys.store.keep(self._lease):
            self._lease = self._keys.store.grant(LEASE_S)
            self._nonce, revision = secrets.token_hex(8), 0
        self._kept = now
        if not revision:  # else the answer to an earlier try was lost
            term = len(self._keys.read("term/")) + 1
            if term <= self._seen:
                raise JournalError(f"{self._keys.folder} in the store has been emptied: its term was {self._seen}, and "
                                   f"without its journal no coordinator leads. {RESTART}")
            led = _Lead(self._me, self._control, self._nonce, term).to_json()
            revision = self._keys.put_if({"leader": 0, f"term/{term:08d}": 0},
                                         {"leader": led, f"term/{term:08d}": led}, self._lease, ("leader",))
            if not revision:
                return None
        read = self._keys.read("")
        terms = [name for name in sorted(read) if name.startswith("term/")]
        if not terms or _Lead.from_json(read[terms[-1]][0]).nonce != self._nonce:
            return None
        now = self._clock()
        if not self._keys.store.keep(self._lease):  # these steps have taken too long
            return None
        self._kept = now
        return ElectedJournal(self._keys, revision, int(terms[-1].partition("/")[2]), self._lease, read, self._kept,
                              self._clock)


class ElectedJournal:
    """The journal, while this process leads; see `journal.Journal`.

    Attributes:
        term: the number of this leadership.
        records: all decisions, in order, and the latest note.
        before: the name of the previous leader, if another one; else empty.
    """

    def __init__(self, keys: Sealed, revision: int, term: int, lease: int, read: Mapping[str, tuple[Any, int]],
                 kept: float, clock: Callable[[], float]) -> None:
        self.path = Path("/" + keys.folder) / "journal"
        self.term = term
        self._keys = keys
        self._mine = {"leader": revision}
        self._lease = lease
        self._until = kept + LEASE_S
        self._clock = clock
        written = [_whole(read, name) for name in sorted(read) if name.startswith("journal/")]
        self._count = len(written)
        led = [_Lead.from_json(read[name][0]).me for name in sorted(read) if name.startswith("term/")]
        self.before: str = led[-2] if len(led) > 1 and led[-2] != led[-1] else ""
        self.records: list[dict[str, Any]] = written + [read[name][0] for name in ("note",) if name in read]
        self._note: Mapping[str, Any] | None = None
        self._taken: Mapping[str, Any] | None = None
        self._lost: str | None = None
        self._over = threading.Event()

    def leads(self) -> bool:
        """Whether no other coordinator can lead yet."""
        return self._lost is None and self._clock() <= self._until

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a record; returns when a majority of the store has it, in this term. Raises LeadLost, or OSError if the
        store does not take it."""
        name = f"journal/{self._count:08d}"
        content = _Written(self.term, dict(record))
        if len(json.dumps(content.to_json())) > _PIECE:
            pieces = _pieces(f"part/{self._count:08d}/{self.term:08d}", record)
            for piece, text in pieces.items():
                self._put({}, {piece: text})
            content = _Written(self.term, parts=tuple(pieces))
        self._put({name: 0}, {name: content.to_json()})
        self._count += 1
        self.records.append(dict(record))

    def _put(self, created: Mapping[str, int], contents: Mapping[str, Any]) -> None:
        while True:
            self._check()
            try:
                if not self._keys.put_if({**self._mine, **created}, contents):
                    for name, content in contents.items():
                        had = self._keys.one(name)
                        if had is None or had[0] != json.loads(json.dumps(content)):  # else the answer was lost
                            raise self._lose("another coordinator leads")
                return
            except StoreUnreachable as error:
                log.warning("recycle: a decision waits for the store: %s", error)

    def note(self, record: Mapping[str, Any]) -> None:
        """Keep the latest of frequent changes: written by `beat`, soon."""
        self._note = dict(record)

    def beat(self) -> None:
        """Renew the lease, and write the latest note. Raises LeadLost."""
        now = self._clock()
        try:
            if not self._keys.store.keep(self._lease):
                raise self._lose("the lease has ended")
            self._until = now + LEASE_S
            self.flush()
        except OSError as error:  # without a note the next leader knows less
            log.warning("recycle: %s", error)
        self._check()

    def flush(self) -> None:
        """Write the latest note, if there is a new one. Raises StoreUnreachable, and LeadLost."""
        note = self._note  # another thread may set the next one at any moment
        if note is None or note is self._taken:
            return
        self._taken = note
        if not self._keys.put_if(self._mine, {"note": note}):
            raise self._lose("another coordinator leads")

    def keep_lead(self, lost: Callable[[str], None]) -> None:
        """Renew the lease in a thread; ``lost`` is called there once, with the reason."""

        def run() -> None:
            due = 0.0
            while not self._over.wait(_NOTE_S):
                try:
                    if self._clock() >= due:
                        due = self._clock() + LEASE_S / 4
                        self.beat()
                    else:
                        self.flush()
                except OSError as error:
                    log.info("recycle: a note is not kept: %s", error)
                except LeadLost as error:
                    lost(str(error))
                    return

        threading.Thread(target=run, name="recycle-lease", daemon=True).start()

    def close(self) -> None:
        """Release the lease, so that another coordinator can lead at once."""
        self._over.set()
        try:
            if self._lost is None:
                self._keys.store.revoke(self._lease)
        except OSError as error:
            log.info("recycle: the lease ends by itself: %s", error)

    # Plans are too large for a record

    def keep_plan(self, plan: Plan) -> None:
        """Keep the plan for the next leader. Raises LeadLost."""
        for piece, text in _pieces(_plan(plan.digest), plan.to_json()).items():
            self._put({}, {piece: text})

    def load_plan(self, digest: str) -> PlanFile | None:
        """The plan with this ``digest``; None if it was not kept. Raises StoreUnreachable."""
        read = self._keys.read(f"{_plan(digest)}/")
        try:
            return Plan.from_json(_joined(content for _, (content, _) in sorted(read.items()))).to_file()
        except (PlanError, ValueError, zlib.error) as error:
            log.warning("recycle: a plan that is in use cannot be read again: %s", error)
            return None

    def _check(self) -> None:
        if self._lost is not None:
            raise LeadLost(self._lost)
        if self._clock() > self._until:
            raise self._lose(f"the store has not answered for {LEASE_S} s")

    def _lose(self, why: str) -> LeadLost:
        self._lost = self._lost or f"this coordinator leads no more (term {self.term}): {why}"
        return LeadLost(self._lost)


def _plan(digest: str) -> str:
    return f"plan/{digest.rpartition(':')[2][:16]}"


def _pieces(name: str, content: Any) -> dict[str, str]:
    """The content, packed and cut into values of a permitted size, by name."""
    text = base64.b85encode(zlib.compress(json.dumps(content).encode())).decode()
    return {f"{name}/{index:04d}": text[at:at + _PIECE] for index, at in enumerate(range(0, len(text), _PIECE))}


def _joined(pieces: Iterable[str]) -> Any:
    return json.loads(zlib.decompress(base64.b85decode("".join(pieces))))


def _whole(read: Mapping[str, tuple[Any, int]], name: str) -> dict[str, Any]:
    content = _Written.from_json(read[name][0])
    return dict(_joined(read[part][0] for part in content.parts)) if content.parts else content.record
