"""Predicted seconds of local prefill: by the rate beside running streams where there are any."""

from __future__ import annotations

import pytest

from common.policy.costs import LocalRates


@pytest.mark.parametrize(
    ("alone", "mixed", "num_rows", "expected"),
    [(1000, 200, 0, 4.0), (1000, 200, 3, 20.0), (1000, 0, 3, 4.0), (0, 200, 0, 20.0), (0, 0, 1, None)],
)
def test_prefill_takes_as_long_as_it_was_seen_to(alone, mixed, num_rows, expected) -> None:
    assert LocalRates(alone, mixed).prefill_s(4000, num_rows) == expected
