"""prefilld's side: accepts sessions and runs one handler task per requested stream. (Interface first.)"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from common.backend import ComputedSegment
from common.errors import PeerError
from common.net.options import LinkOptions, LocalEnd, PeerId, RemoteRequest, Trace

__all__ = ["LinkOptions", "LocalEnd", "PrefillServer", "ServerStream"]


class ServerStream:
    """One request of a decoded, as the handler sees it."""

    request: RemoteRequest
    peer: PeerId

    async def accept(self, num_queued: int = 0) -> None:
        """Tell the peer that it is queued behind `num_queued` others."""
        raise NotImplementedError

    async def refuse(self, error: PeerError) -> None:
        """Refuse instead of accepting."""
        raise NotImplementedError

    async def started(self) -> None:
        """The first chunk begins."""
        raise NotImplementedError

    async def progress(self, num_computed: int) -> None:
        """Tokens [0, num_computed) are computed."""
        raise NotImplementedError

    async def send_segment(self, segment: ComputedSegment) -> None:
        """Encode and queue; returns when queued. Buffers stay referenced until acknowledged."""
        raise NotImplementedError

    @property
    def staged_bytes(self) -> int:
        """Raw bytes queued or sent and not yet acknowledged."""
        raise NotImplementedError

    async def wait_staged_below(self, num_bytes: int) -> None:
        """Until fewer raw bytes are unacknowledged and the peer is connected."""
        raise NotImplementedError

    async def complete(self, num_tokens: int, prefill_s: float) -> None:
        """Send COMPLETE; returns when the peer verified everything."""
        raise NotImplementedError

    async def fail(self, error: PeerError) -> None:
        """End the stream with an error the peer will raise."""
        raise NotImplementedError


class PrefillServer:
    """Listens for decodeds."""

    def __init__(
        self,
        local: LocalEnd,
        options: LinkOptions,
        handler: Callable[[ServerStream], Awaitable[None]],
        *,
        load: Callable[[], Mapping[str, float]] | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.local, self.options, self.handler = local, options, handler
        self.load, self.trace = load, trace

    @property
    def port(self) -> int:
        """The bound port."""
        raise NotImplementedError

    @property
    def sessions(self) -> list[dict[str, object]]:
        """One dict per connected decoded, for `peers`."""
        raise NotImplementedError

    async def start(self, host: str, port: int) -> None:
        """Bind. Raises StartupError (address in use, or a non-loopback address without a key)."""
        raise NotImplementedError

    async def close(self) -> None:
        """Cancel every stream and close every link."""
        raise NotImplementedError

    def set_draining(self, is_draining: bool) -> None:
        """Tell every peer; new streams are refused while draining."""
        raise NotImplementedError
