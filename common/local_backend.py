"""Backend over an engine in this process: turns requests and prefill tasks into sequences, and outputs into iterators.

Lives on the event loop. Knows the worker and the scheduler's sequences; no torch, no sockets, no HTTP. Used by both
daemons, with the torch engine or the fake one behind it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Generic, TypeVar

from common.backend import (
    BackendStats,
    ChunkDone,
    ComputedSegment,
    Generation,
    Marks,
    PrefillJob,
    PrefillTask,
    StateSink,
    StateSource,
)
from common.errors import EngineDead, RequestFailed
from common.layout import ModelInfo, StateLayout
from common.request import PromptLogprobs, Request, TokenOutput
from common.sched.executor import Executor, Slot
from common.sched.scheduler import ChoiceEnded, Event, Scheduler
from common.sched.sequence import Sequence
from common.sched.specs import plan_segments
from common.worker import EngineWorker, Factory, Item, WorkerOptions

T = TypeVar("T")


class LocalBackend:
    """An engine on its own thread, as the daemons see it (common/backend.py has the contract)."""

    info: ModelInfo

    def __init__(self, factory: Factory, options: WorkerOptions) -> None:
        self.worker = EngineWorker(factory, options)
        self.executor: Executor
        self._owners: dict[LocalGeneration | LocalPrefill, None] = {}  # told in the order in which they came
        self._ids = itertools.count(1)
        self._death: EngineDead | None = None

    async def start(self) -> None:
        """Build the engine on its thread. Raises StartupError."""
        await self.worker.start(self._died)
        self.executor = self.worker.executor
        facts = self.executor.facts
        numerics = dict(facts.numerics, chunk_tokens=str(self.worker.options.chunk_tokens))
        self.info = dataclasses.replace(facts, numerics=numerics)

    async def close(self) -> None:
        """Stop the engine thread; whatever runs ends with EngineDead."""
        await self.worker.close()

    async def open(self, request: Request) -> Generation:
        """Reserve state memory for the request and its choices.

        Raises:
            RequestFailed: the prompt can never be served (too long, token ids out of range).
            EngineDead: the engine thread is gone.
        """
        self._check_alive()
        self._check_prompt(request.prompt_tokens, self.info.max_context - 1)
        return LocalGeneration(self, request)

    def prefill(self, task: PrefillTask) -> PrefillJob:
        """Queue the computation of a prompt's state. Raises as `open`."""
        self._check_alive()
        self._check_prompt(task.tokens, self.info.max_context)
        if not 0 <= task.start < len(task.tokens):
            raise RequestFailed(f"start = {task.start} is outside the task's {len(task.tokens)} tokens")
        return LocalPrefill(self, task)

    def state_bytes(self, num_tokens: int, num_choices: int = 1) -> int:
        """State memory that a request of so many tokens reserves."""
        num = min(max(num_tokens, 1), self.info.max_context)
        return num_choices * sum(self.executor.slot_bytes(num).values())

    def stats(self) -> BackendStats:
        """A snapshot; cheap, and empty before the engine has started."""
        worker = self.worker
        if not hasattr(worker, "scheduler"):
            return BackendStats(is_alive=False)
        scheduler = worker.scheduler
        return BackendStats(
            num_running=scheduler.num_running,
            num_rows=scheduler.num_rows,
            num_prefilling=scheduler.num_prefilling,
            num_waiting=scheduler.num_waiting,
            state_bytes=scheduler.accounts.totals(),
            num_steps=worker.num_steps,
            num_prompt_tokens=worker.num_prompt_tokens,
            num_output_tokens=worker.num_output_tokens,
            num_preemptions=scheduler.num_preemptions,
            alone_tokens=scheduler.budget.alone_tokens,
            alone_s=scheduler.budget.alone_s,
            mixed_tokens=scheduler.budget.mixed_tokens,
            mixed_s=scheduler.budget.mixed_s,
            mixed_chunk_tokens=scheduler.budget.last_tokens,
            last_progress_at=worker.last_progress_at,
            is_warm=worker.is_warm,
            is_alive=worker.is_alive,
        )

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDead(str(self._death))

    def _check_prompt(self, tokens: tuple[int, ...], limit: int) -> None:
        if not 1 <= len(tokens) <= limit:
            raise RequestFailed(
                f"the prompt has {len(tokens)} tokens; between 1 and {limit} fit the model's context "
                f"of {self.info.max_context}"
            )
        if min(tokens) < 0 or max(tokens) >= self.info.vocab_size:
            raise RequestFailed(
                f"the prompt's token ids span {min(tokens)} to {max(tokens)}; the model's are 0 to "
                f"{self.info.vocab_size - 1}"
            )

    def _died(self, error: EngineDead) -> None:
        self._death = error
        for owner in list(self._owners):
            owner.push(error)


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
    """State that a slot holds, in parts."""

    def __init__(self, layout: StateLayout, slot: Slot, options: WorkerOptions) -> None:
        self._layout, self._slot, self._options = layout, slot, options

    def segments(self, num_tokens: int) -> Iterator[ComputedSegment]:
        """All that a continuation at `num_tokens` needs, cut as a prefill's state is."""
        for start in range(0, num_tokens, self._options.chunk_tokens):
            span = (start, min(start + self._options.chunk_tokens, num_tokens))
            for plan in plan_segments(self._layout, span, (0, num_tokens), self._options.segment_bytes):
                buffers = self._slot.exported(plan.start, plan.stop, plan.layers)
                yield ComputedSegment(plan.start, plan.stop, plan.layers, buffers, time.monotonic())


class _Outputs(Generic[T]):
    """What an owner of sequences puts out: a queue that ends once, with or without an error."""

    def __init__(self, backend: LocalBackend) -> None:
        self._backend = backend
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

    def _finish(self, last: RequestFailed | EngineDead | None) -> None:
        if self in self._backend._owners:
            del self._backend._owners[self]
            self._queue.put_nowait(last)


class LocalGeneration(_Outputs[TokenOutput | PromptLogprobs]):
    """One request: its sequences in the engine, and the queue of what they put out."""

    def __init__(self, backend: LocalBackend, request: Request) -> None:
        super().__init__(backend)
        self._request = request
        self._open_choices = set(range(request.num_choices))
        self._has_sink = self._has_state = False
        self._num_kept = 0
        self._capacity = min(request.state_tokens, backend.info.max_context)
        sampling = request.sampling
        choices = [
            Sequence(
                seq_id=next(backend._ids),
                owner=self,
                tokens=list(request.prompt_tokens),
                slot=backend.executor.new_slot(self._capacity),
                sampling=sampling,
                choice=choice,
                seed=sampling.seed if sampling.seed is not None else secrets.randbits(63),
                priority=request.priority,
                prompt_logprobs=request.prompt_logprobs,
                is_held=True,
            )
            for choice in range(request.num_choices)
        ]
        self._seq = choices[0]
        self._seq.siblings = choices[1:]
        backend._owners[self] = None
        backend.worker.post(lambda scheduler: scheduler.add(choices[0]))

    @property
    def sink(self) -> StateSink:
        """Memory for one transfer of [kept, n - 1), fresh where nothing was kept."""
        slot = self._renew_slot()
        if not self._num_kept:
            slot.prepare_import(self._request.num_prompt_tokens - 1)
        self._has_sink = True
        return LocalSink(slot)

    @property
    def source(self) -> StateSource:
        """What was kept of an earlier transfer; it stays as it is until something lands in the next sink."""
        return LocalSource(self._backend.info.layout, self._seq.slot, self._backend.worker.options)

    def keep(self, num_tokens: int) -> None:
        """[0, num_tokens) of the latest sink is verified, and nobody writes to it any more.

        Raises:
            RequestFailed: no sink was handed out, or that is not a part of what it was for.
        """
        most = self._request.num_prompt_tokens - 1
        if not self._has_sink or not self._num_kept <= num_tokens <= most:
            raise RequestFailed(f"{num_tokens} tokens cannot be kept: {self._num_kept} to {most} of a sink can")
        self._num_kept = num_tokens
        # With nothing kept the next user gets other memory, as if this had not been said.
        self._has_sink = num_tokens == 0

    def compute(self) -> None:
        """Compute the rest of the prompt here; also after a failed transfer, in memory no straggler can write to."""
        if self._has_state:
            return
        self._has_state = True
        self._renew_slot()
        self._backend.worker.post(self._join_after(self._num_kept))

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
        self._backend.worker.post(self._join_after(num_tokens))

    def cancel(self, choice: int | None = None) -> None:
        """Stop one choice or everything, and free its state. Idempotent."""
        self._open_choices -= set(self._open_choices) if choice is None else {choice}
        self._backend.worker.post(lambda scheduler: scheduler.cancel(self, choice))
        self._end_if_done()

    def push(self, item: Item) -> None:
        """One output from the engine, on the event loop."""
        if isinstance(item, RequestFailed | EngineDead):
            self._open_choices.clear()
            self._finish(item)
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
            self._finish(None)

    def _join_after(self, num_tokens: int) -> Callable[[Scheduler], list[Event]]:
        """For the engine thread: the sequence may be scheduled; state of [0, num_tokens) is there."""

        def join(scheduler: Scheduler) -> list[Event]:
            self._seq.num_computed_tokens = num_tokens
            self._seq.is_held = False
            if self._seq.num_remaining == 0:
                self.marks.joined_at = time.monotonic()
            return scheduler.advance(self._seq)

        return join

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


class LocalPrefill(_Outputs[ComputedSegment | ChunkDone]):
    """One prefill job: a sequence that samples nothing."""

    def __init__(self, backend: LocalBackend, task: PrefillTask) -> None:
        super().__init__(backend)
        self._num_tokens = len(task.tokens)
        self._seq = seq = Sequence(
            seq_id=next(backend._ids),
            owner=self,
            tokens=list(task.tokens),
            slot=backend.executor.new_slot(len(task.tokens)),
            start=task.start,
            priority=task.priority,
            is_held=task.is_pushed,
        )
        self._is_pushed = task.is_pushed
        if task.is_pushed:
            seq.slot.prepare_import(task.start)
        backend._owners[self] = None
        backend.worker.post(lambda scheduler: scheduler.add(seq))

    @property
    def sink(self) -> StateSink:
        """Memory for the state of [0, start)."""
        return LocalSink(self._seq.slot)

    def import_done(self) -> None:
        """That state is in place: computing goes on from there."""

        def join(scheduler: Scheduler) -> list[Event]:
            self._seq.num_computed_tokens, self._seq.is_held = self._seq.start, False
            return scheduler.advance(self._seq)

        if self._is_pushed:
            self._is_pushed = False
            self._backend.worker.post(join)

    def set_paused(self, paused: bool) -> None:
        """No further chunk while paused; the running one ends first."""

        def hold(scheduler: Scheduler) -> list[Event]:
            self._seq.is_held = paused
            return scheduler.advance(self._seq)

        self._backend.worker.post(hold)

    def release(self) -> None:
        """Free the state; before the end this cancels. Idempotent."""
        self._backend.worker.post(lambda scheduler: scheduler.cancel(self))
        self._finish(None)

    def push(self, item: Item) -> None:
        """One output from the engine, on the event loop."""
        if self not in self._backend._owners:
            return
        if isinstance(item, RequestFailed | EngineDead):
            self._finish(item)
        elif isinstance(item, ComputedSegment | ChunkDone):
            self._queue.put_nowait(item)
            if isinstance(item, ChunkDone) and item.stop == self._num_tokens:
                self._finish(None)
