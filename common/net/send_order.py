"""In which order one client's states are sent, as the daemon's SendOrder has it: asked anew every few milliseconds.

Knows streams by what is left of them and when they are due; the session keeps the order. Owned by ServerPeer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from common.linkfacts import SendOrder
from common.net.link import now
from common.net.server_stream import ServerStream
from common.wire.serving import ServerSession

ASK_AGAIN_S = 0.01


class SendOrdering:
    """`path_bps()`: what the path carries, bits per second; 0 is not known. Without `order` states go as they came."""

    def __init__(self, session: ServerSession, path_bps: Callable[[], float]) -> None:
        self._session, self._path_bps = session, path_bps
        self.order: SendOrder | None = None
        self._asked_at = 0.0

    def look(self, streams: Iterable[ServerStream]) -> None:
        """Before anything is sent: all streams of the client."""
        at = now()
        if self.order is None or at - self._asked_at < ASK_AGAIN_S:
            return
        self._asked_at, bps = at, self._path_bps()
        waiting = [s.sending(bps) for s in streams if s.has_waiting]
        self._session.arrange(s.seq_id for s in (self.order(waiting, at) if len(waiting) > 1 else waiting))
