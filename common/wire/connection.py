"""One link's protocol state without I/O: bytes in through get_buffer / buffer_updated, events and bytes to send out.

Payload bytes go straight into the views that `open_piece` names; on a sealed link into memory of their own, to be
opened by whoever gets the Unopened. Knows the handshake, heartbeats and which frame may come when; knows nothing of
streams, sockets or clocks (`now` is monotonic seconds). After any input the caller takes `events()` and
`data_to_send()` and arms one timer at `next_timer()`. Wrong bytes never raise: they end in an Error frame and a Closed
event.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from common.errors import (
    BadMagic,
    BadMessage,
    ChecksumMismatch,
    FrameTooLarge,
    LinkLost,
    LocalProtocolError,
    PdError,
    PeerError,
    RemoteProtocolError,
    TlsFailed,
    UnknownFrame,
    VersionMismatch,
)
from common.wire.auth import check_identity
from common.wire.frames import (
    FRAME_BYTES,
    MAX_EARLY_HEADER_BYTES,
    MAX_HEADER_BYTES,
    NOWHERE,
    FrameHead,
    FrameType,
    Target,
    pack_head,
    parse_head,
)
from common.wire.framing import ClearFraming, Framing, Out, SealedFraming, Unopened
from common.wire.handshake import ConnectionConfig, Handshake
from common.wire.messages import (
    Auth,
    Drain,
    Error,
    Filler,
    Hello,
    HelloAck,
    Message,
    Piece,
    Ping,
    Pong,
    Prefill,
    decode_message,
    encode_frame,
)
from common.wire.tables import CONNECTION, Conn

FAULT_CODES = frozenset({"protocol", "too_large", "unknown_frame", "bad_message", "checksum", "seal"})
_READ_BYTES = 4096
_SILENT_HEARTBEATS = 2.5


@dataclass(frozen=True, slots=True)
class Opened:
    """The handshake is done. `peer` is None on data links."""

    peer: HelloAck | None


Payload = bytearray | Target | Unopened | None


@dataclass(frozen=True, slots=True)
class Received:
    """One complete frame: `payload` holds Prefill's tokens, or is the filled Target of a Piece, or still sealed."""

    stream_id: int
    message: Message
    payload: Payload


@dataclass(frozen=True, slots=True)
class Closed:
    """The link is over: send what is left and close. `is_remote`: the peer said so in an Error frame."""

    error: PdError
    code: str
    is_remote: bool

    @property
    def is_fault(self) -> bool:
        """The protocol was broken, by either end or by what damaged bytes on the way."""
        return self.code in FAULT_CODES


Event = Opened | Received | Closed
OpenPiece = Callable[[int, Piece, int], Target]
"""(stream id, piece, payload bytes) -> where the payload goes. Raises RemoteProtocolError."""


class Connection:
    """One end of one link."""

    def __init__(self, config: ConnectionConfig, handshake: Handshake, now: float, open_piece: OpenPiece) -> None:
        self.config, self.handshake, self.open_piece = config, handshake, open_piece
        self.state = Conn.HELLO
        self.peer: HelloAck | None = None
        self.rtt_s: float | None = None
        self.bytes_in = 0
        self._inbox = memoryview(bytearray(FRAME_BYTES + MAX_EARLY_HEADER_BYTES))
        self._begin = self._end = 0
        self._head: FrameHead | None = None
        self._target: Target | None = None
        self._waiting: Message | None = None
        self._tokens: bytearray | None = None
        self._unopened: Unopened | None = None
        self._framing: Framing = ClearFraming()
        self._events: list[Event] = []
        self._out: list[Out] = list(handshake.frames())
        self._deadline = now + config.handshake_timeout_s
        self._heard_at = self._ping_at = now
        self._ping_no = 0
        self._pings: dict[int, float] = {}

    @property
    def session(self) -> bytes:
        """The session id of the Hellos; empty until the server has read one."""
        return self.handshake.session

    @property
    def link(self) -> int:
        """0 is the control link."""
        return self.handshake.link

    @property
    def is_open(self) -> bool:
        """True after the handshake until the link is closed."""
        return self.state in (Conn.OPEN, Conn.DRAINING)

    # ---- input

    def get_buffer(self) -> memoryview:
        """Where the next bytes of the link go; never empty; idempotent until buffer_updated."""
        if self.state is Conn.CLOSED:
            return NOWHERE
        if self._target is not None:
            return self._target.get_buffer()
        need = FRAME_BYTES if self._head is None else self._head.header_bytes + self._framing.extra_bytes
        stop = max(self._begin + need, min(self._end + _READ_BYTES, len(self._inbox)))
        return self._inbox[self._end : stop]

    def buffer_updated(self, num_bytes: int, now: float) -> None:
        """`num_bytes` were written to the start of get_buffer()."""
        self._heard_at = now
        self.bytes_in += num_bytes
        if self.state is Conn.CLOSED:
            return
        try:
            if self._target is not None:
                self._target.advance(num_bytes)
            else:
                self._end += num_bytes
            while self._parse(now):
                pass
        except (RemoteProtocolError, PeerError) as e:
            self.fail(e)

    def receive(self, data: bytes | memoryview, now: float) -> None:
        """Feed bytes that are somewhere else already (tests, transports without get_buffer)."""
        view = memoryview(data)
        while view:
            buffer = self.get_buffer()
            num = min(len(buffer), len(view))
            buffer[:num] = view[:num]
            view = view[num:]
            self.buffer_updated(num, now)

    def receive_eof(self) -> None:
        """The peer closed the transport."""
        if self.state is not Conn.CLOSED:
            self._close(LinkLost("the peer closed the connection"), "eof", is_remote=False)

    # ---- output

    def events(self) -> list[Event]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    def data_to_send(self) -> list[Out]:
        """What must be written since the last call, in order."""
        out, self._out = self._out, []
        return out

    def send(
        self, message: Message, stream_id: int = 0, payload: tuple[bytes | memoryview, ...] = (), num_bytes: int = 0
    ) -> None:
        """Queue a frame. Raises LocalProtocolError before the handshake is done; ignored after the link is closed."""
        if self.state is Conn.CLOSED:
            return
        if not self.is_open:
            raise LocalProtocolError(f"{message.type.name} before the handshake is done")
        if not self._framing.has_room(num_bytes):
            self.fail(LinkLost("this link's key was used for as long as it may be: the link is made anew"))
            return
        self._out += self._framing.encode(message, stream_id, payload, num_bytes)

    def fail(self, error: PdError) -> None:
        """End the link with an Error frame that says why."""
        if self.state is not Conn.CLOSED:
            code = error.wire_code if isinstance(error, RemoteProtocolError | PeerError) else error.code
            self._say(Error(code, str(error).encode()[:1000].decode(errors="ignore"), None))
            self._close(error, code, is_remote=False)

    def leave(self, message: str) -> None:
        """End the link for good: the peer drops our streams without waiting for a lease."""
        if self.state is not Conn.CLOSED:
            self._say(Error("closing", message, None))
            self._close(LinkLost(message), "closing", is_remote=False)

    def lose(self, error: TlsFailed) -> None:
        """TLS below us failed: the link ends without a word of ours, which would not arrive, or in the clear."""
        if self.state is not Conn.CLOSED:
            self._out.clear()
            # What was good enough for a handshake was damaged later.
            code = "seal" if self.is_open else f"tls_{error.kind}"
            self._close(error, code, is_remote=error.kind == "refused")

    def _say(self, error: Error) -> None:
        self._out += self._framing.encode(error, 0, (), 0)

    # ---- time

    def next_timer(self) -> float | None:
        """When handle_timer wants to be called."""
        if self.state is Conn.CLOSED:
            return None
        if not self.is_open:
            return self._deadline
        return min(self._ping_at, self._heard_at + self._silence_s())

    def handle_timer(self, now: float) -> None:
        """Send a Ping, or give the link up after silence or an unfinished handshake."""
        due = self.next_timer()
        if due is None or now < due:
            return
        if not self.is_open:
            self.fail(LinkLost(f"the handshake was not finished within {self.config.handshake_timeout_s:g} s"))
            return
        heartbeat = self._heartbeat_s()
        if now > due + heartbeat / 2:
            # We slept ourselves: what the peer sent meanwhile is still in the socket.
            self._heard_at = max(self._heard_at, now - self._silence_s() + heartbeat)
        if now >= self._heard_at + self._silence_s():
            self.fail(LinkLost(f"nothing was heard for {now - self._heard_at:.1f} s (heartbeat {heartbeat:g} s)"))
        elif now >= self._ping_at:
            self._ping_at = now + heartbeat
            self._ping_no += 1
            self._pings = {no: at for no, at in self._pings.items() if now - at < 60} | {self._ping_no: now}
            self.send(Ping(self._ping_no))

    def _heartbeat_s(self) -> float:
        return self.config.ack.heartbeat_s

    def _silence_s(self) -> float:
        theirs = self.peer.heartbeat_s if self.peer is not None else 0.0
        return _SILENT_HEARTBEATS * max(self._heartbeat_s(), min(theirs, 60.0))

    # ---- parsing

    def _parse(self, now: float) -> bool:
        """One step; False when more bytes are needed."""
        if self.state is Conn.CLOSED:
            return False
        have = self._end - self._begin
        if self._target is not None:
            return self._fill(self._target, have, now)
        if self._head is None:
            if have < FRAME_BYTES:
                return self._compact()
            self._head = self._parse_head(self._inbox[self._begin : self._begin + FRAME_BYTES])
            self._begin += FRAME_BYTES
            self._check_frame(self._head)
            return True
        num_bytes = self._head.header_bytes + self._framing.extra_bytes
        if have < num_bytes:
            return self._compact()
        header = self._framing.open_header(self._head, self._inbox[self._begin : self._begin + num_bytes])
        message = decode_message(self._head, header)
        if isinstance(message, Hello):
            self.handshake.peer_hello = pack_head(self._head) + header
        self._begin += num_bytes
        self._start_payload(self._head, message, now)
        return True

    def _parse_head(self, data: memoryview) -> FrameHead:
        try:
            return parse_head(data)
        except (BadMagic, VersionMismatch) as e:
            if not self.is_open:
                raise
            # A peer does not change its protocol in the middle of a link.
            raise ChecksumMismatch(f"a frame's fixed header was damaged on the way: {e}") from None

    def _compact(self) -> bool:
        """Move what is left to the front, so that a whole frame header and header fit."""
        if self._begin:
            left = bytes(self._inbox[self._begin : self._end])
            self._inbox[: len(left)] = left
            self._begin, self._end = 0, len(left)
        return False

    def _check_frame(self, head: FrameHead) -> None:
        table = CONNECTION[self.config.role, "data" if self.link else "control"]
        if head.type not in table[self.state]:
            raise UnknownFrame(f"{head.type.name} is not allowed in state {self.state.name} of link {self.link}")
        most = len(self._inbox) - FRAME_BYTES - self._framing.extra_bytes
        if head.header_bytes > most:
            raise FrameTooLarge(f"{head.type.name}: header of {head.header_bytes} bytes exceeds {most}")
        ack = self.config.ack
        most = {
            FrameType.PIECE: ack.max_piece_bytes,
            FrameType.FILLER: ack.max_piece_bytes,
            FrameType.PREFILL: 4 * ack.max_prompt_tokens,
        }.get(head.type, 0)
        if head.payload_bytes > most:
            raise FrameTooLarge(f"{head.type.name}: payload of {head.payload_bytes} bytes exceeds {most}")

    def _start_payload(self, head: FrameHead, message: Message, now: float) -> None:
        if isinstance(message, Piece):
            target = self.open_piece(head.stream_id, message, head.payload_bytes)
            self._target, self._unopened = self._framing.receive_into(head, target)
        elif isinstance(message, Filler):
            if head.payload_bytes != message.num_bytes:
                raise BadMessage(f"FILLER.num_bytes is {message.num_bytes}, its payload has {head.payload_bytes} bytes")
            nowhere = Target([], head.payload_bytes)
            nowhere.discard()
            self._target, self._unopened = self._framing.receive_into(head, nowhere)
        elif isinstance(message, Prefill):
            if head.payload_bytes != 4 * message.num_tokens:
                raise BadMessage(f"PREFILL: {message.num_tokens} tokens in a payload of {head.payload_bytes} bytes")
            self._tokens = bytearray(head.payload_bytes)
            self._target = Target([memoryview(self._tokens)], head.payload_bytes)
        else:
            self._finish_frame(head, message, None, now)
            return
        self._waiting = message

    def _fill(self, target: Target, have: int, now: float) -> bool:
        while have and target.num_left:
            buffer = target.get_buffer()
            num = min(have, len(buffer))
            buffer[:num] = self._inbox[self._begin : self._begin + num]
            self._begin, have = self._begin + num, have - num
            target.advance(num)
        if target.num_left:
            return self._compact()
        head, message = self._head, self._waiting
        payload = self._unopened or (target if self._tokens is None else self._tokens)
        self._target = self._tokens = self._waiting = self._unopened = None
        if head is not None and message is not None:
            self._finish_frame(head, message, payload, now)
        return True

    def _finish_frame(self, head: FrameHead, message: Message, payload: Payload, now: float) -> None:
        self._head = None
        table = CONNECTION[self.config.role, "data" if self.link else "control"]
        following = table[self.state][head.type]
        if isinstance(message, Hello):
            self._on_hello(message)
        elif isinstance(message, Auth):
            self._on_auth(message)
        elif isinstance(message, HelloAck):
            self._on_ack(message)
        elif isinstance(message, Ping):
            self.send(Pong(message.no))
        elif isinstance(message, Pong):
            self._on_pong(message, now)
        elif isinstance(message, Error) and head.stream_id == 0:
            self._close(PeerError.from_wire(message.code, message.message), message.code, is_remote=True)
        else:
            if isinstance(message, Drain):
                following = Conn.DRAINING if message.is_draining else Conn.OPEN
            elif isinstance(message, Error) and not (self.is_open and self.config.role == "decode" and self.link == 0):
                raise UnknownFrame(
                    f"ERROR on stream {head.stream_id}: only the server fails streams, on its control link"
                )
            self._events.append(Received(head.stream_id, message, payload))
        if self.state is not Conn.CLOSED:
            self.state = following

    # ---- handshake

    def _on_hello(self, hello: Hello) -> None:
        self.handshake.on_hello(hello)
        self._out += self.handshake.frames()

    def _on_auth(self, auth: Auth) -> None:
        self.handshake.on_auth(auth)
        self._out += self.handshake.frames()
        if self.handshake.is_sealed:
            self._framing = SealedFraming(*self.handshake.seal_keys())
        left = bytes(self._inbox[self._begin : self._end])
        self._inbox = memoryview(bytearray(FRAME_BYTES + MAX_HEADER_BYTES + self._framing.extra_bytes))
        self._inbox[: len(left)] = left
        self._begin, self._end = 0, len(left)
        if self.link:
            self._open(None)
        else:
            self._out.append(encode_frame(self.handshake.own_ack()))

    def _on_ack(self, ack: HelloAck) -> None:
        check_identity(self.config.ack, ack, require_same_numerics=self.config.require_same_numerics)
        self._open(self.handshake.on_ack(ack))

    def _open(self, peer: HelloAck | None) -> None:
        self.peer = peer
        self._ping_at = self._heard_at
        self._events.append(Opened(peer))

    def _on_pong(self, pong: Pong, now: float) -> None:
        sent_at = self._pings.pop(pong.no, None)
        if pong.no > self._ping_no:
            raise BadMessage(f"PONG.no {pong.no} answers no Ping of ours: the last was {self._ping_no}")
        if sent_at is not None:
            self.rtt_s = now - sent_at

    def _close(self, error: PdError, code: str, *, is_remote: bool) -> None:
        self.state = Conn.CLOSED
        self._target = None
        self._events.append(Closed(error, code, is_remote))
