"""Addresses of a job's coordinator, and TCP connections that notice a silently vanished peer: a cut cable sends no end
of a connection."""

from __future__ import annotations

import socket

SIGN_S = 1.0
"""Seconds between the heartbeats of a coordinator that another one may replace."""
SILENT_S = 4.0
"""Seconds of silence after which it is abandoned: its lease has ended by then. The kernel still answers for a stopped
process, so TCP alone does not show that."""
FOUND_S = SILENT_S + 2.0
"""Seconds after which all live processes have found the new leader."""
_IDLE_PROBES = 3


def targets(address: str) -> tuple[tuple[str, int], ...]:
    """Host and port of each: one address, or several candidates, "host:port,host:port". Raises ValueError."""
    found = []
    for each in address.split(","):
        host, _, port = each.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"the coordinator's address {each!r} is not of the form HOST:PORT")
        found.append((host.strip("[]"), int(port)))
    return tuple(found)


def watch_peer(connection: socket.socket, limit: float) -> None:
    """Let the kernel end `connection` once sent data has not been acknowledged for `limit` seconds, or, while nothing
    is sent, once the peer's kernel has not answered for about as long."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limit * 1000))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    step = max(1, round(limit / _IDLE_PROBES))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, step)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, step)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _IDLE_PROBES - 1)
