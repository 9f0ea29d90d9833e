"""JSON data of the control API as text for people: nested keys, tables, units taken from the names of the keys.

`*_bytes`, `bytes_*`, `*_s` and `*_bps` are sizes, durations and rates (the vocabulary of the whole code), also of
what is nested below; since the value shows its unit, the name is shown without. Nothing is known about any verb.
Standard library only. Called by ctl.py and ctl_views.py.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from common.units import format_duration, format_rate, format_size

MAX_CELL = 48
UNITS = ("_bytes", "_bps", "_s")


def to_text(data: Any) -> str:
    """Any reply: a list of objects (or an object that holds just one) is a table, an object is keys and values."""
    if isinstance(data, dict) and len(data) == 1:
        inner = next(iter(data.values()))
        if _is_table(inner) or inner == []:
            data = inner
    if data == []:
        return "(none)"
    if _is_table(data):
        return table(data)
    if isinstance(data, dict):
        return "\n".join(pairs(data))
    return value_text("", data)


def _is_table(data: Any) -> bool:
    return isinstance(data, list) and bool(data) and all(isinstance(row, dict) for row in data)


def pairs(data: dict[str, Any], indent: str = "", unit: str = "") -> list[str]:
    """Lines of an object: keys and values, nested objects indented. `unit` is the ending of the key around it."""
    names = {key: label(str(key), data) for key in data}
    width = max((len(names[key]) for key, value in data.items() if not _is_nested(value)), default=0)
    lines: list[str] = []
    for key, value in data.items():
        own = f"{key}{unit}"
        if not _is_nested(value):
            lines.append(f"{indent}{names[key]:<{width}}  {value_text(own, value)}".rstrip())
            continue
        lines.append(f"{indent}{names[key]}:")
        if isinstance(value, dict):
            lines += pairs(value, indent + "  ", unit_of(own))
        else:
            lines += [f"{indent}  {line}" for line in table(value).splitlines()]
    return lines


def _is_nested(value: Any) -> bool:
    return bool(isinstance(value, dict) and value) or _is_table(value)


def table(rows: list[dict[str, Any]]) -> str:
    """Columns in the order in which keys appear first; numbers to the right; long cells are cut."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    names = [label(key, columns) for key in columns]
    cells = [[_cell(key, row.get(key)) for key in columns] for row in rows]
    widths = [max(len(name), *(len(row[n]) for row in cells)) for n, name in enumerate(names)]
    is_number = [all(isinstance(row.get(key), int | float | None) for row in rows) for key in columns]
    lines = []
    for row in [names, *cells]:
        parts = [
            text.rjust(w) if right else text.ljust(w) for text, w, right in zip(row, widths, is_number, strict=True)
        ]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def unit_of(key: str) -> str:
    """The ending of a key that tells the unit of its value, or ""."""
    return "" if key.endswith("_per_s") else next((end for end in UNITS if key.endswith(end)), "")


def label(key: str, others: Container[str] = ()) -> str:
    """A key without its unit, unless that is the name of another one."""
    short = key.removesuffix(unit_of(key))
    return key if short in others else short


def _cell(key: str, value: Any) -> str:
    text = value_text(key, value).replace("\n", " ")
    return text if len(text) <= MAX_CELL else text[: MAX_CELL - 3] + "..."


def value_text(key: str, value: Any) -> str:
    """One value, with the unit that its key names; "-" for nothing."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return _number(key, value)
    if isinstance(value, dict):
        return " ".join(f"{k}={value_text(f'{k}{unit_of(key)}', v)}" for k, v in value.items()) or "-"
    if isinstance(value, list):
        return ", ".join(value_text("", v) for v in value) or "-"
    return str(value)


def _number(key: str, value: float) -> str:
    unit = unit_of(key)
    if unit == "_bytes" or key == "bytes" or key.startswith("bytes_"):
        return format_size(value)
    if unit == "_bps":
        return format_rate(value)
    if unit == "_s":
        return format_duration(value)
    return f"{value:,.0f}" if value == int(value) else f"{value:.4g}"
