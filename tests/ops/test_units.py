from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import units


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("64MiB", 64 << 20),
        ("1.5GiB", 3 << 29),
        ("100 MB", 10**8),
        ("7", 7),
        (7, 7),
        ("0", 0),
        ("4kib", 4096),
        ("5B", 5),
    ],
)
def test_sizes(text: str | int, value: int) -> None:
    assert units.parse_size(text) == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("64 parsecs", "unknown size unit 'parsecs'"),
        ("1.5", "has no unit"),
        ("0.3B", "not a whole number of bytes"),
        ("-1MiB", "is not a size"),
        ("", "is not a size"),
        (-1, "cannot be negative"),
        (True, "is not a size"),
        (1.5, "is not a size"),
        (None, "is not a size"),
        ("1e9", "is not a size"),
        ("\uff11MiB", "is not a size"),
    ],
)
def test_wrong_sizes_say_what_was_read_and_what_may_be_written(text: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        units.parse_size(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("250ms", 0.25),
        ("2s", 2.0),
        ("1.5min", 90.0),
        ("0", 0.0),
        (0, 0.0),
        ("10us", 1e-5),
        ("2h", 7200.0),
        ("1d", 86400.0),
    ],
)
def test_durations(text: str | int, value: float) -> None:
    assert units.parse_duration(text) == value


@pytest.mark.parametrize("text", ["2", 2, 2.5, True, None, "2m", "-1s", "s", "1s2", "inf", math.inf])
def test_durations_want_a_unit(text: object) -> None:
    with pytest.raises(ValueError, match=r"unit|is not a duration"):
        units.parse_duration(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "value"),
    [("50Mbit/s", 5e7), ("1.5Gbit/s", 1.5e9), ("100MB/s", 8e8), ("1MiB/s", 8388608.0), ("inf", math.inf)],
)
def test_rates_are_bits_per_second(text: str, value: float) -> None:
    assert units.parse_rate(text) == value


@pytest.mark.parametrize("text", ["0Mbit/s", "50", "50MB", "50mb/s", 5, "-1Mbit/s"])
def test_wrong_rates(text: object) -> None:
    with pytest.raises(ValueError, match=r"rate|unit"):
        units.parse_rate(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "like"), [("0", "50Mbit/s"), ("0.0", "50Mbit/s"), ("20", "20Mbit/s")])
def test_the_example_of_a_rate_is_one(text: str, like: str) -> None:
    with pytest.raises(ValueError, match=f'has no unit: .* like "{like}"$'):
        units.parse_rate(text)
    assert units.parse_rate(like) > 0


@given(st.integers(0, 1 << 50))
def test_exact_size_reads_back(value: int) -> None:
    assert units.parse_size(units.exact_size(value)) == value


@given(st.floats(0, 1e7, allow_nan=False))
def test_exact_duration_reads_back(value: float) -> None:
    assert units.parse_duration(units.exact_duration(value)) == value


@given(st.floats(1e-3, 1e13) | st.just(math.inf))
def test_exact_rate_reads_back(value: float) -> None:
    assert units.parse_rate(units.exact_rate(value)) == value


@pytest.mark.parametrize(
    ("got", "text"),
    [
        (units.exact_size(67108864), "64MiB"),
        (units.exact_size(1000), "1000B"),
        (units.exact_duration(0.25), "250ms"),
        (units.exact_duration(120), "2min"),
        (units.exact_duration(2.5), "2500ms"),
        (units.exact_rate(5e7), "50Mbit/s"),
        (units.format_size(1500), "1.46 KiB"),
        (units.format_size(3 << 20), "3.00 MiB"),
        (units.format_size(0), "0 B"),
        (units.format_duration(0.0123), "12.3 ms"),
        (units.format_duration(245), "4 min 05 s"),
        (units.format_duration(7380), "2 h 03 min"),
        (units.format_duration(0), "0 us"),
        (units.format_rate(47.3e6), "47.3 Mbit/s"),
        (units.format_rate(math.inf), "unlimited"),
    ],
)
def test_how_values_look(got: str, text: str) -> None:
    assert got == text
