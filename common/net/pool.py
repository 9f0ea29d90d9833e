"""decoded's side: one PeerClient per configured prefilld. (Interface first; the transport follows.)"""

from __future__ import annotations

from collections.abc import Callable

from common.backend import StateSink
from common.net.options import (
    LinkOptions,
    LocalEnd,
    PeerState,
    RemoteRequest,
    Trace,
    TransferProgress,
    TransferReport,
)

__all__ = ["LinkOptions", "LocalEnd", "PeerClient", "RemotePrefill", "RemoteRequest", "TransferReport"]


class RemotePrefill:
    """One prefill at a peer."""

    @property
    def progress(self) -> TransferProgress:
        """A snapshot of how far it is."""
        raise NotImplementedError

    @property
    def report(self) -> TransferReport:
        """What arrived so far, also after a failure."""
        raise NotImplementedError

    async def wait(self) -> TransferReport:
        """Until COMPLETE is verified. Raises PeerError or TransferError."""
        raise NotImplementedError

    async def closed(self) -> None:
        """Until nothing of this prefill can touch the sink's memory any more (after cancel or a failure)."""
        raise NotImplementedError

    def cancel(self) -> None:
        """The peer stops within one chunk. Idempotent."""
        raise NotImplementedError


class PeerClient:
    """One configured peer: keeps a session to it alive and asks it for prefills."""

    def __init__(
        self, name: str, host: str, port: int, *, local: LocalEnd, options: LinkOptions, trace: Trace | None = None
    ) -> None:
        self.name, self.host, self.port = name, host, port
        self.local, self.options, self.trace = local, options, trace
        self.state: PeerState = "connecting"
        self.reason = "not connected yet"
        self.num_streams = 0
        self.on_state: Callable[[PeerClient], None] | None = None

    async def start(self) -> None:
        """Begin to connect; returns at once."""
        raise NotImplementedError

    async def close(self) -> None:
        """Cancel all streams, tell the peer, close the links."""
        raise NotImplementedError

    def status(self) -> dict[str, object]:
        """What `peers` shows."""
        raise NotImplementedError

    def prefill(self, request: RemoteRequest, sink: StateSink) -> RemotePrefill:
        """Ask the peer. Raises PeerDraining or LinkLost at once when it is not ready."""
        raise NotImplementedError
