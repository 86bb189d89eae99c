#!/usr/bin/env python3
"""Attacks the coordinator of a running job from outside, and says whether anything came of it.

    python scripts/lab/attack.py                      100,000 messages and 5,000 idle connections, beside a job
    python scripts/lab/attack.py --messages 5000 --idle 500

Starts a job of four workers (scripts/gpt_deepspeed.py), sends messages that are malformed, replayed, reordered, cut,
made with another token, or not allowed with the secret of hosts that join, holds connections that never say anything,
and asks all the while, with the token, to be answered; each of these three in processes of their own. Exit status: 0 if
nothing was let in, nobody was lost, and each who has the token was answered within a second. Sends to 127.0.0.0/8 only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import resource
import secrets
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import msgspec

from megatron_recycle.control.wire import MAX_FIRST_PAYLOAD, SecureChannel, for_joining, seal
from megatron_recycle.membership.inputs import FROM_LAUNCHER, FROM_WORKER, FromLauncher, FromWorker
from megatron_recycle.membership.protocol import Kinds, WireError

ROOT = Path(__file__).resolve().parents[2]
HELLO = {"type": "hello", "role": "launcher", "host": "attacker/0", "ranks": [], "places": 0}
WORKER = {"type": "hello", "role": "worker", "worker": "0:0", "rank": 0, "incarnation": "attacker", "pid": 1,
          "host": "attacker/0", "generation": 0}
STRANGE: Sequence[Any] = (None, True, -1, 10**30, 1.5, float("nan"), "", "x" * 1000, [], [[]], {}, {"a": {}}, "\x1b[2J",
                          "0:0/../..", "9" * 400)
_LENGTH = struct.Struct(">I")
_LIMIT = 8.0
_PAUSE = 20.0
"""Seconds at most after which a connection that says nothing comes again."""
OWN = ("committed", "learnt", "offer", "adopted")
"""What a job writes down by itself: committed iterations, and better plans."""
CROWDS = 2
"""Processes that hold the idle connections."""
LATE = 1.0
"""Seconds within which who has the token is to be answered."""


@dataclass
class Target:
    """A coordinator, what the attackers know of it, and their dice."""

    host: str
    port: int
    token: str
    dice: random.Random
    recorded: bytes = b""
    """A first frame of another connection."""

    def source(self) -> tuple[str, int]:
        return f"127.0.{self.dice.randrange(1, 250)}.{self.dice.randrange(1, 250)}", 0

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.wait_for(asyncio.open_connection(self.host, self.port, local_addr=self.source()), _LIMIT)


async def greeting(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readexactly(36)
    return head + await reader.readexactly(_LENGTH.unpack(head[:4])[0])


# What strangers send, given the greeting


def noise(target: Target, greeted: bytes) -> bytes:
    return target.dice.randbytes(target.dice.randrange(36, 2000))


def too_large(target: Target, greeted: bytes) -> bytes:
    return _LENGTH.pack(target.dice.randrange(MAX_FIRST_PAYLOAD + 1, 1 << 32)) + target.dice.randbytes(64)


def first(greeted: bytes, token: str, message: dict[str, Any] | None = None) -> bytes:
    session = SecureChannel.client(token)
    with contextlib.suppress(ValueError):
        session.feed(greeted)
    if not session.open:  # the greeting is of another token
        return seal({**(message or HELLO), "nonce": secrets.token_hex(16), "n": 0}, token.encode())
    return session.seal(message or HELLO)


def wrong_token(target: Target, greeted: bytes) -> bytes:
    return first(greeted, "another token, as long")


def flipped(target: Target, greeted: bytes) -> bytes:
    frame = bytearray(first(greeted, target.token))
    place = target.dice.randrange(4, len(frame))
    frame[place] ^= 1 << target.dice.randrange(8)
    return bytes(frame)


def replayed(target: Target, greeted: bytes) -> bytes:
    return target.recorded


def mirrored(target: Target, greeted: bytes) -> bytes:
    return greeted


def cut(target: Target, greeted: bytes) -> bytes:
    frame = first(greeted, target.token)
    return frame[:target.dice.randrange(1, len(frame))]


# What is sent by one who has the token or the lesser secret, and may not say that


def opened(target: Target, greeted: bytes, token: str | None = None, hello: dict[str, Any] | None = None
           ) -> tuple[SecureChannel, bytes]:
    session = SecureChannel.client(token or target.token)
    session.feed(greeted)
    return session, session.seal(hello or HELLO)


def disordered(target: Target, greeted: bytes) -> bytes:
    session, hello = opened(target, greeted)
    frames = [hello, *(session.seal({"type": "heartbeat", "progress": None}) for _ in range(3))]
    return b"".join(frames[index] for index in target.dice.choice(
        ((0, 0), (0, 1, 1), (0, 2), (0, 2, 1), (1, 0), (0, 1, 3), (0, 3, 2, 1))))


def malformed(target: Target, greeted: bytes) -> bytes:
    """An authentic message with a field that is missing or is something else; or depth, or a second hello."""
    session = SecureChannel.client(target.token)
    session.feed(greeted)
    kind = target.dice.choice(("hello", "field", "second", "deep", "unknown", "order"))
    if kind == "hello":
        return session.seal(broken(target.dice, *target.dice.choice(((HELLO, FROM_LAUNCHER), (WORKER, FROM_WORKER)))))
    hello = session.seal(HELLO)
    if kind == "second":
        return hello + session.seal(HELLO)
    if kind == "deep":
        return hello + session.seal_encoded(b'{"type":"heartbeat","progress":' + b'{"a":' * 20000 + b"1" + b"}" * 20000
                                            + b"}")
    if kind == "unknown":
        foreign = _tags(FromWorker).keys() - _tags(FromLauncher).keys()
        return hello + session.seal({"type": target.dice.choice((*sorted(foreign), "x"))})
    if kind == "order":
        return session.seal({"type": "heartbeat", "progress": None})
    return hello + session.seal(wrong_field(target.dice))


def wrong_field(dice: random.Random) -> dict[str, Any]:
    """A launcher's message that is none."""
    name = dice.choice([name for name in _tags(FromLauncher) if name not in ("hello", "heartbeat")])
    whole = {field.encode_name: "x" if field.type is str else 1
             for field in msgspec.structs.fields(_tags(FromLauncher)[name]) if field.required}
    return broken(dice, {"type": name, **whole}, FROM_LAUNCHER)


def _tags(union: Any) -> dict[str, Any]:
    """The types of messages by their names on the wire."""
    return {str(each.__struct_config__.tag): each for each in get_args(union)}


def broken(dice: random.Random, message: dict[str, Any], kinds: Kinds[Any]) -> dict[str, Any]:
    """The message with one field missing or strange, such that it is none of ``kinds``."""
    while True:
        name = dice.choice([field for field in message if field not in ("type", "role")] or ["type"])
        found = {key: value for key, value in message.items() if key != name} | (
            {} if dice.random() < 0.3 else {name: dice.choice(STRANGE)})
        try:
            kinds.read(found)
        except WireError:
            return found


def guest(target: Target, greeted: bytes) -> bytes:
    """With the secret of hosts that join: what only the job's token allows."""
    secret = for_joining(target.token)
    if target.dice.random() < 0.5:
        return opened(target, greeted, secret, WORKER)[1]
    session, hello = opened(target, greeted, secret)
    return hello + session.seal({"type": "interrupt", "status": 1, "message": "attack"})


KINDS: Sequence[Callable[[Target, bytes], bytes]] = (
    noise, too_large, wrong_token, flipped, replayed, mirrored, cut, disordered, malformed, guest)


@dataclass
class JobHistory:
    """What came of it: how many of each kind were `sent` and not `hung_up` on; how long who has the token waited."""

    sent: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    answered: list[float] = field(default_factory=list)
    unanswered: int = 0
    unreached: int = 0
    took: Counter[str] = field(default_factory=Counter)


async def attack(target: Target, kind: Callable[[Target, bytes], bytes], seen: JobHistory) -> None:
    """One connection with one message, which the coordinator is to end."""
    try:
        reader, writer = await target.connect()
    except (OSError, asyncio.TimeoutError):
        seen.unreached += 1
        return
    seen.sent[kind.__name__] += 1
    began = time.monotonic()
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):  # it may be pushed out by others: hung up on
        writer.write(kind(target, await asyncio.wait_for(greeting(reader), _LIMIT)))
        if kind is cut:
            writer.close()
            return
        try:
            while await asyncio.wait_for(reader.read(1 << 16), _LIMIT):
                pass
        except asyncio.TimeoutError:
            seen.kept[kind.__name__] += 1
    seen.took[kind.__name__] += time.monotonic() - began
    writer.close()


async def idle(target: Target, count: int, over: asyncio.Event) -> None:
    """Keep this many connections open that never say anything; those that are ended are made again."""

    async def one() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                reader, writer = await target.connect()
                try:
                    while await reader.read(1 << 12):
                        pass
                finally:
                    writer.close()
            await asyncio.sleep(_PAUSE * target.dice.random())

    tasks = [asyncio.create_task(one()) for _ in range(count)]
    await over.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def newcomers(target: Target, seen: JobHistory, over: asyncio.Event) -> None:
    """Every now and then one with the token asks for places, and is to be told so."""
    while not over.is_set():
        began = time.monotonic()
        try:
            await asyncio.wait_for(asked(target), _LIMIT)
            seen.answered.append(time.monotonic() - began)
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
            seen.unanswered += 1
        await asyncio.sleep(0.1)


async def asked(target: Target) -> None:
    """Connect until the coordinator has answered: one that is pushed out at the door tries again, as a Link does."""
    while True:
        try:
            reader, writer = await target.connect()
            try:
                session, hello = opened(target, await greeting(reader))
                writer.write(hello + session.seal({"type": "join", "count": 0}))
                while not any(message["type"] == "places" for message in session.feed(await data(reader))):
                    pass
                return
            finally:
                writer.close()
        except (ConnectionError, asyncio.IncompleteReadError):
            await asyncio.sleep(0.01)


async def data(reader: asyncio.StreamReader) -> bytes:
    found = await reader.read(1 << 16)
    if not found:
        raise ConnectionResetError("hung up")
    return found


async def assault(target: Target, messages: int, crowd: int = 0, limit: float = float("inf"), at_once: int = 64
                  ) -> JobHistory:
    """All of it, but for the newcomers, with a ``crowd`` of idle connections in this very process; what has not been
    sent within ``limit`` seconds is left out."""
    seen, over, until = JobHistory(), asyncio.Event(), time.monotonic() + limit
    reader, writer = await target.connect()
    target.recorded = first(await greeting(reader), target.token)
    writer.close()
    crowded = asyncio.create_task(idle(target, crowd, over))
    turns = iter(range(messages))

    async def worker() -> None:
        for turn in turns:
            if time.monotonic() > until:
                return
            await attack(target, KINDS[turn % len(KINDS)], seen)

    await asyncio.gather(*(worker() for _ in range(at_once)))
    over.set()
    await crowded
    return seen


async def until_set(over: Any, what: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Do this until ``over``, which another process sets, is set."""
    end = asyncio.Event()
    doing = asyncio.create_task(what(end))
    await asyncio.get_running_loop().run_in_executor(None, over.wait)
    end.set()
    await doing


def coming(target: Target, over: Any, told: Any) -> None:
    """Newcomers in a process of their own, which the attackers do not slow down, until ``over`` is set."""
    seen = JobHistory()
    asyncio.run(until_set(over, lambda end: newcomers(target, seen, end)))
    told.put((seen.answered, seen.unanswered))


def crowding(target: Target, count: int, over: Any) -> None:
    """Idle connections in a process of their own, until ``over`` is set."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    target.dice.seed(os.getpid())
    asyncio.run(until_set(over, lambda end: idle(target, count, end)))


def faults(seen: JobHistory) -> list[str]:
    """What went wrong at the door."""
    late = [wait for wait in seen.answered if wait > LATE]
    return [text for text, true in (
        (f"not hung up on: {dict(seen.kept)}", bool(seen.kept)),
        (f"{len(late)} of {len(seen.answered)} newcomers waited longer than {LATE:.0f} s, at most "
         f"{max(seen.answered, default=0):.2f} s", bool(late)),
        (f"{seen.unanswered} newcomers were not answered", bool(seen.unanswered)),
        ("no newcomer came", not seen.answered)) if true]


# The job


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--idle", type=int, default=5_000)
    parser.add_argument("--limit", type=float, default=3600.0, metavar="SECONDS", help="for all messages")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir, log = Path(folder, "run"), Path(folder, "log")
        with log.open("w") as output:
            job = subprocess.Popen(
                [sys.executable, "-m", "megatron_recycle.cli", "run", "--nproc", "4", "--run-dir", str(run_dir),
                 str(ROOT / "scripts/gpt_deepspeed.py"), "--stages", "2", "--iterations", "1000000"],
                stdout=output, stderr=output, env={**os.environ, "DS_ACCELERATOR": "cpu"})
        try:
            return beside(job, run_dir, log, args)
        finally:
            job.terminate()
            job.wait(60)


def decisions(run_dir: Path) -> list[str]:
    """The kinds of what stands in the journal, but for better plans and the like, which the job makes by itself."""
    lines = (run_dir / "journal.jsonl").read_text().splitlines()
    return [kind for kind in (json.loads(line).get("kind", line) for line in lines if line.strip("\0 "))
            if kind not in OWN]


def beside(job: subprocess.Popen[bytes], run_dir: Path, log: Path, args: argparse.Namespace) -> int:
    def events(name: str) -> list[dict[str, Any]]:
        lines = (run_dir / "events.jsonl").read_text().splitlines() if (run_dir / "events.jsonl").exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == name]

    deadline = time.monotonic() + 300
    while len(events("committed")) < 5:
        if time.monotonic() > deadline or job.poll() is not None:
            print(log.read_text()[-3000:])
            return 1
        time.sleep(0.5)
    found = json.loads((run_dir / "join.json").read_text())
    host, _, port = found["control"].rpartition(":")
    before, journal = len(events("committed")), decisions(run_dir)
    target = Target(host, int(port), found["token"], random.Random(args.seed))
    spawn = multiprocessing.get_context("spawn")
    over, told = spawn.Event(), spawn.Queue()
    others = [spawn.Process(target=coming, args=(target, over, told)),
              *(spawn.Process(target=crowding, args=(target, (args.idle + index) // CROWDS, over))
                for index in range(CROWDS))]
    for process in others:
        process.start()
    began = time.monotonic()
    seen = asyncio.run(assault(target, args.messages, limit=args.limit))
    took = time.monotonic() - began
    over.set()
    seen.answered, seen.unanswered = told.get(timeout=60)
    for process in others:
        process.join(60)
    time.sleep(2.0)
    after = len(events("committed"))
    wrong = faults(seen)
    wrong += [f"event {name}: {events(name)[:2]}" for name in ("suspected", "decided", "left", "leaving", "finished",
                                                              "waiting", "joined", "restarted") if events(name)]
    if grown := decisions(run_dir)[len(journal):]:
        wrong.append(f"decisions in the journal: {grown}")
    if job.poll() is not None or after <= before:
        wrong.append("the job does not train any more")
    waits = sorted(seen.answered) or [0.0]
    print(f"{sum(seen.sent.values())} messages in {took:.0f} s: {dict(sorted(seen.sent.items()))}")
    print("hung up on after, on average: " + ", ".join(f"{kind} {seconds / seen.sent[kind]:.2f} s"
                                                      for kind, seconds in sorted(seen.took.items())))
    print(f"{args.idle} idle connections; {seen.unreached} attackers could not connect")
    print(f"{len(seen.answered)} newcomers answered: median {waits[len(waits) // 2] * 1000:.0f} ms, 99.9 % within "
          f"{waits[len(waits) * 999 // 1000] * 1000:.0f} ms, worst {waits[-1] * 1000:.0f} ms")
    print(f"{after - before} iterations committed meanwhile; coordinator.log "
          f"{(run_dir / 'coordinator.log').stat().st_size} bytes, {len(events('refused'))} events of refusals")
    print("\n".join(f"WRONG: {text}" for text in wrong) or "nothing in, nothing down")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
