"""Where the services listen."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from megatron_recycle.control import ports


def test_a_chosen_port_is_none_that_an_outgoing_connection_could_take() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    for _ in range(20):
        with ports.listen("127.0.0.1", 0) as listener:
            host, port = listener.getsockname()
            assert host == "127.0.0.1" and not first <= port <= last


def test_a_given_port_is_taken_or_refused() -> None:
    with ports.listen("127.0.0.1", 0) as listener:
        taken = listener.getsockname()[1]
        with pytest.raises(OSError):
            ports.listen("127.0.0.1", taken)
    with ports.listen("127.0.0.1", taken) as again:
        assert again.getsockname()[1] == taken


@pytest.mark.parametrize(
    ("outgoing", "free"),
    [("32768\t60999", (15000, 32768)), ("1024\t40000", (40001, 65536)), ("1024\t65535", (15000, 65536))],
)
def test_the_free_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outgoing: str, free: tuple[int, int]) -> None:
    (tmp_path / "range").write_text(outgoing)
    monkeypatch.setattr(ports, "_RANGE", tmp_path / "range")
    assert ports._free_range() == free


def test_a_socket_handed_over_keeps_its_port() -> None:
    with ports.listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()) as client:
        assert client.getpeername() == listener.getsockname()
