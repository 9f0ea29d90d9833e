"""Worker threads that encode, seal, open, hash and decode, so that the event loop does not. Owns one Codec per thread.

Used by remote.py, server_stream.py and link.py. Small work is done at once: a thread costs more than the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from common.errors import ChecksumMismatch
from common.wire.codec import Codec, Encoded, TensorRun, place
from common.wire.digest import segment_digest
from common.wire.framing import Unopened
from common.wire.seal import SealJob

T = TypeVar("T")
INLINE_BYTES = 32 << 10
_INLINE_HASH_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Verification:
    """A segment's encoded bytes and what they must be. `is_apart`: raw ones are not in the sink's memory yet."""

    codec: str
    digest: bytes
    views: Sequence[memoryview]
    is_apart: bool
    shape: Sequence[TensorRun]

    def run(self, codec: Codec, sink_views: Callable[[], Sequence[memoryview]]) -> None:
        """Compare the digest, then decode or copy into the sink's views unless the bytes are there already."""
        found = segment_digest(self.views)
        if found != self.digest:
            raise ChecksumMismatch(f"the segment's digest is {found.hex()}, announced was {self.digest.hex()}")
        if self.codec != "raw":
            whole = self.views[0] if len(self.views) == 1 else memoryview(b"".join(self.views))
            codec.decode(self.codec, whole, sink_views(), self.shape)
        elif self.is_apart:
            place(self.views, sink_views())


class CodecPool:
    """A few threads with a Codec each; `clock` is read in them."""

    def __init__(self, num_threads: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="codec")
        self._free: list[Codec] = []

    def close(self) -> None:
        """Let running work end and take no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode(
        self, codec: str, buffers: Sequence[memoryview], shape: Sequence[TensorRun]
    ) -> tuple[Encoded, float]:
        """Encode and hash; see Codec.encode. Also the seconds that took, without waiting for a thread."""

        def work(c: Codec) -> tuple[Encoded, float]:
            began = self._clock()
            return c.encode(codec, buffers, shape), self._clock() - began

        return await self._run(_size(shape), codec == "raw", work)

    async def verify(self, segment: Verification, sink_views: Callable[[], Sequence[memoryview]]) -> None:
        """Check the digest over the encoded bytes, then put what they hold into `sink_views()`.

        Raises:
            ChecksumMismatch, BadMessage: these are not the bytes that were sent; nothing was decoded, or only a part.
        """
        is_hash = segment.codec == "raw" and not segment.is_apart
        await self._run(_size(segment.shape), is_hash, lambda c: segment.run(c, sink_views))

    async def open(self, unopened: Unopened) -> memoryview:
        """The payload of a sealed link. Raises SealBroken."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, unopened.run)

    def seal(self, job: SealJob) -> asyncio.Future[memoryview]:
        """Begin to seal a payload."""
        return asyncio.get_running_loop().run_in_executor(self._threads, job.run)

    async def _run(self, num_bytes: int, is_hash: bool, work: Callable[[Codec], T]) -> T:
        if num_bytes <= (_INLINE_HASH_BYTES if is_hash else INLINE_BYTES):
            return self._with_codec(work)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._with_codec, work)

    def _with_codec(self, work: Callable[[Codec], T]) -> T:
        codec = self._free.pop() if self._free else Codec()
        try:
            return work(codec)
        finally:
            self._free.append(codec)


def _size(shape: Sequence[TensorRun]) -> int:
    return sum(run.num_bytes for run in shape)
