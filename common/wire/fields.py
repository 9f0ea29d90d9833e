"""Checks of one message field each: a check answers "" or what is wrong with the value. Used by messages.py alone."""

from __future__ import annotations

import math
from collections.abc import Callable

Check = Callable[[object], str]


def uint(most: int) -> Check:
    """An integer of 0..most."""

    def check(value: object) -> str:
        is_int = isinstance(value, int) and not isinstance(value, bool)
        return "" if is_int and 0 <= value <= most else f"must be an integer of 0..{most}"  # type: ignore[operator]

    return check


def integer(least: int, most: int) -> Check:
    """An integer of least..most."""

    def check(value: object) -> str:
        is_int = isinstance(value, int) and not isinstance(value, bool)
        return "" if is_int and least <= value <= most else f"must be an integer of {least}..{most}"  # type: ignore[operator]

    return check


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def duration(value: object) -> str:
    """A finite number >= 0."""
    return "" if _is_number(value) and value >= 0 else "must be a finite number >= 0"  # type: ignore[operator]


def maybe_duration(value: object) -> str:
    """nil or a duration."""
    return "" if value is None else duration(value)


def flag(value: object) -> str:
    """A boolean."""
    return "" if isinstance(value, bool) else "must be true or false"


def text(most: int) -> Check:
    """UTF-8 text of at most `most` bytes."""

    def check(value: object) -> str:
        is_ok = isinstance(value, str) and len(value.encode()) <= most
        return "" if is_ok else f"must be text of at most {most} bytes"

    return check


def blob(exact: int) -> Check:
    """Exactly so many bytes."""

    def check(value: object) -> str:
        return "" if isinstance(value, bytes) and len(value) == exact else f"must be exactly {exact} bytes"

    return check


def blob_upto(most: int) -> Check:
    """At most so many bytes."""

    def check(value: object) -> str:
        return "" if isinstance(value, bytes) and len(value) <= most else f"must be at most {most} bytes"

    return check


def list_of(item: Check, least: int, most: int) -> Check:
    """A list whose entries pass `item`."""

    def check(value: object) -> str:
        if not isinstance(value, list | tuple) or not least <= len(value) <= most:
            return f"must be a list of {least}..{most} entries"
        return next((f"entry {i} {wrong}" for i, v in enumerate(value) if (wrong := item(v))), "")

    return check


def map_of(value_check: Check, most: int) -> Check:
    """A map from text of at most 64 bytes to values that pass `value_check`."""
    key_check = text(64)

    def check(value: object) -> str:
        if not isinstance(value, dict) or len(value) > most:
            return f"must be a map of at most {most} entries"
        for k, v in value.items():
            if wrong := key_check(k):
                return f"key {wrong}"
            if wrong := value_check(v):
                return f"entry {str(k)[:64]!r} {wrong}"
        return ""

    return check


def number(value: object) -> str:
    """A finite number."""
    return "" if _is_number(value) else "must be a finite number"


def maybe_blob(exact: int) -> Check:
    """nil or exactly so many bytes."""
    check = blob(exact)
    return lambda value: "" if value is None else check(value)


def one_of(*allowed: str) -> Check:
    """One of these texts."""
    wrong = f"must be one of {', '.join(allowed)}"
    return lambda value: "" if isinstance(value, str) and value in allowed else wrong
