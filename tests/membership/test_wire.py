"""The door of the control protocol: what is let in, and everything that is not."""

from __future__ import annotations

import contextlib
import hmac
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as some

from megatron_recycle.control import wire
from megatron_recycle.control.wire import MAX_FIRST_PAYLOAD, MAX_PAYLOAD, Session, WireError, seal
from megatron_recycle.membership.messages import FROM_WORKER, TO_WORKER, check
from tests.membership.cluster import report

TOKEN = "a token of the job"


def _pair(token: str = TOKEN) -> tuple[Session, Session]:
    """A server and a client that have greeted each other; the client has said hello."""
    server, client = Session.server(TOKEN), Session.client(token)
    assert client.feed(server.greeting()) == []
    assert server.feed(client.seal({"type": "hello"}))[0]["type"] == "hello"
    return server, client


def test_messages_pass_in_both_directions_and_in_any_pieces() -> None:
    server, client = _pair()
    data = b"".join(client.seal({"type": "heartbeat", "progress": {"iteration": k}}) for k in range(3))
    received = [message for byte in data for message in server.feed(bytes([byte]))]
    assert [message["progress"]["iteration"] for message in received] == [0, 1, 2]
    assert client.feed(server.seal({"type": "stop", "generation": 2}))[0]["generation"] == 2


def test_a_wrong_token_is_refused_by_either_side() -> None:
    server, client = Session.server(TOKEN), Session.client("another")
    with pytest.raises(WireError, match="token"):
        client.feed(server.greeting())
    impostor = Session.client(TOKEN)
    impostor.feed(Session.server(TOKEN).greeting())  # the greeting of another connection
    with pytest.raises(WireError, match="token"):
        server.feed(impostor.seal({"type": "hello"}))


@pytest.mark.parametrize(("one", "other"), [(wire.VERSION - 1, wire.VERSION), (wire.VERSION, wire.VERSION - 1)])
def test_two_versions_refuse_each_other_by_name(one: int, other: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "VERSION", one)
    greeting = Session.server(TOKEN).greeting()
    monkeypatch.setattr(wire, "VERSION", other)
    with pytest.raises(WireError, match=f"is of protocol version {one}, this is version {other}: install the same"):
        Session.client(TOKEN).feed(greeting)


def test_an_empty_token_is_an_error() -> None:
    with pytest.raises(WireError, match="RECYCLE_TOKEN"):
        Session.server("")


def test_a_recorded_connection_cannot_be_played_again() -> None:
    first, client = Session.server(TOKEN), Session.client(TOKEN)
    client.feed(first.greeting())
    recorded = client.seal({"type": "hello"}) + client.seal({"type": "finished"})
    assert len(first.feed(recorded)) == 2
    with pytest.raises(WireError, match="authenticate"):
        Session.server(TOKEN).feed(recorded)


def test_a_recorded_answer_of_the_server_cannot_be_played_to_another_client() -> None:
    server, client = _pair()
    greeting, order = server.greeting(), server.seal({"type": "end"})
    assert client.feed(order)
    other = Session.client(TOKEN)
    other.feed(greeting)
    other.seal({"type": "hello"})
    with pytest.raises(WireError, match="authenticate"):
        other.feed(order)


@pytest.mark.parametrize("order", [(0, 0), (1,), (0, 2)])
def test_repeated_lost_and_reordered_frames_are_refused(order: tuple[int, ...]) -> None:
    server, client = _pair()
    frames = [client.seal({"type": "heartbeat", "progress": None}) for _ in range(3)]
    with pytest.raises(WireError, match="number"):
        for index in order:
            server.feed(frames[index])


def test_a_frame_cannot_be_sent_back_to_who_made_it() -> None:
    server, client = _pair()
    with pytest.raises(WireError, match="authenticate"):
        client.feed(client.seal({"type": "heartbeat"}))
    with pytest.raises(WireError, match="authenticate"):
        server.feed(server.seal({"type": "stop"}))


def test_sizes_are_limited_before_anything_is_stored() -> None:
    with pytest.raises(WireError, match=str(MAX_FIRST_PAYLOAD)):
        Session.server(TOKEN).feed(struct.pack(">I", MAX_FIRST_PAYLOAD + 1) + bytes(32))
    server, client = _pair()
    with pytest.raises(WireError, match=str(MAX_PAYLOAD)):
        server.feed(struct.pack(">I", MAX_PAYLOAD + 1) + bytes(32))
    with pytest.raises(WireError, match=str(MAX_PAYLOAD)):
        client.seal({"type": "report", "x": "a" * MAX_PAYLOAD})


@pytest.mark.parametrize(
    "payload",
    [b"[]", b"{", b'{"v":1}', b'{"v":2,"type":"hello"}', b"\xff", b"[" * 60000, b'{"type":1,"v":1}'],
)
def test_authentic_nonsense_is_refused(payload: bytes) -> None:
    server, client = Session.server(TOKEN), Session.client(TOKEN)
    client.feed(server.greeting())
    key = client._send_key
    assert key is not None
    frame = seal({"type": "x"}, key)
    mac = hmac.new(key, payload, "sha256").digest()
    assert len(frame) > 36
    with pytest.raises(WireError):
        server.feed(struct.pack(">I", len(payload)) + mac + payload)


@given(some.binary(max_size=200))
def test_noise_is_refused_or_waits_for_more(noise: bytes) -> None:
    server = Session.server(TOKEN)
    with contextlib.suppress(WireError):
        assert server.feed(noise) == []
    assert not server.open


@given(some.integers(0, 400), some.integers(1, 255))
def test_a_changed_byte_is_always_noticed(place: int, change: int) -> None:
    server, client = _pair()
    frame = bytearray(client.seal({"type": "event", "event": "x", "fields": {"text": "abc" * 20}}))
    frame[place % len(frame)] ^= change
    try:
        assert server.feed(bytes(frame)) == []  # a longer length: waits for more, and fails then
    except WireError:
        return
    with pytest.raises(WireError):
        server.feed(bytes(MAX_PAYLOAD + 100))


HELLO = {
    "type": "hello",
    "worker": "0:1",
    "rank": 1,
    "incarnation": "a",
    "pid": 7,
    "host": "h",
    "generation": 0,
}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"worker": "01:1"}, "written"),
        ({"worker": "first"}, "PIPELINE:STAGE"),
        ({"rank": "1"}, "rank"),
        ({"rank": True}, "rank"),
        ({"pid": None}, "pid"),
        ({"type": "launch"}, "launch"),
    ],
)
def test_a_malformed_hello_is_refused_with_the_field(change: dict[str, object], text: str) -> None:
    assert check(HELLO, FROM_WORKER) is HELLO
    with pytest.raises(WireError, match=text):
        check({**HELLO, **change}, FROM_WORKER)


def test_a_malformed_report_or_description_is_refused() -> None:
    good = {"type": "report", "generation": 2, "report": report(verdict={"iteration": 1})}
    assert check(good, FROM_WORKER) is good
    for bad in (report(holds=None), report(verdict={"norm": 1.0}), report(committed="all"), {}):
        with pytest.raises(WireError):
            check({**good, "report": bad}, FROM_WORKER)
    for grid in (None, {}, {"stages": 0, "microbatches": [1]}, {"stages": 2, "microbatches": ["x"]}):
        with pytest.raises(WireError):
            check({"type": "ready", "description": {"grid": grid}, "report": report()}, FROM_WORKER)


def test_a_worker_does_not_take_orders_that_are_none() -> None:
    for message in ({"type": "hello"}, {"type": "stop", "generation": 2}):
        with pytest.raises(WireError):
            check(message, TO_WORKER)


def test_numbers_that_are_none_travel() -> None:
    """A loss may be no number; the one who reads it decides what that means."""
    server, client = _pair()
    (message,) = server.feed(client.seal({"type": "committed", "loss": float("nan")}))
    assert json.dumps(message["loss"]) == "NaN"


LAGS = {"of": [3, 1], "sent": {"F0.1": -5.0}, "came": {}}
HELD = {"before_b": 1, "after_b": 1, "message": 0, "peak": 3, "planned": 4}
MEASURED = {"type": "measured", "iterations": [{"F": 0.1}], "lags": [LAGS],
            "memory": {"held": HELD, "kept": {"state": 9}, "room": None}}


@pytest.mark.parametrize(("change", "text"), [
    ({"iterations": [{"F": -0.1}]}, "F is -0.1"),
    ({"iterations": [{"F": float("nan")}]}, "F is nan"),
    ({"iterations": [3]}, "3 is no object"),
    ({"lags": [{**LAGS, "of": [1]}]}, "no iteration and attempt"),
    ({"lags": [{**LAGS, "came": {"": 1.0}}]}, "no message of a plan"),
    ({"lags": [None]}, "lags are None"),
    ({"memory": {"held": {**HELD, "peak": None}, "kept": {}, "room": 1}}, "peak is None"),
    ({"memory": {"held": HELD, "kept": {"state": True}, "room": 1}}, "state is True"),
])
def test_measurements_that_are_none_are_refused(change: dict[str, object], text: str) -> None:
    check({**MEASURED}, FROM_WORKER)
    with pytest.raises(WireError, match=text):
        check({**MEASURED, **change}, FROM_WORKER)
