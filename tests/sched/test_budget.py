"""The token budget keeps mixed steps within their stretch, whatever a chunk costs."""

from __future__ import annotations

import pytest

from common.sched.budget import MIN_TOKENS, TokenBudget


def settle(budget: TokenBudget, decode_s: float, fixed_s: float, token_s: float, steps: int = 60) -> float:
    """Feed steps of a machine where a chunk of c tokens takes fixed_s + c * token_s; returns the last stretch."""
    stretch = 0.0
    for _ in range(steps):
        tokens = budget.tokens
        chunk_s = fixed_s + tokens * token_s
        stretch = (decode_s + chunk_s) / decode_s
        budget.note_step(decode_s, tokens, chunk_s)
    return stretch


@pytest.mark.parametrize("token_s", [0.0005, 0.002, 0.01])
@pytest.mark.parametrize("fixed_s", [0.0, 0.02])
def test_mixed_steps_use_their_stretch_and_keep_it(token_s, fixed_s):
    budget = TokenBudget(256)
    stretch = settle(budget, 0.05, fixed_s, token_s)
    if MIN_TOKENS < budget.tokens < 256:
        assert 2.0 < stretch <= 3.01
    elif budget.tokens == 256:
        assert stretch <= 3.01
    else:
        assert (fixed_s + (MIN_TOKENS + 4) * token_s) / 0.05 > 2


def test_it_follows_a_growing_context_and_a_changed_batch():
    budget = TokenBudget(256)
    settle(budget, 0.05, 0.0, 0.001)
    many = budget.tokens
    assert settle(budget, 0.05, 0.0, 0.004) <= 3.01
    assert budget.tokens < many / 3
    settle(budget, 0.2, 0.0, 0.004)
    assert budget.tokens > many / 2


def test_a_prompts_short_end_does_not_move_it():
    budget = TokenBudget(256)
    settle(budget, 0.05, 0.0, 0.001)
    before = budget.tokens
    budget.note_step(0.05, 3, 0.04)
    assert budget.tokens == before


def test_fixed_budget_and_small_limit_win():
    fixed = TokenBudget(256, fixed=40)
    settle(fixed, 0.05, 0.0, 1.0)
    assert fixed.tokens == 40
    assert TokenBudget(4).tokens == 4
    assert TokenBudget(16, fixed=40).tokens == 16


def test_it_knows_the_rate_beside_running_streams():
    budget = TokenBudget(256, fixed=50)
    for _ in range(4):
        budget.note_step(0.1, 50, 0.4)
    budget.note_step(0.1, 0, 0.0)
    assert budget.tokens_per_s == pytest.approx(100)
