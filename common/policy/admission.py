"""Who may enter now, who waits, who is shed: caps on running and queued requests, queued prompt tokens, state memory.

One controller per node. It only counts; the daemon acts on what it returns. Both daemons use it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from common.errors import InvalidRequest, Overloaded
from common.policy.views import Demand
from common.units import exact_size, format_size


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """The caps. `section` is the configuration section that errors name."""

    max_running_requests: int
    max_queued_requests: int
    max_queued_tokens: int
    max_state_bytes: int
    retry_after_s: float = 1.0
    section: str = "admission"


@dataclass(slots=True)
class AdmissionController:
    """FIFO admission. `offer` answers "running", "queued" or raises Overloaded; `release` frees and returns who may
    start now. A demand is known by its request id.
    """

    limits: AdmissionLimits
    running: dict[str, Demand] = field(default_factory=dict)
    queue: deque[Demand] = field(default_factory=deque)
    num_queued_tokens: int = 0
    state_bytes: int = 0

    def offer(self, demand: Demand) -> Literal["running", "queued"]:
        """Take a new request in.

        Raises:
            InvalidRequest: it can never fit the state memory.
            Overloaded: a cap is reached; names gate, value, limit and setting.
        """
        limits = self.limits
        if demand.state_bytes > limits.max_state_bytes:
            raise InvalidRequest(
                f"the request needs {format_size(demand.state_bytes)} of state, more than {limits.section}."
                f"max_state_bytes = {exact_size(limits.max_state_bytes)} allows; shorten the prompt, max_tokens or n",
                "max_tokens",
                "state_exceeds_memory",
            )
        if not self.queue and self._fits(demand):
            self._start(demand)
            return "running"
        self._check_queue(demand)
        self.queue.append(demand)
        self.num_queued_tokens += demand.num_prompt_tokens
        return "queued"

    def release(self, request_id: str) -> list[str]:
        """The request ended or left the queue. Returns the ids of queued requests that run from now on."""
        demand = self.running.pop(request_id, None)
        if demand is not None:
            self.state_bytes -= demand.state_bytes
        else:
            self._drop_queued(request_id)
        return self.pump()

    def pump(self) -> list[str]:
        """Start whoever fits, in order of arrival (also after the limits were raised)."""
        started = []
        while self.queue and self._fits(self.queue[0]):
            demand = self.queue.popleft()
            self.num_queued_tokens -= demand.num_prompt_tokens
            self._start(demand)
            started.append(demand.request_id)
        return started

    def _fits(self, demand: Demand) -> bool:
        # Alone it may always run: limits that shrank while it waited must not block the queue for ever.
        has_room = not self.running or self.state_bytes + demand.state_bytes <= self.limits.max_state_bytes
        return len(self.running) < self.limits.max_running_requests and has_room

    def _start(self, demand: Demand) -> None:
        self.running[demand.request_id] = demand
        self.state_bytes += demand.state_bytes

    def _drop_queued(self, request_id: str) -> None:
        for demand in self.queue:
            if demand.request_id == request_id:
                self.queue.remove(demand)
                self.num_queued_tokens -= demand.num_prompt_tokens
                return

    def _check_queue(self, demand: Demand) -> None:
        limits = self.limits
        tokens = self.num_queued_tokens + demand.num_prompt_tokens
        if len(self.queue) >= limits.max_queued_requests:
            self._shed("queued_requests", len(self.queue), limits.max_queued_requests, "max_queued_requests")
        # An empty queue takes any prompt that fits in memory, or a long one could never be served.
        if self.queue and tokens > limits.max_queued_tokens:
            self._shed("queued_tokens", tokens, limits.max_queued_tokens, "max_queued_tokens")

    def _shed(self, gate: str, value: int, limit: int, key: str) -> None:
        setting = f"{self.limits.section}.{key}"
        raise Overloaded(
            f"refused by gate {gate}: {value} against a limit of {limit} ({setting}); retry later",
            gate=gate,
            value=value,
            limit=limit,
            setting=setting,
            retry_after_s=self.limits.retry_after_s,
            status=429,
        )
