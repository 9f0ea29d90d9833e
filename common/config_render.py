"""A configuration model as commented TOML: `--print-config`, the ctls' `config` verb, and the source of conf/*.toml.

Every key is written with its documentation, its default and its effective value; reading the text back gives an equal
model. Knows no section; called by daemon.py.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from common.config_types import Section, Unit
from common.units import exact_duration, exact_rate, exact_size

WIDTH = 110


def render(config: BaseModel) -> str:
    """The whole model as TOML text, sections in the order of the model."""
    parts: list[str] = []
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, Section):
            parts.append("\n".join([*_comment(_doc(type(value))), f"[{name}]", *_keys(value)]))
        else:
            parts.append(_tables(name, value, field))
    return "\n\n".join(parts) + "\n"


def _tables(name: str, values: tuple[Section, ...], field: FieldInfo) -> str:
    """An array of tables; when it is empty only its documentation."""
    lines = list(_comment(field.description or ""))
    for value in values:
        lines += [f"[[{name}]]", *_keys(value), ""]
    return "\n".join(lines).rstrip("\n")


def _keys(section: Section) -> Iterator[str]:
    for name, field in type(section).model_fields.items():
        yield from _comment(f"{field.description} {_default_note(field)}")
        yield f"{name} = {toml_value(getattr(section, name), unit_of(field))}"


def _doc(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split())


def _comment(text: str) -> Iterator[str]:
    for line in textwrap.wrap(" ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False):
        yield f"# {line}"


def _default_note(field: FieldInfo) -> str:
    if field.is_required():
        return "Required."
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "default_note" in extra:
        return f"Default: {extra['default_note']}."
    return f"Default: {toml_value(field.default, unit_of(field))}."


def unit_of(field: FieldInfo) -> Unit | None:
    """The unit a field is marked with."""
    return next((m for m in field.metadata if isinstance(m, Unit)), None)


def toml_value(value: Any, unit: Unit | None = None) -> str:
    """One value as TOML that its field's type reads back as the same value."""
    if unit is Unit.THRESHOLD and (value is None or math.isinf(value)):
        return '"auto"' if value is None else '"inf"'
    if value is None:
        return '""'
    if unit is Unit.SIZE:
        return f'"{exact_size(value)}"'
    if unit is Unit.RATE:
        return f'"{exact_rate(value)}"'
    if unit is Unit.DURATION:
        return f'"{exact_duration(value)}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Section):
        fields = ((n, f) for n, f in type(value).model_fields.items() if getattr(value, n) != f.default)
        return "{" + ", ".join(f"{n} = {toml_value(getattr(value, n), unit_of(f))}" for n, f in fields) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    raise TypeError(f"no TOML form for {type(value).__name__}")


def plain(config: BaseModel) -> dict[str, Any]:
    """The model as JSON-ready data: sizes, durations and rates as numbers, paths as strings, an infinite one "inf",
    a threshold that is solved while running "auto".
    """
    out: dict[str, Any] = {}
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if value is None and unit_of(field) is Unit.THRESHOLD:
            out[name] = "auto"
        elif isinstance(value, BaseModel):
            out[name] = plain(value)
        elif isinstance(value, tuple):
            out[name] = [plain(v) if isinstance(v, BaseModel) else v for v in value]
        elif isinstance(value, Path):
            out[name] = str(value)
        else:
            out[name] = "inf" if isinstance(value, float) and math.isinf(value) else value
    return out


def changes(old: BaseModel, new: BaseModel, prefix: str = "") -> list[str]:
    """What differs, for people: "engine.threads: 1 -> 2"; one line per key, one per entry of an array of tables."""
    lines: list[str] = []
    for name, field in type(old).model_fields.items():
        before, after = getattr(old, name), getattr(new, name)
        if before == after:
            continue
        if isinstance(before, BaseModel) and isinstance(after, BaseModel):
            lines += changes(before, after, f"{prefix}{name}.")
        elif isinstance(before, tuple) and any(isinstance(v, Section) for v in (*before, *after)):
            lines += [f"{prefix}{name}: removed {toml_value(v)}" for v in before if v not in after]
            lines += [f"{prefix}{name}: added {toml_value(v)}" for v in after if v not in before]
        else:
            unit = unit_of(field)
            lines.append(f"{prefix}{name}: {toml_value(before, unit)} -> {toml_value(after, unit)}")
    return lines


def restart_problems(old: BaseModel, new: BaseModel, reloadable: Collection[str]) -> list[str]:
    """Problems for a ConfigError: the changes outside `reloadable`, which names top-level sections and single keys."""
    lines = ((line.split(":", 1)[0], line) for line in changes(old, new))
    return [f"{line} needs a restart" for path, line in lines if not {path, path.split(".")[0]} & set(reloadable)]
