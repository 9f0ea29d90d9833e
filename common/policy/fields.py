"""An object of JSON read field by field: each refusal names the key in full, its value, and what may stand there.

Knows no key. Called by profile.py and by the simulator's scenarios.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import unknown_key


@dataclass(frozen=True, slots=True)
class Limits:
    """The numbers from `low` to `high`, without the ends that are open. Never NaN, nor anything infinite."""

    low: float = 0.0
    high: float = 1e15
    is_low_open: bool = False
    is_high_open: bool = False

    def hold(self, value: float) -> bool:
        """Whether the value is among them."""
        is_above = value > self.low if self.is_low_open else value >= self.low
        return is_above and (value < self.high if self.is_high_open else value <= self.high)

    def __str__(self) -> str:
        above, below = "above" if self.is_low_open else ">=", "below" if self.is_high_open else "<="
        return f"{above} {self.low:.15g} and {below} {self.high:.15g}"


NOT_NEGATIVE, POSITIVE = Limits(), Limits(is_low_open=True)


class Fields:
    """`where` is the object's own name, "" at the top; keys that are not `known` are refused, unless that is None."""

    def __init__(self, data: object, where: str = "", known: Collection[str] | None = None) -> None:
        """Raises ValueError: no object, or an unknown key in it."""
        self.where = where
        if not isinstance(data, Mapping):
            raise ValueError(f"{where or 'this'} must be a JSON object, not {data!r:.80}")
        self.data: Mapping[str, Any] = data
        if known is not None and (unknown := [key for key in data if key not in known]):
            raise ValueError("; ".join(f"{self.name(key)}: {unknown_key(key, known)}" for key in unknown))

    def __contains__(self, key: str) -> bool:
        return key in self.data

    def name(self, key: str) -> str:
        """In full, from the top."""
        return f"{self.where}.{key}" if self.where else key

    def get(self, key: str, default: Any = None) -> Any:
        """As it stands there. Raises ValueError when it is missing and there is no default."""
        value = self.data.get(key, default)
        if value is None and key not in self.data:
            raise ValueError(f"{self.name(key)} is missing")
        return value

    def table(self, key: str, known: Collection[str] | None = None) -> Fields:
        """An object within. Raises ValueError naming it."""
        return Fields(self.get(key), self.name(key), known)

    def text(self, key: str, default: str | None = None) -> str:
        """Text that is not empty. Raises ValueError naming the key."""
        value = self.get(key, default)
        if not isinstance(value, str) or not value:
            raise ValueError(f"{self.name(key)} must be text, not {value!r:.80}")
        return value

    def flag(self, key: str) -> bool:
        """True or false, the latter where it is missing. Raises ValueError naming the key."""
        value = self.get(key, False)
        if not isinstance(value, bool):
            raise ValueError(f"{self.name(key)} must be true or false, not {value!r:.80}")
        return value

    def number(self, key: str, limits: Limits = NOT_NEGATIVE, default: float | None = None) -> float:
        """A number within the limits. Raises ValueError naming the key."""
        value = self.get(key, default)
        if not is_number(value) or not limits.hold(value):
            raise ValueError(f"{self.name(key)} must be a number {limits}, not {value!r:.40}")
        return float(value)

    def whole(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """A whole number from `low` to `high`. Raises ValueError naming the key."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"{self.name(key)} must be a whole number >= {low} and <= {high}, not {value!r:.40}")
        return value

    def unit(
        self, key: str, parse: Callable[[Any], float], limits: Limits = NOT_NEGATIVE, default: str | None = None
    ) -> float:
        """A number with its unit, as `parse` reads it, within the limits. Raises ValueError naming the key."""
        told = self.get(key, default)
        try:
            value = float(parse(told))
        except ValueError as e:
            raise ValueError(f"{self.name(key)}: {e}") from e
        if not limits.hold(value):
            raise ValueError(f"{self.name(key)} must be {limits}, in seconds or bits per second, not {told!r:.40}")
        return value


def json_object(text: str | bytes) -> dict[str, Any]:
    """What a file should hold. Raises ValueError: no JSON, no object, or one that is nested too deeply."""
    try:
        data = json.loads(text)
    except RecursionError as e:
        raise ValueError(str(e)) from e
    if not isinstance(data, dict):
        raise ValueError(f"it holds no JSON object but {type(data).__name__}")
    return data


def is_number(value: object) -> bool:
    """Of JSON; Python takes true and false for numbers too."""
    return isinstance(value, int | float) and not isinstance(value, bool)
