"""The two Hellos and two proofs at the start of a link, without I/O. Knows keys as bytes and nonces as arguments.

Used by connection.py, which owns the order of frames (tables.py); docs/protocol.md section 4 draws the exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from common.errors import AuthFailed
from common.wire.auth import UNKEYED, is_same_mac, link_mac, session_key
from common.wire.messages import Auth, Hello, HelloAck, encode_frame
from common.wire.tables import Role

FindKey = Callable[[bytes], bytes | None]
"""Session id of a data link's Hello -> that session's key, None for a session that is not there."""
_NO_PROOF = (
    "the peer did not prove that it holds the shared key for this session and link: "
    "compare security.key_file on both ends"
)


@dataclass(frozen=True, slots=True)
class ConnectionConfig:
    """What every link of one process has in common. `ack` is what we say about ourselves."""

    role: Role
    key: bytes | None
    ack: HelloAck
    require_same_numerics: bool
    handshake_timeout_s: float


class Handshake:
    """One link's handshake. Build it with `client` or `server`; `frames()` is what must be sent next."""

    def __init__(self, config: ConnectionConfig, nonce: bytes) -> None:
        self.config, self.nonce = config, nonce
        self.session, self.link = b"", 0
        self.session_key: bytes | None = None
        self.peer_hello = b""
        self._own_hello = b""
        self._find_key: FindKey = lambda session: None
        self._frames: list[bytes] = []

    @classmethod
    def client(
        cls, config: ConnectionConfig, nonce: bytes, session: bytes, link: int = 0, data_key: bytes | None = None
    ) -> Handshake:
        """The connecting end. `data_key` is the session key, for links above 0."""
        self = cls(config, nonce)
        self.session, self.link = session, link
        self._find_key = lambda session: data_key
        self._send_hello()
        return self

    @classmethod
    def server(cls, config: ConnectionConfig, nonce: bytes, find_key: FindKey) -> Handshake:
        """The accepting end."""
        self = cls(config, nonce)
        self._find_key = find_key
        return self

    def frames(self) -> list[bytes]:
        """Frames to send since the last call."""
        frames, self._frames = self._frames, []
        return frames

    def on_hello(self, hello: Hello) -> None:
        """The peer's Hello; `peer_hello` holds its bytes.

        Raises:
            AuthFailed: reflection, different security modes, or an answer for another session or link.
        """
        if hello.role == self.config.role or hello.nonce == self.nonce:
            raise AuthFailed(f"the peer's Hello has our own role {hello.role!r} or nonce: it is not a peer")
        if hello.is_keyed != (self.config.key is not None):
            ours, theirs = ("has a", "none") if self.config.key is not None else ("has no", "one")
            # By role, not "this end": the other end shows the same words to its own operator.
            who = f"the {self.config.role} end {ours} shared key, the {hello.role} end has {theirs}"
            raise AuthFailed(f"{who}: security.key_file must be the same on both")
        if self.config.role == "prefill":
            self.session, self.link = hello.session, hello.link
            self._send_hello()
        elif (hello.session, hello.link) != (self.session, self.link):
            raise AuthFailed("the peer answered for another session or link")
        else:
            self._frames.append(encode_frame(Auth(self._mac("decode"))))

    def on_auth(self, auth: Auth) -> None:
        """The peer's proof; afterwards `session_key` is set on control links.

        Raises:
            AuthFailed: it is not the one that only a holder of the key can make.
        """
        if not is_same_mac(auth.mac, self._mac("prefill" if self.config.role == "decode" else "decode")):
            raise AuthFailed(_NO_PROOF)
        if self.config.role == "prefill":
            self._frames.append(encode_frame(Auth(self._mac("prefill"))))
        if self.link == 0:
            self.session_key = session_key(self.config.key or UNKEYED, self.session, *self._hellos())

    def _send_hello(self) -> None:
        hello = Hello(self.config.role, self.nonce, self.session, self.link, self.config.key is not None)
        self._own_hello = encode_frame(hello)
        self._frames.append(self._own_hello)

    def _mac(self, role: str) -> bytes:
        key = self._find_key(self.session) if self.link else self.config.key or UNKEYED
        if key is None:
            raise AuthFailed(_NO_PROOF)
        return link_mac(key, role, self.session, self.link, *self._hellos())

    def _hellos(self) -> tuple[bytes, bytes]:
        hellos = (self._own_hello, self.peer_hello)
        return hellos if self.config.role == "decode" else hellos[::-1]
