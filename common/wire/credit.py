"""How far each stream of a session may send: absolute offsets over encoded bytes, a reserved minimum for each.

limit >= landed + reserve always holds, and reserve is the largest segment, so the segment at the head of a stream's
queue can always arrive whole: no wait is circular. What is granted beyond the reserve is shared by all streams.
"""

from __future__ import annotations


class CreditPool:
    """Grants of one session. Streams are named by their id."""

    def __init__(self, shared_bytes: int, reserve_bytes: int) -> None:
        self.shared_bytes, self.reserve_bytes = shared_bytes, reserve_bytes
        self._limits: dict[int, int] = {}
        self._landed: dict[int, int] = {}

    @property
    def outstanding_bytes(self) -> int:
        """Granted and not landed, over all streams."""
        return sum(self._limits.values()) - sum(self._landed.values())

    def open(self, stream_id: int) -> int:
        """The first limit of a new stream."""
        self._landed[stream_id] = self._limits[stream_id] = 0
        return self._grant(stream_id)

    def close(self, stream_id: int) -> None:
        """The stream is over; what it had is free for the others."""
        self._limits.pop(stream_id, None)
        self._landed.pop(stream_id, None)

    def limit(self, stream_id: int) -> int:
        """The stream's present limit (0 when it is not open)."""
        return self._limits.get(stream_id, 0)

    def landed(self, stream_id: int, num_bytes: int) -> int:
        """So many more encoded bytes were consumed; answers the new limit."""
        if stream_id not in self._limits:
            return 0
        self._landed[stream_id] += num_bytes
        return self._grant(stream_id)

    def refresh(self) -> dict[int, int]:
        """Raise the limits of streams that were kept short; answers those that moved by at least a quarter window."""
        moved = {}
        for stream_id, before in list(self._limits.items()):
            window = self._window()
            if before - self._landed[stream_id] < window - window // 4 and self._grant(stream_id) > before:
                moved[stream_id] = self._limits[stream_id]
        return moved

    def _window(self) -> int:
        return max(self.reserve_bytes, self.shared_bytes // max(1, len(self._limits)))

    def _grant(self, stream_id: int) -> int:
        limit, landed = self._limits[stream_id], self._landed[stream_id]
        free = max(0, self.shared_bytes - self.outstanding_bytes)
        wanted = min(landed + self._window(), limit + free)
        self._limits[stream_id] = max(limit, landed + self.reserve_bytes, wanted)
        return self._limits[stream_id]
