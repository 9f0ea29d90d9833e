"""The dispatcher with an engine that fails: what is counted and what the log says."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from common.errors import Draining, InvalidRequest, Overloaded, RequestFailed
from common.policy.admission import AdmissionController, AdmissionLimits
from common.policy.fallback import FallbackBudget
from common.request import Request, SamplingParams
from decoded.dispatch import Dispatcher, DispatchSettings
from decoded.metrics import DecodeMetrics


class FailingBackend:
    """Takes every request and fails it."""

    info = SimpleNamespace(name="m", layout=SimpleNamespace(states=()))

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def open(self, request):
        raise self.error

    def state_bytes(self, num_tokens, num_choices=1):
        return num_tokens


def dispatcher(error: Exception | None = None):
    registry = CollectorRegistry()
    made = Dispatcher(
        FailingBackend(error or RequestFailed("nothing")),
        lambda: [],
        admission=AdmissionController(AdmissionLimits(1, 1, 1000, 1000)),
        fallback=FallbackBudget(1000, 1000),
        settings=DispatchSettings("threshold", 1000.0, 2, 30.0, 30.0),
        metrics=DecodeMetrics(registry),
    )
    return made, lambda outcome, route="none": registry.get_sample_value(
        "prfaas_requests_total", {"route": route, "outcome": outcome}
    )


def request(name: str = "r1") -> Request:
    return Request(name, tuple(range(10)), SamplingParams(max_tokens=4))


@pytest.mark.parametrize("error", [RequestFailed("the model put out no finite logits"), KeyError("a bug")])
async def test_a_failed_request_is_a_warning_with_its_reason(caplog, error):
    made, count = dispatcher(error)
    active = made.submit(request(), arrived_at=0.0)
    with caplog.at_level(logging.INFO), pytest.raises(type(error)):
        async for _ in active:
            pass
    (record,) = [r for r in caplog.records if r.message.startswith("request ")]
    assert (record.levelno, record.message) == (logging.WARNING, "request failed")
    assert str(error) in record.why
    assert not {"peer", "reason", "ttft_s"} & set(vars(record))  # it came to none of these
    assert count("error", "local") == 1


async def test_refusals_are_counted_once_each():
    made, count = dispatcher()
    made.submit(request("a"), arrived_at=0.0)
    made.submit(request("b"), arrived_at=0.0)
    with pytest.raises(Overloaded):
        made.submit(request("c"), arrived_at=0.0)
    with pytest.raises(InvalidRequest, match="in flight"):
        made.submit(request("a"), arrived_at=0.0)
    made.admission.limits = AdmissionLimits(1, 1, 1000, 1)
    with pytest.raises(InvalidRequest, match="bytes of state"):
        made.submit(request("d"), arrived_at=0.0)
    made.is_draining = True
    with pytest.raises(Draining):
        made.submit(request("e"), arrived_at=0.0)
    made.count_refused(InvalidRequest("a bad temperature"))
    assert (count("shed"), count("invalid"), count("error")) == (2, 3, None)
