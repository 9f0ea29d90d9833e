"""Slots without memory, and a way to run a scheduler on made-up outputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from common.request import SamplingParams
from common.sched.executor import ChunkResult, Sampled
from common.sched.scheduler import Event, Scheduler, SchedulerLimits
from common.sched.sequence import Batch, Sequence


@dataclass
class PaperSlot:
    num_tokens: int
    is_free: bool = False
    copies: list[int] = field(default_factory=list)
    parked: list[int] = field(default_factory=list)

    @property
    def num_bytes(self) -> dict[str, int]:
        return {} if self.is_free else {"host" if self.parked else "full": self.num_tokens}

    def copy_from(self, source: PaperSlot, num_tokens: int) -> None:
        assert not source.is_free
        self.copies.append(num_tokens)

    def park(self, num_tokens: int) -> None:
        assert not self.parked
        self.parked.append(num_tokens)

    def unpark(self) -> None:
        self.parked.pop()

    def free(self) -> None:
        self.is_free = True

    def prepare_import(self, num_tokens: int) -> None: ...
    def landed(self, start: int, stop: int, layers: tuple[int, ...]) -> None: ...
    def writable(self, *_args: Any) -> tuple[memoryview, ...]:
        raise NotImplementedError

    exported = writable


@dataclass
class Run:
    """Drives a scheduler; `token` says what a row samples."""

    scheduler: Scheduler
    token: Callable[[Sequence], Sampled] = lambda _seq: Sampled(7)
    batches: list[Batch] = field(default_factory=list)
    ids: Any = field(default_factory=lambda: itertools.count(1))

    def sequence(
        self,
        num_tokens: int,
        *,
        choices: int = 1,
        owner: object = None,
        held: bool = False,
        priority: int = 0,
        **params: Any,
    ):
        sampling = SamplingParams(**({"max_tokens": 4} | params))
        owner = owner if owner is not None else object()
        made = [
            Sequence(next(self.ids), owner, list(range(num_tokens)), PaperSlot(num_tokens + 8), sampling, choice=c,
                     seed=c, is_held=held, priority=priority)
            for c in range(choices)
        ]  # fmt: skip
        made[0].siblings = made[1:]
        self.scheduler.add(made[0])
        return made[0]

    def job(self, num_tokens: int, **fields: Any) -> Sequence:
        seq = Sequence(next(self.ids), object(), list(range(num_tokens)), PaperSlot(num_tokens), **fields)
        self.scheduler.add(seq)
        return seq

    def step(self) -> list[Event] | None:
        batch = self.scheduler.schedule()
        if batch is None:
            self.scheduler.check_integrity()
            return None
        self.batches.append(batch)
        events = self.scheduler.update_rows(batch.rows, [self.token(row) for row in batch.rows])
        if batch.chunk is not None:
            events += self.scheduler.update_chunk(batch.chunk, ChunkResult())
        self.scheduler.check_integrity()
        return events

    def drain(self) -> list[Event]:
        events: list[Event] = []
        while (new := self.step()) is not None:
            events += new
        return events


@pytest.fixture
def make_run():
    def make(chunk_tokens=10, token_budget=4, max_batch=3, max_logit_rows=3, eos=(2,), max_context=1000) -> Run:
        return Run(Scheduler(SchedulerLimits(chunk_tokens, token_budget, max_batch, max_logit_rows), eos, max_context))

    return make
