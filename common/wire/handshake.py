"""The two Hellos and two proofs at the start of a link, without I/O. Knows keys as bytes and nonces as arguments.

Used by connection.py, which owns the order of frames (tables.py); docs/protocol.md section 4 draws the exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from common.errors import AuthFailed, BadMessage
from common.wire.auth import UNKEYED, is_same_mac, key_id, link_mac, session_key
from common.wire.messages import Auth, Hello, HelloAck, encode_frame
from common.wire.seal import SealKey, direction_key
from common.wire.tables import Role

Mode = Literal["none", "key", "tls"]
FindKey = Callable[[bytes], bytes | None]
"""Session id of a data link's Hello -> that session's key, None for a session that is not there."""
_NO_PROOF = "the peer did not prove that it holds the key of this session and link"


@dataclass(frozen=True, slots=True)
class ConnectionConfig:
    """What every link of one process has in common. `ack` is what we say about ourselves.

    `keys` (mode "key"): the shared key first, then the one before it while it still holds.
    """

    role: Role
    mode: Mode
    keys: tuple[bytes, ...] = field(repr=False)
    ack: HelloAck
    require_same_numerics: bool
    handshake_timeout_s: float


class Handshake:
    """One link's handshake. Build it with `client` or `server`; `frames()` is what must be sent next.

    The transport sets `is_in_tls` before it hands on the first byte.
    """

    def __init__(self, config: ConnectionConfig, nonce: bytes, secret: bytes) -> None:
        self.config, self.nonce, self._secret = config, nonce, secret
        self.session, self.link = b"", 0
        self.session_key: bytes | None = None
        self.is_in_tls = False
        self.peer_hello = b""
        self._own_hello = b""
        self._peer_nonce = b""
        self._key: bytes | None = None
        self._find_key: FindKey = lambda session: None
        self._frames: list[bytes] = []

    @classmethod
    def client(
        cls,
        config: ConnectionConfig,
        nonce: bytes,
        secret: bytes,
        session: bytes,
        link: int = 0,
        data_key: bytes | None = None,
    ) -> Handshake:
        """The connecting end. `data_key` is the session key, for links above 0; `secret` is 32 fresh random bytes."""
        self = cls(config, nonce, secret)
        self.session, self.link = session, link
        self._find_key = lambda session: data_key
        self._send_hello(tuple(key_id(key) for key in config.keys) if self._is_keyed else ())
        return self

    @classmethod
    def server(cls, config: ConnectionConfig, nonce: bytes, secret: bytes, find_key: FindKey) -> Handshake:
        """The accepting end."""
        self = cls(config, nonce, secret)
        self._find_key = find_key
        return self

    @property
    def _is_keyed(self) -> bool:
        return self.link == 0 and self.config.mode == "key"

    @property
    def is_sealed(self) -> bool:
        """True for a link whose frames are sealed once the handshake is done."""
        return self.link > 0 and self.config.mode == "tls"

    def frames(self) -> list[bytes]:
        """Frames to send since the last call."""
        frames, self._frames = self._frames, []
        return frames

    def on_hello(self, hello: Hello) -> None:
        """The peer's Hello; `peer_hello` holds its bytes.

        Raises:
            AuthFailed: reflection, other security modes or keys, TLS where it does not belong or none where it does,
                or an answer for another session or link.
        """
        if hello.role == self.config.role or hello.nonce == self.nonce:
            raise AuthFailed(f"the peer's Hello has our own role {hello.role!r} or nonce: it is not a peer")
        self._check_mode(hello)
        self._peer_nonce = hello.nonce
        if self.config.role == "prefill":
            self.session, self.link = hello.session, hello.link
        elif (hello.session, hello.link) != (self.session, self.link):
            raise AuthFailed("the peer answered for another session or link")
        if self.config.mode == "tls" and self.is_in_tls != (self.link == 0):
            raise AuthFailed('security.mode is "tls": control links go through TLS, and only they')
        if self.link == 0:
            self._key = self._choose_key(hello)
        if self.config.role == "prefill":
            self._send_hello((key_id(self._key),) if self._key is not None and self._is_keyed else ())
        else:
            self._frames.append(encode_frame(Auth(self._mac("decode"))))

    def on_auth(self, auth: Auth) -> None:
        """The peer's proof.

        Raises:
            AuthFailed: it is not the one that only a holder of the key can make.
        """
        if not is_same_mac(auth.mac, self._mac("prefill" if self.config.role == "decode" else "decode")):
            hint = ", the shared key: compare security.key_file on both ends" if self._is_keyed else ""
            raise AuthFailed(_NO_PROOF + hint)
        if self.config.role == "prefill":
            self._frames.append(encode_frame(Auth(self._mac("prefill"))))

    def own_ack(self) -> HelloAck:
        """What we say about ourselves on this control link."""
        return replace(self.config.ack, secret=self._secret if self.config.mode == "tls" else None)

    def on_ack(self, ack: HelloAck) -> HelloAck:
        """The peer's HelloAck, without its secret; afterwards `session_key` is set.

        Raises:
            BadMessage: a secret that is missing, or would have crossed a link that hides nothing.
        """
        if (ack.secret is None) == (self.config.mode == "tls"):
            raise BadMessage(f'HELLO_ACK.secret must be there with TLS and only then; the mode is "{self.config.mode}"')
        key = self._key if self._key is not None else UNKEYED
        if ack.secret is not None:
            key = self._secret + ack.secret if self.config.role == "decode" else ack.secret + self._secret
        self.session_key = session_key(key, self.session, *self._in_order(self._own_hello, self.peer_hello))
        return replace(ack, secret=None)

    def seal_keys(self) -> tuple[SealKey, SealKey]:
        """Of a sealed link: the key for what we send, and for what we receive."""
        if self._key is None or not self.is_sealed:
            raise RuntimeError(f"link {self.link} is not sealed, or its handshake is not done")
        nonces = self._in_order(self.nonce, self._peer_nonce)
        ours, theirs = self.config.role, "decode" if self.config.role == "prefill" else "prefill"
        keys = [direction_key(self._key, self.session, self.link, sender, *nonces) for sender in (ours, theirs)]
        return SealKey(keys[0]), SealKey(keys[1])

    def _check_mode(self, hello: Hello) -> None:
        if hello.mode == self.config.mode:
            return
        # By role, not "this end": the other end shows the same words to its own operator.
        who = f"the {self.config.role} end has {_MODES[self.config.mode]}, the {hello.role} end {_MODES[hello.mode]}"
        raise AuthFailed(f"{who}: security.mode and security.key_file must fit on both")

    def _choose_key(self, hello: Hello) -> bytes:
        """The key of a control link's proofs: of our own keys, in our order, the first that the peer has too."""
        if self.config.mode != "key":
            return UNKEYED
        common = next((key for key in self.config.keys if key_id(key) in hello.keys), None)
        if common is None:
            raise AuthFailed("both ends have a shared key, but not the same: compare security.key_file on both")
        return common

    def _send_hello(self, keys: tuple[bytes, ...]) -> None:
        hello = Hello(self.config.role, self.nonce, self.session, self.link, self.config.mode, keys)
        self._own_hello = encode_frame(hello)
        self._frames.append(self._own_hello)

    def _mac(self, role: str) -> bytes:
        if self._key is None:
            # Not with the Hello: its control link may have opened at this end a moment later than at the other.
            self._key = self._find_key(self.session)
        if self._key is None:
            raise AuthFailed(_NO_PROOF)
        hellos = self._in_order(self._own_hello, self.peer_hello)
        return link_mac(self._key, role, self.session, self.link, *hellos)

    def _in_order(self, own: bytes, theirs: bytes) -> tuple[bytes, bytes]:
        """The client's first."""
        return (own, theirs) if self.config.role == "decode" else (theirs, own)


_MODES = {"none": "no shared key and no TLS", "key": "a shared key", "tls": "TLS"}
