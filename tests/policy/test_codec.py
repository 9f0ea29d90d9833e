"""A codec is used only where it saves more wire time than it takes."""

from __future__ import annotations

import pytest

from common.policy.codec import TRY_EVERY, CodecChoice

MB = 1_000_000


@pytest.fixture
def choice() -> CodecChoice:
    """400 MB/s, a third saved: it pays below 400 MB/s x 1/3, about 1.07 Gbit/s."""
    found = CodecChoice()
    for _ in range(50):
        found.note(3 * MB, 2 * MB, 3 * MB / 400e6)
    return found


@pytest.mark.parametrize(("bps", "expected"), [(50e6, True), (1.0e9, True), (1.1e9, False), (20e9, False)])
def test_encoding_pays_on_slow_paths(choice: CodecChoice, bps: float, expected: bool) -> None:
    assert choice.pays(bps) is expected


def test_before_anything_is_known_it_is_tried(choice: CodecChoice) -> None:
    assert CodecChoice().pays(100e9)
    assert choice.pays(0.0)


def test_what_did_not_pay_is_tried_again_now_and_then(choice: CodecChoice) -> None:
    asked = [choice.pays(20e9) for _ in range(4 * TRY_EVERY)]
    assert sum(asked) == 4
    for _ in range(100):
        choice.note(MB, MB // 20, MB / 5e9)  # empty state: nearly nothing is left of it
    assert choice.pays(20e9)


def test_a_codec_that_saves_nothing_is_left(choice: CodecChoice) -> None:
    for _ in range(100):
        choice.note(MB, MB, MB / 400e6)
    assert not choice.pays(1e6)
    assert choice.saved == pytest.approx(0.0, abs=1e-3)


def test_segments_without_bytes_say_nothing(choice: CodecChoice) -> None:
    before = (choice.saved, choice.s_per_byte)
    choice.note(0, 0, 1.0)
    assert (choice.saved, choice.s_per_byte) == before
