"""One request in flight: waits for admission, gets its prompt's state into a slot, streams tokens, stamps the times.

Every way out ends in `_close` with exactly one counted outcome. The dispatcher creates it; the API iterates it once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any

from common.backend import Generation
from common.errors import (
    NoPeer,
    PdError,
    PeerCancelled,
    PeerError,
    RequestDamaged,
    StaleHandle,
    TransferError,
)
from common.net.options import TransferReport
from common.net.pool import PeerClient
from common.policy.routing import RouteDecision
from common.policy.views import Demand
from common.request import PromptLogprobs, Request, RequestReport, TokenOutput
from common.sched.prefixes import Prefixes
from decoded.choicetimes import ChoiceTimes
from decoded.deadline import Deadline
from decoded.ends import log_end
from decoded.remote import RemoteAttempt, record_transfer, start_remote

if TYPE_CHECKING:
    from decoded.dispatch import Dispatcher

log = logging.getLogger(__name__)
_ASK_AGAIN = (StaleHandle, RequestDamaged)
"""No fault of the peer's: this process stood still for longer than the lease, or the way damaged the request."""


class ActiveRequest:
    """One request in flight. Iterate it once; `cancel` may come at any time from the event loop."""

    def __init__(
        self, dispatcher: Dispatcher, request: Request, demand: Demand, arrived_at: float, *, is_queued: bool
    ) -> None:
        self.request, self.arrived_at = request, arrived_at
        self.report = RequestReport(request.request_id, num_prompt_tokens=request.num_prompt_tokens)
        self.decisions: list[dict[str, Any]] = []
        self.stage = "queued" if is_queued else "admitted"
        self._times = ChoiceTimes()
        self._dispatcher = dispatcher
        self._admitted = asyncio.Event()
        if not is_queued:
            self._admitted.set()
        self._generation: Generation | None = None
        self._place: str | None = None
        self._predicted_ttft_s: float | None = None
        self._attempt: RemoteAttempt | None = None
        self._is_cancelled = False
        self._kept_tokens = self._num_own_cached = 0
        self._prefixes: Prefixes | None = None
        self._failed_peers: list[str] = []
        self._asked_again: list[str] = []
        self._has_waited = False
        self._failure: PdError | None = None
        self._is_closed = False
        self._joined_at = 0.0
        self._finish_reasons: dict[int, str] = {}
        self._deadline = Deadline(demand, arrived_at, self._pass_deadline)

    @property
    def prefills_at(self) -> str | None:
        """The peer that computes its prompt, "" for here, None while or since nobody does."""
        has_joined = self._generation is None or self._generation.marks.joined_at > 0
        return None if has_joined else self._place

    @property
    def num_uncomputed_tokens(self) -> int:
        """Of its prompt, where that is being computed."""
        num_computed = self._kept_tokens
        if self._attempt is not None:
            num_computed = max(num_computed, self._attempt.prefill.progress.num_computed_tokens)
        elif self._generation is not None:
            num_computed = max(num_computed, self._generation.num_computed_tokens)
        return max(0, self.request.num_prompt_tokens - 1 - num_computed)

    @property
    def num_missing_bytes(self) -> int:
        """Raw bytes of its prompt's state that have not come from the peer yet."""
        num_landed = self._attempt.prefill.progress.raw_bytes if self._attempt is not None else 0
        return max(0, self._transfer_bytes - num_landed)

    @cached_property
    def _transfer_bytes(self) -> int:
        """Asked at every routing decision of others while it waits; constant since a prompt's cached part is."""
        last = self.request.num_prompt_tokens - 1
        return self._dispatcher.info.layout.transfer_bytes(self.report.num_cached_tokens, last)

    @property
    def num_output_tokens(self) -> int:
        """Over all choices."""
        return self._times.num_tokens

    def queue_s(self, now: float) -> float:
        """Seconds it waited, or has waited, for admission."""
        return now - self.arrived_at if self.stage == "queued" else self.report.timing.queue_s

    @property
    def shown_stage(self) -> str:
        """The stage for people: whoever has its prompt's state and no token yet waits for a row of the batch."""
        has_joined = self._generation is not None and self._generation.marks.joined_at > 0
        return "waiting for a row" if has_joined and self.stage.startswith("prefill ") else self.stage

    def admit(self) -> None:
        """Called by the dispatcher when the request leaves the queue."""
        self.stage = "admitted"
        self._admitted.set()

    def cancel(self, choice: int | None = None) -> None:
        """Stop one choice, or everything everywhere: the queue, the peer, the engine. Idempotent."""
        if choice is not None:
            self._finish_reasons.setdefault(choice, "stop")  # a stop string, which only the API sees
            if self._generation is not None:
                self._generation.cancel(choice)
            return
        self._stop()
        if self.stage in ("queued", "admitted"):
            self._close("cancelled")

    def _stop(self) -> None:
        self._is_cancelled = True
        if self._attempt is not None:
            self._attempt.cancel()
        if self._generation is not None:
            self._generation.cancel()
        self._admitted.set()

    def abort(self, error: PdError) -> None:
        """End the request with an error that whoever iterates it gets."""
        self._failure = error
        self._stop()

    def _pass_deadline(self) -> None:
        """Nobody wants an answer any more: end it, unless the first token is out."""
        if self._is_cancelled or self.num_output_tokens:
            return
        dispatcher = self._dispatcher
        dispatcher.metrics.deadline_misses.labels("queue" if self.stage == "queued" else "prefill").inc()
        dispatcher.admission.note_ttft(self.request.request_id, _now() - self.arrived_at)
        error = self._deadline.error(self.stage, dispatcher.admission.limits.retry_after_s)
        log.warning("request given up: %s", error, extra={"request_id": self.request.request_id})
        self.abort(error)

    def __aiter__(self) -> AsyncIterator[TokenOutput | PromptLogprobs]:
        return self._outputs()

    async def _outputs(self) -> AsyncIterator[TokenOutput | PromptLogprobs]:
        # Whatever is not expected below is a failure; leaving early is not.
        outcome = "error"
        try:
            async for output in self._life():
                yield output
            if self._failure is not None:
                raise self._failure
            outcome = "cancelled" if self._is_cancelled else "ok"
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "cancelled"
            raise
        except PdError as e:
            outcome = "shed" if self._dispatcher.count_shed(e) else "error"
            self.report.outcome = f"{outcome}: {e}"
            raise
        except Exception as e:
            self.report.outcome = f"error: {e!r}"
            raise
        finally:
            if self._generation is not None:
                self._generation.cancel()
            self._close(outcome)

    async def _life(self) -> AsyncIterator[TokenOutput | PromptLogprobs]:
        if not await self._wait_admitted():
            return
        request = self._deadline.from_now(self.request, _now())
        generation = self._generation = await self._dispatcher.backend.open(request)
        self._kept_tokens = self.report.num_cached_tokens = self._num_own_cached = generation.num_cached_tokens
        self._prefixes = generation.prefixes
        if self._prefixes is not None and self._kept_tokens:
            self._dispatcher.hot.note(request.prompt_tokens, self._kept_tokens, request.tenant, self._prefixes)
        if not await self._prefill(generation):
            return
        async for output in generation:
            if isinstance(output, TokenOutput):
                self.stage = "decoding"
                self._stamp(output, generation)
            yield output

    async def _wait_admitted(self) -> bool:
        await self._admitted.wait()
        queue_s = self.report.timing.queue_s = _now() - self.arrived_at
        if self._is_cancelled:
            return False
        self._dispatcher.metrics.queue_s.labels(self.request.service_class).observe(queue_s)
        self.stage = "routing"
        return True

    async def _prefill(self, generation: Generation) -> bool:
        """Get the prompt's state into the slot; False when cancelled meanwhile."""
        started_at = self.arrived_at + self.report.timing.queue_s
        while not self._is_cancelled:
            decision = self._dispatcher.router.route(
                self.request,
                tuple(self._failed_peers),
                self._kept_tokens,
                self._prefixes,
                waited_s=_now() - self.arrived_at,
            )
            if self._should_wait(decision):
                self._has_waited, self.stage = True, "waiting for a peer"
                await self._dispatcher.wait_for_peer(self._failed_peers)
                continue
            self._note(decision)
            if decision.route == "local":
                if decision.is_fallback:
                    self._spend_fallback(decision)
                self.stage, self._place = "prefill local", ""
                self._joined_at = _now()
                self.report.timing.route_s += self._joined_at - started_at
                generation.compute()
                return True
            peer = decision.peer or ""
            client = self._dispatcher.client(peer)
            error = await self._try_remote(generation, client, decision, started_at)
            if error is None:
                return True
            self._blame(client, peer, error)
            started_at = _now()
            if self.report.num_cached_tokens < self._kept_tokens == self.request.num_prompt_tokens - 1:
                # Only the word that it was all was missing: nothing is left to compute.
                self._joined_at = started_at
                generation.import_done(self._kept_tokens)
                return True
        return False

    def _should_wait(self, decision: RouteDecision) -> bool:
        """Whether a peer that is just being connected to may save this request from a refusal, or takes it again."""
        if not decision.is_fallback or self._has_waited or decision.reason == "attempts_spent":
            return False
        dispatcher = self._dispatcher
        is_worth_it = bool(self._asked_again) or not dispatcher.fallback.can_take(_now())
        return is_worth_it and dispatcher.is_peer_joining(self._failed_peers)

    def _blame(self, client: PeerClient | None, peer: str, error: PdError) -> None:
        """Note that a peer failed, unless it did not: it left by reload, or is worth asking once more."""
        if self._dispatcher.client(peer) is not client:
            return
        if isinstance(error, _ASK_AGAIN) and peer not in self._asked_again:
            self._asked_again.append(peer)
        else:
            self._failed_peers.append(peer)

    async def _try_remote(
        self, generation: Generation, client: PeerClient | None, decision: RouteDecision, started_at: float
    ) -> PdError | None:
        """None when the state is in place; else why another way must be found."""
        timing, request_id, peer = self.report.timing, self.request.request_id, decision.peer or ""
        sent_at = _now()
        timing.route_s += sent_at - started_at
        try:
            if client is None:
                raise TransferError(f"peer {peer} left the configuration")
            held = self._pushes_from(client) if decision.push_tokens else None
            self._attempt = start_remote(
                client,
                generation,
                self._deadline.from_now(self.request, sent_at),
                start=self._kept_tokens,
                held=held,
                now=sent_at,
                progress_timeout_s=self._dispatcher.settings.progress_timeout_s,
                has_alternative=lambda: self._dispatcher.has_ready_peer(other_than=peer),
            )
            self.stage, self._place = f"prefill at {peer}", peer
            transfer = await self._attempt.wait()
        except (PeerError, TransferError) as e:
            if isinstance(e, PeerCancelled) and self._is_cancelled:
                return e
            self._dispatcher.metrics.offload_failures.labels(peer, type(e).__name__).inc()
            if self._attempt is not None:
                self._count_bytes(peer, self._attempt.prefill.report)
                await self._keep_verified(generation, self._attempt)  # threads may be writing still
            took_s = self._took(_now() - sent_at)
            timing.failed_remote_s += took_s
            self._dispatcher.metrics.failed_remote.labels(peer).observe(took_s)
            extra = {"request_id": request_id, "peer": peer, "error": type(e).__name__, "kept": self._kept_tokens}
            has_left = client is not None and self._dispatcher.client(peer) is not client
            failure = f"peer {peer} left the configuration" if has_left else f"{type(e).__name__}: {e}"
            log.warning("remote prefill failed, looking for another way: %s", failure, extra=extra)
            self.decisions[-1]["failure"] = failure
            return e
        finally:
            self._attempt = self._place = None
        record_transfer(self.report, transfer, sent_at)
        self._note_cached(transfer.num_cached_tokens)
        self._dispatcher.router.learned.transferred(peer, transfer.wire_bytes, transfer.raw_bytes)
        self._count_bytes(peer, transfer)
        self._joined_at = _now()
        self._took(self._joined_at - sent_at)
        timing.import_s = self._joined_at - transfer.last_byte_at
        generation.import_done(self.request.num_prompt_tokens - 1)
        return None

    def _note_cached(self, num_cached: int) -> None:
        """So many tokens the peer did not compute; of them those count as cached that nobody computed for this request,
        as peers did that failed before.
        """
        num_own, num_kept = self._num_own_cached, self._kept_tokens
        self.report.num_cached_tokens = num_own + max(0, num_cached - num_kept) if num_kept > num_own else num_cached

    def _pushes_from(self, client: PeerClient) -> int | None:
        """The peer gets what decoded has beyond so many tokens; None: it has that by now."""
        held = self._dispatcher.peer_tokens(client.name, self._prefixes, self._kept_tokens)
        return held if held < self._kept_tokens else None

    async def _keep_verified(self, generation: Generation, attempt: RemoteAttempt) -> None:
        """What was verified before the failure need not be computed and sent again."""
        num_kept = await attempt.verified_tokens()
        await generation.filled()
        generation.keep(num_kept)
        self._dispatcher.metrics.kept_tokens.inc(num_kept - self._kept_tokens)
        self._kept_tokens = self.decisions[-1]["kept_tokens"] = num_kept

    def _took(self, took_s: float) -> float:
        """What the latest decision cost: seconds until the prompt's state was in place, or until that failed."""
        self.decisions[-1]["until_in_place_s"] = round(took_s, 6)
        return took_s

    def _count_bytes(self, peer: str, transfer: TransferReport) -> None:
        """Bytes crossed whether or not anything came of them."""
        self.report.wire_bytes += transfer.wire_bytes
        self.report.raw_bytes += transfer.raw_bytes
        self._dispatcher.metrics.wire_bytes.labels(peer).inc(transfer.wire_bytes)
        self._dispatcher.metrics.raw_bytes.labels(peer).inc(transfer.raw_bytes)
        for codec, num in transfer.codecs.items():
            self._dispatcher.metrics.segments.labels(peer, codec).inc(num)
        if transfer.pushed_bytes:
            self._dispatcher.metrics.pushed_bytes.labels(peer).inc(transfer.pushed_bytes)
            self.decisions[-1]["pushed_bytes"] = transfer.pushed_bytes

    def _note(self, decision: RouteDecision) -> None:
        report = self.report
        report.route, report.peer, report.reason = decision.route, decision.peer, decision.reason
        report.warning = self._dispatcher.peer_warning if decision.route == "remote" else ""
        if not self.decisions and decision.predicted_ttft_s is not None:
            self._predicted_ttft_s = _now() - self.arrived_at + decision.predicted_ttft_s
        report.uncached_tokens = max(0, self.request.num_prompt_tokens - 1 - report.num_cached_tokens)
        self.decisions.append(
            {"route": decision.route, "reason": decision.reason, "peer": decision.peer, "terms": decision.terms}
        )
        self._dispatcher.metrics.routes.labels(decision.route, decision.reason).inc()

    def _spend_fallback(self, decision: RouteDecision) -> None:
        num_tokens = max(0, self.request.num_prompt_tokens - 1 - self._kept_tokens)
        wait_s = self._dispatcher.fallback.take(num_tokens, _now())
        extra = {"request_id": self.request.request_id, "reason": decision.reason, "num_tokens": num_tokens}
        if wait_s > 0:
            limit = self._dispatcher.fallback.tokens_per_s
            log.warning("no peer and the fallback budget is spent, answering 503", extra=extra)
            raise NoPeer(
                f"no prefill peer is usable ({decision.reason}) and the local fallback budget "
                f"(fallback.local_prefill_tokens_per_s = {limit:g}) is spent",
                value=num_tokens,
                limit=limit,
                retry_after_s=wait_s,
            )
        self._dispatcher.metrics.fallbacks.labels(decision.reason).inc()
        log.warning("no peer, prefilling here within the fallback budget", extra=extra)

    def _stamp(self, output: TokenOutput, generation: Generation) -> None:
        now = _now()
        self._dispatcher.last_output_at = now
        self._dispatcher.metrics.output_tokens.inc()
        if output.finish_reason is not None:
            self._finish_reasons[output.choice] = output.finish_reason
        gap_s = self._times.note(output.choice, now)
        if gap_s is not None:
            self._dispatcher.metrics.itl.observe(gap_s)
        elif self.num_output_tokens == 1:
            self._stamp_first(now, generation)

    def _stamp_first(self, now: float, generation: Generation) -> None:
        timing, marks, report = self.report.timing, generation.marks, self.report
        timing.ttft_s = now - self.arrived_at
        self._deadline.cancel()
        self._dispatcher.admission.note_ttft(self.request.request_id, timing.ttft_s)
        if report.route == "local" and marks.prefill_started_at:
            timing.queue_s += marks.prefill_started_at - self._joined_at
            timing.prefill_s = marks.prefill_ended_at - marks.prefill_started_at
            self._took(marks.prefill_ended_at - self._joined_at)
            timing.first_token_s = now - marks.prefill_ended_at
            is_alone = self._dispatcher.backend.stats().num_running <= self.request.num_choices
            if is_alone and self._kept_tokens == report.num_cached_tokens:
                self._dispatcher.router.learned.prefilled(report, timing.prefill_s)
        else:
            timing.first_token_s = now - self._joined_at
        self._dispatcher.metrics.ttft.labels(report.route).observe(timing.ttft_s)
        if self._predicted_ttft_s is not None:
            report.predicted_ttft_s = round(self._predicted_ttft_s, 6)
            if len(self.decisions) == 1:  # a failure is nothing that was to be foreseen
                self._dispatcher.metrics.note_prediction(report.route, self._predicted_ttft_s, timing.ttft_s)

    def _close(self, outcome: str) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._deadline.cancel()
        self._count_slo(outcome)
        self.stage = "finished"
        self.report.outcome = self.report.outcome or outcome
        metrics, route = self._dispatcher.metrics, self.report.route
        metrics.requests.labels(route, outcome).inc()
        metrics.prompt_tokens.labels(route).inc(self.request.num_prompt_tokens)
        seconds = _now() - self.arrived_at
        if outcome == "ok":
            metrics.seconds.labels(route).observe(seconds)
            self._dispatcher.router.learned.ended(self.report, self.num_output_tokens)
        log_end(self.request, self.report, outcome, seconds, self._times.num_tokens, self._finish_reasons)
        self._dispatcher.forget(self)

    def _count_slo(self, outcome: str) -> None:
        if outcome == "cancelled":
            return
        ttft_s = self.report.timing.ttft_s if outcome == "ok" else inf
        tpot_s = self._times.tpot_s if outcome == "ok" else inf
        for target, is_met in self._dispatcher.settings.slo.judge(ttft_s, tpot_s).items():
            result = "met" if is_met else "missed"
            self._dispatcher.metrics.slo.labels(self.request.service_class, target, result).inc()


def _now() -> float:
    # Not loop.time(): uvloop's has a resolution of 1 ms and stands still within an iteration.
    return time.monotonic()
