"""Who may enter now, who waits, who is shed: gates on requests, prompt tokens, size, state memory and deadlines.

One controller per node; fair.py says in which order those who wait are served. It only counts; the daemon acts on what
it returns. Both daemons use it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil, inf
from typing import Literal

from common.errors import InvalidRequest, Overloaded
from common.policy.fair import Charge, ClassQueue, FairQueue
from common.policy.pace import DrainPace
from common.policy.promises import Promises
from common.policy.run_pace import RunPace
from common.policy.views import Demand, ServiceClass
from common.units import exact_size, format_size

Forecast = Callable[[Demand, int], float | None]
"""Seconds from being admitted to the first token, behind so many other prompt tokens; None: nobody knows."""

# A tenant may queue at most so many times the room that it leaves (Choudhury, Hahne: Dynamic queue length thresholds
# for shared-memory packet switches, IEEE/ACM ToN 1998): one alone gets 8/9 of the queue, a newcomer always finds room.
TENANT_SHARE = 8
# Weight of the latest request in the mean of what requests put out.
OUTPUT_WEIGHT = 1 / 32


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """The caps. `section` is the configuration section that errors name.

    Attributes:
        max_rows: sequences in one decode step; classes leave the guaranteed part of them to lower ones. 0: no matter.
        large_prompt_tokens: longer prompts are large: refused when more than `large_queue_share` of the queue is full.
        classes: priority classes; none is one class.
    """

    max_running_requests: int
    max_queued_requests: int
    max_queued_tokens: int
    max_state_bytes: int
    retry_after_s: float = 1.0
    section: str = "admission"
    max_rows: int = 0
    large_prompt_tokens: float = inf
    large_queue_share: float = 1.0
    classes: tuple[ServiceClass, ...] = ()


@dataclass(slots=True)
class _Running:
    """What one class has running."""

    num_requests: int = 0
    num_rows: int = 0


@dataclass(slots=True)
class AdmissionController:
    """`offer` answers "running", "queued" or raises Overloaded; `release` frees and returns who may start now. A demand
    is known by its request id. Requests do not wait for running ones of lower classes: those are preempted.
    """

    limits: AdmissionLimits
    forecast: Forecast | None = None
    running: dict[str, Demand] = field(default_factory=dict)
    state_bytes: int = 0
    queue: FairQueue = field(init=False)
    pace: DrainPace = field(default_factory=DrainPace)
    run_pace: RunPace = field(default_factory=RunPace)
    promises: Promises = field(default_factory=Promises)
    _charges: dict[str, Charge] = field(default_factory=dict)
    _by_class: dict[str, _Running] = field(default_factory=dict)
    _mean_output: float | None = None

    def __post_init__(self) -> None:
        self.queue = FairQueue(self.limits.classes)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of queued requests."""
        return self.queue.num_tokens

    def offer(self, demand: Demand, now: float = 0.0) -> Literal["running", "queued"]:
        """Take a new request in.

        Raises:
            InvalidRequest: it can never fit the state memory.
            Overloaded: a cap is reached, or its deadline cannot be kept; names gate, value, limit and setting.
        """
        self._check_memory(demand)
        cost = self._cost(demand)
        self.queue.ask(demand, cost, now)
        before, refusal = self._cost_before(demand, now), self._full(demand)
        self.queue.push(demand, cost)
        try:
            head, passed = self._startable()
            if head is demand:
                refusal = self._late(demand, None)
            elif refusal is None:
                refusal = self._late(demand, self._wait_s(demand, before, now))
            if refusal is not None:
                raise refusal
        except BaseException:  # whoever is not taken in must not stay in the queue
            self.queue.remove(demand.request_id)
            raise
        if head is demand:
            self._start(passed, now)
            return "running"
        self.pace.begin(now)
        return "queued"

    def release(self, request_id: str, now: float = 0.0, num_output_tokens: int | None = None) -> list[str]:
        """The request ended or left the queue. Returns the ids of queued requests that run from now on.

        Args:
            num_output_tokens: what it put out, where that counts as service.
        """
        demand = self.running.pop(request_id, None)
        self.promises.drop(request_id)
        if demand is None:
            self.queue.remove(request_id)
        else:
            self._count(demand, -1)
            charge = self._charges.pop(request_id)
            self.run_pace.end(request_id, demand.num_prompt_tokens + (num_output_tokens or 0), now)
            if num_output_tokens is not None:
                self.queue.settle(charge, demand.num_prompt_tokens + num_output_tokens)
                mean = self._mean_output if self._mean_output is not None else float(num_output_tokens)
                self._mean_output = mean + OUTPUT_WEIGHT * (num_output_tokens - mean)
        return self.pump(now)

    def note_ttft(self, request_id: str, ttft_s: float) -> None:
        """Its first token came after so long, or has not come in that time: predictions learn from it."""
        self.promises.note(request_id, ttft_s)

    def pump(self, now: float = 0.0) -> list[str]:
        """Start whoever fits, in fair order; also after limits were raised."""
        started = []
        while True:
            head, passed = self._startable()
            if head is None:
                break
            self.pace.note(self._start(passed, now).cost, now)
            started.append(head.request_id)
        if not self.queue:
            self.pace.end()
        return started

    def set_limits(self, limits: AdmissionLimits) -> None:
        """Take over new limits (reload); what waits and runs stays. `pump` afterwards."""
        self.limits = limits
        self.queue.reclassify(limits.classes)
        self._by_class, self.state_bytes = {}, 0
        for demand in self.running.values():
            self._count(demand, 1)

    # -- who runs

    def _startable(self) -> tuple[Demand | None, set[str]]:
        """Who may start now, if anybody, and the classes that must wait although it would be their turn."""
        passed: set[str] = set()
        while (demand := self.queue.head(passed)) is not None:
            # Alone it may always run: limits that shrank while it waited must not block the queue for ever.
            if self.running and self.state_bytes + demand.state_bytes > self.limits.max_state_bytes:
                break  # nobody overtakes it, or a large one would never find room
            queue = self.queue.class_of(demand.service_class)
            if self._has_slot(queue, demand):
                return demand, passed
            passed.add(queue.facts.name)
        return None, passed

    def _has_slot(self, queue: ClassQueue, demand: Demand) -> bool:
        """Running requests of lower classes take no slot from it, but as far as they have requests they keep their
        guaranteed slots, and their guaranteed rows of the batch. While higher ones wait and no row is free it gets
        no more than its own guaranteed slots: it would only wait on, with its state in memory.
        """
        limits, own = self.limits, self._running(queue)
        num = lower_slots = lower_rows = num_higher_queued = 0
        for other in self.queue.classes.values():
            theirs, num_queued = self._running(other), other.tenants.num_requests
            if other.facts.priority >= queue.facts.priority:
                num += theirs.num_requests
                num_higher_queued += num_queued if other.facts.priority > queue.facts.priority else 0
            else:
                slots = _part(other.facts.share, limits.max_running_requests)
                lower_slots += min(slots, theirs.num_requests + num_queued)
                lower_rows += min(_part(other.facts.share, limits.max_rows), theirs.num_rows + num_queued)
        if num >= limits.max_running_requests or not own.num_requests:
            return num < limits.max_running_requests  # one of each class may always run
        if num_higher_queued and sum(r.num_rows for r in self._by_class.values()) >= limits.max_rows > 0:
            return own.num_requests < _part(queue.facts.share, limits.max_running_requests)
        has_rows = not lower_rows or own.num_rows + demand.num_rows + lower_rows <= limits.max_rows
        return has_rows and num + lower_slots < limits.max_running_requests

    def _start(self, passed: set[str], now: float) -> Charge:
        charge = self.queue.pop(passed)
        demand = charge.demand
        self.running[demand.request_id], self._charges[demand.request_id] = demand, charge
        self._count(demand, 1)
        self.run_pace.begin(demand.request_id, charge.cost, now)
        return charge

    def _count(self, demand: Demand, num: int) -> None:
        self.state_bytes += num * demand.state_bytes
        running = self._running(self.queue.class_of(demand.service_class))
        running.num_requests += num
        running.num_rows += num * demand.num_rows

    def _running(self, queue: ClassQueue) -> _Running:
        return self._by_class.setdefault(queue.facts.name, _Running())

    # -- gates

    def _cost(self, demand: Demand) -> float:
        """Tokens of service it is expected to take."""
        most = demand.max_output_tokens
        return demand.num_prompt_tokens + (most if self._mean_output is None else min(most, self._mean_output))

    def _check_memory(self, demand: Demand) -> None:
        limits = self.limits
        if demand.state_bytes > limits.max_state_bytes:
            raise InvalidRequest(
                f"the request needs {format_size(demand.state_bytes)} of state, more than {limits.section}."
                f"max_state_bytes = {exact_size(limits.max_state_bytes)} allows; shorten the prompt, max_tokens or n",
                "max_tokens",
                "state_exceeds_memory",
            )

    def _full(self, demand: Demand) -> Overloaded | None:
        """Why it cannot be queued. Room that other classes are sure of is not given away."""
        limits, queue = self.limits, self.queue.class_of(demand.service_class)
        open_share = 1.0 - sum(q.facts.share for q in self.queue.classes.values() if q is not queue)
        num, room = queue.tenants.num_requests, _part(open_share, limits.max_queued_requests)
        if num >= room or len(self.queue) >= limits.max_queued_requests:
            return self._shed("queued_requests", num, room, "max_queued_requests", queue)
        num_own = queue.tenants.num_of(demand.tenant)
        if demand.tenant and num_own >= (most := TENANT_SHARE * (room - num)):
            why = f", {TENANT_SHARE} times the room left"
            return self._shed("tenant_requests", num_own, most, "max_queued_requests", queue, why)
        tokens, max_tokens = queue.num_tokens + demand.num_prompt_tokens, _part(open_share, limits.max_queued_tokens)
        # An empty queue takes any prompt that fits in memory, or a long one could never be served.
        if num and tokens > max_tokens:
            return self._shed("queued_tokens", tokens, max_tokens, "max_queued_tokens", queue)
        is_full = num > limits.large_queue_share * room or queue.num_tokens > limits.large_queue_share * max_tokens
        if is_full and demand.num_prompt_tokens > limits.large_prompt_tokens:
            size, most_tokens = demand.num_prompt_tokens, limits.large_prompt_tokens
            return self._shed("large_prompt", size, most_tokens, "large_prompt_tokens", queue)
        return None

    def _cost_before(self, demand: Demand, now: float) -> float:
        """Service before a new request, of those that wait and of those that will come and overtake it."""
        cost_per_s = self.pace.per_s or self.run_pace.per_s(now)
        num_running = self._running(self.queue.class_of(demand.service_class)).num_requests
        return self.queue.cost_before(demand, now, cost_per_s, num_running, self.limits.max_running_requests)

    def _wait_s(self, demand: Demand, before: float, now: float) -> float:
        """Seconds in the queue behind so much service."""
        wait_s = self.pace.wait_s(before, now)
        if wait_s is not None:
            return wait_s
        # Nothing has left the queue yet: what runs tells the pace, and the prompts before it must be computed at least.
        cost_per_s = self.run_pace.per_s(now)
        wait_s = before / cost_per_s if cost_per_s else 0.0
        if self.forecast is None:
            return wait_s
        num_before = int(min(self.queue.num_tokens - demand.num_prompt_tokens, before))
        return max(wait_s, (self.forecast(demand, num_before) or 0.0) - (self.forecast(demand, 0) or 0.0))

    def _late(self, demand: Demand, wait_s: float | None) -> Overloaded | None:
        """Why its deadline cannot be kept, as far as one can know; `wait_s` in the queue, None: it need not wait."""
        forecast_s = self.forecast(demand, 0) if self.forecast is not None else 0.0
        own_s = forecast_s or 0.0
        predicted_s, has_waited = demand.waited_s + (wait_s or 0.0) + own_s, wait_s is not None
        name = self.queue.class_of(demand.service_class).facts.name
        margin_s = self.promises.margin_s(demand, name, wait_s)
        ttft_s, wait_s = predicted_s + margin_s, wait_s or 0.0
        if demand.deadline_s is None or ttft_s <= demand.deadline_s:
            # What took how long at a node of which nothing was known tells nothing of how good predictions are.
            known_s = predicted_s if forecast_s is not None else None
            self.promises.make(demand, name, known_s, has_waited=has_waited)
            return None
        if predicted_s <= demand.deadline_s and self.queue.class_of(name).tenants.num_requests == 1:
            is_alone = len(self.queue) == 1
            self.promises.fade(demand, name, has_waited=has_waited, is_alone=is_alone, is_idle=not self.running)
        return Overloaded(
            f"refused by gate deadline: the first token is expected within {ttft_s:.3g} s ({wait_s:.3g} s in the queue,"
            f" {own_s:.3g} s for the prompt, {margin_s:.3g} s since such predictions are off), the deadline is"
            f" {demand.deadline_s:g} s ({demand.deadline_setting}); retry later",
            gate="deadline",
            value=round(ttft_s, 3),
            limit=demand.deadline_s,
            setting=demand.deadline_setting,
            retry_after_s=max(self.limits.retry_after_s, min(wait_s, ttft_s - demand.deadline_s)),
        )

    def _shed(self, gate: str, value: int, limit: float, key: str, queue: ClassQueue, why: str = "") -> Overloaded:
        setting = f"{self.limits.section}.{key}"
        of_class = f" of class {queue.facts.name}" if len(self.queue.classes) > 1 else ""
        return Overloaded(
            f"refused by gate {gate}: {value} against a limit of {limit:g}{of_class}{why} ({setting}); retry later",
            gate=gate,
            value=value,
            limit=limit,
            setting=setting,
            retry_after_s=self.limits.retry_after_s,
            status=429,
        )


def _part(share: float, limit: int) -> int:
    """A share of a limit, rounded up but for the error of the share."""
    return ceil(round(share * limit, 6))
