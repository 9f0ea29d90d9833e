"""Reads the fields of a JSON object one by one, with errors that name parameter, value and limit.

A field that nobody read is unknown, and unknown is an error: a misspelt parameter must not be ignored. null is the same
as absent. Knows types and ranges, not what any field means. Called by schema.py and messages.py.
"""

from __future__ import annotations

import json
import math
from typing import Any

from decoded.api.errors import RequestRefused

_MAX_SHOWN = 80


def show(value: Any) -> str:
    """A value as JSON for an error message, cut short."""
    if isinstance(value, (list, dict, str)) and len(value) > _MAX_SHOWN:
        kind = {str: "string", list: "list", dict: "object"}[type(value)]
        return f"a {kind} of {len(value)} {'characters' if kind == 'string' else 'entries'}"
    try:
        text = json.dumps(value, ensure_ascii=True)
    except RecursionError:  # what could just be parsed may be too deep for being written from here
        return "nested too deeply"
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def bad_value(name: str, value: Any, wanted: str) -> RequestRefused:
    """The error for a field of the wrong type or out of range; `wanted` completes "it must be ..."."""
    return RequestRefused(f"{name} is {show(value)}; it must be {wanted}.", name, "invalid_value")


def is_int(value: Any) -> bool:
    """True for JSON integers; true and false are not numbers."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_text(name: str, value: str) -> str:
    """The string itself when it is valid Unicode (JSON can spell lone surrogates, UTF-8 cannot)."""
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise RequestRefused(
                f"{name} has a lone surrogate at character {error.start}; it must be valid Unicode.",
                name,
                "invalid_value",
            ) from error
    return value


class Fields:
    """One JSON object being read. `finish()` refuses whatever was not asked for."""

    def __init__(self, values: dict[str, Any], prefix: str = "") -> None:
        self._values = {key: value for key, value in values.items() if value is not None}
        self._unread = set(values)
        self._prefix = prefix

    def raw(self, name: str) -> Any:
        """The value as it came, None when absent."""
        self._unread.discard(name)
        return self._values.get(name)

    def path(self, name: str) -> str:
        """The field's full name for messages."""
        return self._prefix + name

    def integer(self, name: str, low: int, high: int) -> int | None:
        """An integer in [low, high]; None when absent."""
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            value = int(value)
        if not is_int(value) or not low <= value <= high:
            raise bad_value(self.path(name), value, f"an integer from {low} to {high}")
        return int(value)

    def number(self, name: str, low: float, high: float) -> float | None:
        """A finite number in [low, high]; None when absent."""
        value = self.raw(name)
        if value is None:
            return None
        is_number = is_int(value) or (isinstance(value, float) and math.isfinite(value))
        if not is_number or not low <= value <= high:
            wanted = f"a number from {low:g} to {high:g}"
            raise bad_value(self.path(name), value, wanted)
        return float(value)

    def boolean(self, name: str) -> bool:
        """true or false; false when absent."""
        value = self.raw(name)
        if value is not None and not isinstance(value, bool):
            raise bad_value(self.path(name), value, "true or false")
        return bool(value)

    def string(self, name: str, max_chars: int) -> str | None:
        """A string of at most `max_chars` characters; None when absent."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, str) or len(value) > max_chars:
            raise bad_value(self.path(name), value, f"a string of at most {max_chars} characters")
        return check_text(self.path(name), value)

    def unsupported(self, name: str, *harmless: Any) -> None:
        """A parameter we know and do not offer: only the values that ask for nothing are accepted."""
        value = self.raw(name)
        if value is None or any(type(value) is type(ok) and value == ok for ok in harmless):
            return
        raise RequestRefused(
            f"{self.path(name)} is {show(value)}; this parameter is not supported.",
            self.path(name),
            "unsupported_parameter",
        )

    def finish(self) -> None:
        """Raises RequestRefused when a field was never read."""
        if self._unread:
            name = self.path(min(self._unread))
            shown = name if len(name) <= _MAX_SHOWN else name[: _MAX_SHOWN - 3] + "..."
            shown = shown.encode("utf-8", "backslashreplace").decode()
            raise RequestRefused(f"Unknown parameter: {shown}.", shown, "unknown_parameter")
