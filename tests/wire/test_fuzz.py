"""Lying frames against both ends: lengths, dtypes, counts, offsets, layers, digests, garbage, in random cuts.

Whatever comes, every connection stays open or ends in a typed error, and no memory beyond the limits is reserved. An
input is one frame fed to an open connection (a closed one is replaced): 10,000 by default, or what PRFAAS_FUZZ says;
1,000,000 in the tests marked slow.
"""

from __future__ import annotations

import copy
import os
import random
import struct
from dataclasses import fields, replace
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import common.wire.arrivals as arrivals_module
import common.wire.connection as connection_module
from common.errors import PeerError, ProtocolError, RemoteProtocolError, TransferError
from common.layout import StateLayout
from common.wire.connection import Closed, Connection
from common.wire.digest import token_hash
from common.wire.frames import FRAME_BYTES, FrameHead, FrameType, Target, checksum, pack_head
from common.wire.messages import (
    Accepted,
    CacheEvent,
    Complete,
    Message,
    Piece,
    Prefill,
    Progress,
    Started,
    encode_frame,
)
from common.wire.session import SegmentArrived
from common.wire.tables import Conn, Phase
from tests.wire.kit import LAYOUT, Ends, Sink, client, config, cut, exchange, server
from tests.wire.test_messages import PIECE, SAMPLES

FRAMES = 10
INPUTS = int(os.environ.get("PRFAAS_FUZZ", "10000"))
LONG = 1_000_000


def fuzz(inputs: int, frames: int = FRAMES) -> settings:
    """Each example feeds so many frames; the two ends share the inputs."""
    return settings(
        max_examples=max(1, inputs // frames // 2),
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


N = 60
ODD = [0, 1, -1, 2, 15, 16, 59, 60, 61, 255, 4095, 4096, 4097, 65535, 65536, 2**20, 2**31, 2**32 - 1]
ODD += [2**40, 2**62, 2**63]
JUNK: list[Any] = [*ODD, None, True, 1.5, float("nan"), float("inf"), -2.0, b"", b"x" * 16, b"x" * 32, "", "x" * 300]
JUNK += ["zstd", "raw", "float32", [], [0], [0, 0], list(range(70)), [None], {}, {"a": 1}, {"a": "b"}, [[[]]]]
ROWS = [(0, 10, 26), (0, 26, 60), (1, 10, 60), (3, 10, 60), (2, 53, 60), (4, 59, 60)]
SOURCE = Sink(LAYOUT, N).filled()


class Allocations:
    """Counts what wire/ reserves through bytearray."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.largest = self.total = 0

    def __call__(self, source: int) -> bytearray:
        if isinstance(source, int):
            self.largest, self.total = max(self.largest, source), self.total + source
        return bytearray(source)


def shaken(mine: Connection, other: Connection) -> Connection:
    """Open, its events read."""
    exchange(mine, other)
    mine.events()
    return mine


CONTROL, ACCEPTED = shaken(client(), server()), server(config("prefill"))
shaken(ACCEPTED, client())
DATA = shaken(client(link=1, data_key=b"k" * 32), server(find_key=lambda s: b"k" * 32))


def reopened(connection: Connection) -> Connection:
    """A fresh connection after the handshake, without running it again: that would be most of the time of this file."""
    fresh = copy.copy(connection)
    fresh._inbox = memoryview(bytearray(len(connection._inbox)))
    fresh._events, fresh._out, fresh._pings = [], [], {}
    return fresh


class Client:
    """decoded's end with one stream that was asked for and one that streams, on open links."""

    def __init__(self, layout: StateLayout = LAYOUT) -> None:
        self.ends = Ends(layout)
        self.sinks = [Sink(layout, N), Sink(layout, N)]
        self.streams = [self.ends.request(N, s * 10, sink) for s, sink in enumerate(self.sinks)]
        self.ends.talk()
        self.served = self.ends.accepted(self.streams[1])
        self.control, self.data = reopened(CONTROL), reopened(DATA)
        self.control.open_piece = self.data.open_piece = self.open

    def open(self, stream_id: int, piece: Piece, num_bytes: int) -> Target:
        return self.ends.client.open_piece(1, stream_id, piece, num_bytes)

    def settle(self, connection: Connection) -> None:
        """What net/ does with events."""
        session = self.ends.client
        while events := connection.events():
            for event in events:
                if isinstance(event, Closed):
                    check(event)
                elif hasattr(event, "message"):
                    try:
                        self.handle(event)
                    except (RemoteProtocolError, PeerError) as e:
                        connection.fail(e)
        for found in session.events():
            if isinstance(found, SegmentArrived) and found.stream.wants(found.segment):
                session.segment_landed(found.stream, found.segment, 0.0)
        session.take_outbox(), connection.data_to_send()

    def handle(self, event: Any) -> None:
        session = self.ends.client
        if isinstance(event.payload, Target):
            session.piece_arrived(event.stream_id, event.message, event.payload, 0.0)
        elif event.stream_id:
            session.receive(event.stream_id, event.message, 0.0)


class Server:
    """prefilld's end with one requested, one streaming and one completed stream on an open control link."""

    def __init__(self) -> None:
        self.ends = Ends(LAYOUT)
        for _ in range(3):
            self.ends.request(N)
        self.ends.talk()
        for stream_id in (2, 3):
            served = self.ends.server.streams[stream_id]
            served.accept(bytes(range(16)), 0, 0.0)
            served.start(0.0)
            self.ends.queue(served, SOURCE, cut(LAYOUT, 0, N, 30))
        self.ends.server.streams[3].complete(N, 0.0)
        self.control = reopened(ACCEPTED)

    def settle(self, connection: Connection) -> None:
        session = self.ends.server
        while events := connection.events():
            for event in events:
                if isinstance(event, Closed):
                    check(event)
                elif hasattr(event, "message"):
                    try:
                        session.receive(event.stream_id, event.message, event.payload)
                    except (RemoteProtocolError, PeerError) as e:
                        connection.fail(e)
        session.events(), session.take_outbox(), connection.data_to_send()
        session.next_piece(1)


def check(closed: Closed) -> None:
    assert isinstance(closed.error, ProtocolError | PeerError | TransferError), closed
    assert str(closed.error) or closed.is_remote
    assert len(str(closed.error)) < 2000


def lying_message(rng: random.Random, samples: list[tuple[Message, int, bytes]]) -> bytes:
    message, stream_id, payload = rng.choice(samples)
    values = {f.name: getattr(message, f.name) for f in fields(message)}
    for name in rng.sample(sorted(values), min(len(values), rng.choice((0, 0, 1, 1, 2, 3)))):
        values[name] = rng.choice(JUNK)
    if rng.random() < 0.05:
        values[rng.choice(["extra", "no", "dtype"])] = rng.choice(JUNK)
    if values and rng.random() < 0.05:
        del values[rng.choice(sorted(values))]
    try:
        header = msgpack.packb(values)
    except (OverflowError, ValueError):
        header = msgpack.packb(rng.choice([None, [], {}, 7]))
    payload_bytes = len(payload) if rng.random() < 0.8 else rng.choice([n for n in ODD if 0 <= n < 2**32])
    if isinstance(message, Prefill) and rng.random() < 0.7:
        header = sealed(values, header, payload)
    stream_id = stream_id if rng.random() < 0.5 else rng.choice((0, 1, 2, 3, 4, 2**32 - 1))
    header_bytes = len(header) if rng.random() < 0.95 else rng.choice((0, 1, 511, 16384, 16385, 65535))
    head = FrameHead(message.type, stream_id, header_bytes, payload_bytes, checksum(header))
    return pack_head(head) + header + payload


def sealed(values: dict[str, Any], header: bytes, payload: bytes) -> bytes:
    """A Prefill that means its lies."""
    try:
        return msgpack.packb(values | {"token_hash": token_hash(Prefill(**values), payload)})
    except (TypeError, AttributeError, struct.error, OverflowError):
        return header


def lying_piece(rng: random.Random) -> bytes:
    """A Piece that is right but for some of its fields; often wholly right."""
    which = rng.randrange(len(ROWS))
    n, start, stop = ROWS[which]
    no, codec = (which, "raw") if rng.random() < 0.9 else (rng.randrange(9), "zstd")
    raw = LAYOUT.segment_bytes(start, stop, (n,))
    piece = replace(PIECE, no=no, start=start, stop=stop, layers=(n,), raw=raw, encoded=raw, at=0, piece=4096)
    piece = replace(piece, codec=codec)
    values = {f.name: getattr(piece, f.name) for f in fields(piece)}
    for name in rng.sample(sorted(values), rng.choice((0, 0, 0, 1, 2))):
        near = values[name] + rng.choice((-1, 1, 4096)) if isinstance(values[name], int) else None
        values[name] = rng.choice([near, *JUNK])
    try:
        header = msgpack.packb(values)
    except OverflowError:
        header = b"\x80"
    encoded = values["encoded"] if isinstance(values["encoded"], int) else raw
    offset = values["offset"] if isinstance(values["offset"], int) else 0
    num_bytes = max(0, min(4096, encoded - offset)) if rng.random() < 0.9 else rng.choice((0, 1, 4096, 65536, 65537))
    head = FrameHead(FrameType.PIECE, rng.choice((1, 2, 2, 2, 2, 2, 3)), len(header), num_bytes, checksum(header))
    return pack_head(head) + header + bytes(min(num_bytes, 70000))


def reseal(frame: bytearray) -> None:
    """Make the checksums right: what passes them must still be checked."""
    header_bytes = int.from_bytes(frame[6:8], "big")
    frame[16:20] = checksum(frame[FRAME_BYTES : FRAME_BYTES + header_bytes]).to_bytes(4, "big")
    frame[20:24] = checksum(frame[:20]).to_bytes(4, "big")


def garbage(rng: random.Random, samples: list[tuple[Message, int, bytes]]) -> bytes:
    kind = rng.randrange(4)
    if kind == 0:
        return rng.randbytes(rng.randrange(80))
    if kind == 1:
        header = rng.randbytes(rng.randrange(60))
        head = FrameHead(rng.choice(list(FrameType)), rng.randrange(4), len(header), 0, checksum(header))
        return pack_head(head) + header
    message, stream_id, payload = rng.choice(samples)
    data = bytearray(encode_frame(message, stream_id, len(payload)) + payload)
    for _ in range(rng.randint(1, 3)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    if rng.random() < 0.7:
        reseal(data)
    return bytes(data)[: rng.randrange(len(data))] if kind == 3 else bytes(data)


def feed(rng: random.Random, connection: Connection, data: bytes) -> None:
    while data:
        num = rng.choice((1, 7, 16, 100, 5000, 100_000))
        connection.receive(data[:num], 0.0)
        data = data[num:]


CLIENT_SAMPLES = [v for n, v in SAMPLES.items() if n not in ("Hello C", "Hello S", "Auth C", "Auth S", "HelloAck")]
GOOD_ENDINGS: list[tuple[Message, int, bytes]] = [
    (Accepted(bytes(16), 0, bytes(16)), 1, b""), (Started(0.0, 0), 1, b""), (CacheEvent(0, True, bytes(42)), 0, b""),
    (Progress(20, 1, bytes(16)), 2, b""),
    (Complete(N, 1, 100, bytes(16), 0.0, 0.0), 2, b""), (Complete(N, 0, 0, bytes(16), 0.0, 0.0), 2, b""),
]  # fmt: skip


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> Allocations:
    found = Allocations()
    for module in (arrivals_module, connection_module):
        monkeypatch.setattr(module, "bytearray", found, raising=False)
    return found


@fuzz(INPUTS)
@given(st.randoms(use_true_random=True))
def test_client_survives(allocations, rng):
    attack_client(allocations, rng)


@fuzz(INPUTS)
@given(st.randoms(use_true_random=True))
def test_server_survives(allocations, rng):
    attack_server(allocations, rng)


@pytest.mark.slow
@fuzz(LONG)
@given(st.randoms(use_true_random=True))
def test_client_survives_long(allocations, rng):
    attack_client(allocations, rng)


@pytest.mark.slow
@fuzz(LONG)
@given(st.randoms(use_true_random=True))
def test_server_survives_long(allocations, rng):
    attack_server(allocations, rng)


def attack_client(allocations: Allocations, rng: random.Random) -> None:
    peer = Client()
    allocations.reset()
    for _ in range(FRAMES):
        choice = rng.random()
        connection = peer.data if choice < 0.7 else peer.control
        if choice < 0.55:
            data = lying_piece(rng)
        elif choice < 0.9:
            data = lying_message(rng, CLIENT_SAMPLES + 4 * GOOD_ENDINGS)
        else:
            data = garbage(rng, CLIENT_SAMPLES)
        feed(rng, connection, data)
        peer.settle(connection)
        if not connection.is_open:
            check_client(peer, allocations)
            peer = Client()
            allocations.reset()
    check_client(peer, allocations)


def check_client(peer: Client, allocations: Allocations) -> None:
    """What must hold at any time: reserved memory within the credit, rows landed once, DONE only when whole."""
    assert allocations.largest <= peer.ends.client.ours.max_segment_bytes
    assert allocations.total <= sum(s.arrivals.limit for s in peer.streams) + FRAMES * 16384
    for stream, sink in zip(peer.streams, peer.sinks, strict=True):
        needed = LAYOUT.required_segments(stream.prefill.start, N)
        assert stream.arrivals.raw_bytes <= sum(LAYOUT.states[n].num_bytes(b - a) for n, (a, b) in needed.items())
        assert all(len(m) <= N * 40 for m in sink.memory.values())
        if stream.phase is Phase.DONE:
            assert stream.arrivals.num_landed and stream.arrivals._coverage.missing() == ""


def attack_server(allocations: Allocations, rng: random.Random) -> None:
    peer = Server()
    allocations.reset()
    samples = list(SAMPLES.values())
    for _ in range(FRAMES):
        data = lying_message(rng, samples) if rng.random() < 0.85 else garbage(rng, samples)
        feed(rng, peer.control, data)
        peer.settle(peer.control)
        assert allocations.largest <= 4 * peer.ends.server.ours.max_prompt_tokens
        assert len(peer.ends.server.streams) <= peer.ends.server.ours.max_streams
        if not peer.control.is_open:
            peer = Server()
            allocations.reset()


@fuzz(INPUTS)
@given(st.randoms(use_true_random=True))
def test_handshake_survives(rng):
    """Before the proof: nothing but a Hello and an Auth, nothing larger than 536 bytes."""
    mine = rng.choice((client, server))()
    mine.data_to_send()
    samples = [SAMPLES[n] for n in ("Hello C", "Hello S", "Auth C", "Auth S", "HelloAck", "Error", "Ping", "Prefill")]
    for _ in range(4):
        data = lying_message(rng, samples) if rng.random() < 0.7 else garbage(rng, samples)
        feed(rng, mine, data)
        assert len(mine.get_buffer()) <= 536 or mine.state is Conn.CLOSED
        for event in mine.events():
            assert isinstance(event, Closed)
            check(event)
    assert not mine.is_open
