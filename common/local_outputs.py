"""What generations and prefill jobs of a LocalBackend have in common: their outputs, and views of their slot's memory.

Lives on the event loop. Knows the worker and its sequences; no torch, no sockets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from common.backend import ComputedSegment, Marks
from common.errors import EngineDead, RequestFailed
from common.layout import StateLayout
from common.sched.executor import Slot
from common.sched.prefixes import Prefixes
from common.sched.specs import plan_segments
from common.worker import Item

if TYPE_CHECKING:
    from common.local_backend import LocalBackend

T = TypeVar("T")


def cache_failed(error: BaseException) -> RequestFailed:
    """What ends a request whose cached state could not be used."""
    return error if isinstance(error, RequestFailed) else RequestFailed(f"cached state: {error}")


class LocalSink:
    """Import memory of one slot; of one transfer attempt."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot

    def buffers(self, start: int, stop: int, layers: tuple[int, ...]) -> tuple[memoryview, ...]:
        """Writable views of the segment's rows. Raises RequestFailed once the sequence is gone."""
        return self._slot.writable(start, stop, layers)

    def landed(self, start: int, stop: int, layers: tuple[int, ...]) -> None:
        """The segment is in place."""
        self._slot.landed(start, stop, layers)


class LocalSource:
    """State that a slot holds, in parts. `chunk_tokens`, `segment_bytes`: how a prefill's state is cut."""

    def __init__(self, layout: StateLayout, slot: Slot, chunk_tokens: int, segment_bytes: int) -> None:
        self._layout, self._slot = layout, slot
        self._chunk_tokens, self._segment_bytes = chunk_tokens, segment_bytes

    def segments(self, num_tokens: int, held: int = 0) -> Iterator[ComputedSegment]:
        """All that a continuation at `num_tokens` needs beyond [0, held)."""
        return self.between((held, num_tokens), (held, num_tokens))

    def between(self, span: tuple[int, int], wanted: tuple[int, int]) -> Iterator[ComputedSegment]:
        """What tokens [span) are for a receiver that holds [0, wanted[0]) and goes on at wanted[1]."""
        for start in range(span[0], span[1], self._chunk_tokens):
            chunk = (start, min(start + self._chunk_tokens, span[1]))
            for plan in plan_segments(self._layout, chunk, wanted, self._segment_bytes):
                buffers = self._slot.exported(plan.start, plan.stop, plan.layers)
                yield ComputedSegment(
                    plan.start, plan.stop, plan.layers, buffers, time.monotonic(), is_last=plan.is_last
                )


class Outputs(Generic[T]):
    """What an owner of sequences puts out: a queue that ends once, with or without an error.

    `prefixes`: the names of its prompt's prefixes, where its state goes to the prefix cache.
    """

    def __init__(self, backend: LocalBackend, prefixes: Prefixes | None = None) -> None:
        self._backend, self.prefixes = backend, prefixes
        self._queue: asyncio.Queue[T | RequestFailed | EngineDead | None] = asyncio.Queue()
        self.marks = Marks(opened_at=time.monotonic())

    def push(self, item: Item) -> None:
        """One output from the engine, on the event loop."""
        raise NotImplementedError

    def __aiter__(self) -> AsyncIterator[T]:
        return self._items()

    async def _items(self) -> AsyncIterator[T]:
        while (item := await self._queue.get()) is not None:
            if isinstance(item, RequestFailed | EngineDead):
                self._queue.put_nowait(item)
                raise item
            yield item
        # Whoever asks again gets the same end, at once.
        self._queue.put_nowait(None)

    def _source(self, slot: Slot) -> LocalSource:
        """What a slot of ours holds, cut as a prefill's state is."""
        options = self._backend.worker.options
        return LocalSource(self._backend.info.layout, slot, options.chunk_tokens, options.segment_bytes)

    @property
    def _is_over(self) -> bool:
        return self not in self._backend.owners

    def _finish(self, last: RequestFailed | EngineDead | None) -> None:
        if not self._is_over:
            del self._backend.owners[self]
            self._queue.put_nowait(last)
