"""Worker threads that encode, hash and decode segments, so that the event loop does not. Owns one Codec per thread.

Used by remote.py and server_stream.py. Small segments are done at once: a thread costs more than the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from common.errors import ChecksumMismatch
from common.wire.codec import Codec, Encoded, Run
from common.wire.digest import segment_digest

T = TypeVar("T")
_INLINE_BYTES = 32 << 10
_INLINE_RAW_BYTES = 2 << 20


class CodecPool:
    """A few threads with a Codec each."""

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="codec")
        self._free: list[Codec] = []

    def close(self) -> None:
        """Let running work end and take no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode(self, codec: str, buffers: Sequence[memoryview], runs: Sequence[Run]) -> Encoded:
        """Encode and hash; see Codec.encode."""
        num_bytes = sum(n for n, _ in runs)
        return await self._run(codec, num_bytes, lambda c: c.encode(codec, buffers, runs))

    async def verify(
        self,
        codec: str,
        digest: bytes,
        views: Sequence[memoryview],
        sink_views: Callable[[], Sequence[memoryview]],
        runs: Sequence[Run],
    ) -> None:
        """Check the digest over the encoded bytes, then decode them into `sink_views()` unless they are there already.

        Raises:
            ChecksumMismatch, BadMessage: these are not the bytes that were sent; nothing was decoded, or only a part.
        """

        def work(c: Codec) -> None:
            found = segment_digest(views)
            if found != digest:
                raise ChecksumMismatch(f"the segment's digest is {found.hex()}, announced was {digest.hex()}")
            if codec != "raw":
                c.decode(views[0], sink_views(), runs)

        await self._run(codec, sum(n for n, _ in runs), work)

    async def _run(self, codec: str, num_bytes: int, work: Callable[[Codec], T]) -> T:
        if num_bytes <= (_INLINE_RAW_BYTES if codec == "raw" else _INLINE_BYTES):
            return self._with_codec(work)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._with_codec, work)

    def _with_codec(self, work: Callable[[Codec], T]) -> T:
        codec = self._free.pop() if self._free else Codec()
        try:
            return work(codec)
        finally:
            self._free.append(codec)
