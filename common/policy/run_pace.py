"""What a node serves in a second, told from the requests that run: known before the first one has left the queue.

Pure; used by admission.py, until pace.py has seen the queue drain.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# One end in so many is the weight of the latest.
MEMORY = 32


@dataclass(slots=True)
class RunPace:
    """Service of requests that have ended over the time they ran, older ones ever less, and of those that run."""

    cost: float = 0.0
    seconds: float = 0.0
    _running: dict[str, tuple[float, float]] = field(default_factory=dict)
    _running_cost: float = 0.0
    _sum_began: float = 0.0

    def begin(self, request_id: str, cost: float, now: float) -> None:
        """A request that is expected to cost so many tokens runs from now on."""
        self._running[request_id] = cost, now
        self._running_cost += cost
        self._sum_began += now

    def end(self, request_id: str, cost: float, now: float) -> None:
        """It has ended, and this is what it did cost."""
        expected, began = self._running.pop(request_id)
        keep = 1.0 - 1.0 / MEMORY
        self.cost, self.seconds = keep * self.cost + cost, keep * self.seconds + max(0.0, now - began)
        # From the start when nothing runs: sums of floats drift.
        self._running_cost = self._running_cost - expected if self._running else 0.0
        self._sum_began = self._sum_began - began if self._running else 0.0

    def per_s(self, now: float) -> float:
        """Tokens per second of those that run now; 0 before anything is known.

        By Little's law: as many as run, times what each gets. One that runs is taken to be half done, as those are on
        average that are seen at an arbitrary instant.
        """
        num = len(self._running)
        seconds = self.seconds + num * now - self._sum_began
        return num * (self.cost + self._running_cost / 2) / seconds if num and seconds > 0.0 else 0.0
