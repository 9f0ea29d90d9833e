"""The verb `profile`: the daemon measures itself, its own engine on its own cores, and keeps what it found.

Which measurements are made, in which order, within which time; common/policy/ladder.py says what comes of them. Works
beside requests, which go first; then the profile says so. Used by both daemons' control verbs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter

from common.backend import Backend
from common.errors import ControlError, PdError
from common.policy import ladder
from common.policy.admission import AdmissionController
from common.policy.ladder import DecodeSample, PrefillSample, Samples
from common.profile_probe import NUM_STEPS, Probe
from common.profiles import identity, store
from common.release import version

log = logging.getLogger(__name__)
NUM_REPEATS = 2
DEFAULT_ROWS = (1, 4, 16)
DEFAULT_TIMEOUT_S, MAX_TIMEOUT_S = 120.0, 3600.0
MEMORY_PART = 0.5
"""Of the state memory a measurement takes no more, so that requests find the rest."""


@dataclass(frozen=True, slots=True)
class Node:
    """Who is measured. `max_rows`: of one decode step, 0 where nothing is decoded."""

    daemon: str
    name: str
    state_dir: Path | None
    max_rows: int = 0


@dataclass(frozen=True, slots=True)
class Wish:
    """What was asked for, checked. `rows` is empty where nothing is decoded."""

    max_tokens: int
    rows: tuple[int, ...]
    timeout_s: float


class Profiler:
    """Measures the daemon that it lives in, once at a time."""

    def __init__(
        self,
        backend: Backend,
        admission: AdmissionController,
        node: Node,
        admit: Callable[[str], None],
        registry: CollectorRegistry,
    ) -> None:
        """`admit` is told each request that may run since a measurement gave its memory back."""
        self._backend, self._admission, self._node = backend, admission, node
        self._probe = Probe(backend, admission, admit)
        self._count = Counter(
            "prfaas_profiles",
            "Profiles measured, by outcome (ok, refused, failed, timeout, cancelled).",
            ["outcome"],
            registry=registry,
        )
        self._is_running = False

    async def run(self, params: dict[str, Any]) -> dict[str, Any]:
        """The verb. Cancelling it ends what runs.

        Raises:
            ControlError: a parameter is wrong, a profile is being measured, or the time was too short.
            EngineError: the engine failed.
        """
        with self._counted():
            wish = self._check(params)
            if self._is_running:
                raise _Refused("a profile is being measured already: wait for it, or end the command that asked")
            self._is_running = True
            began = time.monotonic()
            log.info("measuring a profile", extra={"max_tokens": wish.max_tokens, "timeout_s": wish.timeout_s})
            try:
                async with asyncio.timeout(wish.timeout_s):
                    samples = await self._measure(wish)
            except TimeoutError:
                raise _TooSlow(
                    f"not done after {wish.timeout_s:g} s: measure shorter prompts (--max-tokens), allow more time"
                    " (--timeout), or measure while fewer requests are served"
                ) from None
            finally:
                self._is_running = False
            return self._finish(samples, time.monotonic() - began)

    # -- what is asked

    def _check(self, params: dict[str, Any]) -> Wish:
        node, limit = self._node, self._longest()
        rows = params.get("rows")
        if rows is None:
            rows = sorted({min(num, node.max_rows) for num in DEFAULT_ROWS} - {0})
        elif not node.max_rows:
            raise _Refused(f"rows: {node.daemon} decodes nothing")
        elif not isinstance(rows, list) or not rows or not all(_is_whole(num, 1, node.max_rows) for num in rows):
            raise _Refused(f"rows {rows!r:.60} must be a list of numbers from 1 to batch.max_batch = {node.max_rows}")
        if limit < ladder.MIN_LIMIT:
            raise _Refused(f"prompts of up to {limit} tokens fit here, {ladder.MIN_LIMIT} are needed to measure")
        max_tokens = params.get("max_tokens", limit)
        if not _is_whole(max_tokens, ladder.MIN_LIMIT, limit):
            raise _Refused(
                f"max_tokens {max_tokens!r:.40} must be from {ladder.MIN_LIMIT} to {limit}, which the model's context"
                f" and {MEMORY_PART:.0%} of {self._admission.limits.section}.max_state_bytes allow"
            )
        timeout_s = params.get("timeout_s", DEFAULT_TIMEOUT_S)
        is_time = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
        if not is_time or not 1 <= timeout_s <= MAX_TIMEOUT_S:
            raise _Refused(f"timeout_s {timeout_s!r:.40} must be from 1 to {MAX_TIMEOUT_S:g} seconds")
        return Wish(max_tokens, tuple(sorted(set(rows))), float(timeout_s))

    def _longest(self) -> int:
        """The longest prompt that may be measured."""
        low, high = 0, max(0, self._backend.info.max_context - NUM_STEPS)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._fits(middle, 1) else (low, middle - 1)
        return low

    def _fits(self, num_tokens: int, num_rows: int) -> bool:
        num_bytes = self._backend.state_bytes(num_tokens, num_rows)
        return num_bytes <= MEMORY_PART * self._admission.limits.max_state_bytes

    # -- what is measured

    async def _measure(self, wish: Wish) -> Samples:
        """The whole ladder once, then again what is quick, then decode steps."""
        samples = Samples()
        reached = await self._climb(ladder.ladder(wish.max_tokens), wish.timeout_s, samples)
        quick = [s.num_tokens for s in reached if s.seconds <= ladder.REPEATED_PART * wish.timeout_s]
        for _ in range(NUM_REPEATS):
            for num_tokens in quick:
                samples.prefill += await self._probe.prefill(num_tokens)
        for num_rows in wish.rows:
            samples.decode += await self._steps(num_rows, quick or [reached[0].num_tokens], samples)
        return samples

    async def _climb(self, lengths: Sequence[int], timeout_s: float, samples: Samples) -> list[PrefillSample]:
        """As far as the time goes; returns the whole prompts. Raises _TooSlow when that is not two."""
        await self._probe.prefill(lengths[0])  # whatever the first one of all takes longer
        reached: list[PrefillSample] = []
        for num_tokens in lengths:
            if reached and ladder.expected_s(reached[-1], num_tokens) > ladder.LONGEST_PART * timeout_s:
                samples.remarks.append(
                    f"prompts of {num_tokens} tokens and more would take too long for a time limit of {timeout_s:g} s"
                    " (--timeout) and were not measured"
                )
                break
            found = await self._probe.prefill(num_tokens)
            samples.prefill += found
            reached.append(found[0])
        if len(reached) < 2:
            took_s = reached[0].seconds
            raise _TooSlow(f"a prompt of {lengths[0]} tokens takes {took_s:.3g} s: allow more time (--timeout)")
        return reached

    async def _steps(self, num_rows: int, contexts: Sequence[int], samples: Samples) -> list[DecodeSample]:
        """Decode steps behind the shortest of the contexts, and behind the longest for which there is memory."""
        fitting = [context for context in contexts if self._fits(context + NUM_STEPS, num_rows)]
        if not fitting:
            samples.remarks.append(f"{num_rows} rows of {contexts[0]} tokens do not fit and were not measured")
        return [await self._probe.decode(num_rows, context) for context in sorted({*fitting[:1], *fitting[-1:]})]

    # -- what comes of it

    def _finish(self, samples: Samples, took_s: float) -> dict[str, Any]:
        """The profile as JSON; kept for the next start where there is a place for it."""
        profile = self._document(samples, took_s)
        for text in profile["warnings"]:
            log.warning("profile: %s", text)
        state_dir, stored = self._node.state_dir, None
        if state_dir is not None:
            try:
                stored = str(store(state_dir, profile))
            except OSError as e:
                log.warning("the profile could not be kept in node.state_dir: %s", e)
                profile["warnings"].append(f"it could not be kept in node.state_dir: {e}")
        log.info(
            "profile measured", extra={"took_s": round(took_s, 1), "was_idle": profile["was_idle"], "path": stored}
        )
        return {**profile, "stored": stored}

    def _document(self, samples: Samples, took_s: float) -> dict[str, Any]:
        node, info = self._node, self._backend.info
        layout, longest = info.layout, info.max_context
        decode = {"decode": ladder.decode_facts(samples, node.max_rows)} if samples.decode else {}
        chunk = info.numerics.get("chunk_tokens", "")
        fixed_bytes = layout.transfer_bytes(0, longest) - longest * layout.token_bytes
        return {
            "name": node.name,
            "daemon": node.daemon,
            "version": version(),
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "took_s": round(took_s, 3),
            "was_idle": ladder.was_idle(samples),
            "warnings": ladder.doubts(samples),
            "model": {"name": info.name, "digest": identity(info), "max_context": longest},
            "numerics": dict(info.numerics),
            "chunk_tokens": int(chunk) if chunk.isdigit() else None,
            "state": {"fixed_bytes": fixed_bytes, "bytes_per_token": layout.token_bytes},
            "prefill": ladder.prefill_facts(samples),
            **decode,
            "measured": ladder.measured_facts(samples),
        }

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Every way out is counted and logged once."""
        outcome = "failed"
        try:
            yield
            outcome = "ok"
        except asyncio.CancelledError:
            outcome = "cancelled"
            log.warning("profile given up: whoever asked has left, or this daemon stops")
            raise
        except _TooSlow as e:
            outcome = "timeout"
            log.warning("profile given up: %s", e)
            raise
        except _Refused as e:
            outcome = "refused"
            log.warning("profile refused: %s", e)
            raise
        except PdError as e:
            log.warning("profile failed: %s", e)
            raise
        finally:
            self._count.labels(outcome).inc()


class _Refused(ControlError):
    """Not measured at all."""


class _TooSlow(ControlError):
    """The time was too short."""


def _is_whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
