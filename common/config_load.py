"""TOML text to a configuration model: every problem at once, each with its path and, where it can be found, its line.

Knows no section; called by config.load. Unknown keys are refused with the nearest known one. When keys are wrong, the
contradictions among the right ones are still looked for: the wrong ones are taken out, the rest validated again.
"""

from __future__ import annotations

import copy
import math
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from common.config_render import toml_value, unit_of
from common.config_types import Problem, RootSection, Unit, When
from common.errors import ConfigError, unknown_key

R = TypeVar("R", bound=RootSection)
Loc = tuple[int | str, ...]

_HEADER = re.compile(r"\s*\[(\[)?\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?$")
_PLAIN_WORDS = {
    "model_type": "must be a table of keys",
    "tuple_type": "must be an array",
    "missing": "is required",
}
_KEY = re.compile(r"\s*((?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*'))*)\s*=")


def load_file(path: Path, root: type[R], *, environment: When = "start") -> R:
    """Read and validate a configuration file. Relative paths in it are relative to its directory.

    Args:
        environment: how far to check what the machine has (files, permissions, cores).

    Raises:
        ConfigError: the file cannot be read, is not TOML, or has problems; all of them are listed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8: {error}") from error
    return parse_text(text, root, base=path.parent, environment=environment)


def parse_text(text: str, root: type[R], *, base: Path | None = None, environment: When = "start") -> R:
    """Validate TOML text; as load_file.

    Raises:
        ConfigError: all problems, in the order of their lines.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([*_given_twice(text)] or f"not valid TOML: {error}") from error
    if foreign := root.foreign(data):
        raise ConfigError(foreign)
    found: list[tuple[Loc, str]] = []
    config = _validate(data, root, base, found)
    wrong = {dotted(loc) for loc, _ in found}
    if config is None:
        config = _validate(_without(data, [loc for loc, _ in found]), root, base, [])
    if config is not None:
        checks = [*config.check(), *(() if environment == "never" else config.check_environment(environment))]
        found += [(_undotted(p.paths[0]), p.message) for p in checks if not _is_moot(p, wrong)]
    if found or config is None:
        lines = locate(text)
        found.sort(key=lambda item: _line_of(item[0], lines) or 0)
        raise ConfigError([_sentence(loc, message, lines) for loc, message in found])
    return config


def _validate(data: dict[str, Any], root: type[R], base: Path | None, found: list[tuple[Loc, str]]) -> R | None:
    try:
        return root.model_validate(data, context={"base": base})
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            loc = _shorten(detail["loc"], data)
            found.append((loc, _message(detail, loc, root)))
        return None


def _shorten(loc: Loc, data: Any) -> Loc:
    """Cut what pydantic appends to a path for branches of unions: keep what the data has, and a missing key."""
    out: list[int | str] = []
    for part in loc:
        if not isinstance(data, dict | list):
            break
        out.append(part)
        if isinstance(data, dict) and part not in data:
            break
        data = typing.cast(Any, data)[part]
    return tuple(out)


def _message(detail: ErrorDetails, loc: Loc, root: type[BaseModel]) -> str:
    """One problem as a sentence that ends with what was found."""
    if not loc:
        return detail["msg"]
    if detail["type"] == "extra_forbidden":
        return unknown_key(str(loc[-1]), _fields(root, loc[:-1]))
    field = _fields(root, loc[:-1]).get(str(loc[-1]))
    value, text = detail["input"], _PLAIN_WORDS.get(detail["type"], "")
    if detail["type"] == "string_pattern_mismatch" and field is not None:
        text = f"has the wrong form: {field.description}"
    elif isinstance(value, float) and math.isnan(value):
        text = "must be a number"
    elif not text:
        text = detail["msg"].removeprefix("Value error, ").replace("Input should", "should", 1)
    unit = unit_of(field) if field is not None else None
    if unit in (Unit.SIZE, Unit.DURATION) and isinstance(value, int | float) and not isinstance(value, bool):
        limit = next(iter(detail.get("ctx", {}).values()), None)
        if isinstance(limit, int | float):
            text = re.sub(r"[0-9.]+$", toml_value(limit, unit), text)
        shown = toml_value(value, unit)
    else:
        shown = repr(value)
    # Some texts quote what they found; a digit of the limit is no quotation.
    is_quoted = re.search(rf"(?<![\w.]){re.escape(repr(value))}(?![\w.])", text) is not None
    if not isinstance(value, str | int | float | bool) or is_quoted:
        return text
    return f"{text} (got {shown})"


def _fields(model: Any, loc: Iterable[int | str]) -> dict[str, FieldInfo]:
    """The fields of the model at a path, through tuples and optional values; none when there is no model."""
    for part in loc:
        if isinstance(part, str):
            field = getattr(model, "model_fields", {}).get(part)
            model = _inner_model(field.annotation) if field is not None else None
    return dict(getattr(model, "model_fields", {}))


def _inner_model(annotation: Any) -> Any:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation
    return next((m for a in typing.get_args(annotation) if (m := _inner_model(a)) is not None), None)


def _without(data: dict[str, Any], locs: Iterable[Loc]) -> dict[str, Any]:
    """A copy of the data without the given paths (array entries go whole)."""
    data = copy.deepcopy(data)
    for loc in locs:
        keys = loc[: next((i for i, part in enumerate(loc) if isinstance(part, int)), len(loc))]
        target: Any = data
        for part in keys[:-1]:
            target = target.get(part, {}) if isinstance(target, dict) else {}
        if keys and isinstance(target, dict):
            target.pop(keys[-1], None)
    return data


def _is_moot(problem: Problem, wrong: set[str]) -> bool:
    """True when a key that the problem depends on is itself wrong (or holds something wrong)."""
    return any(p == w or w.startswith((f"{p}.", f"{p}[")) or p.startswith((f"{w}.", f"{w}[")) for p in problem.paths
               for w in wrong)  # fmt: skip


def dotted(loc: Loc) -> str:
    """("peers", 0, "address") -> "peers[0].address"."""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "(file)"


def _undotted(path: str) -> Loc:
    return tuple(int(p[1:-1]) if p.startswith("[") else p for p in re.findall(r"\[\d+\]|[^.\[\]]+", path))


def _sentence(loc: Loc, message: str, lines: dict[Loc, int]) -> str:
    line = _line_of(loc, lines)
    return f"{dotted(loc)}: {message}" + (f" (line {line})" if line else "")


def _line_of(loc: Loc, lines: dict[Loc, int]) -> int | None:
    """The line of a path, or of the nearest table around it."""
    return next((lines[loc[:n]] for n in range(len(loc), 0, -1) if loc[:n] in lines), None)


def locate(text: str) -> dict[Loc, int]:
    """Line numbers (from 1) of tables and keys in valid TOML. Keys inside inline tables are not looked for."""
    lines: dict[Loc, int] = {}
    for loc, number in _places(text):
        lines.setdefault(loc, number)
    return lines


def _given_twice(text: str) -> Iterator[str]:
    """Why TOML refuses a text: its parser tells a line and a column, but no key."""
    lines: dict[Loc, int] = {}
    for loc, number in _places(text):
        if loc in lines:
            yield f"{dotted(loc)}: is given twice, first in line {lines[loc]} (line {number})"
        lines.setdefault(loc, number)


def _places(text: str) -> Iterator[tuple[Loc, int]]:
    """Every table and key with its line."""
    table: Loc = ()
    counts: dict[Loc, int] = {}
    for number, line in _logical_lines(text):
        if header := _HEADER.match(line):
            table = _resolve(_split_key(header[2]), counts)
            if header[1]:
                counts[table] = counts.get(table, -1) + 1
                table = (*table, counts[table])
            yield table, number
        elif match := _KEY.match(line):
            yield table + _split_key(match[1]), number


def _resolve(parts: Loc, counts: dict[Loc, int]) -> Loc:
    """Put the current index behind each array of tables that the header goes through."""
    out: Loc = ()
    for n, part in enumerate(parts):
        out = (*out, part)
        if n + 1 < len(parts) and out in counts:
            out = (*out, counts[out])
    return out


def _split_key(text: str) -> Loc:
    return tuple(part.strip("\"' ") for part in re.findall(r"\"[^\"]*\"|'[^']*'|[^.\s]+", text))


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines that can start a key or a header: not those inside multi-line strings and arrays."""
    closer, depth = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if not closer and depth == 0:
            yield number, line
        closer, depth = _scan(line, closer, depth)
        if _HEADER.match(line) and not closer:
            depth = 0


def _scan(line: str, closer: str, depth: int) -> tuple[str, int]:
    """Follow one line: the multi-line string it ends in (its closing quotes, or "") and the bracket depth."""
    i = 0
    while i < len(line):
        if closer:
            end = line.find(closer, i)
            if end < 0:
                return closer, depth
            i, closer = end + 3, ""
        elif line.startswith(('"""', "'''"), i):
            closer, i = line[i : i + 3], i + 3
        elif line[i] in "\"'":
            i = _skip_string(line, i)
        elif line[i] == "#":
            break
        else:
            depth += {"[": 1, "]": -1, "{": 1, "}": -1}.get(line[i], 0)
            i += 1
    return closer, depth


def _skip_string(line: str, start: int) -> int:
    """The index behind a one-line string that begins at `start`."""
    i = start + 1
    while i < len(line) and line[i] != line[start]:
        i += 2 if line[i] == "\\" and line[start] == '"' else 1
    return i + 1
