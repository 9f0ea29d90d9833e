"""decoded under overload in virtual time: the real admission and the real batch scheduler over an engine of set speeds.

Knows no network, event loop or routing: what becomes of requests here is the policies' doing alone, the same from the
same seed. Asks as benchmarks/overload.py does. Used by test_overload.py; `python -m tests.policy.overload [SEEDS]`
prints what becomes of an overload at a node that has served before, and at one that was just started.
"""

from __future__ import annotations

import heapq
import itertools
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from common.errors import Overloaded
from common.policy.admission import AdmissionController, AdmissionLimits
from common.policy.views import Demand, ServiceClass
from common.request import SamplingParams, TokenOutput
from common.sched.executor import ChunkResult, Sampled
from common.sched.scheduler import Event, Scheduler, SchedulerLimits
from common.sched.sequence import Sequence
from tests.sched.conftest import PaperSlot

CLASSES = (ServiceClass("low", 0, 0.2), ServiceClass("high", 10, 0.5))
KEYS = ("greedy", "second", "third", "fourth")
MAX_BATCH, MAX_RUNNING, MAX_QUEUED = 8, 12, 64
NO_DEADLINE_S = 3600.0


@dataclass(frozen=True)
class Engine:
    """Seconds of a decode step, tokens of a prompt per second, and the standard deviation of the logarithm of both."""

    step_s: float = 0.02
    prefill_tokens_per_s: float = 8000.0
    jitter: float = 0.1


FAKE = Engine()
"""Serves 10.3 requests per second."""
SMALL_MODEL = Engine(0.085, 1400.0, 0.3)
"""SmolLM2-135M on one core: 2.2 requests per second."""


@dataclass
class Job:
    """One request. `outcome`: "" (under way), served, refused, queue or prefill (given up there)."""

    demand: Demand
    arrived_at: float
    outcome: str = ""
    has_started: bool = False
    has_token: bool = False

    @property
    def num_tokens(self) -> int:
        return self.demand.num_prompt_tokens + self.demand.max_output_tokens


@dataclass
class Node:
    """One decoded; `run` plays arrivals, in order of time, to the end of the last."""

    engine: Engine
    rng: random.Random
    admission: AdmissionController = field(init=False)
    scheduler: Scheduler = field(init=False)
    now: float = 0.0
    clients_until: float = 0.0
    jobs: dict[str, Job] = field(default_factory=dict)
    sequences: dict[str, Sequence] = field(default_factory=dict)
    deadlines: list[tuple[float, str]] = field(default_factory=list)
    ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        limits = AdmissionLimits(MAX_RUNNING, MAX_QUEUED, 1 << 20, 1 << 40, max_rows=MAX_BATCH, classes=CLASSES)
        self.admission = AdmissionController(limits, self._forecast_s)
        self.scheduler = Scheduler(SchedulerLimits(256, 0, MAX_BATCH, 256), (), 1 << 20)

    def warm_up(self, seconds: float) -> float:
        """As many clients as may run, each asking again as soon as it is answered. Returns requests per second."""
        self.clients_until = seconds
        for _ in range(MAX_RUNNING):
            self._ask_again(0.0)
        self.run([])
        num = len(self.jobs)
        self.jobs, self.deadlines = {}, []
        return num / self.now

    def run(self, arrivals: Iterable[Job]) -> None:
        todo = list(arrivals)[::-1]
        while todo or self.admission.running or self.admission.queue:
            if not self._step():
                self.now = max(self.now, min([j.arrived_at for j in todo[-1:]] + [at for at, _ in self.deadlines[:1]]))
            while True:
                arrives_at = todo[-1].arrived_at if todo else self.now + 1.0
                passes_at = self.deadlines[0][0] if self.deadlines else self.now + 1.0
                if min(arrives_at, passes_at) > self.now:
                    break
                if arrives_at < passes_at:
                    self._arrive(todo.pop())
                else:
                    self._pass_deadline(*heapq.heappop(self.deadlines))

    def _forecast_s(self, demand: Demand, num_before: int) -> float:
        """As decoded's router: what must be computed at the rate beside running streams, and a step."""
        budget = self.scheduler.budget
        rate = budget.mixed_tokens / budget.mixed_s if budget.mixed_s else self.engine.prefill_tokens_per_s
        waiting = sum(s.num_remaining for s in self.sequences.values())
        return (demand.num_prompt_tokens + waiting + num_before) / rate + self.engine.step_s

    def _arrive(self, job: Job) -> None:
        name, at = job.demand.request_id, job.arrived_at
        self.jobs[name] = job
        try:
            answer = self.admission.offer(job.demand, at)
        except Overloaded:
            job.outcome = "refused"
            return
        heapq.heappush(self.deadlines, (at + (job.demand.deadline_s or NO_DEADLINE_S), name))
        self._start(([name] if answer == "running" else []) + self.admission.pump(at))

    def _start(self, names: Iterable[str]) -> None:
        for name in names:
            self.jobs[name].has_started = True
            demand = self.jobs[name].demand
            priority = self.admission.queue.class_of(demand.service_class).facts.priority
            sampling = SamplingParams(max_tokens=demand.max_output_tokens, ignore_eos=True)
            tokens = [7] * demand.num_prompt_tokens
            seq = Sequence(next(self.ids), name, tokens, PaperSlot(len(tokens)), sampling, priority=priority)
            if (demand.deadline_s or NO_DEADLINE_S) < NO_DEADLINE_S:
                seq.arrived_at = self.jobs[name].arrived_at
                seq.due_at = seq.arrived_at + (demand.deadline_s or 0.0)
            self.sequences[name] = seq
            self.scheduler.add(seq)

    def _pass_deadline(self, at: float, name: str) -> None:
        job = self.jobs[name]
        if not job.outcome and not job.has_token:
            job.outcome = "prefill" if job.has_started else "queue"
            self.admission.note_ttft(name, at - job.arrived_at)
            self._end(name, at, 0)

    def _end(self, name: str, at: float, num_output: int) -> None:
        if self.sequences.pop(name, None) is not None:
            self.scheduler.cancel(name)
        self._start(self.admission.release(name, at, num_output))
        if at < self.clients_until:
            self._ask_again(at)

    def _ask_again(self, at: float) -> None:
        self._arrive(Job(demand_of(self.rng, f"client{next(self.ids)}", "low", KEYS[1], NO_DEADLINE_S), at))

    def _step(self) -> bool:
        batch = self.scheduler.schedule(self.now)
        if batch is None:
            return False
        began, factor = self.now, self.rng.lognormvariate(0.0, self.engine.jitter)
        if batch.rows:
            self.now += self.engine.step_s * factor
            self.scheduler.budget.note_quiet(len(batch.rows), self.now - began)
            self._deliver(self.scheduler.update_rows(batch.rows, [Sampled(7)] * len(batch.rows)))
        if (chunk := batch.chunk) is not None:
            num_tokens = chunk.stop - chunk.start
            self.now += num_tokens / self.engine.prefill_tokens_per_s * factor
            if batch.rows:
                self.scheduler.budget.note_chunk(num_tokens, len(batch.rows), self.now - began)
            else:
                self.scheduler.budget.note_alone(num_tokens, self.now - began)
            self._deliver(self.scheduler.update_chunk(chunk, ChunkResult()))
        return True

    def _deliver(self, events: Iterable[Event]) -> None:
        for seq, item in events:
            name = str(seq.owner)
            job = self.jobs[name]
            if isinstance(item, TokenOutput) and not job.outcome:
                if not job.has_token:
                    job.has_token = True
                    self.admission.note_ttft(name, self.now - job.arrived_at)
                if item.finish_reason is not None:
                    job.outcome = "served"
                    self._end(name, self.now, job.demand.max_output_tokens)


def demand_of(rng: random.Random, name: str, service_class: str, key: str, deadline_s: float) -> Demand:
    """50 to 400 prompt tokens and 8 to 48 output tokens."""
    return Demand(name, rng.randint(50, 400), 1, rng.randint(8, 48), 1, service_class, key, deadline_s, "test")


def arrivals(
    rng: random.Random,
    rate_rps: float,
    seconds: float,
    deadline_s: float,
    *,
    start: float = 0.0,
    classes=("high", "low"),
) -> Iterator[Job]:
    """Poisson; one key sends 70 %."""
    at = start
    while (at := at + rng.expovariate(rate_rps)) < start + seconds:
        key = KEYS[0] if rng.random() < 0.7 else rng.choice(KEYS[1:])
        yield Job(demand_of(rng, f"{at!r}", rng.choice(classes), key, deadline_s), at)


@dataclass
class Result:
    """What became of requests."""

    jobs: list[Job]

    @property
    def num_served(self) -> int:
        return sum(j.outcome == "served" for j in self.jobs)

    @property
    def missed(self) -> float:
        """Of those that were let in, the part that was given up at the deadline."""
        num = sum(j.outcome in ("queue", "prefill") for j in self.jobs)
        return num / max(1, num + self.num_served)

    def share(self, service_class: str) -> float:
        """A class's part of all service."""
        tokens: Counter[str] = Counter()
        for job in self.jobs:
            if job.outcome == "served":
                tokens[job.demand.service_class] += job.num_tokens
        return tokens[service_class] / max(1, tokens.total())

    def by_key(self) -> Counter[str]:
        return Counter(j.demand.tenant for j in self.jobs if j.outcome == "served")


def overload(seed: int, engine: Engine, deadline_s: float, warm_s: float, times: float = 5.0) -> tuple[Result, float]:
    """`times` the capacity for 60 s, and the requests per second that the capacity is."""
    rng = random.Random(seed)
    capacity = Node(engine, rng).warm_up(100.0)
    node = Node(engine, rng)
    if warm_s:
        node.warm_up(warm_s)
    node.run(arrivals(rng, times * capacity, 60.0, deadline_s, start=node.now))
    return Result(list(node.jobs.values())), capacity


def main() -> None:
    num_seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    for label, engine, deadline_s in (("fake", FAKE, 3.0), ("small model", SMALL_MODEL, 10.0)):
        for warm_s in (15.0, 0.0):
            runs = [overload(seed, engine, deadline_s, warm_s) for seed in range(num_seeds)]
            every = Result([job for run, _ in runs for job in run.jobs])
            sys.stdout.write(
                f"{label:12} {'has served' if warm_s else 'just started':12} capacity {runs[0][1]:5.2f}/s, served"
                f" {every.num_served / num_seeds / 60:5.2f}/s, missed {every.missed:.2%}, low {every.share('low'):.2f},"
                f" {dict(Counter(j.outcome for j in every.jobs))}, {dict(every.by_key())}\n"
            )


if __name__ == "__main__":
    main()
