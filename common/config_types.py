"""What configuration models are made of: the frozen base class, unit types, and problems that name several keys.

Keys are declared with `key(default, "why and unit", limits...)`; the text is the documentation that `--print-config`
and conf/*.toml carry. Knows no section and reads no file; called by config.py and the daemons' root models.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo

from common.units import parse_duration, parse_rate, parse_size

When = Literal["never", "reload", "start", "check"]
"""What is looked at beyond the text: nothing; what a running daemon reads again; what start-up needs; all of that and
what takes seconds to find out."""


class Section(BaseModel):
    """Base of every configuration model: frozen, unknown keys refused, no silent conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Unit(enum.Enum):
    """Marks a field's unit, so that a value is written the way it is read."""

    SIZE = "size"
    DURATION = "duration"
    RATE = "rate"
    THRESHOLD = "threshold"
    PATH = "path"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong across keys. `paths[0]` is blamed; if another of its paths is wrong itself, it is moot."""

    paths: tuple[str, ...]
    message: str


class RootSection(Section):
    """Base of a daemon's root model."""

    def check(self) -> Iterator[Problem]:
        """Contradictions between keys. Pure: the same model always has the same problems."""
        yield from ()

    def check_environment(self, when: When) -> Iterator[Problem]:
        """What this machine lacks: files, permissions, cores, for `--check` a device. Never touches the network."""
        yield from ()

    @classmethod
    def foreign(cls, data: dict[str, Any]) -> str:
        """Whose configuration this is, as a sentence, when it clearly is not for this root; else ""."""
        return ""


def key(default: Any, why: str, **limits: Any) -> Any:
    """A configuration key with a default. `why` says unit, effect and reason in the user's words."""
    return Field(default=default, description=why, **limits)


def required(why: str, **limits: Any) -> Any:
    """A configuration key that must be given."""
    return Field(description=why, **limits)


def _threshold(value: object) -> int | float:
    """An int >= 0, or math.inf for "inf" (TOML's own inf too)."""
    if value == "inf" or value == math.inf:
        return math.inf
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ValueError('must be a whole number of tokens >= 0, or "inf" (nothing goes remote)')


def _threshold_or_auto(value: object) -> int | float | None:
    """None for "auto"."""
    if value is None or value == "auto":
        return None
    try:
        return _threshold(value)
    except ValueError as e:
        raise ValueError(f'{e}, or "auto" (solved while running)') from None


def _bound(value: object) -> float:
    """A duration, or math.inf for "inf" (TOML's own inf too)."""
    return math.inf if value == "inf" or value == math.inf else parse_duration(value)  # type: ignore[arg-type]


def _path(value: object, info: ValidationInfo) -> Path | None:
    """A path; relative ones are taken from the configuration file's directory; "" is none."""
    if value is None or value == "":
        return None
    if isinstance(value, Path):
        return value
    if not isinstance(value, str):
        raise ValueError('must be a path in quotes, or "" for none')
    if "\0" in value:
        raise ValueError("must not have a NUL byte: no file has such a name")
    base = (info.context or {}).get("base")
    path = Path(value).expanduser()
    return path if base is None else Path(base) / path


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


Size = Annotated[int, BeforeValidator(parse_size), Unit.SIZE]
Duration = Annotated[float, BeforeValidator(parse_duration), Unit.DURATION]
Bound = Annotated[float, BeforeValidator(_bound), Unit.DURATION]
"""A duration that may be "inf": no bound."""
Rate = Annotated[float, BeforeValidator(parse_rate), Unit.RATE]
Threshold = Annotated[int | float | None, BeforeValidator(_threshold_or_auto), Unit.THRESHOLD]
"""Tokens, math.inf, or None for "auto"."""
FilePath = Annotated[Path | None, BeforeValidator(_path), Unit.PATH]
IntList = Annotated[tuple[int, ...], BeforeValidator(_as_tuple)]
Array = BeforeValidator(_as_tuple)
