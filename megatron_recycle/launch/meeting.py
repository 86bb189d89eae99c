"""Meeting file of a job's hosts: RUN_DIR/join.json, which the first host writes once its coordinator listens.

With it, hosts that share a file system need no address, port or token from the user, and a joining host needs the
folder only. The file holds the token: only this user can read it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from megatron_recycle.control import tokens
from megatron_recycle.control.sockets import targets
from megatron_recycle.errors import ConfigError, RecycleError
from megatron_recycle.launch.reachability import knock
from megatron_recycle.plan.value import Value

FILE = "join.json"
_FORMAT = {"format": "recycle-join", "version": 2}
_PAUSE = 0.2


class Meeting(Value, frozen=True, forbid_unknown_fields=True):
    """Facts about the first host for the other hosts.

    `control` is "host:port" of the coordinator, or several of them. `name` tells the job from earlier jobs in the
    folder. `refusal`: why the first host has started nothing. `command` is the script with its arguments, and `folder`
    its working directory: for joining hosts.
    """

    name: str
    control: str = ""
    token: str = ""
    nproc: int = 0
    refusal: str = ""
    command: tuple[str, ...] = ()
    folder: str = ""

    @property
    def host(self) -> str:
        return targets(self.control)[0][0] if self.control else ""


def publish(run_dir: Path, meeting: Meeting) -> None:
    """Write the file atomically. Raises ConfigError."""
    path = run_dir / FILE
    part = path.with_suffix(".part")
    try:
        part.unlink(missing_ok=True)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump({**_FORMAT, **meeting.to_json()}, file)
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): choose another --run-dir") from error


def withdraw(run_dir: Path) -> None:
    """Remove the file: the job is over."""
    for name in (FILE, tokens.FOR_JOINING):
        with contextlib.suppress(OSError):
            (run_dir / name).unlink()


def read(run_dir: Path) -> Meeting | None:
    """The file of the first host; None if it is missing, or of another version.

    Raises:
        ConfigError: the file belongs to another user, or is malformed.
    """
    path = run_dir / FILE
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})") from error
    with os.fdopen(descriptor) as file:
        if os.fstat(file.fileno()).st_uid != run_dir.stat().st_uid:
            raise ConfigError(f"{path} belongs to another user than the run's folder: nothing in it is believed")
        try:
            content = json.load(file)
            if {key: content.pop(key, None) for key in _FORMAT} != _FORMAT:
                return None
            return Meeting.from_json(content)
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is damaged ({error})") from error


def await_first(run_dir: Path, name: str, limit: float, say: Callable[[str], None]) -> Meeting:
    """Wait until the first host of the job `name` has written its address, and answers there.

    Raises:
        RecycleError: it has refused, or does not come within `limit` seconds.
    """
    until, shown = time.monotonic() + limit, ""
    while True:
        found, why = read(run_dir), f"there is no {run_dir / FILE} yet: is that folder on a file system of all hosts?"
        if found is not None and found.name != name:
            why = f"{run_dir / FILE} is of another job ({found.name or 'a job of one host'})"
        elif found is not None and found.refusal:
            raise RecycleError(f"the first host has not started: {found.refusal}")
        elif found is not None:
            refused = knock(found.control, found.token)
            if refused is None:
                return found
            why = f"nobody of this job answers at {found.control}: {refused}"
        if time.monotonic() > until:
            raise RecycleError(f"the first host has not come within {limit:.0f} s; {why}")
        if why != shown and time.monotonic() > until - limit + 10.0:
            shown = why
            say(f"recycle: still waiting for the first host; {why}")
        time.sleep(_PAUSE)
