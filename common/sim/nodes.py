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

# Of a chunk that is mixed into decode steps: whether there are rows is looked at anew so often.
MIXED_TOKENS = 32
ChunkStarts = Callable[[SimRequest, int, float, bool], None]


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


class PrefillNode:
    """One prefill instance. `seconds(tokens)` is its profile; `on_chunk(request, stop, ends_at, is_last)` is called
    when a chunk starts, as its state leaves while it is computed. Up to `max_sharing` prompts take turns as in the
    daemons, chunk by chunk; with one, prompts are served in the order in which they come.
    """

    def __init__(
        self, loop: Loop, name: str, seconds: Callable[[float], float], chunk_tokens: int, max_sharing: int = 1
    ) -> None:
        self._loop, self.name, self._seconds = loop, name, seconds
        self.chunk_tokens, self.max_sharing = chunk_tokens, max_sharing
        self._constant_s = seconds(0.0)
        self._waiting: deque[_Job] = deque()
        self._sharing: list[_Job] = []
        self._turns = Turns()
        self._num_jobs = 0
        self._is_busy = False
        self._lost_s = 0.0
        self.slowdown: Callable[[], float] | None = None
        self.busy_s = 0.0
        self.num_queued_tokens = 0

    def seconds(self, start: int, stop: int) -> float:
        """Seconds for tokens [start, stop) of a prompt, without what a request costs whatever its length."""
        return self._seconds(stop) - self._seconds(start)

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
        """Its processor does something else for so long: the next chunk ends later."""
        if self._is_busy:
            self._lost_s += seconds

    def _admit(self) -> None:
        while self._waiting and len(self._sharing) < self.max_sharing:
            self._sharing.append(self._waiting.popleft())
            self._turns.join(self._sharing[-1])

    def _next(self) -> None:
        self._admit()
        job = self._turns.take(self._sharing)
        if job is None:
            self._is_busy = False
            return
        slow = self.slowdown() if self.slowdown is not None else 1.0
        end = min(job.stop, job.start + (self.chunk_tokens if slow == 1.0 else min(MIXED_TOKENS, self.chunk_tokens)))
        took_s = slow * (self.seconds(job.start, end) + (0.0 if job.has_begun else self._constant_s)) + self._lost_s
        self._lost_s = 0.0
        self.busy_s += took_s
        ends_at, is_last, num_tokens = self._loop.now + took_s, end == job.stop, end - job.start
        job.start, job.has_begun = end, True
        if is_last:
            self._sharing.remove(job)
        # First, so that whatever the chunk leads to at its end sees the queue without it.
        self._loop.at(ends_at, self._chunk_done, num_tokens)
        job.on_chunk(job.request, end, ends_at, is_last)

    def _chunk_done(self, num_tokens: int) -> None:
        self.num_queued_tokens -= num_tokens
        # Last of all that happens now: a prompt that is complete decodes beside the next chunk.
        self._loop.at(self._loop.now, self._next)


class DecodeNode:
    """One decoding instance with `max_rows` rows; those who find none free wait in order."""

    def __init__(self, loop: Loop, cost: DecodeCost, max_rows: int, on_done: Callable[[SimRequest], None]) -> None:
        self._loop, self._cost, self.max_rows, self._on_done = loop, cost, max_rows, on_done
        self.waiting: deque[SimRequest] = deque()
        self._rows: list[tuple[float, int, SimRequest]] = []
        self._tokens = 0.0  # that a row has made which was there from the start
        self._context = 0.0
        self._at = 0.0
        self._count = 0
        self._version = 0
        self._free_at = 0.0
        self.stretch = 1.0
        self.row_s = 0.0

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    @property
    def load(self) -> int:
        """Rows in use or wanted."""
        return len(self._rows) + len(self.waiting)

    @property
    def step_s(self) -> float:
        """Of the next step."""
        return self.stretch * self._cost.step_s(len(self._rows), self._context)

    def share_until(self, ends_at: float, stretch: float) -> None:
        """A chunk of a prompt is computed here until then: mixed into steps, or without rows in a step of its own, for
        whose end a newcomer waits.
        """
        if not self._rows:
            self._free_at = ends_at
        self.set_stretch(stretch)

    def set_stretch(self, stretch: float) -> None:
        """From now on steps take so many times as long: local prefill is mixed in."""
        self._advance()
        self.stretch = stretch
        self._wake()

    def lose(self, seconds: float) -> None:
        """Its processor does something else for so long: no row gets on."""
        if self._rows:
            self._advance()
            self._at = max(self._at, self._loop.now) + seconds
            self._wake()

    def join(self, request: SimRequest) -> None:
        """A prompt is ready for its last token."""
        if self._loop.now < self._free_at:
            self._loop.at(self._free_at, self.join, request)
        elif len(self._rows) < self.max_rows:
            self._advance()
            self._start(request)
            self._wake()
        else:
            self.waiting.append(request)

    def _start(self, request: SimRequest) -> None:
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
        first = self._cost.step_s(num, self._context)
        return self.stretch * steps * (first + self._cost.per_context_s * num * steps / 2)

    def _steps_in(self, seconds: float) -> float:
        """The inverse of `_seconds_for`, by the root of the quadratic that does not cancel."""
        num = len(self._rows)
        first = self._cost.step_s(num, self._context)
        bend = self._cost.per_context_s * num
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
