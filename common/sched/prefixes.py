"""Names of prefixes: a prompt is cut into blocks, and every prefix is named by a chain of hashes over them.

    name(0) = H("prfaas prefix 1\\0" salt)     name(i + 1) = H(name(i), tokens of block i)     H: SHA-256, 16 bytes
    a prefix that ends inside a block:  H(name of the blocks before, the tokens behind them)

Tokens are unsigned 32-bit, little-endian. The salt is the tenant's, so that nobody finds what another one's prompts
left behind. Equal in every process (scheme "sha256-chain-1"). Pure; used by both daemons' caches and by directories.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

from common.layout import BLOCK_TOKENS

NAME_BYTES = 16
_ROOT = b"prfaas prefix 1\0"
_TOKEN_BYTES = 4


class Prefixes:
    """The names of all prefixes of one token sequence, which may grow. Costs time linear in its length."""

    def __init__(self, tokens: Sequence[int], salt: bytes = b"") -> None:
        """Raises OverflowError for a token id outside 0 .. 2^32 - 1."""
        self._bytes = bytearray()
        self._names = [_hash(_ROOT, salt)]
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._bytes) // _TOKEN_BYTES

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        packed = array("I", tokens)
        if sys.byteorder == "big":
            packed.byteswap()
        self._bytes += packed.tobytes()
        for number in range(len(self._names) - 1, len(self) // BLOCK_TOKENS):
            self._names.append(_hash(self._names[-1], self._tokens(number, BLOCK_TOKENS)))

    def extended(self, tokens: Sequence[int]) -> Prefixes:
        """Another sequence: this one and more tokens."""
        other = Prefixes.__new__(Prefixes)
        other._bytes, other._names = bytearray(self._bytes), list(self._names)
        other.extend(tokens)
        return other

    @property
    def num_blocks(self) -> int:
        """Whole blocks so far."""
        return len(self._names) - 1

    def block(self, number: int) -> bytes:
        """Name of the prefix of so many whole blocks; 0 is the empty one. Raises IndexError beyond `num_blocks`."""
        return self._names[number]

    def at(self, position: int) -> bytes:
        """Name of the prefix [0, position). Raises IndexError beyond the sequence."""
        if position > len(self):
            raise IndexError(f"position {position} is beyond the {len(self)} tokens")
        number, rest = divmod(position, BLOCK_TOKENS)
        return _hash(self._names[number], self._tokens(number, rest)) if rest else self._names[number]

    def _tokens(self, block: int, num_tokens: int) -> memoryview:
        first = block * BLOCK_TOKENS * _TOKEN_BYTES
        return memoryview(bytes(self._bytes[first : first + num_tokens * _TOKEN_BYTES]))


def _hash(before: bytes, data: bytes | memoryview) -> bytes:
    state = hashlib.sha256(before)
    state.update(data)
    return state.digest()[:NAME_BYTES]
