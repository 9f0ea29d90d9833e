"""Nodes in virtual time: prefill in chunks, one prompt after the other or in turns, and decode that advances in closed
form.

Between events that change its batch a decoding node needs no event of its own: all rows advance one token a step, and a
step takes base + rows + context, context growing by one token per row and step, so the time of any number of steps is a
quadratic. Called by cluster.py, which says what a finished chunk, prompt or generation leads to.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

from common.policy.costs import DecodeCost
from common.sched.turns import Turns
from common.sim.loop import Loop
from common.sim.workload import SimRequest

ChunkStarts = Callable[[SimRequest, int, float, bool], None]


class Processor:
    """What computes a prefill node's chunks: this one does nothing else."""

    is_shared = False

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens

    def wants_quiet(self) -> bool:
        """Whether the next step should go without a chunk. Asked once a step."""
        return False

    def num_tokens(self, num_left: int) -> int:
        """Tokens of the next chunk, of a prompt that lacks `num_left`."""
        return min(self._chunk_tokens, num_left)

    def begin(self, num_tokens: int, chunk_s: float) -> float:
        """Seconds of a step that begins now, with so many tokens that take `chunk_s` by themselves."""
        return chunk_s

    def end(self, took_s: float) -> None:
        """The step is over, after all that made it longer."""

    def stop(self) -> None:
        """No prompt is left."""


@dataclass(slots=True, eq=False)
class _Job:
    """Tokens [start, stop) of a prompt at one node, as common/sched/turns.py sees it."""

    request: SimRequest
    start: int
    stop: int
    on_chunk: ChunkStarts
    seq_id: int
    priority: int = 0
    last_turn: int = 0
    has_begun: bool = False

    @property
    def num_remaining(self) -> int:
        return self.stop - self.start

    @property
    def arrived_at(self) -> float:
        return self.request.arrived_at

    @property
    def due_at(self) -> float:
        return self.request.due_at


class PrefillNode:
    """One prefill instance. `seconds(tokens)` is its profile; `on_chunk(request, stop, ends_at, is_last)` is called
    when a chunk starts, as its state leaves while it is computed, or at its end where the processor is shared: nobody
    knows before when that is. Up to `max_sharing` prompts take turns as in the daemons, chunk by chunk; with one,
    prompts are served in the order in which they come.
    """

    def __init__(
        self, loop: Loop, name: str, seconds: Callable[[float], float], processor: Processor, max_sharing: int = 1
    ) -> None:
        self._loop, self.name, self._seconds = loop, name, seconds
        self._processor, self.max_sharing = processor, max_sharing
        self._constant_s = seconds(0.0)
        self._waiting: deque[_Job] = deque()
        self._sharing: list[_Job] = []
        self._turns = Turns()
        self._num_jobs = 0
        self._is_busy = False
        self._lost_s = 0.0
        self.busy_s = 0.0
        self.num_queued_tokens = 0

    def seconds(self, start: int, stop: int) -> float:
        """Seconds for tokens [start, stop) of a prompt, without what a request costs whatever its length."""
        return self._seconds(stop) - self._seconds(start)

    def _left_s(self, job: _Job) -> float:
        return self.seconds(job.start, job.stop) + (0.0 if job.has_begun else self._constant_s)

    def put(self, request: SimRequest, start: int, stop: int, on_chunk: ChunkStarts) -> None:
        """Compute tokens [start, stop)."""
        self.num_queued_tokens += stop - start
        self._num_jobs += 1
        self._waiting.append(_Job(request, start, stop, on_chunk, self._num_jobs))
        if not self._is_busy:
            self._is_busy = True
            self._next()
        else:
            self._admit()

    def lose(self, seconds: float) -> None:
        """Its processor does something else for so long: the step that it computes ends later."""
        self._lost_s += seconds

    def _admit(self) -> None:
        while self._waiting and len(self._sharing) < self.max_sharing:
            self._sharing.append(self._waiting.popleft())
            self._turns.join(self._sharing[-1])

    def _next(self) -> None:
        self._admit()
        now, processor = self._loop.now, self._processor
        self._lost_s = 0.0
        if self._sharing and processor.wants_quiet():
            self._loop.at(now + processor.begin(0, 0.0), self._step_done, now, 0)
            return
        job = self._turns.take(self._sharing, now, self._left_s)
        if job is None:
            self._is_busy = False
            processor.stop()
            return
        num_tokens = processor.num_tokens(job.num_remaining)
        end = job.start + num_tokens
        chunk_s = self.seconds(job.start, end) + (0.0 if job.has_begun else self._constant_s)
        ends_at, is_last = now + processor.begin(num_tokens, chunk_s), end == job.stop
        job.start, job.has_begun = end, True
        if is_last:
            self._sharing.remove(job)
        # First, so that whatever the chunk leads to at its end sees the queue without it.
        self._loop.at(ends_at, self._step_done, now, num_tokens, job)
        if not processor.is_shared:
            job.on_chunk(job.request, end, ends_at, is_last)

    def _step_done(self, began_at: float, num_tokens: int, job: _Job | None = None) -> None:
        now, lost_s = self._loop.now, self._lost_s
        if lost_s:
            self._lost_s = 0.0
            self._loop.at(now + lost_s, self._step_done, began_at, num_tokens, job)
            return
        self._processor.end(now - began_at)
        self.num_queued_tokens -= num_tokens
        if job is not None:
            self.busy_s += now - began_at
            if self._processor.is_shared:
                job.on_chunk(job.request, job.start, now, not job.num_remaining)
        # Last of all that happens now: a prompt that is complete decodes beside the next chunk.
        self._loop.at(now, self._next)


class DecodeNode:
    """One decoding instance with `max_rows` rows; those who find none free wait in order."""

    def __init__(self, loop: Loop, cost: DecodeCost, max_rows: int, on_done: Callable[[SimRequest], None]) -> None:
        self._loop, self.cost, self.max_rows, self._on_done = loop, cost, max_rows, on_done
        self.waiting: deque[SimRequest] = deque()
        self._rows: list[tuple[float, int, SimRequest]] = []
        self._tokens = 0.0  # that a row has made which was there from the start
        self._context = 0.0
        self._at = 0.0
        self._count = 0
        self._version = 0
        self._is_shared = False
        self._held: list[SimRequest] = []  # until the end of a shared step
        self._newcomers: list[SimRequest] = []  # who joined at `_joined_at`
        self._joined_at = 0.0
        self.stretch = 1.0
        self.row_s = 0.0

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    @property
    def load(self) -> int:
        """Rows in use or wanted."""
        return len(self._rows) + len(self._held) + len(self.waiting)

    @property
    def alone_s(self) -> float:
        """Of a step now without a chunk."""
        return self.cost.step_s(len(self._rows), self._context)

    @property
    def step_s(self) -> float:
        """Of the next step."""
        return self.stretch * self.alone_s

    def share(self, stretch: float) -> None:
        """A step begins that computes a prompt here too; newcomers wait for its end."""
        self._is_shared = True
        self.set_stretch(stretch)

    def step_over(self) -> None:
        """That step is over."""
        self._is_shared = False
        held, self._held = self._held, []
        for request in held:
            self.join(request)

    def set_stretch(self, stretch: float) -> None:
        """From now on steps take so many times as long: local prefill is mixed in."""
        self._advance()
        self.stretch = stretch
        if self._joined_at == self._loop.now:
            # Their first step is the one that begins now, whatever it was taken for when they joined.
            for request in self._newcomers:
                request.first_token_at = max(self._loop.now, self._at) + self.step_s
        self._wake()

    def lose(self, seconds: float) -> None:
        """Its processor does something else for so long: no row gets on."""
        if self._rows:
            self._advance()
            self._at = max(self._at, self._loop.now) + seconds
            self._wake()

    def join(self, request: SimRequest) -> None:
        """A prompt is ready for its last token."""
        if self._is_shared:
            self._held.append(request)
        elif len(self._rows) < self.max_rows:
            self._advance()
            self._start(request)
            self._wake()
        else:
            self.waiting.append(request)

    def _start(self, request: SimRequest) -> None:
        if self._joined_at != self._loop.now:
            self._joined_at = self._loop.now
            self._newcomers.clear()
        self._newcomers.append(request)
        self._count += 1
        self._context += request.num_prompt
        heappush(self._rows, (self._tokens + request.num_output, self._count, request))
        # The first token is one step away, and steps hardly change within one: no event is needed.
        request.first_token_at = max(self._loop.now, self._at) + self.step_s

    def _advance(self) -> None:
        if self._loop.now < self._at:  # what was lost is not over
            return
        passed, self._at = self._loop.now - self._at, self._loop.now
        num = len(self._rows)
        if num and passed > 0:
            self.row_s += passed * num
            steps = self._steps_in(passed)
            self._tokens += steps
            self._context += steps * num

    def _seconds_for(self, steps: float) -> float:
        num = len(self._rows)
        first = self.cost.step_s(num, self._context)
        return self.stretch * steps * (first + self.cost.per_context_s * num * steps / 2)

    def _steps_in(self, seconds: float) -> float:
        """The inverse of `_seconds_for`, by the root of the quadratic that does not cancel."""
        num = len(self._rows)
        first = self.cost.step_s(num, self._context)
        bend = self.cost.per_context_s * num
        want = seconds / self.stretch
        return 2 * want / (first + math.sqrt(first * first + 2 * bend * want))

    def _wake(self) -> None:
        self._version += 1
        if self._rows:
            left = max(0.0, self._rows[0][0] - self._tokens)
            self._loop.at(max(self._loop.now, self._at) + self._seconds_for(left), self._finish, self._version)

    def _finish(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        self._tokens = max(self._tokens, self._rows[0][0])
        done = []
        while self._rows and self._rows[0][0] <= self._tokens + 1e-9:
            request = heappop(self._rows)[2]
            self._context -= request.num_prompt + request.num_output
            done.append(request)
        while self.waiting and len(self._rows) < self.max_rows:
            self._start(self.waiting.popleft())
        self._wake()
        for request in done:
            self._on_done(request)
