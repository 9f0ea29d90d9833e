"""The token budget keeps mixed steps within their stretch, whatever a chunk costs."""

from __future__ import annotations

import pytest

from common.sched.budget import AIM, MIN_TOKENS, QUIET_TRIES, START_TOKENS, TokenBudget, joint_size


def settle(budget: TokenBudget, decode_s: float, fixed_s: float, token_s: float, steps: int = 60) -> float:
    """Feed steps of a machine where a chunk of c tokens takes fixed_s + c * token_s; returns the last stretch."""
    stretch = 0.0
    for _ in range(steps):
        tokens = budget.tokens(4)
        chunk_s = fixed_s + tokens * token_s
        stretch = (decode_s + chunk_s) / decode_s
        budget.note_quiet(4, decode_s)
        budget.note_chunk(tokens, 4, decode_s + chunk_s)
    return stretch


def settle_joint(budget: TokenBudget, decode_s: float, token_s: float, steps: int = 200) -> tuple[float, set[int]]:
    """The same where a chunk shares the forward of the decode rows: the last stretch, and the last sizes."""
    stretch, sizes = 0.0, []
    for _ in range(steps):
        if budget.wants_quiet():
            budget.note_quiet(4, decode_s)
            continue
        tokens = budget.joint_tokens(4) or budget.tokens(4)
        step_s = decode_s + tokens * token_s
        stretch = step_s / decode_s
        budget.note_chunk(tokens, 4, step_s)
        sizes.append(tokens)
    return stretch, set(sizes[-50:])


@pytest.mark.parametrize("token_s", [0.0005, 0.002, 0.01])
@pytest.mark.parametrize("fixed_s", [0.0, 0.02])
def test_mixed_steps_use_their_stretch_and_keep_it(token_s, fixed_s):
    budget = TokenBudget(256)
    stretch = settle(budget, 0.05, fixed_s, token_s)
    if MIN_TOKENS < budget.tokens(4) < 256:
        assert 2.0 < stretch <= 3.01
    elif budget.tokens(4) == 256:
        assert stretch <= 3.01
    else:
        assert (fixed_s + (MIN_TOKENS + 4) * token_s) / 0.05 > AIM * 3.0 - 1.0


def test_it_follows_a_growing_context_and_a_changed_batch():
    budget = TokenBudget(256)
    settle(budget, 0.05, 0.0, 0.001)
    many = budget.tokens(4)
    assert settle(budget, 0.05, 0.0, 0.004) <= 3.01
    assert budget.tokens(4) < many / 3
    settle(budget, 0.2, 0.0, 0.004)
    assert budget.tokens(4) > many / 2


def test_a_prompts_short_end_does_not_move_it():
    budget = TokenBudget(256)
    settle(budget, 0.05, 0.0, 0.001)
    before = budget.tokens(4)
    budget.note_chunk(3, 4, 0.09)
    assert budget.tokens(4) == before


def test_fixed_budget_and_small_limit_win():
    fixed = TokenBudget(256, fixed=40)
    settle(fixed, 0.05, 0.0, 1.0)
    assert fixed.tokens(4) == 40
    assert TokenBudget(4).tokens(4) == 4
    assert TokenBudget(16, fixed=40).tokens(4) == 16


def test_it_knows_the_rate_beside_running_streams():
    budget = TokenBudget(256, fixed=50)
    for _ in range(4):
        budget.note_quiet(4, 0.1)
        budget.note_chunk(50, 4, 0.5)
    budget.note_quiet(4, 0.1)
    assert budget.mixed_tokens / budget.mixed_s == pytest.approx(100)


@pytest.mark.parametrize(
    ("token_s", "size"),
    [
        (0.03, 4),
        (0.02, 4),
        (0.0065, 8),
        (0.0055, 16),
        (0.004, 16),
        (0.003, 24),
        (0.0018, 32),
        (0.0015, 48),
        (0.0013, 64),
    ],
)
def test_joint_chunks_have_one_of_a_few_sizes_and_keep_it(token_s, size):
    budget = TokenBudget(256)
    stretch, sizes = settle_joint(budget, 0.05, token_s)
    assert sizes == {size}
    assert stretch <= 3.0 or size == MIN_TOKENS


def test_far_larger_chunks_get_a_forward_of_their_own():
    budget = TokenBudget(256)
    settle_joint(budget, 0.05, 0.0001)
    assert budget.tokens(4) == 256
    assert budget.joint_tokens(4) == 0
    assert TokenBudget(256, fixed=100).joint_tokens(4) == 0
    assert TokenBudget(256, fixed=20).joint_tokens(4) == 20


def test_some_steps_go_without_a_chunk():
    budget = TokenBudget(256)
    quiet = 0
    for _ in range(200):
        if budget.wants_quiet():
            quiet += 1
            budget.note_quiet(4, 0.05)
    assert 4 <= quiet <= 10
    assert not any(TokenBudget(256, fixed=16).wants_quiet() for _ in range(100))


def test_it_knows_what_rows_take_by_their_number():
    budget = TokenBudget(256)
    assert budget.tokens(1) == budget.tokens(16) == START_TOKENS
    assert budget.decode_s(3) == 0
    budget.note_quiet(1, 0.01)
    assert budget.decode_s(4) == pytest.approx(0.02)
    budget.note_quiet(16, 0.06)
    assert budget.decode_s(16) == pytest.approx(0.06)
    assert budget.decode_s(2) == pytest.approx(0.01 * 2**0.5)
    settle(budget, 0.03, 0.0, 0.003)
    assert budget.tokens(16) > budget.tokens(4) > budget.tokens(1)


def test_a_step_that_took_longer_than_others_will_does_not_shrink_it():
    budget = TokenBudget(256)
    settle_joint(budget, 0.05, 0.003)
    before = budget.joint_tokens(4)
    budget.note_chunk(before, 4, 2.0, is_settled=False)
    assert budget.joint_tokens(4) == before
    budget.note_chunk(before, 4, 2.0)
    assert budget.joint_tokens(4) < before


def test_quiet_steps_that_tell_nothing_do_not_keep_prompts_waiting():
    budget = TokenBudget(256)
    asked = [budget.wants_quiet() for _ in range(300)]
    longest = max(len(run) for run in "".join("q" if quiet else " " for quiet in asked).split())
    assert longest == QUIET_TRIES
    assert sum(asked) < 80


def test_one_slow_step_hardly_moves_what_is_known():
    budget = TokenBudget(256)
    settle(budget, 0.05, 0.0, 0.004)
    before = budget.decode_s(4)
    budget.note_quiet(4, 10.0)
    assert budget.decode_s(4) < 1.5 * before
    for _ in range(12):
        budget.note_quiet(4, 0.2)
    assert budget.decode_s(4) == pytest.approx(0.2, rel=0.1)


@pytest.mark.parametrize(("size", "part"), [(1, 1), (3, 3), (4, 4), (13, 8), (64, 64), (70, 70)])
def test_the_end_of_a_prompt_is_computed_in_prepared_sizes(size, part):
    assert joint_size(size) == part
