"""Where a job's coordinator may be: one address, or several of which one leads, "host:port,host:port"."""

from __future__ import annotations


def targets(address: str) -> tuple[tuple[str, int], ...]:
    """Host and port of each. Raises ValueError."""
    found = []
    for each in address.split(","):
        host, _, port = each.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"the coordinator's address {each!r} is not of the form HOST:PORT")
        found.append((host.strip("[]"), int(port)))
    return tuple(found)
