"""Continuous batching: which sequences run in the next engine step, and what its outputs mean for them.

schedule() -> Batch, then update_rows() / update_chunk() with what came out. Reads no clock and touches no
tensors, so tests feed it made-up outputs. Called by common/worker.py on the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from common.errors import RequestFailed
from common.request import FinishReason, PromptLogprobs, SamplingParams, TokenOutput
from common.sched.budget import TokenBudget, joint_size
from common.sched.executor import ChunkResult, Sampled
from common.sched.sequence import Batch, Chunk, Sequence
from common.sched.slots import SlotAccounts
from common.sched.turns import Turns


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Sizes of a step.

    Attributes:
        chunk_tokens: most tokens of one chunk.
        token_budget: most tokens of a chunk that shares its step with decode rows; 0: as many as `max_stretch` allows.
        max_batch: most decode rows of one step; further sequences wait for a row.
        max_logit_rows: most tokens of a chunk whose every position needs logits (bounds their memory).
        max_stretch: how many times as long as its decode rows alone a step with a chunk may take.
    """

    chunk_tokens: int
    token_budget: int
    max_batch: int
    max_logit_rows: int
    max_stretch: float = 3.0


@dataclass(frozen=True, slots=True)
class ChoiceEnded:
    """A choice is over without a (further) token, e.g. with max_tokens = 0."""

    choice: int


Event = tuple[Sequence, TokenOutput | PromptLogprobs | ChoiceEnded | RequestFailed]


class Scheduler:
    """Owns every sequence from `add` until it ends or is removed, and the accounts of their slots.

    `_prefilling` has the sequences that need chunks, in order of arrival, `_running` those that sample; a sequence
    whose state is still to come from elsewhere is in `_prefilling` and held.
    """

    def __init__(self, limits: SchedulerLimits, eos_token_ids: tuple[int, ...], max_context: int) -> None:
        self.limits, self.max_context = limits, max_context
        self.accounts = SlotAccounts()
        self.budget = TokenBudget(limits.chunk_tokens, limits.token_budget, limits.max_stretch)
        self.num_preemptions = 0
        self.takes_chunks = False  # whether the engine computes small chunks with the decode rows
        self._eos = frozenset(eos_token_ids)
        self._prefilling: list[Sequence] = []
        self._running: list[Sequence] = []
        self._done: dict[int, Sequence] = {}
        self._turns = Turns()
        self.on_leave: Callable[[Sequence], None] = _ignore
        """Told of each sequence whose slot is about to be freed, unless its state may be wrong."""

    # -- sequences come and go

    def add(self, seq: Sequence) -> list[Event]:
        """Take a sequence and its siblings; it is scheduled unless held."""
        for each in (seq, *seq.siblings):
            self.accounts.reserve(each)
        self._prefilling.append(seq)
        self._turns.join(seq)
        return [] if seq.is_held else self.advance(seq)

    def advance(self, seq: Sequence) -> list[Event]:
        """Call when `num_computed_tokens` or `is_held` changed: a computed prompt forks its choices and joins."""
        if seq not in self._prefilling or seq.num_remaining > 0 or seq.is_held:
            return []
        self._prefilling.remove(seq)
        if seq.sampling is None:
            self._done[seq.seq_id] = seq
            return []
        events: list[Event] = []
        if seq.prompt_logprobs is not None:
            events.append((seq, PromptLogprobs((None, *seq.prompt_entries))))
        choices = [seq, *seq.siblings]
        seq.siblings = []
        for other in choices[1:]:
            other.slot.copy_from(seq.slot, seq.num_computed_tokens)
            other.num_computed_tokens = seq.num_computed_tokens
            other.keeps_state, other.num_offered, other.point_at = seq.keeps_state, seq.num_offered, seq.point_at
        self._running += choices
        for each in choices:
            if seq.sampling.max_tokens <= 0:
                self._end(each)
                events.append((each, ChoiceEnded(each.choice)))
        return events

    def cancel(self, owner: object, choice: int | None = None, *, has_failed: bool = False) -> None:
        """Drop one choice of an owner, or all its sequences; after a failure nobody goes on from their state.

        Unknown ones are ignored.
        """
        for seq in [s for s in self.sequences() if s.owner is owner and choice in (None, s.choice)]:
            if choice is not None and seq.siblings:
                # The prompt goes on under another choice's name; that one's own slot is what becomes free.
                heir = seq.siblings.pop(0)
                seq.choice, seq.seed, heir.choice = heir.choice, heir.seed, seq.choice
                self.accounts.release(heir)
            elif seq.seq_id in self.accounts:
                seq.keeps_state &= not has_failed
                self._end(seq)

    def sequences(self) -> Iterator[Sequence]:
        """Every sequence that holds a slot."""
        for seq in (*self._prefilling, *self._running, *self._done.values()):
            yield seq
            yield from seq.siblings

    def _end(self, seq: Sequence) -> None:
        self.on_leave(seq)
        for queue in (self._prefilling, self._running):
            if seq in queue:
                queue.remove(seq)
        self._done.pop(seq.seq_id, None)
        for leader in self._prefilling:
            if seq in leader.siblings:
                leader.siblings.remove(seq)
        self.accounts.release(seq)

    # -- one step

    def schedule(self, now: float = 0.0) -> Batch | None:
        """The next step, or None when nothing can run; `now` by the clock of the sequences' `due_at`."""
        failed: list[tuple[Sequence, RequestFailed]] = []
        rows = self._choose_rows(failed)
        seq = None if rows and self._prefilling and self.budget.wants_quiet() else self._next_prefill(now)
        chunk = self._chunk(seq, len(rows)) if seq is not None else None
        return Batch(rows, chunk, tuple(failed)) if rows or chunk or failed else None

    def _choose_rows(self, failed: list[tuple[Sequence, RequestFailed]]) -> tuple[Sequence, ...]:
        """Who decodes: the highest priorities, and of equal ones whoever came first; others are parked meanwhile."""
        rows = self._running
        if len(rows) > self.limits.max_batch:
            ordered = sorted(rows, key=lambda s: -s.priority)
            rows = ordered[: self.limits.max_batch]
            for seq in ordered[self.limits.max_batch :]:
                if seq.has_run and not seq.is_parked:
                    self._park(seq)
        for seq in [s for s in rows if s.is_parked]:
            if seq.seq_id not in self.accounts:  # another choice of its request failed here
                continue
            try:
                seq.slot.unpark()
            except RequestFailed as e:
                failed.append((seq, e))
                self.cancel(seq.owner, has_failed=True)
                continue
            seq.is_parked = False
            self.accounts.rebook(seq)
        chosen = tuple(s for s in rows if s.seq_id in self.accounts)
        for seq in chosen:
            seq.has_run = True
        return chosen

    def _park(self, seq: Sequence) -> None:
        self.num_preemptions += 1
        seq.slot.park(seq.num_computed_tokens)
        seq.is_parked = True
        self.accounts.rebook(seq)

    def _next_prefill(self, now: float) -> Sequence | None:
        """Who gets the next chunk."""
        is_mixed = bool(self._running)
        ready = (s for s in self._prefilling if not s.is_held)
        return self._turns.take(ready, now, lambda s: self.budget.prompt_s(s.num_remaining, is_mixed=is_mixed))

    def _chunk(self, seq: Sequence, num_rows: int) -> Chunk:
        limits = self.limits
        size = limits.chunk_tokens
        if num_rows:
            size = (self.takes_chunks and self.budget.joint_tokens(num_rows)) or self.budget.tokens(num_rows)
        if seq.prompt_logprobs is not None:
            size = min(size, limits.max_logit_rows)
        start = seq.num_computed_tokens
        left = seq.split_at - start if start < seq.split_at else seq.num_remaining
        size = min(size, left, seq.num_remaining)
        if num_rows and self.takes_chunks and size in (left, seq.num_remaining):
            size = joint_size(size)  # the end of a prompt could have any size
        return Chunk(seq, start, start + size)

    def update_rows(self, rows: tuple[Sequence, ...], sampled: list[Sampled]) -> list[Event]:
        """Append what the decode rows sampled; ended sequences leave and free their slots."""
        events: list[Event] = []
        for seq, out in zip(rows, sampled, strict=True):
            if seq.sampling is None or seq.seq_id not in self.accounts:
                continue
            if out.error is not None:
                self.cancel(seq.owner, has_failed=True)
                events.append((seq, out.error))
                continue
            seq.num_computed_tokens += 1
            seq.tokens.append(out.token_id)
            reason = self._finish_reason(seq, seq.sampling, out.token_id)
            if reason is not None:
                self._end(seq)
            events.append((seq, TokenOutput(seq.choice, out.token_id, seq.num_output_tokens, out.logprob, reason)))
        return events

    def update_chunk(self, chunk: Chunk, result: ChunkResult) -> list[Event]:
        """Note the computed tokens; a prompt that is complete joins the batch."""
        chunk.seq.num_computed_tokens = chunk.stop
        chunk.seq.prompt_entries += result.prompt_logprobs
        return self.advance(chunk.seq)

    def _finish_reason(self, seq: Sequence, sampling: SamplingParams, token_id: int) -> FinishReason | None:
        if token_id in sampling.stop_token_ids or (token_id in self._eos and not sampling.ignore_eos):
            return "stop"
        if seq.num_output_tokens >= sampling.max_tokens or seq.num_tokens >= self.max_context:
            return "length"
        return None

    # -- facts

    @property
    def num_running(self) -> int:
        """Sequences that sample."""
        return len(self._running)

    @property
    def num_rows(self) -> int:
        """Of those, how many have a row in a step; the others wait for one."""
        return min(len(self._running), self.limits.max_batch)

    @property
    def num_prefilling(self) -> int:
        """Sequences that need chunks and may have them."""
        return sum(not s.is_held for s in list(self._prefilling))

    @property
    def num_waiting(self) -> int:
        """Held sequences: their state is on its way, or their consumer is behind."""
        return sum(s.is_held for s in list(self._prefilling))

    def check_integrity(self) -> None:
        """Books and slots agree; every sequence is in one place. Raises IntegrityError."""
        self.accounts.check(self.sequences())


def _ignore(_seq: Sequence) -> None:
    """Nobody wants its state."""
