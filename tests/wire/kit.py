"""Both ends of the protocol in memory: connections and sessions wired together without sockets, and made-up state."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from common.layout import StateLayout, StateSpec, TensorSpec
from common.wire.auth import key_id
from common.wire.codec import Codec, segment_shape
from common.wire.connection import Closed, Connection, Opened, Received
from common.wire.digest import segment_digest
from common.wire.frames import Target
from common.wire.handshake import ConnectionConfig, Handshake
from common.wire.incoming import ReceiveStream
from common.wire.messages import HelloAck, Piece, Prefill
from common.wire.seal import SealJob
from common.wire.serving import ServerSession
from common.wire.session import ClientSession, SegmentArrived
from common.wire.tokens import pack_tokens

KEY = bytes(range(32))
KEY_ID = key_id(KEY)
SESSION = b"s" * 16
VOCAB = 1000


def rows(name: str, width: int, dtype: str) -> TensorSpec:
    return TensorSpec(name, (width,), dtype)


LAYOUT = StateLayout(
    (
        StateSpec(0, "full", (rows("k", 6, "float32"), rows("v", 6, "float32"))),
        StateSpec(1, "full", (rows("k", 6, "bfloat16"), rows("v", 6, "float32"))),
        StateSpec(2, "window", (rows("k", 6, "float32"),), window=8),
        StateSpec(3, "latent", (rows("c", 5, "int8"),)),
        StateSpec(4, "recurrent", (rows("s", 40, "float32"),)),
    )
)
DIGEST = LAYOUT.digest
FULL = StateLayout(LAYOUT.states[:2])


def ack(role: str = "decode", **changes: object) -> HelloAck:
    base = HelloAck(
        name="d1" if role == "decode" else "p1",
        instance=f"{role}-1",
        weights="w",
        config="c",
        tokenizer="t",
        layout=DIGEST,
        block_tokens=64,
        hash_scheme="h",
        numerics={"dtype": "float32"},
        codecs=("raw", "zstd"),
        max_piece_bytes=65536,
        max_segment_bytes=1 << 20,
        max_prompt_tokens=4096,
        max_streams=8,
        heartbeat_s=2.0,
        lease_s=30.0,
    )
    return replace(base, **changes)


def config(
    role: str, key: bytes | None = KEY, require_same_numerics: bool = False, *, keys=None, mode=None, **changes: object
):
    keys = keys or (() if key is None or mode == "tls" else (key,))
    mode = mode or ("key" if keys else "none")
    return ConnectionConfig(role, mode, keys, ack(role, **changes), require_same_numerics, 5.0)


def no_piece(stream_id: int, piece: Piece, num_bytes: int) -> Target:
    return Target([memoryview(bytearray(num_bytes))], num_bytes)


def client(cfg=None, *, session=SESSION, link=0, data_key=None, nonce=b"c" * 32, now=0.0, open_piece=no_piece):
    cfg = cfg or config("decode")
    handshake = Handshake.client(cfg, nonce, b"C" * 32, session, link, data_key)
    handshake.is_in_tls = cfg.mode == "tls" and link == 0
    return Connection(cfg, handshake, now, open_piece)


def server(cfg=None, *, find_key=lambda session: None, nonce=b"p" * 32, now=0.0, open_piece=no_piece, is_in_tls=None):
    cfg = cfg or config("prefill")
    handshake = Handshake.server(cfg, nonce, b"S" * 32, find_key)
    handshake.is_in_tls = cfg.mode == "tls" if is_in_tls is None else is_in_tls
    return Connection(cfg, handshake, now, open_piece)


def sent(connection: Connection) -> bytes:
    return b"".join(p.run() if isinstance(p, SealJob) else bytes(p) for p in connection.data_to_send())


def exchange(a: Connection, b: Connection, now: float = 0.0) -> None:
    """Carry bytes both ways until nobody says anything."""
    while True:
        to_b, to_a = sent(a), sent(b)
        if not to_b and not to_a:
            return
        b.receive(to_b, now)
        a.receive(to_a, now)


def opened(client_config=None, server_config=None, **client_args):
    a, b = client(client_config, **client_args), server(server_config)
    exchange(a, b)
    return a, b


def kinds(connection: Connection) -> list[str]:
    return [type(e).__name__ for e in connection.events()]


def closed(connection: Connection) -> Closed:
    """The Closed event; fails when there is none."""
    return next(e for e in connection.events() if isinstance(e, Closed))


def received(connection: Connection) -> list[Received]:
    return [e for e in connection.events() if isinstance(e, Received)]


def is_opened(connection: Connection) -> bool:
    return any(isinstance(e, Opened) for e in connection.events())


@dataclass
class Sink:
    """Memory of one request's state: one bytearray per (layer, tensor)."""

    layout: StateLayout
    num_tokens: int
    memory: dict[tuple[int, int], bytearray] = field(default_factory=dict)
    landings: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for n, spec in enumerate(self.layout.states):
            for t, tensor in enumerate(spec.tensors):
                self.memory[n, t] = bytearray((self.num_tokens if spec.is_rows else 1) * tensor.row_bytes)

    def buffers(self, start: int, stop: int, layers: tuple[int, ...]) -> tuple[memoryview, ...]:
        views = []
        for n in layers:
            spec = self.layout.states[n]
            a, b = (start, stop) if spec.is_rows else (0, 1)
            for t, tensor in enumerate(spec.tensors):
                views.append(memoryview(self.memory[n, t])[a * tensor.row_bytes : b * tensor.row_bytes])
        return tuple(views)

    def landed(self, start: int, stop: int, layers: tuple[int, ...]) -> None:
        self.landings.append((start, stop, layers))

    def filled(self, seed: int = 0) -> Sink:
        """Random state, half of its bytes of low entropy so that codecs have something to do."""
        rng = random.Random(seed)
        for n in range(len(self.layout.states)):
            for view in self.buffers(0, self.num_tokens, (n,)):
                view[:] = bytes(rng.choice((0, 1, rng.randrange(256))) for _ in range(len(view)))
        return self

    def equals(self, other: Sink, start: int, stop: int) -> bool:
        needed = self.layout.required_segments(start, stop)
        return all(
            bytes(x) == bytes(y)
            for n, (a, b) in needed.items()
            for x, y in zip(self.buffers(a, b, (n,)), other.buffers(a, b, (n,)), strict=True)
        )


def cut(layout: StateLayout, start: int, stop: int, chunk: int) -> list[tuple[int, int, tuple[int, ...]]]:
    """Segments that cover what a request needs: chunks of rows, one layer each."""
    out = []
    for n, (a, b) in layout.required_segments(start, stop).items():
        if layout.states[n].is_rows:
            out += [(x, min(x + chunk, b), (n,)) for x in range(a, b, chunk)]
        else:
            out.append((a, b, (n,)))
    return sorted(out)


def prefill(num_tokens: int, start: int = 0, **changes: object) -> Prefill:
    base = Prefill("r1", start, num_tokens, None, 0, b"", ("zstd",), 0, bytes(16))
    return replace(base, **changes)


class Ends:
    """A ClientSession and a ServerSession; messages and pieces are carried by hand."""

    def __init__(self, layout: StateLayout = LAYOUT, credit_bytes: int = 1 << 20, **limits: object) -> None:
        self.layout, self.now, self.codec = layout, 0.0, Codec()
        self.handles = 0
        self.client = ClientSession(ack("decode", **limits), layout, credit_bytes)
        self.server = ServerSession(ack("prefill", **limits), layout, VOCAB, self._handle, credit_bytes=credit_bytes)
        self.attach()

    def _handle(self) -> bytes:
        self.handles += 1
        return self.handles.to_bytes(16, "big")

    def attach(self, **changes: object) -> None:
        self.server.attach(self.client.ours)
        self.client.attach(replace(self.server.ours, **changes), self.now)

    def detach(self) -> None:
        self.client.detach(self.now)
        self.server.detach(self.now)

    def talk(self) -> None:
        """Deliver control messages until both are silent."""
        while True:
            up, down = self.client.take_outbox(), self.server.take_outbox()
            if not up and not down:
                return
            for out in up:
                self.server.receive(out.stream_id, out.message, bytearray(out.payload))
            for out in down:
                self.client.receive(out.stream_id, out.message, self.now)

    def request(self, num_tokens: int, start: int = 0, sink: Sink | None = None, **changes: object) -> ReceiveStream:
        sink = sink or Sink(self.layout, num_tokens)
        tokens = pack_tokens([i % VOCAB for i in range(num_tokens)])
        return self.client.request(prefill(num_tokens, start, **changes), tokens, sink.buffers, self.now)

    def accepted(self, stream: ReceiveStream):
        """The server's side of it, accepted and started."""
        self.talk()
        served = self.server.streams[stream.stream_id]
        served.accept(self._handle(), 0, self.now)
        served.start(self.now)
        self.server.settle(served)
        self.talk()
        return served

    def queue(self, served, source: Sink, segments, codec: str = "raw", piece: int = 4096):
        for start, stop, layers in segments:
            shape = segment_shape(self.layout, start, stop, layers)
            encoded = self.codec.encode(codec, source.buffers(start, stop, layers), shape)
            served.add_segment((start, stop), layers, sum(run.num_bytes for run in shape), encoded, piece)

    def carry(self, piece, link: int = 1, *, flip: bool = False) -> None:
        """One piece from the server's memory to the client's."""
        data = b"".join(bytes(p) for p in piece.payload())
        if flip and data:
            data = bytes([data[0] ^ 1]) + data[1:]
        stream_id = piece.stream_id
        target = self.client.open_piece(link, stream_id, piece.message, len(data))
        fill(target, data)
        self.client.piece_arrived(stream_id, piece.message, target, self.now)

    def _put(self, segment, sink: Sink | None) -> None:
        """Verify a segment, and decode what is not raw."""
        head = segment.head
        assert segment_digest(segment.views) == head.digest
        if head.codec != "raw" and sink is not None:
            shape = segment_shape(self.layout, head.start, head.stop, head.layers)
            out = sink.buffers(head.start, head.stop, head.layers)
            self.codec.decode(head.codec, segment.views[0], out, shape)

    # ---- a pushed prefix

    def queue_push(self, stream: ReceiveStream, source: Sink, segments, codec: str = "raw", piece: int = 4096):
        for start, stop, layers in segments:
            shape = segment_shape(self.layout, start, stop, layers)
            encoded = self.codec.encode(codec, source.buffers(start, stop, layers), shape)
            stream.push.add((start, stop), layers, sum(run.num_bytes for run in shape), encoded, piece)

    def carry_up(self, piece, link: int = 1, *, flip: bool = False) -> None:
        """One pushed piece from the client's memory to the server's."""
        data = b"".join(bytes(p) for p in piece.payload())
        if flip and data:
            data = bytes([data[0] ^ 1]) + data[1:]
        target = self.server.open_piece(link, piece.stream_id, piece.message, len(data))
        fill(target, data)
        self.server.piece_arrived(piece.stream_id, piece.message, target)

    def land_push(self, sink: Sink | None = None) -> list[object]:
        """Verify and decode what was pushed; answers all events."""
        events = self.server.events()
        for event in events:
            if isinstance(event, SegmentArrived) and event.stream.wants(event.segment):
                self._put(event.segment, sink)
                self.server.segment_landed(event.stream, event.segment)
        return [*events, *self.server.events()]

    def push(self, sink: Sink | None = None) -> list[object]:
        """Carry and land all that may be pushed; answers the server's events."""
        found: list[object] = []
        while True:
            self.talk()
            moved = False
            while (piece := self.client.next_piece(1)) is not None:
                self.carry_up(piece)
                moved = True
            found += self.land_push(sink)
            self.talk()
            if not moved:
                return found

    def land(self, sink: Sink | None = None) -> int:
        """Verify and decode what has arrived; answers how many segments."""
        num = 0
        for event in self.client.events():
            if isinstance(event, SegmentArrived) and event.stream.wants(event.segment):
                self._put(event.segment, sink)
                self.client.segment_landed(event.stream, event.segment, self.now)
                num += 1
        return num

    def run(self, sink: Sink | None = None) -> None:
        """Carry everything until nothing moves."""
        while True:
            moved = False
            self.talk()
            while (piece := self.server.next_piece(1)) is not None:
                self.carry(piece)
                moved = True
            moved = bool(self.land(sink)) or moved
            self.talk()
            if not moved:
                return


def fill(target: Target, data: bytes) -> None:
    view = memoryview(data)
    while target.num_left:
        buffer = target.get_buffer()
        num = min(len(buffer), len(view))
        buffer[:num] = view[:num]
        target.advance(num)
        view = view[num:]
