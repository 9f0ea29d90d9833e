"""One remote prefill as decoded sees it: ask a peer, let the state land in the slot, time the parts.

Knows the net layer's PeerClient and the backend's Generation; decides nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from common.backend import Generation
from common.errors import TransferTimeout
from common.net.pool import PeerClient, RemotePrefill, RemoteRequest, TransferReport
from common.request import Request, RequestReport


@dataclass(slots=True)
class RemoteAttempt:
    """A prefill under way at one peer; `cancel` may be called at any time."""

    client: PeerClient
    prefill: RemotePrefill
    sent_at: float
    progress_timeout_s: float

    async def wait(self) -> TransferReport:
        """Until COMPLETE is verified.

        Raises:
            TransferTimeout: nothing came for `progress_timeout_s`.
            PeerError, TransferError: the peer refused or failed, or the state did not arrive.
        """
        waiter = asyncio.ensure_future(self.prefill.wait())
        try:
            last: object = None
            while True:
                done, _ = await asyncio.wait([waiter], timeout=self.progress_timeout_s)
                if done:
                    return waiter.result()
                seen = self.prefill.progress
                if seen == last:
                    raise TransferTimeout(
                        f"peer {self.client.name} sent neither state nor progress for {self.progress_timeout_s:g} s "
                        f"(stream.progress_timeout)"
                    )
                last = seen
        finally:
            if not waiter.done():
                waiter.cancel()
                self.prefill.cancel()

    def cancel(self) -> None:
        """The peer stops within one chunk."""
        self.prefill.cancel()


def start_remote(
    client: PeerClient, generation: Generation, request: Request, now: float, progress_timeout_s: float
) -> RemoteAttempt:
    """Send Prefill for prompt tokens [0, n-1). Raises PeerDraining or LinkLost when the peer is not ready."""
    wanted = RemoteRequest(
        request_id=request.request_id,
        tokens=request.prompt_tokens[:-1],
        start=0,
        deadline_s=request.deadline_s,
        priority=request.priority,
        tenant_salt=b"",
    )
    return RemoteAttempt(client, client.prefill(wanted, generation.sink), now, progress_timeout_s)


def record_transfer(report: RequestReport, transfer: TransferReport, sent_at: float) -> None:
    """Fill the remote parts of the timing.

    The peer's durations start at Accepted, whose arrival is the one instant both clocks share up to a one-way delay, so
    the parts join without a gap: sent .. accepted + queue | prefill | what was left of the transfer.
    """
    timing = report.timing
    computed_at = transfer.accepted_at + transfer.remote_queue_s + transfer.prefill_s
    timing.remote_queue_s += transfer.accepted_at - sent_at + transfer.remote_queue_s
    timing.prefill_s += transfer.prefill_s
    timing.transfer_s += max(0.0, transfer.last_byte_at - computed_at)
    report.wire_bytes += transfer.wire_bytes
    report.raw_bytes += transfer.raw_bytes
    report.codec = transfer.codec
