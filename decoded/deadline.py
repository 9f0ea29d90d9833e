"""A request's deadline for its first token: what is left of it, and the error that ends the request when it passes.

Used by active.py. Reads the event loop's timer and this process's clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from common.errors import Overloaded
from common.policy.views import Demand
from common.request import Request

GRACE_S = 0.5
"""So much later a peer gives up: whoever asked it is to end the request, not to look for another way."""


class Deadline:
    """Calls `on_passed` once when the deadline has passed, unless it is cancelled before; without a deadline never."""

    def __init__(self, demand: Demand, arrived_at: float, on_passed: Callable[[], None]) -> None:
        self._demand, self._arrived_at = demand, arrived_at
        self._timer: asyncio.TimerHandle | None = None
        if demand.deadline_s is not None:
            left_s = max(0.0, arrived_at + demand.deadline_s - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(left_s, on_passed)

    def cancel(self) -> None:
        """The first token is out, or the request has ended."""
        if self._timer is not None:
            self._timer.cancel()

    def from_now(self, request: Request, now: float) -> Request:
        """The request as a peer gets it: its times count from `now`, and its deadline is a little later than here."""
        passed_s = now - self._arrived_at
        deadline_s, due_s = (None if s is None else max(0.0, s - passed_s) for s in (request.deadline_s, request.due_s))
        return replace(request, deadline_s=None if deadline_s is None else deadline_s + GRACE_S, due_s=due_s)

    def error(self, stage: str, retry_after_s: float) -> Overloaded:
        """What the client is told: where it was, how long that took, and who set the deadline."""
        waited_s, deadline_s = time.monotonic() - self._arrived_at, self._demand.deadline_s or 0.0
        setting = self._demand.deadline_setting
        return Overloaded(
            f"given up by gate deadline: no token after {waited_s:.3g} s ({stage}), the deadline is {deadline_s:g} s"
            f" ({setting}); retry later",
            gate="deadline",
            value=round(waited_s, 3),
            limit=deadline_s,
            setting=setting,
            retry_after_s=retry_after_s,
        )
