from __future__ import annotations

import asyncio
import time

import pytest

from common.looplag import INTERVAL_S, LoopLag, lags
from common.metrics import Metrics


def test_a_blockage_counts_for_all_who_were_due_in_it() -> None:
    assert lags(-0.001) == [0.0]
    assert lags(0.004) == [0.004]
    assert lags(2.5 * INTERVAL_S) == pytest.approx([2.5 * INTERVAL_S, 1.5 * INTERVAL_S, 0.5 * INTERVAL_S])
    assert len(lags(1e9)) == 1200


async def test_a_blocked_loop_shows() -> None:
    metrics = Metrics("d", "1")
    lag = LoopLag(metrics)
    lag.start()
    try:
        time.sleep(5 * INTERVAL_S)  # the loop cannot run meanwhile
        async with asyncio.timeout(10):
            while _count(metrics, "+Inf") < 4:
                await asyncio.sleep(INTERVAL_S / 10)
    finally:
        lag.close()
    assert _count(metrics, "+Inf") - _count(metrics, "0.1") >= 2
    assert metrics.check() == []


def _count(metrics: Metrics, bound: str) -> float:
    value = metrics.registry.get_sample_value("prfaas_event_loop_lag_seconds_bucket", {"le": bound})
    return value or 0.0
