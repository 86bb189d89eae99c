"""A query or an order to a job's coordinator, from a command line: its address, one connection, the answers.

Orders need the owner's token.
"""

from __future__ import annotations

import argparse
import getpass
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_recycle.control.sockets import targets
from megatron_recycle.control.tokens import given
from megatron_recycle.control.wire import GUEST, SecureChannel
from megatron_recycle.errors import ConfigError, RecycleError
from megatron_recycle.launch import meeting
from megatron_recycle.launch.meeting import Meeting
from megatron_recycle.membership.protocol import (
    TO_OPERATOR,
    Facts,
    Lives,
    OperatorHello,
    Order,
    StacksOf,
    WireError,
)
from megatron_recycle.tools.operate.runs import folder_of, meeting_of

_LIMIT = 5.0
"""Seconds that a coordinator has to answer."""


class Unreachable(RecycleError):
    """No coordinator of this job answers; the message says why."""


class Refused(RecycleError):
    """The coordinator refuses the request; the message says why."""


def add_token_file(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names the file with a job's token."""
    parser.add_argument("--token-file", type=Path, metavar="FILE",
                        help="where the job's token stands (default: RECYCLE_TOKEN, or the run's folder)")


def find(args: argparse.Namespace) -> tuple[Path, str, str]:
    """The folder of the named run, the address of its coordinator, and the job's token. Raises ConfigError."""
    folder = folder_of(args.run)
    found = meeting_of(folder)
    if found is None or not found.control:
        raise ConfigError(f"no job runs in {folder} (it has no {meeting.FILE}): `recycle status {folder}` says how it "
                          "ended")
    return folder, found.control, secret(found, args.token_file)


def secret(found: Meeting | None, file: Path | None) -> str:
    """The owner's token, from the user or from the run's folder.

    Raises:
        ConfigError: there is none, or it is only the secret of joining hosts.
    """
    token = given(os.environ, file) or (None if found is None else found.token)
    if not token:
        raise ConfigError("the job's token is needed: give --token-file, or RECYCLE_TOKEN, as the job was started with")
    if token.startswith(GUEST):
        raise ConfigError("join.token lets hosts join, and commands nothing: give the job's own token (--token-file, "
                          "RECYCLE_TOKEN), or the run's folder")
    return token


def ask(control: str, token: str, what: str, workers: Sequence[str] = (), host: str = "", limit: float = _LIMIT
        ) -> dict[str, Any]:
    """Facts from the coordinator at ``control`` ("host:port", or several with commas).

    Raises:
        Unreachable: no coordinator of this job answers there.
        Refused: it says no.
    """
    return _facts(_replies(control, token, Order(what, tuple(workers), host, _sender()), limit))


def ask_stacks(control: str, token: str, workers: Sequence[str], host: str, limit: float) -> dict[str, str | None]:
    """The stacks of these workers (of all, if none is named) by name; None for workers that do not answer within
    ``limit`` seconds. Raises as `ask` does."""
    replies = _replies(control, token, Order("stacks", tuple(workers), host, _sender()), limit)
    found: dict[str, str | None] = dict.fromkeys(_facts(replies)["workers"])
    with suppress(Unreachable):  # workers that have not answered stay without
        while None in found.values():
            if isinstance(message := next(replies), StacksOf):
                found[message.worker] = message.text
    return found


def _facts(replies: Iterator[Facts | StacksOf]) -> dict[str, Any]:
    first = next(replies)
    return first.facts if isinstance(first, Facts) else {}


def _sender() -> str:
    try:
        return f"{getpass.getuser()} on {socket.gethostname()}"
    except (KeyError, OSError):  # a container's user without a name
        return f"somebody on {socket.gethostname()}"


def _replies(control: str, token: str, message: Order, limit: float) -> Iterator[Facts | StacksOf]:
    """All answers, until ``limit`` seconds have passed. One of several addresses leads."""
    why = ""
    for host, port in targets(control):
        try:
            yield from _replies_from(host, port, token, message, limit)
        except TimeoutError:
            why = f"no answer within {limit:.0f} s"
        except WireError:
            why = "who answers there does not have this job's token, or is of another version"
        except OSError as error:
            why = error.strerror or str(error)
    raise Unreachable(f"the coordinator at {control} does not answer: {why}")


def _replies_from(host: str, port: int, token: str, message: Order, limit: float) -> Iterator[Facts | StacksOf]:
    until = time.monotonic() + limit
    with socket.create_connection((host, port), limit) as connection:
        if connection.getsockname() == connection.getpeername():
            raise ConnectionRefusedError("nobody listens there")
        session, sent = SecureChannel.client(token), False
        while True:
            connection.settimeout(max(0.001, until - time.monotonic()))
            if not (data := connection.recv(1 << 16)):
                raise ConnectionResetError("it hangs up: is it another job's, or of an older version that cannot be "
                                           "asked?")
            for reply in map(TO_OPERATOR.read, session.feed(data)):
                if isinstance(reply, Facts) and reply.refusal:
                    raise Refused(reply.refusal)
                if not isinstance(reply, Lives):
                    yield reply
            if session.open and not sent:
                connection.sendall(session.seal(OperatorHello("operator")) + session.seal(message))
                sent = True
