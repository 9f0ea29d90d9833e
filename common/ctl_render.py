"""JSON data of the control API as text for people: nested keys, tables, units taken from the names of the keys.

`*_bytes`, `*_s` and `*_bps` are sizes, durations and rates (the vocabulary of the whole code); nothing else is known
about any verb. Standard library only. Called by ctl.py.
"""

from __future__ import annotations

from typing import Any

from common.units import format_duration, format_rate, format_size

MAX_CELL = 48


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
        return "\n".join(_pairs(data, ""))
    return value_text("", data)


def _is_table(data: Any) -> bool:
    return isinstance(data, list) and bool(data) and all(isinstance(row, dict) for row in data)


def _pairs(data: dict[str, Any], indent: str) -> list[str]:
    width = max((len(str(key)) for key, value in data.items() if not _is_nested(value)), default=0)
    lines: list[str] = []
    for key, value in data.items():
        if not _is_nested(value):
            lines.append(f"{indent}{key!s:<{width}}  {value_text(str(key), value)}".rstrip())
            continue
        lines.append(f"{indent}{key}:")
        if isinstance(value, dict):
            lines += _pairs(value, indent + "  ")
        else:
            lines += [f"{indent}  {line}" for line in table(value).splitlines()]
    return lines


def _is_nested(value: Any) -> bool:
    return bool(isinstance(value, dict) and value) or _is_table(value)


def table(rows: list[dict[str, Any]]) -> str:
    """Columns in the order in which keys appear first; numbers to the right; long cells are cut."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(key, row.get(key)) for key in columns] for row in rows]
    widths = [max(len(name), *(len(row[n]) for row in cells)) for n, name in enumerate(columns)]
    is_number = [all(isinstance(row.get(key), int | float | None) for row in rows) for key in columns]
    lines = []
    for row in [columns, *cells]:
        parts = [
            text.rjust(w) if right else text.ljust(w) for text, w, right in zip(row, widths, is_number, strict=True)
        ]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


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
        return " ".join(f"{k}={value_text(str(k), v)}" for k, v in value.items()) or "-"
    if isinstance(value, list):
        return ", ".join(value_text("", v) for v in value) or "-"
    return str(value)


def _number(key: str, value: float) -> str:
    if key.endswith("_bytes") or key == "bytes":
        return format_size(value)
    if key.endswith("_bps"):
        return format_rate(value)
    if key.endswith("_s") and not key.endswith("_per_s"):
        return format_duration(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
