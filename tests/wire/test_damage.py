"""A whole exchange of two ends in memory, with one bit flipped on the way: the same state, or a typed error, always.

Handshakes of a control and a data link, four prefills (one cancelled, one whose prefix is pushed), heartbeats,
Status, Drain, loss of all links, Resume. Every bit of every frame's headers is flipped before the end that reads it;
bits of payloads, and some of everything, in whole runs (a bit of every byte in the test marked slow).
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import pytest

from common.errors import (
    PdError,
    PeerError,
    ProtocolError,
    RemoteProtocolError,
    RequestDamaged,
    TransferError,
    TransferIncomplete,
)
from common.wire.codec import segment_shape
from common.wire.connection import Closed, Connection, Opened, Received
from common.wire.digest import segment_digest
from common.wire.frames import FrameType, Target
from common.wire.incoming import ReceiveStream
from common.wire.messages import Drain, Piece, Status
from common.wire.outgoing import SendStream
from common.wire.session import PushMoved, SegmentArrived, StreamEnded
from common.wire.tables import Phase
from common.wire.tokens import unpack_tokens
from tests.wire.kit import LAYOUT, SESSION, VOCAB, Ends, Sink, client, cut, prefill, server

N = 12
CODECS = {1: "zstd", 2: "raw", 3: "raw", 4: "raw"}
START = {4: 5}
Where = tuple[str, int]
"""Direction and link, as "up 0", and the number of a bit of all that is sent there."""
Probe = Callable[[Connection, bytes], None]


@lru_cache(1000)
def state_of(tokens: tuple[int, ...]) -> Sink:
    """What the engine would compute: other tokens, other bytes."""
    return Sink(LAYOUT, len(tokens)).filled(random.Random(repr(tokens)).randrange(2**32))


EXPECTED = {s: state_of(tuple((s * 31 + i) % VOCAB for i in range(N))) for s in CODECS}


def frames_of(data: bytes | bytearray) -> list[tuple[int, int, int]]:
    """Offsets of every frame: its begin, its payload, its end."""
    found, at = [], 0
    while at < len(data):
        payload = at + 24 + int.from_bytes(data[at + 6 : at + 8], "big")
        end = payload + int.from_bytes(data[at + 12 : at + 16], "big")
        found.append((at, payload, end))
        at = end
    return found


@dataclass
class Wire:
    """One direction of one link; counts bytes over reconnections."""

    name: str
    flip: Where | None
    num_bytes: int = 0
    frames: bytearray = field(default_factory=bytearray)

    def carry(self, data: bytes) -> bytes:
        begin, self.num_bytes = self.num_bytes, self.num_bytes + len(data)
        self.frames += data
        if self.flip is not None and self.flip[0] == self.name and begin <= self.flip[1] // 8 < self.num_bytes:
            damaged = bytearray(data)
            damaged[self.flip[1] // 8 - begin] ^= 1 << self.flip[1] % 8
            return bytes(damaged)
        return data


class Exchange:
    """Runs the script; `flip` names the bit that changes on its way."""

    def __init__(self, flip: Where | None = None, probe: Probe | None = None) -> None:
        self.probe = probe
        self.ends = Ends(LAYOUT)
        self.ends.client.detach(0.0), self.ends.server.detach(0.0)
        self.wires = {f"{way} {link}": Wire(f"{way} {link}", flip) for way in ("up", "down") for link in (0, 1)}
        self.errors: list[PdError] = []
        self.streams: dict[int, ReceiveStream] = {}
        self.sinks = {s: Sink(LAYOUT, N) for s in CODECS}
        self.waiting: list[tuple[SendStream, list[tuple[int, int, tuple[int, ...]]]]] = []
        self.sources: dict[SendStream, Sink] = {}
        self.prefixes: dict[SendStream, Sink] = {}
        self.pushed: set[object] = set()
        self.links: dict[int, tuple[Connection, Connection]] = {}
        self.most = 10**9

    def run(self) -> Exchange:
        self.connect()
        for s in CODECS:
            tokens = b"".join(((s * 31 + i) % VOCAB).to_bytes(4, "little") for i in range(N))
            start = START.get(s, 0)
            asked = prefill(N, start, request_id=f"r{s}", codecs=(CODECS[s],), deadline_s=9.5, salt=b"salt")
            asked = replace(asked, pushes=start > 0)
            if self.ends.client.is_attached:
                self.streams[s] = self.ends.client.request(asked, tokens, self.sinks[s].buffers, 0.0)
        self.most = 3  # segments of each stream, until the links go
        self.move()
        if 3 in self.streams:
            self.ends.client.cancel(self.streams[3])
        self.say(Status({"num_queued": 2}))
        self.beat()
        self.lose()
        self.most = 10**9
        self.connect()
        self.say(Drain(True))
        self.move()
        self.beat()
        return self

    # ---- links

    def connect(self) -> None:
        a = client(open_piece=self.open_piece)
        self.links = {0: (a, server())}
        self.move()
        key = a.handshake.session_key
        if key is not None and self.ends.client.is_attached and self.ends.server.is_attached:
            found = self.links[0][1].handshake.session_key
            data = client(link=1, data_key=key, open_piece=self.open_piece)
            find_key = lambda session: found if session == SESSION else None  # noqa: E731
            self.links[1] = (data, server(find_key=find_key, open_piece=self.open_push))
            self.move()

    def lose(self) -> None:
        for a, b in self.links.values():
            a.receive_eof(), b.receive_eof()
        self.handle_all()
        self.links = {}
        self.ends.client.detach(0.0), self.ends.server.detach(0.0)
        self.ends.client.link_lost(1), self.ends.server.link_lost(1)

    def beat(self) -> None:
        for a, b in self.links.values():
            a.handle_timer(2.0), b.handle_timer(2.0)
        self.move()

    def say(self, message: Status | Drain) -> None:
        if 0 in self.links and self.links[0][1].is_open:
            self.links[0][1].send(message)
        self.move()

    def move(self) -> None:
        """Until nobody has anything to say."""
        moved = True
        while moved:
            self.handle_all()
            moved = False
            for link, (a, b) in list(self.links.items()):
                for way, source, target in (("up", a, b), ("down", b, a)):
                    data = b"".join(bytes(p) for p in source.data_to_send())
                    if data:
                        self.deliver(target, self.wires[f"{way} {link}"].carry(data))
                        moved = True
        self.handle_all()

    def deliver(self, target: Connection, data: bytes) -> None:
        if self.probe is None:
            target.receive(data, 2.0)
            return
        for begin, _, end in frames_of(data):
            self.probe(target, data[begin:end])
            target.receive(data[begin:end], 2.0)

    # ---- what net/ does

    def handle_all(self) -> None:
        for link, (a, b) in list(self.links.items()):
            self.handle(a, link, self.on_client)
            self.handle(b, link, self.on_server)
        self.serve()
        self.land()
        self.flush()

    def handle(self, connection: Connection, link: int, on_event) -> None:
        while events := connection.events():
            for event in events:
                if isinstance(event, Closed):
                    if event.code != "eof":
                        self.errors.append(event.error)
                    self.gone(connection, link)
                    continue
                try:
                    on_event(event, connection)
                except (RemoteProtocolError, PeerError) as e:
                    connection.fail(e)

    def gone(self, connection: Connection, link: int) -> None:
        a, _ = self.links.get(link, (None, None))
        session = self.ends.client if connection is a else self.ends.server
        session.link_lost(link) if link else session.detach(0.0)

    def on_client(self, event: Opened | Received, connection: Connection) -> None:
        session = self.ends.client
        if isinstance(event, Opened):
            if event.peer is not None:
                session.attach(event.peer, 0.0)
        elif isinstance(event.message, Piece):
            session.piece_arrived(event.stream_id, event.message, event.payload, 0.0)
        elif not isinstance(event.message, Drain | Status):
            session.receive(event.stream_id, event.message, 0.0)

    def on_server(self, event: Opened | Received, connection: Connection) -> None:
        if isinstance(event, Received) and isinstance(event.message, Piece):
            self.ends.server.piece_arrived(event.stream_id, event.message, event.payload)
        elif isinstance(event, Received):
            self.ends.server.receive(event.stream_id, event.message, event.payload)
        elif event.peer is not None:
            self.ends.server.attach(event.peer)

    def open_piece(self, stream_id: int, piece: Piece, num_bytes: int) -> Target:
        return self.ends.client.open_piece(1, stream_id, piece, num_bytes)

    def open_push(self, stream_id: int, piece: Piece, num_bytes: int) -> Target:
        return self.ends.server.open_piece(1, stream_id, piece, num_bytes)

    def serve(self) -> None:
        """The engine: state that follows from the tokens that arrived."""
        session = self.ends.server
        for served in list(session.streams.values()):
            if served.phase is Phase.REQUESTED:
                tokens = unpack_tokens(served.tokens)
                self.sources[served] = state_of(tokens)
                served.accept(self.ends._handle(), 0, 0.0)
                if served.prefill.pushes:
                    prefix = self.prefixes[served] = Sink(LAYOUT, served.prefill.start)
                    session.accept_push(served, prefix.buffers)
                    continue
                served.start(0.0)
                self.waiting.append((served, cut(LAYOUT, served.prefill.start, len(tokens), 7)))
                session.settle(served)
            elif served.is_pushed and served.phase is Phase.ACCEPTED:
                start, tokens = served.prefill.start, unpack_tokens(served.tokens)
                assert self.prefixes[served].equals(state_of(tokens[:start]), 0, start), "a wrong prefix is taken"
                served.start(0.0)
                self.waiting.append((served, cut(LAYOUT, start, len(tokens), 7)))
                session.settle(served)
        for served, segments in self.waiting:
            while segments and not served.is_over and served.departures.next_no < self.most:
                self.send(served, segments.pop(0))
                if not segments:
                    served.complete(served.prefill.num_tokens, 0.5)
                session.settle(served)

    def send(self, served: SendStream, where: tuple[int, int, tuple[int, ...]]) -> None:
        shape = segment_shape(LAYOUT, *where)
        encoded = self.ends.codec.encode(served.prefill.codecs[0], self.sources[served].buffers(*where), shape)
        served.add_segment(where[:2], where[2], sum(run.num_bytes for run in shape), encoded, 4096)
        served.progress(where[0])

    def land(self) -> None:
        session = self.ends.client
        for event in session.events():
            if isinstance(event, StreamEnded) and event.stream.error is not None:
                self.errors.append(event.stream.error)
            elif isinstance(event, SegmentArrived) and event.stream.wants(event.segment):
                self.land_one(event.stream, event.segment)
            elif (
                isinstance(event, PushMoved) and event.stream.push is not None and event.stream.push not in self.pushed
            ):
                self.pushed.add(event.stream.push)
                start = event.stream.prefill.start
                source = state_of(unpack_tokens(event.stream.tokens)[:start])
                self.ends.queue_push(event.stream, source, cut(LAYOUT, 0, start, 2))
                session.push_all(event.stream)
        for event in self.ends.server.events():
            if isinstance(event, SegmentArrived) and event.stream.wants(event.segment):
                self.land_pushed(event.stream, event.segment)

    def land_one(self, stream: ReceiveStream, segment) -> None:
        head, session = segment.head, self.ends.client
        if segment_digest(segment.views) != head.digest:
            session.fail(stream, TransferIncomplete("a segment is damaged"))
            return
        if head.codec != "raw":
            out = self.sinks[stream.stream_id].buffers(head.start, head.stop, head.layers)
            try:
                shape = segment_shape(LAYOUT, head.start, head.stop, head.layers)
                self.ends.codec.decode(head.codec, segment.views[0], out, shape)
            except RemoteProtocolError as e:
                session.fail(stream, TransferIncomplete(str(e)))
                return
        session.segment_landed(stream, segment, 0.0)

    def land_pushed(self, served: SendStream, segment) -> None:
        if segment_digest(segment.views) != segment.head.digest:
            served.fail(RequestDamaged("a pushed segment is damaged"))
            self.ends.server.settle(served)
            return
        self.ends.server.segment_landed(served, segment)

    def flush(self) -> None:
        a, b = self.links.get(0, (None, None))
        for session, connection in ((self.ends.client, a), (self.ends.server, b)):
            for out in session.take_outbox():
                if connection is not None and connection.is_open:
                    connection.send(out.message, out.stream_id, (out.payload,), len(out.payload))
        for session, data in zip((self.ends.client, self.ends.server), self.links.get(1, (None, None)), strict=True):
            while data is not None and data.is_open and (piece := session.next_piece(1)) is not None:
                data.send(piece.message, piece.stream_id, piece.payload(), piece.num_bytes)


def check(flip: Where) -> PdError | None:
    """The first error that the flip led to; None when it changed nothing."""
    exchange = Exchange(flip).run()
    errors = [e for e in exchange.errors if not is_own_cancel(e)]
    for s, stream in exchange.streams.items():
        if stream.phase is Phase.DONE:
            assert exchange.sinks[s].equals(EXPECTED[s], START.get(s, 0), N), (flip, "wrong state taken for right")
    for served in exchange.sources:
        s = int(served.prefill.request_id[1:])
        assert exchange.sources[served].equals(EXPECTED[s], 0, N), (flip, "state of other tokens computed")
    is_whole = len(exchange.streams) == 4 and all(exchange.streams[s].phase is Phase.DONE for s in (1, 2, 4))
    assert is_whole or errors, (flip, "neither done nor failed")
    for error in errors:
        assert isinstance(error, ProtocolError | PeerError | TransferError) and str(error), (flip, error)
    return errors[0] if errors else None


def is_own_cancel(error: PdError) -> bool:
    return "cancelled at this end" in str(error)


CLEAN = Exchange().run()
BYTES = {name: wire.num_bytes for name, wire in CLEAN.wires.items()}


def test_the_exchange_is_whole_and_has_every_message():
    assert [e for e in CLEAN.errors if not is_own_cancel(e)] == []
    assert all(CLEAN.streams[s].phase is Phase.DONE for s in (1, 2, 4))
    assert CLEAN.streams[3].phase is Phase.CANCELLED
    seen = {w.frames[begin + 3] for w in CLEAN.wires.values() for begin, _, _ in frames_of(w.frames)}
    idle = {FrameType.MEASURE, FrameType.FILLER, FrameType.CACHE_EVENT}  # no state depends on them
    assert seen >= set(FrameType) - {FrameType.ERROR, FrameType.REFUSED, FrameType.CREDIT} - idle


def twin(connection: Connection) -> Connection:
    """Its double: what happens to one does not happen to the other."""
    double = copy.copy(connection)
    double.handshake = copy.copy(connection.handshake)
    double._inbox = memoryview(bytearray(connection._inbox))
    double._events, double._out, double._pings = [], [], dict(connection._pings)
    return double


def test_every_bit_of_every_header_is_covered():
    num_flips = 0

    def probe(connection: Connection, frame: bytes) -> None:
        nonlocal num_flips
        assert connection._begin == connection._end and connection._head is None
        (_, payload, _) = frames_of(frame)[0]
        for bit in range(8 * payload):
            double = twin(connection)
            damaged = bytearray(frame)
            damaged[bit // 8] ^= 1 << bit % 8
            double.receive(damaged, 2.0)
            (event,) = double.events()
            assert isinstance(event, Closed) and isinstance(event.error, ProtocolError), (frame, bit, event)
            num_flips += 1

    Exchange(probe=probe).run()
    assert num_flips > 50_000


def payload_bytes(name: str, step: int) -> list[int]:
    spans = [(payload, end) for _, payload, end in frames_of(CLEAN.wires[name].frames)]
    return [at for payload, end in spans for at in range(payload, end)][::step]


def test_a_bit_of_any_token_is_refused_by_its_hash():
    for at in payload_bytes("up 0", 1):
        assert isinstance(check(("up 0", 8 * at + at % 8)), RequestDamaged)


def test_bits_of_state_end_the_stream():
    """A cancelled one, or one that was resent after the loss of the links, may not need the damaged copy."""
    found = [check(("down 1", 8 * at + at % 8)) for at in payload_bytes("down 1", 37)]
    assert len(found) > 50 and sum(isinstance(e, TransferIncomplete) for e in found) > len(found) // 2


@pytest.mark.parametrize("name", BYTES)
def test_flipped_bits_anywhere(name):
    rng = random.Random(name)
    assert all(check((name, rng.randrange(8 * BYTES[name]))) is not None or name == "down 1" for _ in range(30))


@pytest.mark.slow
@pytest.mark.parametrize("name", BYTES)
def test_a_flipped_bit_in_any_byte(name):
    rng = random.Random(name)
    for i in range(BYTES[name]):
        check((name, 8 * i + rng.randrange(8)))
