"""Sealed records of data links: AES-256-GCM with keys per link, direction and epoch, and nonces that never travel.

Both ends count the records of a direction: the count is the nonce, so that a record that was altered, repeated, left
out or moved does not open. Keys and counts are arguments or plain state here; no I/O, no clock, no thread. What SealJob
and OpenJob do is a pure function of their fields: any thread may run them, in any order. Used by framing.py, and by
net/ to run the jobs; docs/protocol.md section 5 has the format byte by byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from common.errors import LocalProtocolError, SealBroken
from common.wire.buffers import BUFFERS, join_into

KEY_BYTES = 32
TAG_BYTES = 16
MAX_BLOCKS = 1 << 34
"""AES blocks under one key, 256 GiB: a little less than RFC 8446 section 5.5 allows TLS (2^24.5 records of 16 KiB)."""
_LAST_WORDS_BLOCKS = 4096
_NONCE_BYTES = 12


def direction_key(
    session_key: bytes, session: bytes, link: int, sender: str, client_nonce: bytes, server_nonce: bytes
) -> bytes:
    """The 32-byte key of what `sender` ("decode" or "prefill") says on one link.

    HKDF-SHA256 (RFC 5869). The nonces are those of the link's two Hellos, fresh for every connection: the epoch.
    """
    info = b"prfaas seal 1\0" + sender.encode() + b"\0" + link.to_bytes(4, "big") + client_nonce + server_nonce
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=session, info=info).derive(session_key)


@dataclass(frozen=True, slots=True)
class SealJob:
    """One record to be sealed; `parts` must not change until `run` returned."""

    cipher: AESGCM = field(repr=False)
    count: int
    aad: bytes
    parts: tuple[bytes | memoryview, ...] = field(repr=False)
    num_bytes: int

    @property
    def sealed_bytes(self) -> int:
        """Size of what `run` answers."""
        return self.num_bytes + TAG_BYTES

    def run(self) -> memoryview:
        """Ciphertext and tag, to be given back to BUFFERS. One part is read where it lies, several are joined first."""
        out = BUFFERS.take(self.sealed_bytes)
        if len(self.parts) == 1:
            self.cipher.encrypt_into(_nonce(self.count), self.parts[0], self.aad, out)
            return out
        joined = BUFFERS.take(self.num_bytes)
        join_into(self.parts, joined)
        self.cipher.encrypt_into(_nonce(self.count), joined, self.aad, out)
        BUFFERS.give_back(joined)
        return out


@dataclass(frozen=True, slots=True)
class OpenJob:
    """One record to be opened, whose turn it was when this was made."""

    cipher: AESGCM = field(repr=False)
    count: int
    aad: bytes

    def run(self, sealed: bytes | bytearray | memoryview) -> memoryview:
        """The clear bytes, to be given back to BUFFERS: in memory of their own, which is only handed out when the tag
        was right.

        Raises:
            SealBroken: this is not the record that the peer sealed at this place.
        """
        out = BUFFERS.take(max(0, len(sealed) - TAG_BYTES))
        try:
            self.cipher.decrypt_into(_nonce(self.count), sealed, self.aad, out)
            return out
        except InvalidTag:
            BUFFERS.give_back(out)
            raise SealBroken(
                f"record {self.count} of this link does not open: it was altered, or is another one than was sent here"
            ) from None


class SealKey:
    """One direction of one link: its key and the number of records so far. For sealing or for opening, never both."""

    def __init__(self, key: bytes, max_blocks: int = MAX_BLOCKS) -> None:
        if len(key) != KEY_BYTES:
            raise LocalProtocolError(f"a sealing key has {len(key)} bytes, must be {KEY_BYTES}")
        self._cipher = AESGCM(key)
        self._max_blocks = max_blocks
        self._count = self._blocks = 0

    def has_room(self, num_bytes: int) -> bool:
        """False when a record of that size would leave no room for a few last words: the link must be made anew."""
        return self._blocks + _blocks_of(num_bytes) + _LAST_WORDS_BLOCKS <= self._max_blocks

    def seal(self, aad: bytes, parts: Sequence[bytes | memoryview], num_bytes: int) -> SealJob:
        """The next record that is sent.

        Raises:
            LocalProtocolError: the key is used up.
        """
        if self._is_beyond(num_bytes):
            raise LocalProtocolError(
                f"a sealing key was used for {self._blocks} blocks, the limit is {self._max_blocks}"
            )
        return SealJob(self._cipher, self._next(num_bytes), aad, tuple(parts), num_bytes)

    def open(self, aad: bytes, num_bytes: int) -> OpenJob:
        """The next record that arrives, `num_bytes` of clear bytes long.

        Raises:
            SealBroken: the peer uses one key for more than it may.
        """
        if self._is_beyond(num_bytes):
            raise SealBroken(f"the peer sealed more than {self._max_blocks} blocks with one key")
        return OpenJob(self._cipher, self._next(num_bytes), aad)

    def _is_beyond(self, num_bytes: int) -> bool:
        return self._blocks + _blocks_of(num_bytes) > self._max_blocks

    def _next(self, num_bytes: int) -> int:
        self._blocks += _blocks_of(num_bytes)
        self._count += 1
        return self._count - 1


def _nonce(count: int) -> bytes:
    return count.to_bytes(_NONCE_BYTES, "big")


def _blocks_of(num_bytes: int) -> int:
    """Blocks that go through the cipher or the hash for one record: data, frame header, lengths, tag mask."""
    return -(-num_bytes // 16) + 4
