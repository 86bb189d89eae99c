"""The door of the control protocol: what is let in, and everything that is not."""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import random
import struct
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from megatron_recycle.control import wire
from megatron_recycle.control.wire import MAX_FIRST_PAYLOAD, MAX_PAYLOAD, SecureChannel, WireError, seal
from megatron_recycle.membership import inputs, protocol
from megatron_recycle.membership.description import Description
from megatron_recycle.membership.inputs import FROM_LAUNCHER, FROM_WORKER
from megatron_recycle.membership.protocol import TO_WORKER
from megatron_recycle.membership.state import Member
from megatron_recycle.plan import Grid
from tests.membership.cluster import report, verdict

TOKEN = "a token of the job"


def _pair(token: str = TOKEN) -> tuple[SecureChannel, SecureChannel]:
    """A server and a client that have greeted each other; the client has said hello."""
    server, client = SecureChannel.server(TOKEN), SecureChannel.client(token)
    assert client.feed(server.greeting()) == []
    assert server.feed(client.seal({"type": "hello"}))[0]["type"] == "hello"
    return server, client


def test_messages_pass_in_both_directions_and_in_any_pieces() -> None:
    server, client = _pair()
    data = b"".join(client.seal({"type": "heartbeat", "progress": {"iteration": k}}) for k in range(3))
    received = [message for byte in data for message in server.feed(bytes([byte]))]
    assert [message["progress"]["iteration"] for message in received] == [0, 1, 2]
    assert client.feed(server.seal({"type": "stop", "generation": 2}))[0]["generation"] == 2


def test_texts_and_numbers_of_derived_classes_are_written_as_plain_ones() -> None:
    class Text(str):
        """As the version of torch, which a description has."""

    class Number(float):
        """As a scalar of numpy."""

    description = Description(grid=Grid(1, (1,)), settings={"torch": Text("2"), "rate": Number(0.5)})
    told = json.loads(wire.encode(inputs.Ready("0:0/0", description, report())))
    assert told["description"]["settings"] == {"torch": "2", "rate": 0.5}
    with pytest.raises(TypeError, match="no value of JSON"):
        msgspec.structs.replace(description, settings={"strange": object()}).to_json()


def test_a_wrong_token_is_refused_by_either_side() -> None:
    server, client = SecureChannel.server(TOKEN), SecureChannel.client("another")
    with pytest.raises(WireError, match="token"):
        client.feed(server.greeting())
    impostor = SecureChannel.client(TOKEN)
    impostor.feed(SecureChannel.server(TOKEN).greeting())  # the greeting of another connection
    with pytest.raises(WireError, match="token"):
        server.feed(impostor.seal({"type": "hello"}))


@pytest.mark.parametrize(("one", "other"), [(wire.VERSION - 1, wire.VERSION), (wire.VERSION, wire.VERSION - 1)])
def test_two_versions_refuse_each_other_by_name(one: int, other: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "VERSION", one)
    greeting = SecureChannel.server(TOKEN).greeting()
    monkeypatch.setattr(wire, "VERSION", other)
    with pytest.raises(WireError, match=f"is of protocol version {one}, this is version {other}: install the same"):
        SecureChannel.client(TOKEN).feed(greeting)


def test_an_empty_token_is_an_error() -> None:
    with pytest.raises(WireError, match="RECYCLE_TOKEN"):
        SecureChannel.server("")


def test_a_recorded_connection_cannot_be_played_again() -> None:
    first, client = SecureChannel.server(TOKEN), SecureChannel.client(TOKEN)
    client.feed(first.greeting())
    recorded = client.seal({"type": "hello"}) + client.seal({"type": "finished"})
    assert len(first.feed(recorded)) == 2
    with pytest.raises(WireError, match="authenticate"):
        SecureChannel.server(TOKEN).feed(recorded)


def test_a_recorded_answer_of_the_server_cannot_be_played_to_another_client() -> None:
    server, client = _pair()
    greeting, order = server.greeting(), server.seal({"type": "end"})
    assert client.feed(order)
    other = SecureChannel.client(TOKEN)
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
        SecureChannel.server(TOKEN).feed(struct.pack(">I", MAX_FIRST_PAYLOAD + 1) + bytes(32))
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
    server, client = SecureChannel.server(TOKEN), SecureChannel.client(TOKEN)
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
    server = SecureChannel.server(TOKEN)
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
    assert FROM_WORKER.read(HELLO).member == Member("0:1", 1, "a", 7, "h")
    with pytest.raises(WireError, match=text):
        FROM_WORKER.read({**HELLO, **change})


def test_a_malformed_report_or_description_is_refused() -> None:
    good = inputs.Reported("a", 2, report(verdict=verdict(1))).to_json()
    assert FROM_WORKER.read(good).report.verdict == verdict(1)
    for change in ({"holds": None}, {"verdict": {"norm": 1.0}}, {"committed": "all"}, {"iteration": True}):
        bad = {**report().to_json(), **change}
        with pytest.raises(WireError):
            FROM_WORKER.read({**good, "report": bad})
    for grid in (None, {}, {"stages": 0, "microbatches": [1]}, {"stages": 2, "microbatches": ["x"]}):
        with pytest.raises(WireError):
            FROM_WORKER.read({"type": "ready", "incarnation": "a", "description": {"grid": grid},
                              "report": report().to_json()})


def test_a_worker_does_not_take_orders_that_are_none() -> None:
    for message in ({"type": "hello"}, {"type": "stop", "generation": 2}):
        with pytest.raises(WireError):
            TO_WORKER.read(message)


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
    ({"iterations": [{"F": -0.1}]}, "iterations"),
    ({"iterations": [{"F": float("nan")}]}, "iterations"),
    ({"iterations": [3]}, "iterations"),
    ({"lags": [{**LAGS, "of": [1]}]}, r"lags\[0\].of"),
    ({"lags": [{**LAGS, "came": {"": 1.0}}]}, "came"),
    ({"lags": [None]}, "lags"),
    ({"memory": {"held": {**HELD, "peak": None}, "kept": {}, "room": 1}}, "held"),
    ({"memory": {"held": HELD, "kept": {"state": True}, "room": 1}}, "kept"),
])
def test_measurements_that_are_none_are_refused(change: dict[str, object], text: str) -> None:
    FROM_WORKER.read({**MEASURED})
    with pytest.raises(WireError, match=text):
        FROM_WORKER.read({**MEASURED, **change})


STRANGE = (None, True, -1, 10**30, 10**400, 1.5, math.nan, math.inf, "", "9" * 400, "\ud800", [], [[]], [1, "a"], {},
           {"a": {}}, {"1": 1}, {"": None})


@pytest.mark.parametrize(("kinds", "union"), [
    (FROM_WORKER, inputs.FromWorker), (FROM_LAUNCHER, inputs.FromLauncher), (protocol.FROM_STORE, protocol.FromStore),
    (protocol.FROM_OPERATOR, protocol.FromOperator), (TO_WORKER, protocol.ToWorker)])
def test_whatever_stands_in_a_message_it_is_read_or_refused(kinds: Any, union: Any) -> None:
    """Nothing else is raised: that would be an error of the coordinator's."""
    dice, refused = random.Random(5), 0
    for each in get_args(union):
        for _ in range(200):
            names = [field.encode_name for field in msgspec.structs.fields(each) if dice.random() < 0.9]
            message = {"type": each.__struct_config__.tag, **{name: dice.choice(STRANGE) for name in names}}
            try:
                assert isinstance(kinds.read(message), each)
            except WireError:
                refused += 1
    assert refused > 100
