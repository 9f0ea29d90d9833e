"""The engine seam: what the daemons need from an engine, whatever stands behind it (ours, a fake, a serving engine).

A backend lives on the event loop; it hides the engine's own thread (common/worker.py). All methods are called on the
event loop unless said otherwise. Nothing here knows torch, sockets or HTTP.

    decoded:   gen = await backend.open(request)         state memory is reserved
               gen.compute()                             local: prompt chunks join the batch
               gen.sink -> net writes rows ... gen.import_done(n - 1)       remote
               async for output in gen: ...              PromptLogprobs?, TokenOutput*
    prefilld:  job = backend.prefill(task)
               async for item in job: ...                ComputedSegment* and ChunkDone*, in order of computation
               job.release()                             after the last acknowledgement, or to cancel
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from common.layout import ModelInfo
from common.request import PromptLogprobs, Request, TokenOutput
from common.sched.prefixes import Prefixes


@dataclass(frozen=True, slots=True)
class PrefillTask:
    """Compute the state of prompt tokens [start, len(tokens)): `tokens` already lacks the last prompt token.

    `start` > 0 means the receiver holds [0, start); what the engine itself must recompute for that is its own affair.
    With `is_pushed` the state of [held, start) is put into the job's `sink` if the job `wants_push`, and nothing is
    computed before `import_done`. `salt`: whose prefixes may be found, and find these; without `uses_cache` nobody's.
    Within `due_s` from now it is in time (None: whenever it is done).
    """

    request_id: str
    tokens: tuple[int, ...]
    start: int = 0
    priority: int = 0
    is_pushed: bool = False
    held: int = 0
    salt: bytes = b""
    uses_cache: bool = True
    due_s: float | None = None


@dataclass(frozen=True, slots=True)
class ComputedSegment:
    """Rows [start, stop) of the given layer numbers, final. Buffers are in StateLayout's segment order, read-only and
    unchanged until PrefillJob.release(). `is_last` marks the last segment of the whole job.
    """

    start: int
    stop: int
    layers: tuple[int, ...]
    buffers: tuple[memoryview, ...]
    computed_at: float
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """One chunk went through all layers, or with `is_cached` was there already, computed for another request.

    Instants are monotonic seconds of this process.
    """

    start: int
    stop: int
    started_at: float
    ended_at: float
    is_cached: bool = False


@dataclass(slots=True)
class Marks:
    """Monotonic instants of a generation or a prefill job; 0.0 until it happened."""

    opened_at: float = 0.0
    prefill_started_at: float = 0.0
    prefill_ended_at: float = 0.0
    joined_at: float = 0.0


class StateSource(Protocol):
    """State that is there already."""

    def segments(self, num_tokens: int, held: int = 0) -> Iterator[ComputedSegment]:
        """All that a continuation at `num_tokens` needs beyond [0, held), in parts; unchanged until whoever asked is
        done with them.
        """


class PrefillJob(Protocol):
    """A running prefill; `marks.prefill_started_at` is set before the first item comes.

    Iteration raises RequestFailed or EngineDead; it ends after the last chunk's ChunkDone, which follows the segment
    with `is_last`.
    """

    @property
    def marks(self) -> Marks: ...

    def __aiter__(self) -> AsyncIterator[ComputedSegment | ChunkDone]: ...

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that need not be computed: found in the cache, or pushed. Known when the first item comes."""

    async def wants_push(self) -> bool:
        """Whether the state of [held, start) shall come from outside: of a task with `is_pushed`, unless it is here,
        or what should be before it is not.
        """

    @property
    def sink(self) -> StateSink:
        """Memory for the state of [held, start), of a job that wants it."""

    def import_done(self) -> None:
        """That state is in place and verified: computing goes on from there."""

    def set_paused(self, paused: bool) -> None:
        """Back-pressure: a paused job gets no further chunk until it is resumed; the running chunk ends first."""

    def release(self) -> None:
        """The state may be freed. Before the end this cancels: no further chunk starts. Idempotent."""


@runtime_checkable
class StateSink(Protocol):
    """Where received state goes. `buffers` may be called from any thread."""

    def buffers(self, start: int, stop: int, layers: tuple[int, ...]) -> tuple[memoryview, ...]:
        """Writable memory of the segment's rows, in StateLayout's segment order, byte-sized views."""

    def landed(self, start: int, stop: int, layers: tuple[int, ...]) -> None:
        """The segment's verified bytes are in place."""


class Generation(Protocol):
    """One request in the engine. Iteration yields PromptLogprobs at most once, then TokenOutputs of all choices, and
    ends after every choice finished or was cancelled; it raises RequestFailed or EngineDead.
    """

    marks: Marks

    @property
    def prefixes(self) -> Prefixes | None:
        """The names of the prompt's prefixes, by which others may hold them; None without a prefix cache."""

    @property
    def num_cached_tokens(self) -> int:
        """What was found of the prompt in the prefix cache: a sink, or `compute`, goes on from there."""

    @property
    def num_computed_tokens(self) -> int:
        """How far the prompt's state is in the engine: 0 before it was imported, or `compute` has begun."""

    @property
    def sink(self) -> StateSink:
        """Memory for one transfer, fresh but for what was kept and cached. Every access starts over: what else an
        earlier sink holds, or still gets written by a straggler, is no longer part of the sequence.
        """

    @property
    def source(self) -> StateSource:
        """What was kept of an earlier transfer."""

    def keep(self, num_tokens: int) -> None:
        """A transfer into the latest sink failed, but [0, num_tokens) of it was verified, every layer can continue
        there, and nobody writes to it any more: the next sink, or `compute`, goes on from there.
        """

    async def filled(self) -> None:
        """Until what is cached is in the memory of the latest sink, so that `source` has it too."""

    def compute(self) -> None:
        """Compute whatever of the prompt is not held yet, here. Also the fallback after a failed transfer."""

    def import_done(self, num_tokens: int) -> None:
        """State of [0, num_tokens) is in place and verified; the sequence joins the batch. `num_tokens` is n - 1."""

    def cancel(self, choice: int | None = None) -> None:
        """Stop one choice (a stop string matched) or all of it, and free its state. Idempotent."""

    def __aiter__(self) -> AsyncIterator[TokenOutput | PromptLogprobs]: ...


@dataclass(frozen=True, slots=True)
class BackendStats:
    """A snapshot for status, metrics and admission.

    `num_rows`: sequences in the running batch, of `num_running`; the others wait for a row. `alone_tokens`, `alone_s`:
    local prefill in steps of its own, and how long those took; `mixed_tokens`, `mixed_s`: in steps that also decode;
    `mixed_chunk_tokens`: of the last such chunk.
    `num_output_tokens` counts what was sampled, also where nobody waited for it any more. `is_warm`: the engine has got
    ready for decode steps, as it does while idle after its start; before, the first steps of each kind take longer.
    """

    num_running: int = 0
    num_rows: int = 0
    num_prefilling: int = 0
    num_waiting: int = 0
    state_bytes: dict[str, int] = field(default_factory=dict)
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    alone_tokens: int = 0
    alone_s: float = 0.0
    mixed_tokens: int = 0
    mixed_s: float = 0.0
    mixed_chunk_tokens: int = 0
    last_progress_at: float = 0.0
    is_warm: bool = True
    is_alive: bool = True

    @property
    def alone_tokens_per_s(self) -> float:
        """Local prefill rate while nothing was decoded; 0 before the first chunk."""
        return self.alone_tokens / self.alone_s if self.alone_s else 0.0

    @property
    def mixed_tokens_per_s(self) -> float:
        """Local prefill rate beside running streams so far; 0 before the first step of both."""
        return self.mixed_tokens / self.mixed_s if self.mixed_s else 0.0


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A step of `num_rows` sequences with `num_context_tokens` together, and no prompt tokens beside them."""

    num_rows: int
    num_context_tokens: int
    seconds: float


class Backend(Protocol):
    """An engine as the daemons see it."""

    info: ModelInfo

    async def start(self) -> None:
        """Load the model and start the engine thread. Raises StartupError."""

    async def close(self) -> None:
        """Stop the engine thread; whatever runs ends with EngineDead."""

    async def open(self, request: Request) -> Generation:
        """Reserve state memory for the request and all its choices; its `due_s` counts from now.

        Raises RequestFailed when it can never fit.
        """

    def prefill(self, task: PrefillTask) -> PrefillJob:
        """Start computing the state of a prompt. It is queued fairly among the others."""

    def state_bytes(self, num_tokens: int, num_choices: int = 1) -> int:
        """State memory that a request of so many tokens (prompt + output) reserves."""

    def stats(self) -> BackendStats:
        """A snapshot; cheap, callable at any rate."""

    def take_decode_steps(self) -> list[DecodeStep]:
        """What was measured since the last call, the latest ones at least."""

    def set_max_stretch(self, max_stretch: float) -> None:
        """From the next step on a step with a local prompt may take so many times as long as its decode rows alone."""
