"""One request in a LocalBackend: its sequences, where its prompt's state comes from, and what it puts out.

    slot   [ .. cached: from the prefix cache | .. kept: verified of a failed transfer | .. n-1: computed, received ]

Lives on the event loop. Made by LocalBackend.open.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from common.backend import StateSink, StateSource
from common.errors import EngineDead, RequestFailed
from common.local_outputs import LocalSink, Outputs, cache_failed
from common.request import PromptLogprobs, Request, TokenOutput
from common.sched.executor import Slot
from common.sched.scheduler import ChoiceEnded, Event, Scheduler
from common.sched.sequence import Sequence
from common.state_cache import LookUp
from common.worker import Item

if TYPE_CHECKING:
    from common.local_backend import LocalBackend


class LocalGeneration(Outputs[TokenOutput | PromptLogprobs]):
    """One request: its sequences in the engine, and the queue of what they put out."""

    def __init__(self, backend: LocalBackend, request: Request, found: LookUp | None) -> None:
        super().__init__(backend, None if found is None else found.prefixes)
        self._request, self._hold = request, None if found is None else found.hold
        self._num_cached = 0 if self._hold is None else self._hold.num_tokens
        self._filled: asyncio.Future[None] | None = None
        self._open_choices = set(range(request.num_choices))
        self._has_sink = self._has_state = False
        self._num_kept = 0
        self._capacity = min(request.state_tokens, backend.info.max_context)
        sampling, now = request.sampling, time.monotonic()
        choices = [
            Sequence(
                seq_id=next(backend.ids),
                owner=self,
                tokens=list(request.prompt_tokens),
                slot=backend.executor.new_slot(self._capacity),
                sampling=sampling,
                choice=choice,
                seed=sampling.seed if sampling.seed is not None else secrets.randbits(63),
                priority=request.priority,
                arrived_at=now,
                due_at=inf if request.due_s is None else now + request.due_s,
                prompt_logprobs=request.prompt_logprobs,
                split_at=0 if found is None else found.split_at,
                keeps_state=found is not None,
                is_held=True,
            )
            for choice in range(request.num_choices)
        ]
        self._seq = choices[0]
        self._seq.siblings = choices[1:]
        backend.owners[self] = None
        backend.worker.post(lambda scheduler: scheduler.add(choices[0]))

    @property
    def num_cached_tokens(self) -> int:
        """[0, num_cached_tokens) of the prompt was found in the prefix cache."""
        return self._num_cached

    @property
    def num_computed_tokens(self) -> int:
        """How far the engine is with the prompt."""
        return self._seq.num_computed_tokens

    @property
    def sink(self) -> StateSink:
        """Memory for one transfer of [held, n - 1), fresh where nothing was kept; the cache fills in its part."""
        slot = self._renew_slot()
        if not self._num_kept:
            self._fill(slot, self._request.num_prompt_tokens - 1)
        self._has_sink = True
        return LocalSink(slot)

    @property
    def source(self) -> StateSource:
        """What is cached, or was kept of an earlier transfer: as it is until something lands in the next sink."""
        cache, hold = self._backend.cache, self._hold
        if not self._num_kept and cache is not None and hold is not None:
            return cache.source(hold)
        return self._source(self._seq.slot)

    def keep(self, num_tokens: int) -> None:
        """[0, num_tokens) of the latest sink is verified, and nobody writes to it any more.

        Raises:
            RequestFailed: no sink was handed out, or that is not a part of what it was for.
        """
        least, most = max(self._num_kept, self._num_cached), self._request.num_prompt_tokens - 1
        if not self._has_sink or not least <= num_tokens <= most:
            raise RequestFailed(f"{num_tokens} tokens cannot be kept: {least} to {most} of a sink can")
        # With nothing but what is cached the next user gets other memory, as if this had not been said.
        if num_tokens > self._num_cached:
            self._num_kept, self._has_sink = num_tokens, False

    def compute(self) -> None:
        """Compute the rest of the prompt here; also after a failed transfer, in memory no straggler can write to."""
        if self._has_state:
            return
        self._has_state = True
        slot = self._renew_slot()
        if not self._num_kept:
            self._fill(slot, self._num_cached)
        self._join(self._num_kept or self._num_cached)

    def import_done(self, num_tokens: int) -> None:
        """The state of [0, num_tokens) is in place; the sequence joins the batch.

        Raises:
            RequestFailed: `num_tokens` is not n - 1, or no sink was handed out.
        """
        if num_tokens != self._request.num_prompt_tokens - 1 or not (self._has_sink or num_tokens == self._num_kept):
            raise RequestFailed(
                f"import of {num_tokens} tokens was reported, the prompt needs {self._request.num_prompt_tokens - 1}"
            )
        if self._has_state:
            return
        self._has_state = True
        self._join(num_tokens)

    def cancel(self, choice: int | None = None) -> None:
        """Stop one choice or everything, and free its state. Idempotent."""
        self._open_choices -= set(self._open_choices) if choice is None else {choice}
        self._backend.worker.post(lambda scheduler: scheduler.cancel(self, choice))
        self._end_if_done()

    def push(self, item: Item) -> None:
        """One output from the engine, on the event loop."""
        if isinstance(item, RequestFailed | EngineDead):
            self._open_choices.clear()
            self._end(item)
        elif isinstance(item, ChoiceEnded):
            self._open_choices.discard(item.choice)
            self._end_if_done()
        elif isinstance(item, TokenOutput) and item.choice in self._open_choices:
            self._queue.put_nowait(item)
            if item.finish_reason is not None:
                self._open_choices.discard(item.choice)
                self._end_if_done()
        elif isinstance(item, PromptLogprobs):
            self._queue.put_nowait(item)

    def _end_if_done(self) -> None:
        if not self._open_choices:
            self._end(None)

    def _end(self, last: RequestFailed | EngineDead | None) -> None:
        self._finish(last)
        self._let_go()

    async def filled(self) -> None:
        """Until what is cached is in the memory of the latest sink."""
        if self._filled is not None:
            await asyncio.wait([self._filled])

    def _fill(self, slot: Slot, target: int) -> None:
        """Have what is cached copied into a slot from which [0, target) will be gone on from."""
        slot.prepare_import(target)
        cache, hold = self._backend.cache, self._hold
        if cache is not None and hold is not None:
            self._filled = asyncio.get_running_loop().run_in_executor(None, cache.fill, hold, slot, target)
            self._filled.add_done_callback(lambda filled: filled.exception())  # of a cancelled request: nobody asks

    def _join(self, num_tokens: int) -> None:
        """The sequence may be scheduled, once what is cached is in place; all else of [0, num_tokens) is."""
        if self._filled is None:
            self._backend.worker.post(self._join_after(num_tokens))
        else:
            self._filled.add_done_callback(lambda filled: self._joined(filled, num_tokens))

    def _joined(self, filled: asyncio.Future[None], num_tokens: int) -> None:
        error = filled.exception()
        self._let_go()
        if error is None:
            self._backend.worker.post(self._join_after(num_tokens))
        elif not self._is_over:
            self.push(cache_failed(error))
            self._backend.worker.post(lambda scheduler: scheduler.cancel(self, has_failed=True))

    def _join_after(self, num_tokens: int) -> Callable[[Scheduler], list[Event]]:
        """For the engine thread: the sequence may be scheduled; state of [0, num_tokens) is there."""

        def join(scheduler: Scheduler) -> list[Event]:
            seq = self._seq
            if seq.seq_id not in scheduler.accounts:
                return []
            seq.num_computed_tokens, seq.num_offered, seq.point_at = num_tokens, self._num_cached, self._num_cached
            if num_tokens > self._num_cached:
                self._backend.worker.offer_state(seq, num_tokens, is_point=True)
            seq.is_held = False
            if seq.num_remaining == 0:
                self.marks.joined_at = time.monotonic()
            return scheduler.advance(seq)

        return join

    def _let_go(self) -> None:
        if self._hold is not None:
            self._hold.release()
            self._hold = None

    def _renew_slot(self) -> Slot:
        """The slot to fill; a new one when a sink to the present one exists."""
        if not self._has_sink:
            return self._seq.slot
        if self._num_kept:
            raise RequestFailed(f"the state of {self._num_kept} tokens was kept, and a sink to it is still in use")
        self._has_sink = False
        old, new = self._seq.slot, self._backend.executor.new_slot(self._capacity)
        self._seq.slot = new

        def forget(scheduler: Scheduler) -> None:
            # Same size, so the books do not change; a sequence cancelled meanwhile freed whichever it had.
            old.free()
            if self._seq.seq_id not in scheduler.accounts:
                new.free()

        self._backend.worker.post(forget)
        return new
