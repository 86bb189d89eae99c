"""Which of this host's network interfaces leads to the other hosts of the job."""

from __future__ import annotations

import fcntl
import socket
import struct

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


def _address(probe: socket.socket, interface: str) -> str | None:
    """The first IPv4 address of an interface."""
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])
