"""What requests with deadlines were let in on: predictions of their first token, and how far such predictions are off.

Pure; used by admission.py, which says whether they are let in.
"""

from __future__ import annotations

from typing import NamedTuple

from common.policy.pace import Errors, Misses
from common.policy.views import Demand

# Errors of predictions are kept for so many classes and tenants, the earliest known go first.
MAX_ERRORS = 4096
# A wait may take longer than predicted by so many times itself: at first, when an overload begins that nobody has seen
# the like of, and in the long run. After so many that waited it is half of what it is at first.
FIRST_DOUBT, LEAST_DOUBT, HALF_DOUBT = 3.0, 0.5, 32


class Promise(NamedTuple):
    """A request that was let in, when its first token was expected, where known, and where that is learnt from."""

    demand: Demand
    service_class: str
    predicted_s: float | None
    has_waited: bool


class Promises:
    """Of all requests that have no first token yet, and what was learnt from the others."""

    def __init__(self) -> None:
        self.made: dict[str, Promise] = {}
        self._misses: dict[str, Misses] = {}
        self._errors: dict[tuple[str, str, bool], Errors] = {}
        self._num_waited = 0

    def make(self, demand: Demand, service_class: str, predicted_s: float | None, *, has_waited: bool) -> None:
        """It is let in."""
        self.made[demand.request_id] = Promise(demand, service_class, predicted_s, has_waited)

    def drop(self, request_id: str) -> None:
        """It ended without a first token, or had one long ago."""
        self.made.pop(request_id, None)

    def note(self, request_id: str, ttft_s: float) -> None:
        """Its first token came after so long, or it was given up then."""
        if (found := self.made.pop(request_id, None)) is None:
            return
        demand, service_class, predicted_s, has_waited = found
        if predicted_s is not None:
            self._errors_of(demand, service_class, has_waited=has_waited).note(ttft_s - predicted_s)
        self._num_waited += has_waited
        if demand.deadline_s is not None:
            self._misses_of(service_class).note(is_missed=ttft_s >= demand.deadline_s)

    def margin_s(self, demand: Demand, service_class: str, wait_s: float | None) -> float:
        """What to add to a prediction; `wait_s` of it in the queue, None: it need not wait."""
        margin_s = self._errors_of(demand, service_class, has_waited=wait_s is not None).margin_s
        doubt = max(LEAST_DOUBT, FIRST_DOUBT * HALF_DOUBT / (HALF_DOUBT + self._num_waited))
        return margin_s + doubt * (wait_s or 0.0) + self._misses_of(service_class).reserve * (demand.deadline_s or 0.0)

    def fade(self, demand: Demand, service_class: str, *, has_waited: bool, is_alone: bool, is_idle: bool) -> None:
        """It was refused for its margin while nobody of its class waits from whom to learn that it is too much;
        `is_alone`: nor of another class, `is_idle`: nor does anybody run.
        """
        self._errors_of(demand, service_class, has_waited=has_waited).fade()
        self._num_waited += has_waited and is_alone
        if is_idle:
            self._misses_of(service_class).fade()

    def _errors_of(self, demand: Demand, service_class: str, *, has_waited: bool) -> Errors:
        """How far predictions were off for a class and tenant, and for requests that wait or do not."""
        kind = service_class, demand.tenant, has_waited
        if kind not in self._errors and len(self._errors) >= MAX_ERRORS:
            del self._errors[next(iter(self._errors))]
        return self._errors.setdefault(kind, Errors())

    def _misses_of(self, service_class: str) -> Misses:
        return self._misses.setdefault(service_class, Misses())
