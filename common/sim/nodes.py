"""Nodes in virtual time: prefill in chunks, first come first served, and decode that advances in closed form.

Between events that change its batch a decoding node needs no event of its own: all rows advance one token a step, and a
step takes base + rows + context, context growing by one token per row and step, so the time of any number of steps is a
quadratic. Called by cluster.py, which says what a finished chunk, prompt or generation leads to.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

from common.policy.costs import DecodeCost
from common.sim.loop import Loop
from common.sim.workload import SimRequest

ChunkStarts = Callable[[SimRequest, int, float, bool], None]


class PrefillNode:
    """One prefill instance. `seconds(tokens)` is its profile; `on_chunk(request, stop, ends_at, is_last)` is called
    when a chunk starts, as its state leaves while it is computed.
    """

    def __init__(self, loop: Loop, name: str, seconds: Callable[[float], float], chunk_tokens: int) -> None:
        self._loop, self.name, self._seconds, self.chunk_tokens = loop, name, seconds, chunk_tokens
        self._constant_s = seconds(0.0)
        self._queue: deque[tuple[SimRequest, int, int, ChunkStarts]] = deque()
        self._is_busy = False
        self.slowdown: Callable[[], float] | None = None
        self.busy_s = 0.0
        self.num_queued_tokens = 0

    def seconds(self, start: int, stop: int) -> float:
        """Seconds for tokens [start, stop) of a prompt, without what a request costs whatever its length."""
        return self._seconds(stop) - self._seconds(start)

    def put(self, request: SimRequest, start: int, stop: int, on_chunk: ChunkStarts) -> None:
        """Compute tokens [start, stop)."""
        self.num_queued_tokens += stop - start
        self._queue.append((request, start, stop, on_chunk))
        if not self._is_busy:
            self._is_busy = True
            self._next(is_first=True)

    def _next(self, *, is_first: bool) -> None:
        if not self._queue:
            self._is_busy = False
            return
        request, start, stop, on_chunk = self._queue[0]
        end = min(stop, start + self.chunk_tokens)
        took_s = self.seconds(start, end) + (self._constant_s if is_first else 0.0)
        took_s *= self.slowdown() if self.slowdown is not None else 1.0
        self.busy_s += took_s
        ends_at, is_last = self._loop.now + took_s, end == stop
        if is_last:
            self._queue.popleft()
        else:
            self._queue[0] = (request, end, stop, on_chunk)
        # First, so that whatever the chunk leads to at its end sees the queue without it.
        self._loop.at(ends_at, self._chunk_done, end - start, is_last)
        on_chunk(request, end, ends_at, is_last)

    def _chunk_done(self, num_tokens: int, is_last: bool) -> None:
        self.num_queued_tokens -= num_tokens
        self._next(is_first=is_last)


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

    def set_stretch(self, stretch: float) -> None:
        """From now on steps take so many times as long: local prefill is mixed in."""
        self._advance()
        self.stretch = stretch
        self._wake()

    def join(self, request: SimRequest) -> None:
        """A prompt is ready for its last token."""
        if len(self._rows) < self.max_rows:
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
        request.first_token_at = self._loop.now + self.step_s

    def _advance(self) -> None:
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
            self._loop.at(self._loop.now + self._seconds_for(left), self._finish, self._version)

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
