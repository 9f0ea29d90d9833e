"""What a link is about to write, in order, while worker threads seal the payloads in it. Owned by link.py.

A record's number is its place in this order: whichever is sealed first waits until all before it were taken.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from common.errors import LinkLost
from common.net.codecs import INLINE_BYTES, CodecPool
from common.wire.buffers import BUFFERS
from common.wire.framing import Out, Part
from common.wire.seal import SealJob


class SealQueue:
    """Parts in, parts out. `num_bytes` is what is in it, on the wire. `on_sealed` is called when one more is ready."""

    def __init__(self, codecs: CodecPool | None, on_sealed: Callable[[], None]) -> None:
        self._codecs, self._on_sealed = codecs, on_sealed
        self._parts: deque[Part | asyncio.Future[memoryview]] = deque()
        self._taken: deque[tuple[int, memoryview]] = deque()
        self._num_taken_bytes = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._parts)

    def push(self, part: Out) -> None:
        """Put it last; a large payload is sealed meanwhile."""
        if not isinstance(part, SealJob):
            self._parts.append(part)
            self.num_bytes += len(part)
            return
        self.num_bytes += part.sealed_bytes
        if part.num_bytes <= INLINE_BYTES or self._codecs is None:
            self._parts.append(part.run())
            return
        future = self._codecs.seal(part)
        future.add_done_callback(self._sealed)
        self._parts.append(future)

    def _sealed(self, future: asyncio.Future[memoryview]) -> None:
        if not future.cancelled():
            future.exception()  # so that asyncio does not complain when the link is gone and nobody takes it
        self._on_sealed()

    def take(self) -> Part | None:
        """The first part, when it is ready.

        Raises:
            LinkLost: its payload was not sealed, so that nothing can follow.
        """
        if not self._parts:
            return None
        part = self._parts[0]
        if isinstance(part, asyncio.Future):
            if not part.done():
                return None
            error = asyncio.CancelledError() if part.cancelled() else part.exception()
            if error is not None:
                raise LinkLost(f"a payload could not be sealed: {error!r}")
            part = part.result()
            self._taken.append((self._num_taken_bytes + len(part), part))
        self._parts.popleft()
        self.num_bytes -= len(part)
        self._num_taken_bytes += len(part)
        return part

    def written(self, num_left: int) -> None:
        """All that was taken but the last `num_left` bytes is with the kernel: its buffers are used again."""
        while self._taken and self._taken[0][0] <= self._num_taken_bytes - num_left:
            BUFFERS.give_back(self._taken.popleft()[1])

    def clear(self) -> None:
        """The link is gone."""
        self._parts.clear()
        self._taken.clear()
        self.num_bytes = 0
