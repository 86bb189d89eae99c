"""Route to the job's other hosts: this host's address and interface towards them, and whether the first host is there
yet."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from megatron_recycle.control.ports import listen
from megatron_recycle.control.sockets import targets
from megatron_recycle.control.wire import SecureChannel, WireError
from megatron_recycle.errors import ConfigError, RecycleError

_CONNECT_LIMIT = 5.0
_PAUSE = 0.2
_SHOWN_AFTER = 10.0
_SIOCGIFADDR = 0x8915
_INET6 = Path("/proc/net/if_inet6")
_ANYWHERE = "203.0.113.1", "2001:db8::1"
"""Addresses of no host (reserved): the default routes lead there."""


def own_address(towards: Iterable[str]) -> str | None:
    """This host's address towards those hosts, or else that of the default route; None if there is only loopback.

    The host's own name would not do: with /etc/hosts as Debian writes it, that is 127.0.1.1.
    """
    for other in (*towards, *_ANYWHERE):
        source = _source(other)
        if source is not None and not ipaddress.ip_address(source).is_loopback:
            return source
    return None


def interface_towards(host: str) -> str | None:
    """Name of the interface by which `host` is reached, or that has its address; None if it is unknown.

    gloo would otherwise take the interface of the host's own name, which often is loopback.
    """
    own = _source(host)
    if own is None:
        return None
    return next((name for _, name in socket.if_nameindex() if own in _addresses(name)), None)


def bare(host: str) -> str:
    """A name or an address as sockets take it; an IPv6 address may come in brackets, as it does in front of a port."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def check_address(option: str, text: str) -> None:
    """Raises ConfigError if ``text``, given for ``option``, is no "host:port", or several."""
    for each in text.split(","):
        host, _, port = each.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            where = ("`recycle serve` has printed it" if option == "--coordinator" else
                     "the first host's launcher printed it, or the job's run folder")
            raise ConfigError(f"{option} is {text!r}; give HOST:PORT, as {where}")


def check_host(host: str, several: bool) -> None:
    """Raises ConfigError if the first host cannot listen under this name so that others, if there are several, reach
    it."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} ({error.strerror or error}): give an address of this host in "
                          "--master-addr or RECYCLE_INTERFACE") from error
    if all(ipaddress.ip_address(address).is_link_local for address in found):
        raise ConfigError(f"{host} is an address of one link ({', '.join(sorted(found))}), which other hosts know by "
                          "another name: give a routed address of this host in --master-addr")
    if several and host != "localhost" and host not in found and all(
            ipaddress.ip_address(address).is_loopback for address in found):
        own = own_address(())
        raise ConfigError(f"on this host {host} is {', '.join(sorted(found))} (/etc/hosts), where no other host can "
                          f"reach it: give the address itself, --master-addr {own or 'ADDRESS'}, on each host")


def check_listening(host: str, port: int, options: tuple[str, str] = ("--master-addr", "--master-port"),
                    patience: float = 0.0) -> None:
    """Raises ConfigError, with the `options` that give them, if `host` is no address of this host, or `port` is still
    in use after ``patience`` seconds. Port 0: any."""
    deadline = time.monotonic() + patience
    try:
        while True:
            try:
                return listen(host, port).close()
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                    raise
            time.sleep(_PAUSE)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}, port {port or 'any'} ({_reason(error)}): give an "
                          f"address of this host in {options[0]} or RECYCLE_INTERFACE, and a free {options[1]}"
                          ) from error


def _reason(error: OSError) -> str:
    """The error's text without the address, which Python appends."""
    return (error.strerror or str(error)).partition(" (while attempting")[0]


def await_coordinator(control: str, token: str, limit: float, say: Callable[[str], None]) -> None:
    """Wait until host 0's coordinator answers at `control`, "host:port". Before that host 0 may still be clearing the
    run directory, which on a shared file system is this host's too.

    Raises:
        RecycleError: it does not within `limit` seconds.
    """
    until, shown = time.monotonic() + limit, ""
    while (why := knock(control, token)) is not None:
        if time.monotonic() > until:
            raise RecycleError(f"the coordinator of host 0 at {control} does not answer within {limit:.0f} s "
                               f"({why}): is `recycle run --node-rank 0` running there?")
        if why != shown and time.monotonic() > until - limit + _SHOWN_AFTER:
            shown = why
            say(f"recycle: still waiting for host 0: {why}")
        time.sleep(_PAUSE)


def knock(control: str, token: str) -> str | None:
    """None if the coordinator of the job with this token answers at `control`, or at one of several addresses; else why
    not, for the last address.

    An open port is no proof: it may be another job's.
    """
    why = None
    for target in targets(control):
        if (why := _knock(target, token)) is None:
            break
    return why


def _knock(target: tuple[str, int], token: str) -> str | None:
    try:
        with socket.create_connection(target, _CONNECT_LIMIT) as connection:
            if connection.getsockname() == connection.getpeername():  # a self-connection blocks the real listener
                return "nobody listens there"
            session = SecureChannel.client(token)
            until = time.monotonic() + _CONNECT_LIMIT
            while not session.open:
                connection.settimeout(max(0.001, until - time.monotonic()))
                data = connection.recv(1 << 12)
                if not data:
                    return "whoever listens there hangs up: it is no coordinator"
                session.feed(data)
    except TimeoutError:
        return f"no answer within {_CONNECT_LIMIT:.0f} s: if somebody listens there, it is no coordinator"
    except WireError:
        return "who answers there does not have this job's token: it is another job, or the tokens differ"
    except OSError as error:
        return str(error)
    return None


def _source(host: str) -> str | None:
    """This host's source address for packets to `host`, an IPv4 one if possible."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing; any port will do
            return str(probe.getsockname()[0])
    return None


def _addresses(interface: str) -> Iterator[str]:
    """The first IPv4 address of an interface, and its IPv6 addresses."""
    with contextlib.suppress(OSError):
        for line in _INET6.read_text().splitlines():
            digits, *_, name = line.split()
            if name == interface:
                yield str(ipaddress.IPv6Address(bytes.fromhex(digits)))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        yield socket.inet_ntoa(answer[20:24])
