"""`decodectl link bench`: bytes that mean nothing over a session's data links, to see what they carry.

The client asks with Measure and counts Filler; the server sends it where no stream has anything for a link. Used by
PeerClient and ServerPeer.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from common.errors import BadMessage, LinkLost, LocalProtocolError, TransferTimeout
from common.wire.messages import MAX_MEASURE_BYTES, Filler, Measure

FILLER = memoryview(bytes(1 << 20))


@dataclass(frozen=True, slots=True)
class Measurement:
    """What came: payload bytes, seconds from asking, and from the first byte on."""

    num_bytes: int
    seconds: float
    transfer_s: float

    @property
    def goodput_bps(self) -> float:
        """Bits per second of payload, the asking not counted."""
        return 8.0 * self.num_bytes / self.transfer_s


class FillerSource:
    """The server's end: what is still to be sent of the latest Measure."""

    def __init__(self) -> None:
        self._no, self._left = 0, 0

    def start(self, message: Measure) -> None:
        """Begin, in place of an earlier one; with 0 bytes stop."""
        self._no, self._left = message.no, message.num_bytes

    def take(self, most: int) -> tuple[Filler, memoryview] | None:
        """The next frame, of at most so many bytes; None when nothing is left."""
        num = min(self._left, most, len(FILLER))
        if not num:
            return None
        self._left -= num
        return Filler(self._no, num), FILLER[:num]


class Measuring:
    """The client's end: one measurement at a time."""

    def __init__(self) -> None:
        self._no = self._wanted = self._got = 0
        self._asked_at = self._first_at = 0.0
        self._first_bytes = 0
        self._done: asyncio.Future[Measurement] | None = None

    def ask(self, num_bytes: int, now: float) -> Measure:
        """The message that asks.

        Raises:
            LocalProtocolError: another measurement runs, or so many bytes are not allowed.
        """
        if self._done is not None and not self._done.done():
            raise LocalProtocolError("a measurement of this peer's links is running")
        if not 1 <= num_bytes <= MAX_MEASURE_BYTES:
            raise LocalProtocolError(f"{num_bytes} bytes cannot be measured, 1 to {MAX_MEASURE_BYTES} can")
        self._no, self._wanted, self._got = (self._no + 1) % (1 << 31), num_bytes, 0
        self._asked_at, self._done = now, asyncio.get_running_loop().create_future()
        return Measure(self._no, num_bytes)

    async def wait(self, timeout_s: float) -> Measurement:
        """Until all bytes came.

        Raises:
            TransferTimeout: they did not within `timeout_s`.
            LinkLost: the session was lost.
        """
        if self._done is None:
            raise LocalProtocolError("no measurement was asked for")
        try:
            return await asyncio.wait_for(self._done, timeout_s)
        except TimeoutError:
            got = f"{self._got} of {self._wanted} bytes"
            raise TransferTimeout(f"the links brought {got} within {timeout_s:g} s") from None

    def stop(self) -> Measure:
        """The message that ends what is under way."""
        return Measure(self._no, 0)

    def arrived(self, filler: Filler, now: float) -> None:
        """A frame of filler. Raises BadMessage when it is more than was asked for."""
        if filler.no != self._no or self._done is None or self._done.done():
            return  # of one that was given up
        if not self._got:
            self._first_at, self._first_bytes = now, filler.num_bytes
        self._got += filler.num_bytes
        if self._got > self._wanted:
            raise BadMessage(f"FILLER.num_bytes: {self._got} bytes came, asked were {self._wanted}")
        if self._got == self._wanted:
            # The first frame's bytes were on their way before it was whole.
            is_one = self._got == self._first_bytes
            num, since = (self._got, self._asked_at) if is_one else (self._got - self._first_bytes, self._first_at)
            self._done.set_result(Measurement(num, now - self._asked_at, max(now - since, 1e-9)))

    def lost(self, why: str) -> None:
        """The session is gone."""
        if self._done is not None and not self._done.done():
            self._done.set_exception(LinkLost(f"the session was lost while its links were measured: {why}"))
            self._done.exception()  # whoever waits raises it; nobody may wait any more
