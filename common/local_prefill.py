"""One prefill job in a LocalBackend: a sequence that samples nothing, and goes on from what the prefix cache has.

Lives on the event loop. Made by LocalBackend.prefill.
"""

from __future__ import annotations

import asyncio
import logging
import time
from math import inf
from typing import TYPE_CHECKING

from common.backend import ChunkDone, ComputedSegment, PrefillTask, StateSink
from common.errors import EngineDead, RequestFailed
from common.local_outputs import LocalSink, Outputs, cache_failed
from common.sched.scheduler import Event, Scheduler
from common.sched.sequence import Sequence
from common.worker import Item

if TYPE_CHECKING:
    from common.local_backend import LocalBackend
    from common.state_cache import StateCache

log = logging.getLogger(__name__)


class LocalPrefill(Outputs[ComputedSegment | ChunkDone]):
    """One prefill job: a sequence that samples nothing."""

    def __init__(self, backend: LocalBackend, task: PrefillTask) -> None:
        super().__init__(backend)
        self._task, cache = task, backend.cache if task.uses_cache else None
        self._seq = seq = Sequence(
            seq_id=next(backend.ids),
            owner=self,
            tokens=list(task.tokens),
            slot=backend.executor.new_slot(len(task.tokens)),
            start=task.start,
            priority=task.priority,
            arrived_at=(now := time.monotonic()),
            due_at=inf if task.due_s is None else now + task.due_s,
            is_held=True,
            keeps_state=cache is not None,
        )
        self.num_cached_tokens = 0
        self._wants_push: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        backend.owners[self] = None
        backend.worker.post(lambda scheduler: scheduler.add(seq))
        self._beginning: asyncio.Task[None] | None = None
        if cache is None:
            self._begin(0, wants_push=task.is_pushed and not task.held)
        else:
            self._beginning = asyncio.create_task(self._look_up(cache))
            self._beginning.add_done_callback(self._looked_up)

    async def wants_push(self) -> bool:
        """Whether the state of [0, start) must come from outside."""
        return await asyncio.shield(self._wants_push)

    @property
    def sink(self) -> StateSink:
        """Memory for the state of [held, start)."""
        return LocalSink(self._seq.slot)

    def import_done(self) -> None:
        """That state is in place: computing goes on from there."""

        def join(scheduler: Scheduler) -> list[Event]:
            seq = self._seq
            if seq.seq_id not in scheduler.accounts or seq.num_computed_tokens:
                return []
            seq.num_computed_tokens, seq.num_offered, seq.is_held = seq.start, self._task.held, False
            self._backend.worker.offer_state(seq, seq.start, is_point=True)
            return scheduler.advance(seq)

        self.num_cached_tokens = self._task.start
        self._backend.worker.post(join)

    def set_paused(self, paused: bool) -> None:
        """No further chunk while paused; the running one ends first."""

        def hold(scheduler: Scheduler) -> list[Event]:
            self._seq.is_held = paused
            return scheduler.advance(self._seq)

        self._backend.worker.post(hold)

    def release(self) -> None:
        """Free the state; before the end this cancels. Idempotent."""
        if self._beginning is not None:
            self._beginning.cancel()
        self._wants_push.cancel()
        self._backend.worker.post(lambda scheduler: scheduler.cancel(self))
        self._finish(None)

    def push(self, item: Item) -> None:
        """One output from the engine, on the event loop."""
        if self._is_over:
            return
        if isinstance(item, RequestFailed | EngineDead):
            self._finish(item)
        elif isinstance(item, ComputedSegment | ChunkDone):
            self._queue.put_nowait(item)
            if isinstance(item, ChunkDone) and item.stop == len(self._task.tokens):
                self._finish(None)

    async def _look_up(self, cache: StateCache) -> None:
        """Have what is cached in the slot, and begin behind it."""
        task, slot = self._task, self._seq.slot
        found = await cache.look_up(task.tokens, task.salt, len(task.tokens))
        self.prefixes, self._seq.split_at = found.prefixes, found.split_at
        hold = found.hold
        if hold is None:
            self._begin(0, wants_push=task.is_pushed and not task.held)
            return
        # What is pushed lies behind what was said to be held; a point behind all of it is better.
        wants_push = task.is_pushed and task.held <= hold.num_tokens < task.start
        target = task.start if wants_push else hold.num_tokens
        try:
            if not wants_push or task.held:
                slot.prepare_import(target)
                await asyncio.to_thread(cache.fill, hold, slot, target)
            self._begin(hold.num_tokens, wants_push=wants_push)
        finally:
            hold.release()

    def _looked_up(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if not isinstance(error, RequestFailed):
            log.error("what is cached of a prompt could not be used", exc_info=error)
        if not self._wants_push.done():
            self._wants_push.set_result(False)  # whoever waits for it hears of the error from the job
        if not self._is_over:
            self.push(cache_failed(error))

    def _begin(self, num_cached: int, *, wants_push: bool) -> None:
        """Compute from there on, once the rest of the beginning was pushed if it is."""
        if not self._wants_push.done():
            self._wants_push.set_result(wants_push)
        if wants_push:
            if not self._task.held:
                self._seq.slot.prepare_import(self._task.start)
            return
        self.num_cached_tokens = num_cached
        self._backend.worker.post(lambda scheduler: self._join(scheduler, num_cached))

    def _join(self, scheduler: Scheduler, num_cached: int) -> list[Event]:
        """On the engine thread: what is cached goes out like computed state, then chunks follow."""
        seq, backend = self._seq, self._backend
        if seq.seq_id not in scheduler.accounts:
            return []
        seq.num_computed_tokens = seq.num_offered = seq.point_at = num_cached
        if num_cached > seq.start:
            began_at = self.marks.prefill_started_at = time.monotonic()
            for segment in self._source(seq.slot).between((seq.start, num_cached), (seq.start, seq.num_prompt_tokens)):
                backend.worker.hand_out(seq, segment)
            backend.worker.hand_out(seq, ChunkDone(seq.start, num_cached, began_at, began_at, is_cached=True))
            if not seq.num_remaining:
                self.marks.prefill_ended_at = began_at
        seq.is_held = False
        return scheduler.advance(seq)
