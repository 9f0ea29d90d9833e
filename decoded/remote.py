"""One remote prefill as decoded sees it: ask a peer, let the state land in the slot, time the parts.

Knows the net layer's PeerClient and the backend's Generation; decides nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from common.backend import Generation
from common.errors import PdError, TransferTimeout
from common.net.pool import PeerClient, RemotePrefill, RemoteRequest, TransferReport
from common.request import Request, RequestReport

_WATCH_S = 0.5
_AWAY_S = 5.0
_MOST_TURNS = 10.0
"""So many times stream.progress_timeout a prefill may wait for others of ours at the same peer."""


@dataclass(slots=True)
class RemoteAttempt:
    """A prefill under way at one peer; `cancel` may be called at any time."""

    client: PeerClient
    prefill: RemotePrefill
    sent_at: float
    progress_timeout_s: float
    has_alternative: Callable[[], bool]

    async def wait(self) -> TransferReport:
        """Until COMPLETE is verified.

        Raises:
            TransferTimeout: nothing came for `progress_timeout_s`, or the peer is away and another one is not.
            PeerError, TransferError: the peer refused or failed, or the state did not arrive.
        """
        waiter = asyncio.ensure_future(self.prefill.wait())
        # Whoever leaves meanwhile must not leave an exception that nobody looked at.
        waiter.add_done_callback(lambda w: w.cancelled() or w.exception())
        try:
            await self._watch(waiter)
            return waiter.result()
        finally:
            if not waiter.done():
                waiter.cancel()
                self.prefill.cancel()

    async def _watch(self, waiter: asyncio.Future[TransferReport]) -> None:
        """Return when it is done; raise when waiting on makes no sense."""
        last = self.prefill.progress
        moved_at = seen_at = others_at = time.monotonic()
        num_moves = last.num_peer_moves
        while not (await asyncio.wait([waiter], timeout=_WATCH_S))[0]:
            now, progress, name = time.monotonic(), self.prefill.progress, self.client.name
            is_here = self.client.state in ("ready", "draining")
            # A queued stream is silent by nature: then the peer's heartbeat counts.
            if progress != last or (is_here and not progress.first_chunk_at):
                last, moved_at = progress, now
            if progress.num_peer_moves != num_moves:
                num_moves, others_at = progress.num_peer_moves, now
            if is_here:
                seen_at = now
            elif now - seen_at > _AWAY_S and self.has_alternative():
                raise TransferTimeout(f"peer {name} is away for {_AWAY_S:g} s and another one is not")
            # While it works for others of ours, who go first, this one has its turn later; but not for ever.
            silent_s = max(now - max(moved_at, others_at), (now - moved_at) / _MOST_TURNS)
            if silent_s > self.progress_timeout_s:
                limit = f"{self.progress_timeout_s:g} s (stream.progress_timeout)"
                raise TransferTimeout(f"peer {name} sent neither state nor progress for {limit}")

    async def verified_tokens(self) -> int:
        """After a failure: how much of the prompt's state is right, and can be continued by every layer.

        Returns when nothing can touch the state any more.
        """
        await self.prefill.closed()
        return self.prefill.report.verified_tokens

    def cancel(self) -> None:
        """The peer stops within one chunk."""
        self.prefill.cancel()


def start_remote(
    client: PeerClient,
    generation: Generation,
    request: Request,
    *,
    start: int,
    held: int | None,
    now: float,
    progress_timeout_s: float,
    has_alternative: Callable[[], bool],
) -> RemoteAttempt:
    """Send Prefill for prompt tokens [0, n-1), of which [0, start) is held here.

    What the peer lacks of that is sent along where `held` says of how much it has the state; None: nothing is.

    Raises PeerDraining or LinkLost when the peer is not ready.
    """
    wanted = RemoteRequest(
        request_id=request.request_id,
        tokens=request.prompt_tokens[:-1],
        start=start,
        deadline_s=request.deadline_s,
        due_s=request.due_s,
        priority=request.priority,
        tenant_salt=request.tenant.encode(),
        pushes=held is not None,
        held=held or 0,
    )
    source, sink = generation.source if held is not None else None, generation.sink
    try:
        prefill = client.prefill(wanted, sink, source)
    except PdError:
        generation.keep(start)  # nobody writes to this sink: what was held before is held still
        raise
    return RemoteAttempt(client, prefill, now, progress_timeout_s, has_alternative)


def record_transfer(report: RequestReport, transfer: TransferReport, sent_at: float) -> None:
    """Fill the remote parts of the timing, and the codec.

    The peer's durations start at Accepted, whose arrival is the one instant both clocks share up to a one-way delay, so
    the parts join without a gap: sent .. accepted + queue | prefill | what was left of the transfer. Where Accepted was
    held up and the state was not, the queue is what the prefill leaves of the time until the last byte.
    """
    timing, total_s = report.timing, transfer.last_byte_at - sent_at
    prefill_s = min(transfer.prefill_s, total_s)
    queue_s = min(transfer.accepted_at - sent_at + transfer.remote_queue_s, total_s - prefill_s)
    timing.remote_queue_s += queue_s
    timing.prefill_s += prefill_s
    timing.transfer_s += total_s - prefill_s - queue_s
    report.codec = transfer.codec
