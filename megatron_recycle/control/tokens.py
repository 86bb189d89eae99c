"""The job's token. Its owner commands the job, so it is long, and only processes that need it get it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from megatron_recycle.control.wire import for_joining
from megatron_recycle.environment import SHORTEST_TOKEN, TOKEN
from megatron_recycle.errors import ConfigError

FOR_JOINING = "join.token"
_HOW = "make one with `openssl rand -hex 16`"


def given(environ: Mapping[str, str], file: Path | None = None) -> str | None:
    """The user's token, from a file or a variable; None: neither.

    Raises:
        ConfigError: the file cannot be read, or the token is too short to be a secret.
    """
    if file is None:
        return _checked(environ[TOKEN], TOKEN) if environ.get(TOKEN) else None
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file {file} cannot be read ({getattr(error, 'strerror', None) or error}): {_HOW}"
                          ) from error
    return _checked(token, f"--token-file {file}")


def publish(folder: Path, token: str) -> None:
    """Write the secret for hosts that join into FOLDER/join.token, for this user only."""
    with contextlib.suppress(OSError):  # only a convenience
        path = folder / FOR_JOINING
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(for_joining(token) + "\n")


def without(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment for a process that does not need the token."""
    return {name: text for name, text in environ.items() if name != TOKEN}


def _checked(token: str, source: str) -> str:
    if len(token) < SHORTEST_TOKEN:
        raise ConfigError(f"{source} has {len(token)} characters; a token has {SHORTEST_TOKEN} or more, since who "
                          f"guesses it commands the job: {_HOW}")
    return token
