"""Whether a kept prefix is sent or computed again."""

from __future__ import annotations

import pytest

from common.policy.push import plan_push

MB = 1_000_000


@pytest.mark.parametrize(
    ("path_bps", "tokens_per_s", "pays"),
    [
        (80 * MB, 100.0, True),  # 1 s against 10 s
        (80 * MB, 2000.0, False),  # 1 s against 0.5 s
        (0.0, 100.0, False),
        (80 * MB, 0.0, False),
    ],
)
def test_the_quicker_way_is_taken(path_bps, tokens_per_s, pays):
    plan = plan_push("auto", 10 * MB, path_bps, 1000, tokens_per_s)
    assert plan.pushes is pays
    assert plan_push("always", 10 * MB, path_bps, 1000, tokens_per_s).pushes
    assert not plan_push("never", 10 * MB, path_bps, 1000, tokens_per_s).pushes


def test_nothing_kept_is_nothing_pushed():
    assert not plan_push("always", 0, 80 * MB, 0, 100.0).pushes


def test_terms_say_what_either_way_takes():
    terms = plan_push("auto", 10 * MB, 80 * MB, 1000, 100.0).terms
    assert terms == {"pushes_prefix": True, "predicted_push_s": 1.0, "predicted_recompute_s": 10.0}
    assert plan_push("auto", 10 * MB, 0.0, 1000, 0.0).terms == {"pushes_prefix": False}
