import pytest

from common.policy.fallback import FallbackBudget


def test_average_rate_holds_over_time():
    budget = FallbackBudget(tokens_per_s=100, burst_tokens=200)
    served = sum(500 for now in range(1000) if budget.take(500, float(now)) == 0.0)
    assert served <= 100 * 1000 + 200 + 500


def test_answer_says_when_to_come_back():
    budget = FallbackBudget(tokens_per_s=100, burst_tokens=200)
    assert budget.take(1200, 0.0) == 0.0
    wait = budget.take(1, 0.0)
    assert wait > 9
    assert budget.take(1, wait) == 0.0


def test_one_prompt_of_any_length_may_overdraw():
    """As conf/decoded.toml says: while anything is left of the burst; the next one waits until that is paid."""
    budget = FallbackBudget(tokens_per_s=100, burst_tokens=200)
    assert budget.take(199, 0.0) == 0.0
    assert budget.take(1_000_000, 0.0) == 0.0
    assert budget.take(1, 0.0) == pytest.approx(9999.99 + 0.01)
    assert budget.take(1, 9999.0) > 0.0
    assert budget.take(1, 10_000.0) == 0.0


def test_zero_means_never():
    assert FallbackBudget(tokens_per_s=0, burst_tokens=1000).take(1, 0.0) > 0
