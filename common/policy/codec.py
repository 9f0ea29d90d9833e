"""Which codec a segment gets: the wanted one, unless encoding takes longer than the bytes it saves would on the wire.

Ratio and speed are what was measured on earlier segments; now and then the wanted codec is tried again all the same,
since state changes. Pure; asked by net/server_stream.py.
"""

from __future__ import annotations

from dataclasses import dataclass

# How fast the averages follow.
WEIGHT = 0.1
# One in so many segments is encoded though it did not pay so far.
TRY_EVERY = 64


@dataclass(slots=True)
class CodecChoice:
    """What is known about one codec at one daemon (the CodecChooser protocol).

    Attributes:
        saved: part of the raw bytes that encoding takes away.
        s_per_byte: seconds of encoding for each raw byte.
    """

    saved: float = 0.0
    s_per_byte: float = 0.0
    _num_skipped: int = 0

    def note(self, raw_bytes: int, encoded_bytes: int, seconds: float) -> None:
        """A segment was encoded by the wanted codec, in one thread."""
        if not raw_bytes:
            return
        saved, cost = 1.0 - encoded_bytes / raw_bytes, seconds / raw_bytes
        weight = WEIGHT if self.s_per_byte else 1.0
        self.saved += weight * (saved - self.saved)
        self.s_per_byte += weight * (cost - self.s_per_byte)

    def pays(self, bps: float) -> bool:
        """Whether the next segment is to be encoded, on a path of so many bits per second; 0 is not known."""
        if not bps or not self.s_per_byte or self.s_per_byte <= self.saved * 8.0 / bps:
            self._num_skipped = 0
            return True
        self._num_skipped += 1
        if self._num_skipped >= TRY_EVERY:
            self._num_skipped = 0
            return True
        return False
