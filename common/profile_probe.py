"""One measurement of a running engine: a prompt's prefill, or a batch's decode steps, as a request of its own.

Asks through the engine seam like any request, behind all others, and leaves nothing in the prefix cache. Its state
memory is booked with the daemon's admission. Knows neither which measurements are made nor what comes of them. Used by
profiler.py.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from statistics import median

from common.backend import Backend, BackendStats, ChunkDone, PrefillTask
from common.errors import Overloaded
from common.policy.admission import AdmissionController
from common.policy.ladder import DecodeSample, PrefillSample
from common.policy.views import Demand
from common.request import Request, SamplingParams, TokenOutput

REQUEST_ID = "(profile)"
"""No client may choose it."""
PRIORITY = -(1 << 20)
"""Below that of any class: users go first."""
POLL_S = 0.1
"""How often it is looked for room."""
NUM_STEPS, NUM_SKIPPED = 24, 8
"""Decode steps of a measurement; the first ones, in which an engine gets ready for a batch, do not count."""


class Probe:
    """Measures one engine. `admit` is told each request that may run since the probe gave its memory back."""

    def __init__(self, backend: Backend, admission: AdmissionController, admit: Callable[[str], None]) -> None:
        self._backend, self._admission, self._admit = backend, admission, admit
        self._rng = random.Random(0)

    async def prefill(self, num_tokens: int) -> list[PrefillSample]:
        """A prompt of random tokens; and of the same run the part behind its first half, as if that had been there.

        Raises:
            EngineError: the engine cannot compute it.
        """
        chunks = []
        async with self._booked(self._backend.state_bytes(num_tokens), 1):
            before = self._backend.stats()
            job = self._backend.prefill(
                PrefillTask(REQUEST_ID, self._tokens(num_tokens), priority=PRIORITY, uses_cache=False)
            )
            try:
                async for item in job:
                    if isinstance(item, ChunkDone):
                        chunks.append(item)
            finally:
                job.release()
        is_quiet = self._was_quiet(before, num_tokens, 0)
        whole = PrefillSample(0, num_tokens, sum(c.ended_at - c.started_at for c in chunks), is_quiet)
        later = [c for c in chunks if 2 * c.start >= num_tokens]
        if len(later) == len(chunks) or not later:
            return [whole]
        behind = sum(c.ended_at - c.started_at for c in later)
        return [whole, PrefillSample(later[0].start, num_tokens - later[0].start, behind, is_quiet)]

    async def decode(self, num_rows: int, num_context: int) -> DecodeSample:
        """Steps of so many rows, each behind so many tokens of one prompt. Raises as `prefill`."""
        sampling = SamplingParams(NUM_STEPS, seed=0, ignore_eos=True)
        request = Request(
            REQUEST_ID,
            self._tokens(num_context),
            sampling,
            num_choices=num_rows,
            priority=PRIORITY,
            uses_cache=False,
        )
        ended_at = [0.0] * (NUM_STEPS + 1)
        async with self._booked(self._backend.state_bytes(request.state_tokens, num_rows), num_rows):
            before = self._backend.stats()
            generation = await self._backend.open(request)
            try:
                generation.compute()
                async for output in generation:
                    if isinstance(output, TokenOutput):
                        ended_at[output.num_output_tokens] = time.monotonic()
            finally:
                generation.cancel()
        steps = [b - a for a, b in zip(ended_at[NUM_SKIPPED:], ended_at[NUM_SKIPPED + 1 :], strict=False)]
        context = num_context + (NUM_SKIPPED + NUM_STEPS) // 2
        is_quiet = self._was_quiet(before, num_context - 1, num_rows * NUM_STEPS)
        return DecodeSample(num_rows, num_rows * context, median(steps), is_quiet)

    def _tokens(self, num: int) -> tuple[int, ...]:
        return tuple(self._rng.choices(range(self._backend.info.vocab_size), k=num))

    def _was_quiet(self, before: BackendStats, num_prompt: int, num_output: int) -> bool:
        """Whether the engine did nothing else since then."""
        after = self._backend.stats()
        return (
            not (before.num_running or before.num_prefilling or before.num_waiting)
            and after.num_prompt_tokens - before.num_prompt_tokens == num_prompt
            and after.num_output_tokens - before.num_output_tokens == num_output
        )

    @asynccontextmanager
    async def _booked(self, num_bytes: int, num_rows: int) -> AsyncIterator[None]:
        """State memory held like a request's, so that all of it stays below the limit; waits while there is no room."""
        while not self._is_admitted(Demand(REQUEST_ID, 1, num_bytes, num_rows=num_rows)):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        try:
            yield
        finally:
            self._give_back()

    def _is_admitted(self, demand: Demand) -> bool:
        """Whether it runs at once. It does not wait in the queue, where it would stand before requests."""
        try:
            if self._admission.offer(demand, time.monotonic()) == "running":
                return True
        except Overloaded:
            return False
        self._give_back()
        return False

    def _give_back(self) -> None:
        for request_id in self._admission.release(REQUEST_ID, time.monotonic()):
            self._admit(request_id)
