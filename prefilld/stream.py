"""One remote prefill as prefilld serves it: queue, compute chunk by chunk, send segments as layers finish, complete.

Runs as one task per accepted stream; the net layer cancels it when the requester is gone. Knows no sockets, no torch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from math import inf

from common.backend import Backend, ChunkDone, ComputedSegment, PrefillJob, PrefillTask
from common.errors import (
    EngineError,
    InvalidRequest,
    Overloaded,
    PeerCancelled,
    PeerDraining,
    PeerEngineFailed,
    PeerError,
    PeerInvalid,
    PeerShed,
    PeerTimeout,
    PromptTooLong,
    TransferError,
)
from common.net.server import RemoteRequest, ServerStream
from common.policy.admission import AdmissionController
from common.policy.views import Demand
from common.trace import TraceWriter
from prefilld.learned import LearnedCost
from prefilld.metrics import PrefillMetrics
from prefilld.sharing import Sharing

log = logging.getLogger(__name__)
_WATCH_S = 0.5


@dataclass(slots=True)
class StreamRecord:
    """What `prefillctl requests` shows of one stream."""

    key: str
    request_id: str
    peer: str
    num_tokens: int
    stage: str = "queued"
    num_computed_tokens: int = 0
    arrived_at: float = 0.0
    started_at: float = 0.0
    ended_at: float = 0.0
    computing_s: float = 0.0
    paused_s: float = 0.0
    raw_bytes: int = 0
    push_s: float = 0.0
    is_timed_out: bool = False

    @property
    def is_sending(self) -> bool:
        """Everything is computed; the links have the rest."""
        return self.stage == "sending"

    @property
    def waited_s(self) -> float:
        """Time between its first and last chunk that went to other prompts; pauses for the links do not count."""
        return max(0.0, self.ended_at - self.started_at - self.computing_s - self.paused_s)

    def facts(self, now: float) -> dict[str, object]:
        """For people and programs."""
        return {
            "request_id": self.request_id,
            "peer": self.peer,
            "stage": self.stage,
            "num_tokens": self.num_tokens,
            "num_computed_tokens": self.num_computed_tokens,
            "age_s": round(now - self.arrived_at, 3),
        }


class StreamHandler:
    """Serves streams; one for the whole daemon."""

    def __init__(
        self,
        backend: Backend,
        admission: AdmissionController,
        metrics: PrefillMetrics,
        *,
        max_staged_bytes: int,
        max_prompt_tokens: int,
        progress_timeout_s: float = 60.0,
        trace: TraceWriter | None = None,
    ) -> None:
        self.backend, self.admission, self.metrics = backend, admission, metrics
        self.max_staged_bytes, self.max_prompt_tokens = max_staged_bytes, max_prompt_tokens
        self.progress_timeout_s = progress_timeout_s
        self._trace = trace
        self.learned, self.sharing = LearnedCost(), Sharing()
        self.is_draining = False
        self.active: dict[str, StreamRecord] = {}
        self._admitted: dict[str, asyncio.Event] = {}
        self._num_seen = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def __call__(self, stream: ServerStream) -> None:
        """Serve one stream to its end; every way out is counted once."""
        request = stream.request
        self._num_seen += 1
        record = StreamRecord(
            f"{self._num_seen}", request.request_id, stream.peer.name, len(request.tokens), arrived_at=_now()
        )
        self.active[record.key] = record
        self._idle.clear()
        outcome = "lost"
        watch = asyncio.create_task(self._watch(stream, record))
        try:
            outcome = await self._serve(stream, record)
        except asyncio.CancelledError:
            outcome = "timeout" if record.is_timed_out else "cancelled"
            raise
        except (TransferError, PeerError) as e:
            outcome = "cancelled" if isinstance(e, PeerCancelled) else "timeout" if record.is_timed_out else "lost"
            log.warning("stream ended early: %s", e, extra=_extra(record))
        finally:
            watch.cancel()
            self.metrics.prefills.labels(outcome).inc()
            self._release(record)
            facts = {
                "queue_s": round(
                    (record.started_at or _now()) - record.arrived_at - record.push_s + record.waited_s, 3
                ),
                "prefill_s": round(record.computing_s, 3),
                "raw_bytes": record.raw_bytes,
            }
            log.info("prefill %s", outcome, extra=_extra(record) | facts)

    def start_admitted(self) -> None:
        """Let those run who fit now (after the limits were raised)."""
        for key in self.admission.pump():
            self.admit(key)

    def admit(self, key: str) -> None:
        """A queued stream's turn has come."""
        self._admitted[key].set()

    async def wait_idle(self) -> None:
        """Until no stream is in flight and everything sent was acknowledged."""
        await self._idle.wait()

    async def _watch(self, stream: ServerStream, record: StreamRecord) -> None:
        """End the stream, and with it this request's task, when waiting on makes no sense."""
        deadline_s = stream.request.deadline_s
        ends_at = record.arrived_at + (deadline_s if deadline_s is not None else inf)
        while True:
            await asyncio.sleep(max(0.0, min(_WATCH_S, ends_at - _now())))
            now = _now()
            if now >= ends_at:
                why = f"the deadline of {deadline_s:g} s has passed"
            elif stream.stalled_s(now) > self.progress_timeout_s:
                limit = f"{self.progress_timeout_s:g} s (stream.progress_timeout)"
                why = f"nothing of the state that waits was taken, acknowledged or pushed for {limit}"
            else:
                continue
            record.is_timed_out = True
            log.warning("stream given up: %s", why, extra=_extra(record))
            await stream.fail(PeerTimeout(f"the prefill peer gave up: {why}"))
            return

    async def _serve(self, stream: ServerStream, record: StreamRecord) -> str:
        refusal = self._admit(stream.request, record)
        if refusal is not None:
            await stream.refuse(refusal)
            return "refused"
        await stream.accept(num_queued=len(self.admission.queue))
        await self._admitted[record.key].wait()
        request = stream.request
        due_s = None if request.due_s is None else request.due_s - (_now() - record.arrived_at)
        task = PrefillTask(
            record.request_id,
            tuple(request.tokens),
            request.start,
            request.priority,
            request.pushes,
            request.held,
            request.tenant_salt,
            due_s=due_s,
        )
        job: PrefillJob | None = None
        try:
            job = self.backend.prefill(task)
            if request.pushes and await job.wants_push():
                await self._take_push(stream, job, record)
            record.stage = "prefill"
            await self._pump(stream, job, record)
            num_cached = job.num_cached_tokens
            self.learned.prefilled(num_cached, len(task.tokens) - num_cached, record.computing_s)
            record.stage = "sending"
            await stream.complete(len(task.tokens), record.computing_s, record.waited_s)
        except EngineError as e:
            log.error("engine failed: %s", e, extra=_extra(record))
            await stream.fail(PeerEngineFailed(f"the engine of the prefill peer failed: {e}"))
            return "error"
        finally:
            if job is not None:
                job.release()
        self.metrics.prefill_s.observe(record.computing_s)
        return "ok"

    async def _take_push(self, stream: ServerStream, job: PrefillJob, record: StreamRecord) -> None:
        record.stage = "receiving the prefix"
        began = _now()
        await stream.take_push(job.sink)
        job.import_done()
        record.num_computed_tokens = stream.request.start
        self.metrics.pushed_tokens.inc(stream.request.start - stream.request.held)
        record.push_s = _now() - began
        self.metrics.push_s.observe(record.push_s)

    async def _pump(self, stream: ServerStream, job: PrefillJob, record: StreamRecord) -> None:
        """Move what the engine computes to the links; pause the job while too much is unacknowledged."""
        resume: asyncio.Task[None] | None = None
        try:
            async for item in job:
                if isinstance(item, ChunkDone):
                    await self._chunk_done(stream, job, item, record)
                    continue
                if not record.started_at:
                    await self._started(stream, job, record)
                if stream.staged_bytes > self.max_staged_bytes:
                    # Pausing stops chunks; where encoding is slower than computing, segments of earlier ones wait here.
                    await stream.wait_staged_below(self.max_staged_bytes)
                await self._send(stream, item, record)
                if stream.staged_bytes > self.max_staged_bytes and (resume is None or resume.done()):
                    self.metrics.paused.inc()
                    job.set_paused(True)
                    resume = asyncio.create_task(self._resume(stream, job, record))
        finally:
            if resume is not None:
                resume.cancel()

    async def _started(self, stream: ServerStream, job: PrefillJob, record: StreamRecord) -> None:
        record.started_at = job.marks.prefill_started_at
        self.metrics.queue_s.observe(record.started_at - record.arrived_at - record.push_s)
        await stream.started(record.started_at, job.num_cached_tokens)

    async def _resume(self, stream: ServerStream, job: PrefillJob, record: StreamRecord) -> None:
        paused_at = _now()
        await stream.wait_staged_below(self.max_staged_bytes // 2)
        record.paused_s += _now() - paused_at
        job.set_paused(False)

    async def _send(self, stream: ServerStream, segment: ComputedSegment, record: StreamRecord) -> None:
        if self._trace is not None:
            rows = {"start": segment.start, "stop": segment.stop, "layers": segment.layers}
            self._trace("segment_computed", now=segment.computed_at, request_id=stream.request.request_id, **rows)
        num_bytes = sum(b.nbytes for b in segment.buffers)
        record.raw_bytes += num_bytes
        self.metrics.raw_bytes.inc(num_bytes)
        for codec in await stream.send_segment(segment):
            self.metrics.segments.labels(codec).inc()

    async def _chunk_done(self, stream: ServerStream, job: PrefillJob, chunk: ChunkDone, record: StreamRecord) -> None:
        if not record.started_at:
            await self._started(stream, job, record)
        if self._trace is not None:
            span = {"start": chunk.start, "stop": chunk.stop, "started_at": chunk.started_at}
            self._trace("chunk_done", now=chunk.ended_at, request_id=stream.request.request_id, **span)
        record.ended_at = chunk.ended_at
        seconds = chunk.ended_at - chunk.started_at
        record.computing_s += seconds
        self.sharing.computed(record.peer, seconds, _now())
        record.num_computed_tokens = chunk.stop
        if not chunk.is_cached:
            self.metrics.chunks.inc()
            self.metrics.prompt_tokens.inc(chunk.stop - chunk.start)
        await stream.progress(chunk.stop)

    def _admit(self, request: RemoteRequest, record: StreamRecord) -> PeerError | None:
        """None and the stream is admitted or queued, or why it is refused."""
        gate: str
        error: PeerError
        if self.is_draining:
            gate, error = "draining", PeerDraining("this prefilld is draining and takes no new work")
        elif request.start >= record.num_tokens:
            what = f"start = {request.start} of {record.num_tokens} tokens"
            gate, error = "invalid", PeerInvalid(f"{what}: there is nothing to compute")
        elif request.deadline_s is not None and request.deadline_s <= 0:
            gate, error = "deadline", PeerTimeout("the deadline has passed")
        elif too_long := self._too_long(record.num_tokens):
            gate, error = "prompt_tokens", PromptTooLong(too_long)
        else:
            state_bytes = self.backend.state_bytes(record.num_tokens)
            # decodeds take turns: a flood of one fills its own part of the queue.
            demand = Demand(record.key, record.num_tokens, state_bytes, tenant=record.peer)
            try:
                is_running = self.admission.offer(demand) == "running"
            except Overloaded as e:
                gate, error = e.gate, PeerShed(str(e), e.retry_after_s)
            except InvalidRequest as e:
                gate, error = "state_bytes", PromptTooLong(str(e))
            else:
                event = self._admitted[record.key] = asyncio.Event()
                if is_running:
                    event.set()
                return None
        self.metrics.refused.labels(gate).inc()
        log.warning("prefill refused by gate %s: %s", gate, error, extra=_extra(record))
        return error

    def _too_long(self, num_tokens: int) -> str:
        if 0 < self.max_prompt_tokens < num_tokens:
            return f"{num_tokens} tokens exceed limits.max_prompt_tokens = {self.max_prompt_tokens}"
        if self.backend.info.max_context < num_tokens:
            return f"{num_tokens} tokens exceed the model's context of {self.backend.info.max_context}"
        return ""

    def _release(self, record: StreamRecord) -> None:
        self.active.pop(record.key, None)
        if self._admitted.pop(record.key, None) is not None:
            for key in self.admission.release(record.key):
                self.admit(key)
        if not self.active:
            self._idle.set()


def _extra(record: StreamRecord) -> dict[str, object]:
    return {"request_id": record.request_id, "peer": record.peer, "num_tokens": record.num_tokens}


def _now() -> float:
    # Not loop.time(): uvloop's has a resolution of 1 ms and stands still within an iteration.
    return time.monotonic()
