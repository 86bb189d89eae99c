"""Old ticks of a large event file move to files of their own; decisions, from which all else follows, stay."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

TICKS = frozenset({"committed", "guarded", "rebuilt", "rolled_back"})
"""Events that are written in every iteration or on every worker: old ones of them move to files of their own."""
MOST = 16 << 20
"""Bytes of events.jsonl."""
FILES = 4
"""Files of old ticks that are kept."""
FIRST = 200
"""Commits of each generation that stay, as the record of its speed."""
LATEST = 1000
"""Lines that stay in any case: a reader of the growing file finds its place by them."""
_EVENT = re.compile(rb'\{"t": [^,]*, "event": "(\w+)"(?:, "generation": (\d+))?')


def roll(path: Path) -> int:
    """Move old ticks out of the file, to ticks-N.jsonl beside it; returns the bytes that are left. Atomic for
    readers: they find the old file or the new one.

    Raises:
        OSError: the disk does not take it; then the file is unchanged.
    """
    stay, go = divided(path.read_bytes().splitlines(keepends=True))
    old = sorted(path.parent.glob("ticks-*.jsonl"))
    number = 1 + max((int(found[1]) for one in old if (found := re.fullmatch(r"ticks-(\d+)", one.stem))), default=0)
    part, data = path.with_suffix(".part"), b"".join(stay)
    aside = path.parent / f"ticks-{number:04}.jsonl"
    try:
        _write(part, data)
        _write(aside, b"".join(go))
        os.replace(part, path)
    except OSError:
        for half in (part, aside):
            with contextlib.suppress(OSError):
                half.unlink()
        raise
    for each in old[:max(0, len(old) + 1 - FILES)]:
        each.unlink(missing_ok=True)
    return len(data)


def divided(lines: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
    """The lines that stay, and the lines that go."""
    stay: list[bytes] = []
    go: list[bytes] = []
    commits: dict[bytes, int] = {}
    for line in lines[:-LATEST]:
        found = _EVENT.match(line)
        name = b"" if found is None else found[1]
        if name == b"committed" and found is not None:
            commits[found[2]] = commits.get(found[2], 0) + 1
        first = name == b"committed" and found is not None and commits[found[2]] <= FIRST
        (go if name.decode() in TICKS and not first else stay).append(line)
    return [*stay, *lines[-LATEST:]], go


def _write(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
