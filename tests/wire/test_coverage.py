"""Which rows may be claimed, what is missing, and how far a prefix reaches, by hand and by brute force."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import BadMessage
from common.layout import StateLayout
from common.wire.coverage import Coverage
from tests.wire.kit import FULL, LAYOUT, cut
from tests.wire.test_messages import PIECE

WINDOW = StateLayout(LAYOUT.states[1:3])
RECURRENT = StateLayout((LAYOUT.states[0], LAYOUT.states[4]))


def seg(start: int, stop: int, *layers: int, no: int = 0):
    return replace(PIECE, no=no, start=start, stop=stop, layers=layers)


def claimed(layout, start, stop, segments) -> Coverage:
    coverage = Coverage(layout, start, stop)
    for s in segments:
        coverage.check(s)
        coverage.claim(s)
    return coverage


@pytest.mark.parametrize(
    "segment",
    [seg(9, 20, 0), seg(10, 101, 0), seg(20, 20, 0), seg(20, 10, 0), seg(0, 5, 0), seg(10, 20, 9), seg(10, 20, 0, 0),
     seg(10, 20, 2), seg(92, 100, 2), seg(10, 20, 4), seg(98, 100, 4)],
)  # fmt: skip
def test_rows_that_are_not_needed(segment):
    with pytest.raises(BadMessage):
        Coverage(LAYOUT, 10, 100).check(segment)


@pytest.mark.parametrize("segment", [seg(10, 100, 0, 1, 3), seg(93, 100, 0, 1, 2, 3), seg(99, 100, 0, 1, 2, 3, 4)])
def test_rows_that_are(segment):
    num_bytes = Coverage(LAYOUT, 10, 100).check(segment)
    assert num_bytes == LAYOUT.segment_bytes(segment.start, segment.stop, segment.layers)


@pytest.mark.parametrize(("start", "stop"), [(10, 20), (15, 25), (5, 11), (0, 30), (12, 18), (19, 20), (10, 11)])
def test_overlap(start, stop):
    coverage = claimed(FULL, 0, 100, [seg(10, 20, 0), seg(40, 50, 0)])
    with pytest.raises(BadMessage, match="overlap"):
        coverage.check(seg(start, stop, 0))
    coverage.check(seg(start, stop, 1))
    coverage.check(seg(20, 40, 0))
    coverage.check(seg(0, 10, 0))


def test_missing_names_layer_kind_and_row():
    coverage = claimed(FULL, 0, 100, [seg(0, 100, 0), seg(0, 60, 1), seg(70, 100, 1)])
    assert "layer 1 (full): row 60" in coverage.missing()
    coverage.claim(seg(60, 70, 1))
    assert coverage.missing() == ""


def test_window_layer_needs_only_its_last_rows():
    assert claimed(WINDOW, 0, 100, [seg(0, 100, 0), seg(93, 100, 1)]).missing() == ""
    assert "layer 1 (window)" in claimed(WINDOW, 0, 100, [seg(0, 100, 0), seg(94, 100, 1)]).missing()


def test_nothing_to_send():
    assert Coverage(LAYOUT, 7, 7).missing() == ""
    assert Coverage(LAYOUT, 7, 7).prefix([]) == 7


def test_prefix_of_full_layers_is_contiguous():
    coverage = Coverage(FULL, 10, 100)
    assert coverage.prefix([]) == 10
    assert coverage.prefix([seg(10, 30, 0)]) == 10
    assert coverage.prefix([seg(10, 30, 0), seg(10, 25, 1)]) == 25
    assert coverage.prefix([seg(10, 30, 0, 1), seg(40, 60, 0, 1)]) == 30
    assert coverage.prefix([seg(20, 60, 0, 1)]) == 10


def test_prefix_with_a_window_only_where_its_rows_are_held():
    coverage = Coverage(WINDOW, 0, 100)
    assert coverage.prefix([seg(0, 64, 0)]) == 0
    assert coverage.prefix([seg(0, 64, 0), seg(57, 64, 1)]) == 64
    assert coverage.prefix([seg(0, 60, 0), seg(50, 64, 1)]) == 60
    assert coverage.prefix([seg(0, 100, 0), seg(50, 64, 1)]) == 64
    assert coverage.prefix([seg(0, 100, 0), seg(60, 63, 1)]) == 0


def test_prefix_with_a_window_that_begins_in_what_is_held():
    coverage = Coverage(WINDOW, 50, 100)
    assert coverage.prefix([seg(50, 53, 0), seg(50, 53, 1)]) == 53


def test_prefix_with_recurrent_state_only_at_its_position():
    coverage = Coverage(RECURRENT, 0, 100)
    assert coverage.prefix([seg(0, 100, 0)]) == 0
    assert coverage.prefix([seg(0, 100, 0), seg(99, 100, 1)]) == 100


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_prefix_is_the_largest_position_that_brute_force_finds(data):
    layout = StateLayout((*LAYOUT.states[:4],))
    start = data.draw(st.integers(0, 10))
    stop = start + data.draw(st.integers(1, 30))
    parts = [seg(a, b, *layers) for a, b, layers in cut(layout, start, stop, data.draw(st.integers(1, 9)))]
    chosen = [p for p in parts if data.draw(st.booleans())]
    held = {(n, r) for p in chosen for n in p.layers for r in range(p.start, p.stop)}

    def can(position: int) -> bool:
        return all(
            (n, r) in held for n, (a, b) in layout.required_segments(start, position).items() for r in range(a, b)
        )

    expected = max(p for p in range(start, stop + 1) if p == start or can(p))
    assert Coverage(layout, start, stop).prefix(chosen) == expected
