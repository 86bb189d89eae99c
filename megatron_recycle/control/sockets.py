"""Where a job's coordinator may be, and TCP connections that notice that a peer has vanished without a word: a cut
cable sends no end of a connection."""

from __future__ import annotations

import socket

SIGN_S = 1.0
"""Seconds between the signs of life of a coordinator in whose place another one may lead."""
SILENT_S = 4.0
"""Seconds without one after which it is left: its lease has ended by then. A kernel answers for a process that is
stopped."""
FOUND_S = SILENT_S + 2.0
"""Seconds after which whoever lives has found the coordinator that leads in another one's place."""
_IDLE_PROBES = 3


def targets(address: str) -> tuple[tuple[str, int], ...]:
    """Host and port of each: one address, or several of which one leads, "host:port,host:port". Raises ValueError."""
    found = []
    for each in address.split(","):
        host, _, port = each.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"the coordinator's address {each!r} is not of the form HOST:PORT")
        found.append((host.strip("[]"), int(port)))
    return tuple(found)


def watch_peer(connection: socket.socket, limit: float) -> None:
    """Let the kernel end `connection` once what was sent has not been acknowledged for `limit` seconds, or, while
    nothing is sent, once the peer's kernel has not answered for about as long."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limit * 1000))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    step = max(1, round(limit / _IDLE_PROBES))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, step)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, step)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _IDLE_PROBES - 1)
