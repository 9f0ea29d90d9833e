"""The engine's own thread: takes commands from the event loop, steps the scheduler, hands outputs back.

Sees the engine as an Executor (common/sched/executor.py) that a factory builds on this thread; knows no torch, no
sockets, no requests. The only place that stamps engine times. Used by common/local_backend.py.

    event loop: post(command) ->  commands run between two steps | step: rows, then a chunk  -> owner.push(item)
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from common.backend import ChunkDone, ComputedSegment, DecodeStep, Marks
from common.errors import EngineDead, RequestFailed, StartupError
from common.request import PromptLogprobs, TokenOutput
from common.sched.budget import JOINT_SIZES
from common.sched.executor import ChunkResult, Executor
from common.sched.scheduler import ChoiceEnded, Event, Scheduler, SchedulerLimits
from common.sched.sequence import Chunk, Sequence
from common.sched.specs import plan_segments

log = logging.getLogger(__name__)
T = TypeVar("T")

Item = TokenOutput | PromptLogprobs | ChoiceEnded | RequestFailed | EngineDead | ComputedSegment | ChunkDone
# A chunk whose every position needs logits keeps them below this many bytes (float32, twice: logits and log softmax).
MAX_LOGIT_BYTES = 128 << 20
# Without work for so long, the engine may get ready for what may come.
QUIET_S = 0.3


class Owner(Protocol):
    """Who gets a sequence's outputs. `push` is called on the event loop, `marks` are stamped by the engine thread."""

    marks: Marks

    def push(self, item: Item) -> None:
        """Take one output, in order."""


# Measured decode steps that are kept for whoever asks: the latest ones.
MAX_DECODE_STEPS = 256


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How the engine thread runs.

    Attributes:
        token_budget: 0: steered by `max_stretch`.
        warm_up_rows: while idle after the start, the engine gets ready for decode steps of up to so many rows.
        cpus: none: wherever the process may.
    """

    chunk_tokens: int = 256
    token_budget: int = 0
    max_stretch: float = 3.0
    max_batch: int = 16
    segment_bytes: int = 1 << 20
    warm_up_rows: int = 0
    cpus: tuple[int, ...] = ()


Factory = Callable[[], Executor]
Command = Callable[[Scheduler], list[Event] | None]


class EngineWorker:
    """Runs one executor. Methods are called on the event loop; `executor` and `scheduler` exist after `start`."""

    executor: Executor
    scheduler: Scheduler

    def __init__(self, factory: Factory, options: WorkerOptions) -> None:
        self.options = options
        self.is_alive = False
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.decode_steps: deque[DecodeStep] = deque(maxlen=MAX_DECODE_STEPS)
        self._factory = factory
        self._commands: deque[Command] = deque()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_idle = True
        self._is_building = False
        self._is_closing = False
        self.is_warm = not options.warm_up_rows
        self._progress_at = 0.0
        self.on_state: Callable[[Sequence, int, bool], None] | None = None
        """on_state(sequence, stop, is_point), on the engine thread: state of [0, stop) is in the slot, for the time of
        the call; others may go on from `stop` if it is a point."""
        self._on_death: Callable[[EngineDead], None] = lambda _error: None

    async def start(self, on_death: Callable[[EngineDead], None]) -> None:
        """Start the thread and wait until the executor is built; `on_death` is called on the loop if it dies later.

        Raises:
            StartupError: the executor could not be built.
        """
        self._loop = asyncio.get_running_loop()
        self._on_death = on_death
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._is_building = True
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._thread.start()
        await self._ready

    async def close(self) -> None:
        """End the thread after its current forward; one that still builds the executor is left alone. Idempotent."""
        self._is_closing = True
        self._wake.set()
        if self._thread is not None and not self._is_building:
            await asyncio.to_thread(self._thread.join)

    def post(self, command: Command) -> None:
        """Run a command on the engine thread before the next step; its events are delivered like a step's."""
        self._commands.append(command)
        self._wake.set()

    @property
    def last_progress_at(self) -> float:
        """Monotonic instant of the last layer, step or command; now while there is nothing to do."""
        return time.monotonic() if self._is_idle and self.is_alive else self._progress_at

    # -- on the engine thread

    def _main(self) -> None:
        try:
            self._build()
        except StartupError as e:
            self.call(self._started, e)
            return
        except Exception as e:
            log.exception("the engine could not be started")
            self.call(self._started, StartupError(f"the engine could not be started: {type(e).__name__}: {e}"))
            return
        finally:
            self._is_building = False
        self.is_alive = True
        self.call(self._started, None)
        error = EngineDead("the engine is closed")
        try:
            while not self._is_closing:
                self._turn()
        except Exception as e:
            log.exception("the engine died")
            error = EngineDead(f"the engine died: {type(e).__name__}: {e}")
        self.is_alive = False
        self.call(self._on_death, error)

    def _build(self) -> None:
        # Read by OpenMP when the factory loads torch: idle threads must not spin on cores that others need.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        if self.options.cpus:
            # 0 is the calling thread; what it starts later (OpenMP's pool among it) inherits the mask.
            os.sched_setaffinity(0, self.options.cpus)
        self.executor = self._factory()
        facts, options = self.executor.facts, self.options
        limits = SchedulerLimits(
            chunk_tokens=options.chunk_tokens,
            token_budget=options.token_budget,
            max_stretch=options.max_stretch,
            max_batch=options.max_batch,
            max_logit_rows=max(1, MAX_LOGIT_BYTES // (8 * facts.vocab_size)),
        )
        self.scheduler = Scheduler(limits, facts.eos_token_ids, facts.max_context)
        self.scheduler.on_leave = self._leaves

    def _turn(self) -> None:
        self._wake.clear()
        while self._commands:
            self._deliver(self._commands.popleft()(self.scheduler) or [])
        self._progress_at = time.monotonic()
        self._is_idle = False
        if not self._is_closing and not self._step():
            self.scheduler.check_integrity()
            self._is_idle = True
            self._wait()

    def _wait(self) -> None:
        """Until there is work; a piece of the warm-up after some quiet, since it takes longer than most gaps."""
        quiet_until = time.monotonic() + QUIET_S
        while not self._wake.wait(None if self.is_warm else max(0.0, quiet_until - time.monotonic())):
            self.is_warm = not self.executor.warm_up(self.options.warm_up_rows)
            self._progress_at = time.monotonic()

    def _step(self) -> bool:
        self.scheduler.takes_chunks = self.executor.takes_chunks
        batch = self.scheduler.schedule(time.monotonic())
        if batch is None:
            return False
        self.num_steps += 1
        self._deliver(list(batch.failed))
        chunk, budget = batch.chunk, self.scheduler.budget
        joint = chunk if chunk is not None and batch.rows and self._is_joint(chunk) else None
        started_at = time.monotonic()
        if batch.rows:
            self._decode(batch.rows, joint)
            if self.executor.is_settled and joint is None:
                self._note_decode(batch.rows, time.monotonic() - started_at)
        if chunk is not None and joint is None:
            self._prefill(chunk)
        if chunk is not None:
            num_tokens, step_s = chunk.stop - chunk.start, time.monotonic() - started_at
            if batch.rows:
                budget.note_chunk(num_tokens, len(batch.rows), step_s, is_settled=self.executor.is_settled)
            else:
                budget.note_alone(num_tokens, step_s)
        return True

    def _note_decode(self, rows: tuple[Sequence, ...], seconds: float) -> None:
        self.scheduler.budget.note_quiet(len(rows), seconds)
        self.decode_steps.append(DecodeStep(len(rows), sum(seq.num_computed_tokens for seq in rows), seconds))

    def _is_joint(self, chunk: Chunk) -> bool:
        """Whether the chunk can share the forward of the decode rows."""
        size = chunk.stop - chunk.start
        is_plain = chunk.seq.sampling is not None and not chunk.has_logits
        return is_plain and size <= JOINT_SIZES[-1] and self.executor.takes_chunks

    def _decode(self, rows: tuple[Sequence, ...], chunk: Chunk | None) -> None:
        started_at = self._chunk_starts(chunk) if chunk is not None else 0.0
        try:
            sampled = self.executor.decode(rows, chunk)
        except RequestFailed as e:
            if chunk is None:
                raise
            self._give_up(chunk, e)
            chunk, sampled = None, self.executor.decode(rows)
        self.num_output_tokens += len(sampled)
        self._deliver(self.scheduler.update_rows(rows, sampled))
        if chunk is not None:
            self._chunk_done(chunk, ChunkResult(), started_at)

    def _chunk_starts(self, chunk: Chunk) -> float:
        """Segments leave while the chunk is computed: whoever sends them must know by then that it began."""
        started_at, marks = time.monotonic(), _owner(chunk.seq).marks
        marks.prefill_started_at = marks.prefill_started_at or started_at
        return started_at

    def _prefill(self, chunk: Chunk) -> None:
        started_at = self._chunk_starts(chunk)
        try:
            result = self.executor.prefill(chunk, self._layer_hook(chunk))
        except RequestFailed as e:
            self._give_up(chunk, e)
            return
        self._chunk_done(chunk, result, started_at)

    def _give_up(self, chunk: Chunk, error: RequestFailed) -> None:
        self.scheduler.cancel(chunk.seq.owner, has_failed=True)
        self._deliver([(chunk.seq, error)])

    def _leaves(self, seq: Sequence) -> None:
        if seq.num_computed_tokens > seq.point_at and not seq.is_parked:
            self.offer_state(seq, seq.num_computed_tokens, is_point=True)

    def hand_out(self, seq: Sequence, item: ComputedSegment | ChunkDone) -> None:
        """On the engine thread: give a sequence's owner something that was there without being computed."""
        self.call(_owner(seq).push, item)

    def offer_state(self, seq: Sequence, stop: int, *, is_point: bool) -> None:
        """On the engine thread: tell who keeps state that this sequence's is there up to `stop`."""
        if self.on_state is not None and seq.keeps_state:
            self.on_state(seq, stop, is_point)

    def _chunk_done(self, chunk: Chunk, result: ChunkResult, started_at: float) -> None:
        seq, marks = chunk.seq, _owner(chunk.seq).marks
        self.num_prompt_tokens += chunk.stop - chunk.start
        ended_at = time.monotonic()
        if chunk.is_final:
            marks.prefill_ended_at = ended_at
        self.offer_state(seq, chunk.stop, is_point=chunk.is_final or chunk.stop == seq.split_at)
        events = self.scheduler.update_chunk(chunk, result)
        if seq.sampling is None:
            self.call(_owner(seq).push, ChunkDone(chunk.start, chunk.stop, started_at, ended_at))
        elif seq.num_remaining == 0:
            marks.joined_at = ended_at
        self._deliver(events)

    def _layer_hook(self, chunk: Chunk) -> Callable[[int], None]:
        """Hand out each segment of a prefill job as soon as its last layer is in the slot."""
        seq = chunk.seq
        if seq.sampling is not None:
            return self._note_progress
        plans = deque(
            plan_segments(
                self.executor.facts.layout,
                (chunk.start, chunk.stop),
                (seq.start, seq.num_prompt_tokens),
                self.options.segment_bytes,
            )
        )

        def on_layer(layer: int) -> None:
            self._note_progress(layer)
            while plans and plans[0].layers[-1] <= layer:
                plan = plans.popleft()
                buffers = seq.slot.exported(plan.start, plan.stop, plan.layers)
                segment = ComputedSegment(
                    plan.start, plan.stop, plan.layers, buffers, time.monotonic(), is_last=plan.is_last
                )
                self.call(_owner(seq).push, segment)

        return on_layer

    def _note_progress(self, _layer: int) -> None:
        self._progress_at = time.monotonic()

    def _deliver(self, events: list[Event]) -> None:
        if events:
            self.call(_push_all, events)

    def call(self, function: Callable[[T], None], argument: T) -> None:
        """Call a function on the event loop. For the engine thread."""
        try:
            self._loop.call_soon_threadsafe(function, argument)
        except RuntimeError:
            # The loop is gone: the process is on its way out and nobody listens.
            log.debug("an engine output came after the event loop closed")

    # -- back on the event loop

    def _started(self, error: StartupError | None) -> None:
        if self._ready.done():
            return
        if error is not None:
            self._ready.set_exception(error)
        else:
            self._ready.set_result(None)


def _push_all(events: list[Event]) -> None:
    for seq, item in events:
        _owner(seq).push(item)


def _owner(seq: Sequence) -> Owner:
    owner: Owner = seq.owner  # type: ignore[assignment]
    return owner
