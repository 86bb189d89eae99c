"""The other hosts of the job: which of this host's interfaces leads to them, and whether host 0 is there yet."""

from __future__ import annotations

import fcntl
import socket
import struct
import time

from megatron_recycle.errors import ConfigError, RecycleError
from megatron_recycle.launch.ports import listen

_CONNECT_LIMIT = 5.0
_PAUSE = 0.2
_SIOCGIFADDR = 0x8915


def interface_towards(host: str) -> str | None:
    """Name of the interface by which `host` is reached, or that has its address; None if that cannot be told.

    gloo would otherwise take the interface of the host's own name, which often is loopback.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing; any port will do
        except OSError:
            return None
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            if _address(probe, name) == own:
                return name
    return None


def check_address(option: str, text: str) -> None:
    """Raises ConfigError if ``text``, given for ``option``, is no "host:port"."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{option} is {text!r}; give HOST:PORT, as the first host's launcher printed it")


def check_listening(host: str, port: int) -> None:
    """Raises ConfigError if nobody can listen there: not an address of this host, or a port in use. Port 0: any."""
    try:
        listen(host, port).close()
    except OSError as error:
        raise ConfigError(f"nobody can listen on {host}, port {port or 'any'} ({error.strerror or error}): give an "
                          "address of this host in --master-addr or RECYCLE_INTERFACE, and a free --master-port"
                          ) from error


def await_coordinator(host: str, port: int, limit: float) -> None:
    """Wait until host 0's coordinator listens. Before that host 0 may still be clearing the run directory, which on a
    shared file system is this host's too.

    Raises:
        RecycleError: it does not within `limit` seconds.
    """
    until = time.monotonic() + limit
    while True:
        try:
            socket.create_connection((host, port), _CONNECT_LIMIT).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise RecycleError(f"the coordinator of host 0 at {host}:{port} cannot be reached within {limit:.0f} s "
                                   f"({error}): is `recycle run --node-rank 0` running there?") from error
        time.sleep(_PAUSE)


def _address(probe: socket.socket, interface: str) -> str | None:
    """The first IPv4 address of an interface."""
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])
