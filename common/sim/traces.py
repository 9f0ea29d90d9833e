"""Readers of public traces: lengths, blocks and instants of real requests.

Mooncake (FAST 2025): JSON lines with `timestamp` in ms, `input_length`, `output_length` and `hash_ids`, the chained ids
of blocks of 512 tokens. Azure LLM inference (2023): CSV with TIMESTAMP, ContextTokens, GeneratedTokens. Called by
plan.py.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from common.policy.fields import NOT_NEGATIVE
from common.sim.workload import BLOCK_TOKENS, Shape, SimRequest

MAX_TOKENS = 10_000_000
_SECONDS = (3600.0, 60.0, 1.0)
_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order they came; `instants` are seconds from the first."""

    shapes: tuple[Shape, ...]
    instants: tuple[float, ...]

    def repeated(self, count: int) -> list[Shape]:
        """So many shapes, from the beginning again where the trace is over."""
        return [self.shapes[n % len(self.shapes)] for n in range(count)]

    def requests(self, speed: float = 1.0) -> list[SimRequest]:
        """As they came, `speed` times as fast."""
        asked = enumerate(zip(self.instants, self.shapes, strict=True))
        return [shape.request(n, at / speed) for n, (at, shape) in asked]


def read_trace(path: Path) -> Trace:
    """Either format, by its first character.

    Raises:
        ValueError: naming line and field.
        OSError: it cannot be read.
    """
    with path.open(encoding="utf-8", newline="") as file:
        is_json = file.read(1) == "{"
        file.seek(0)
        try:
            rows = list(_mooncake(file) if is_json else _azure(file))
        except csv.Error as e:
            raise ValueError(f"neither a Mooncake nor an Azure trace: {e}") from e
    if not rows:
        raise ValueError("no request in it")
    rows.sort(key=lambda row: row[0])
    first = rows[0][0]
    return Trace(tuple(shape for _, shape in rows), tuple(at - first for at, _ in rows))


def _mooncake(lines: Iterable[str]) -> Iterator[tuple[float, Shape]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt = _positive(row["input_length"], "input_length")
            # A trailing id may stand for a part of a block; only whole ones can be shared here.
            blocks = tuple(_block(b) for b in row["hash_ids"][: prompt // BLOCK_TOKENS])
            yield (
                _instant(float(row["timestamp"]) / 1000),
                Shape(prompt, _output(row["output_length"], "output_length"), blocks),
            )
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as e:
            raise ValueError(f"line {number} is not a request of a Mooncake trace: {e!r}") from e


def _azure(lines: Iterable[str]) -> Iterator[tuple[float, Shape]]:
    reader = csv.DictReader(lines)
    if missing := [c for c in _COLUMNS if c not in (reader.fieldnames or ())]:
        raise ValueError(f"neither a Mooncake nor an Azure trace: no column {', '.join(missing)}")
    days: list[str] = []
    for number, row in enumerate(reader, 2):
        try:
            day, _, clock = row["TIMESTAMP"].partition(" ")
            # Midnights count in the order they come: the trace spans hours, so no calendar is needed.
            if not days or days[-1] != day:
                days.append(day)
            seconds = sum(float(part) * unit for part, unit in zip(clock.split(":"), _SECONDS, strict=True))
            prompt = _positive(row["ContextTokens"], "ContextTokens")
            yield (
                _instant(86400.0 * len(days) + seconds),
                Shape(prompt, _output(row["GeneratedTokens"], "GeneratedTokens")),
            )
        except (ValueError, TypeError) as e:
            raise ValueError(f"line {number} is not a request of an Azure trace: {e}") from e


def _instant(seconds: float) -> float:
    if not NOT_NEGATIVE.hold(seconds):
        raise ValueError(f"the instant must be a number of seconds {NOT_NEGATIVE}, not {seconds!r}")
    return seconds


def _block(value: object) -> int:
    number = _whole(value, "hash_ids")
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"hash_ids must be of 64 bits, not {number}")
    return number


def _whole(value: object, name: str) -> int:
    try:
        return int(str(value))
    except ValueError as e:
        raise ValueError(f"{name} must be a whole number, not {value!r:.40}") from e


def _positive(value: object, name: str) -> int:
    tokens = _whole(value, name)
    if not 1 <= tokens <= MAX_TOKENS:
        raise ValueError(f"{name} must be a whole number >= 1 and <= {MAX_TOKENS}, not {tokens}")
    return tokens


def _output(value: object, name: str) -> int:
    """Requests that were cut off before their first token count as one token: their prompt was computed."""
    return 1 if str(value) == "0" else _positive(value, name)
