"""Large buffers that are used again: fresh memory costs a page fault for every 4 KiB, together more than AES does.

One pool for the process, bounded. Whoever takes a buffer owns it until it gives it back, or forgets it, which is no
harm. Any thread may call. Used for sealed payloads and for what they hold; knows neither.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MIN_BYTES = 64 << 10
MAX_SPARE_BYTES = 64 << 20
_MARGIN_BYTES = 64
"""So that a piece of a power of two fits together with its tag."""


class BufferPool:
    """Buffers by size, each a power of two and a little more."""

    def __init__(self, max_spare_bytes: int = MAX_SPARE_BYTES) -> None:
        self._max_spare_bytes = max_spare_bytes
        self._spare: dict[int, list[bytearray]] = {}

    @property
    def spare_bytes(self) -> int:
        """Memory of the buffers that nobody has."""
        return sum(size * len(spare) for size, spare in tuple(self._spare.items()))

    def take(self, num_bytes: int) -> memoryview:
        """So many bytes with anything in them."""
        if num_bytes < MIN_BYTES:
            return memoryview(bytearray(num_bytes))
        size = _size_of(num_bytes)
        try:
            # One operation: another thread may take the last one.
            buffer = self._spare.setdefault(size, []).pop()
        except IndexError:
            buffer = bytearray(size)
        return memoryview(buffer)[:num_bytes]

    def give_back(self, view: memoryview | bytes) -> None:
        """Nobody looks at it any more. What is not of this pool, or too much, is forgotten."""
        buffer = view.obj if isinstance(view, memoryview) else None
        if not isinstance(buffer, bytearray) or len(buffer) != _size_of(len(buffer)):
            return
        if self.spare_bytes + len(buffer) <= self._max_spare_bytes:
            self._spare.setdefault(len(buffer), []).append(buffer)


def join_into(parts: Sequence[bytes | memoryview], out: memoryview) -> None:
    """Copy the parts one after another to the start of `out`, without holding the GIL."""
    at = 0
    for part in parts:
        if part:
            np.copyto(np.frombuffer(out[at : at + len(part)], np.uint8), np.frombuffer(part, np.uint8))
            at += len(part)


def _size_of(num_bytes: int) -> int:
    return (1 << max(0, num_bytes - _MARGIN_BYTES - 1).bit_length()) + _MARGIN_BYTES if num_bytes >= MIN_BYTES else 0


BUFFERS = BufferPool()
