"""Ports that stay ours when the process listening on them dies and is restarted.

A port from the ephemeral range could meanwhile be taken by any outgoing connection, even by that of a worker that tries
to connect to this very port and so connects to itself.
"""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 15000
_TRIES = 200


def listen(interface: str, port: int) -> socket.socket:
    """A listening socket on `interface` only; port 0 is any port outside the ephemeral range.

    Raises:
        OSError: the port, or every tried port, is in use.
    """
    family = _family(interface)
    if port:
        return socket.create_server((interface, port), family=family)
    dice = random.SystemRandom()
    low, high = _free_range()
    for _ in range(_TRIES):
        try:
            return socket.create_server((interface, dice.randrange(low, high)), family=family)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"no free port from {low} to {high} on {interface}")


def reserve(interface: str, port: int) -> socket.socket:
    """A socket on `interface` that is bound and does not listen yet: connections are refused. Port 0 as for `listen`.
    Raises OSError."""
    if not port:
        chosen = listen(interface, 0)
        port = chosen.getsockname()[1]
        chosen.close()
    made = socket.socket(_family(interface), socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((interface, port))
    except OSError:
        made.close()
        raise
    return made


def _family(interface: str) -> int:
    """IPv4, unless the interface's name or address has none."""
    found = {entry[0] for entry in socket.getaddrinfo(interface, None, type=socket.SOCK_STREAM)}
    return socket.AF_INET if socket.AF_INET in found else socket.AF_INET6


def joined(host: str, port: int) -> str:
    """ "host:port", with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _free_range() -> tuple[int, int]:
    """The larger of the two port ranges outside the ephemeral one, end excluded."""
    first, last = map(int, _RANGE.read_text().split())
    below, above = (min(_LOWEST, first), first), (last + 1, 65536)
    widest = max(below, above, key=lambda ports: ports[1] - ports[0])
    return widest if widest[1] - widest[0] > _TRIES else (_LOWEST, 65536)
