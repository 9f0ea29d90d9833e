"""How late the event loop runs: a timer that measures its own delay into a histogram. Knows no daemon.

A callback that was due while the loop was blocked waited for the rest of the blockage. So a delay of several intervals
is entered once for each interval in it, as if a timer had been due at each: percentiles are those of a random arrival.
Started and closed by the services, on the loop.
"""

from __future__ import annotations

import asyncio
import time

from common.metrics import Metrics

INTERVAL_S = 0.05
_MAX_SAMPLES = 1200  # of one delay: a minute
_BUCKETS = (0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 5, 30)


class LoopLag:
    """One timer on the running loop."""

    def __init__(self, metrics: Metrics) -> None:
        self._histogram = metrics.histogram(
            "prfaas_event_loop_lag_seconds",
            "How much later than due the event loop ran a callback",
            sample=f"one callback, due every {INTERVAL_S:g} s",
            buckets=_BUCKETS,
        )
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = 0.0

    def start(self) -> None:
        """Measure from now on, until `close`."""
        self._due_at = time.monotonic() + INTERVAL_S
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._tick)

    def close(self) -> None:
        """Stop. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        for lag in lags(time.monotonic() - self._due_at):
            self._histogram.observe(lag)
        self.start()


def lags(delay_s: float) -> list[float]:
    """What callbacks due every INTERVAL_S waited, when the first of them ran `delay_s` late."""
    num = min(int(max(delay_s, 0.0) / INTERVAL_S) + 1, _MAX_SAMPLES)
    return [max(delay_s - n * INTERVAL_S, 0.0) for n in range(num)]
