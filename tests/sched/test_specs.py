"""Segment plans: what leaves, when, and that it is exactly what a receiver needs."""

from __future__ import annotations

import pytest

from common.layout import StateLayout, StateSpec, TensorSpec
from common.sched.specs import plan_segments, slot_bytes, slot_rows

ROW = (TensorSpec("k", (2, 4), "float32"), TensorSpec("v", (2, 4), "float32"))


def layout(kinds: str, window: int = 8) -> StateLayout:
    return StateLayout(
        tuple(
            StateSpec(n, "full", ROW) if kind == "f" else StateSpec(n, "window", ROW, window=window)
            for n, kind in enumerate(kinds)
        )
    )


def plans_of(model, total, chunk, first=0, segment_bytes=1 << 20):
    spans = [(a, min(a + chunk, total)) for a in range(0, total, chunk)]
    return [p for span in spans for p in plan_segments(model, span, (first, total), segment_bytes)]


@pytest.mark.parametrize("kinds", ["ffff", "wwfwwf", "w", "fw", "wwww"])
@pytest.mark.parametrize("chunk", [1, 3, 8, 100])
@pytest.mark.parametrize("total", [1, 2, 7, 8, 9, 30])
@pytest.mark.parametrize("first", [0, 1, 6, 25])
def test_plans_cover_what_is_required_exactly_once(kinds, chunk, total, first):
    first = min(first, total - 1)
    model = layout(kinds)
    rows: dict[int, list[int]] = {}
    plans = plans_of(model, total, chunk, first)
    for plan in plans:
        assert plan.start < plan.stop
        assert list(plan.layers) == sorted(plan.layers)
        for layer in plan.layers:
            rows.setdefault(layer, []).extend(range(plan.start, plan.stop))
    assert rows == {n: list(range(a, b)) for n, (a, b) in model.required_segments(first, total).items()}
    assert [p.is_last for p in plans] == [False] * (len(plans) - 1) + [True]
    raw = sum(model.segment_bytes(p.start, p.stop, p.layers) for p in plans)
    assert raw == model.transfer_bytes(first, total)


def test_a_small_chunk_still_leaves_in_several_segments():
    plans = plan_segments(layout("f" * 30), (0, 5), (0, 5), 1 << 20)
    assert len(plans) >= 4
    assert plans[0].layers[-1] < 10


def test_groups_close_at_the_wanted_size():
    one_layer = layout("f").segment_bytes(0, 100, (0,))
    plans = plan_segments(layout("f" * 30), (0, 100), (0, 100), 3 * one_layer)
    assert [len(p.layers) for p in plans] == [3] * 10


def test_window_rows_leave_only_near_the_end():
    model = layout("wf", window=8)
    assert [p.layers for p in plan_segments(model, (0, 20), (0, 100), 1)] == [(1,)]
    assert [(p.layers, p.start, p.stop) for p in plan_segments(model, (80, 100), (0, 100), 1)] == [
        ((0,), 93, 100),
        ((1,), 80, 100),
    ]


def test_slot_sizes():
    model = layout("wf", window=8)
    window, full = model.states
    assert slot_rows(window, 1000, room=16) == 23
    assert slot_rows(window, 10, room=16) == 10
    assert slot_rows(full, 1000, room=16) == 1000
    assert slot_bytes(model, 1000, 16) == {"window": 23 * 64, "full": 1000 * 64}
