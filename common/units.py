"""Sizes, durations and rates as people write them. Standard library only; knows no configuration key.

Sizes are bytes (int), durations seconds (float), rates bits per second (float). `parse_*` raise ValueError with a
sentence that says what was read and what may be written. `exact_*` write a value so that `parse_*` reads the very same
one again (configuration files); `format_*` round for a reader (tables, logs).
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-zµ/]*)\s*")
_SIZES = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_DURATIONS = {
    "us": Decimal("0.000001"),
    "ms": Decimal("0.001"),
    "s": Decimal(1),
    "min": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}
_BITS = {"bit/s": 1, "kbit/s": 10**3, "Mbit/s": 10**6, "Gbit/s": 10**9}
_RATES = _BITS | {"B/s": 8, "kB/s": 8 * 10**3, "MB/s": 8 * 10**6, "GB/s": 8 * 10**9}
_RATES |= {"KiB/s": 8 * KIB, "MiB/s": 8 * MIB, "GiB/s": 8 * GIB}


def _split(text: str, kind: str, units: list[str], example: str) -> tuple[Decimal, str]:
    """The number and the unit of `text`. Case matters in rates only, where "mb/s" might mean bits or bytes."""
    match, like = _NUMBER.fullmatch(text), example.lstrip("0123456789")
    hint = f'write a number and one of {", ".join(units)}, for example "{example}"'
    if match is None:
        raise ValueError(f"{text!r} is not a {kind}: {hint}")
    number, unit = Decimal(match[1]), match[2]
    if unit in units:
        return number, unit
    alike = [u for u in units if u.lower() == unit.lower()]
    if len(alike) == 1 and kind != "rate":
        return number, alike[0]
    if not unit:
        # Of what would be refused for being zero, the example.
        shown = example.removesuffix(like) if kind == "rate" and not number else match[1]
        raise ValueError(f'{text!r} has no unit: write a number and one of {", ".join(units)}, like "{shown}{like}"')
    raise ValueError(f"{text!r} has the unknown {kind} unit {unit!r}: {hint}")


def parse_size(text: str | int) -> int:
    """Bytes from "64MiB", "1.5GiB", "100MB" or a plain number of bytes.

    Raises:
        ValueError: not a size, negative, or not a whole number of bytes.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ValueError(f"a size cannot be negative: {text}")
        return text
    if not isinstance(text, str):
        raise ValueError(f'{text!r} is not a size: write a number of bytes or a string like "64MiB"')
    if text.strip().isascii() and text.strip().isdigit():
        return int(text)
    number, unit = _split(text, "size", list(_SIZES), "64MiB")
    exact = number * _SIZES[unit]
    if exact != int(exact):
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(exact)


def parse_duration(text: str | int | float) -> float:
    """Seconds from "250ms", "2s", "5min", "1h"; only zero may stand without a unit.

    Raises:
        ValueError: not a duration, or a number without a unit.
    """
    if isinstance(text, int | float) and not isinstance(text, bool):
        if text == 0:
            return 0.0
        raise ValueError(f'{text!r} has no unit: write a string like "{text}s" or "{text}ms"')
    if not isinstance(text, str):
        raise ValueError(f'{text!r} is not a duration: write a string like "2s" or "250ms"')
    if text.strip() == "0":
        return 0.0
    number, unit = _split(text, "duration", list(_DURATIONS), "30s")
    return float(number * _DURATIONS[unit])


def parse_rate(text: str) -> float:
    """Bits per second from "50Mbit/s", "1.5Gbit/s" or "100MB/s"; "inf" is no limit (math.inf).

    Raises:
        ValueError: not a rate, or zero.
    """
    if not isinstance(text, str):
        raise ValueError(f'{text!r} is not a rate: write a string like "50Mbit/s"')
    if text.strip() == "inf":
        return math.inf
    number, unit = _split(text, "rate", list(_RATES), "50Mbit/s")
    if number == 0:
        raise ValueError(f"{text!r} is no rate at all: it must be above zero")
    return float(number * _RATES[unit])


def exact_size(num_bytes: int) -> str:
    """The shortest exact way to write a size: 67108864 is "64MiB", 1000 is "1000B"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if num_bytes and num_bytes % _SIZES[unit] == 0:
            return f"{num_bytes // _SIZES[unit]}{unit}"
    return f"{num_bytes}B"


def exact_duration(seconds: float) -> str:
    """The shortest exact way to write a duration: 0.25 is "250ms", 120.0 is "2min", math.inf is "inf"."""
    if not math.isfinite(seconds):
        return f"{seconds:g}"
    value = Decimal(repr(seconds))
    for unit in ("d", "h", "min", "s", "ms", "us"):
        count = value / _DURATIONS[unit]
        if value and count == int(count):
            return f"{int(count)}{unit}"
    return f"{value:f}s"


def exact_rate(bits_per_s: float) -> str:
    """The shortest exact way to write a rate: 5e7 is "50Mbit/s", math.inf is "inf"."""
    if math.isinf(bits_per_s):
        return "inf"
    for unit in ("Gbit/s", "Mbit/s", "kbit/s"):
        if bits_per_s and bits_per_s % _RATES[unit] == 0:
            return f"{int(bits_per_s // _RATES[unit])}{unit}"
    return f"{Decimal(repr(bits_per_s)):f}bit/s"


def format_size(num_bytes: float) -> str:
    """A size for a reader, three digits or so: "1.42 MiB"."""
    value, unit = float(num_bytes), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < KIB:
            break
        value, unit = value / KIB, bigger
    return f"{value:.0f} B" if unit == "B" else f"{value:.{_digits(value)}f} {unit}"


def format_duration(seconds: float) -> str:
    """A duration for a reader: "2.90 ns", "350 us", "12.5 ms", "3.20 s", "4 min 05 s", "2 h 03 min"."""
    size = abs(seconds)
    if 0 < size < 1e-6:
        return f"{seconds * 1e9:.{_digits(seconds * 1e9)}f} ns"
    if size < 1:
        value, unit = (seconds * 1e6, "us") if size < 1e-3 else (seconds * 1e3, "ms")
        return f"{value:.{_digits(value) if seconds else 0}f} {unit}"
    if size < 60:
        return f"{seconds:.2f} s"
    if size < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    if size < 48 * 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    return f"{seconds / 86400:.1f} d"


def format_rate(bits_per_s: float) -> str:
    """A rate for a reader: "47.3 Mbit/s"; "unlimited" for math.inf."""
    if math.isinf(bits_per_s):
        return "unlimited"
    value, unit = float(bits_per_s), "bit/s"
    for bigger in ("kbit/s", "Mbit/s", "Gbit/s"):
        if abs(value) < 1000:
            break
        value, unit = value / 1000, bigger
    return f"{value:.0f} bit/s" if unit == "bit/s" else f"{value:.{_digits(value)}f} {unit}"


def _digits(value: float) -> int:
    return 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
