"""What completions and chat answers have in common: ids, usage, the timing object, and how a token is spelt.

Pure. Used by completions.py and chat.py, which know their endpoint's JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from common.request import RequestReport
from decoded.api.choices import Choice, Delta
from decoded.api.fanout import Fanout

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_LOWEST_LOGPROB = -9999.0
_LINE_ENDS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one response carries. `created` is Unix time in whole seconds."""

    request_id: str
    created: int
    model: str
    has_usage_field: bool = False


class Shape(Protocol):
    """One endpoint's JSON."""

    def opening(self, choice: Choice) -> bytes:
        """The SSE event before a choice's first delta, b"" if there is none."""

    def chunk(self, choice: Choice, delta: Delta, prfaas: Any = None) -> bytes:
        """The SSE event of one delta."""

    def tail(self, fanout: Fanout, prfaas: Any) -> bytes:
        """The SSE event with the usage, after all deltas."""

    def whole(self, fanout: Fanout, prfaas: Any) -> bytes:
        """The answer without streaming. Called off the event loop when it is large."""


def event(data: dict[str, Any]) -> bytes:
    """One SSE event."""
    return b"data: " + dumps(data) + b"\n\n"


def spell(data: Any) -> str:
    """Compact JSON. Characters beyond ASCII stay as they are, but for those that many SSE readers take as line ends."""
    text = _ENCODER.encode(data)
    return text if text.isascii() else text.translate(_LINE_ENDS)


def dumps(data: Any) -> bytes:
    """Compact JSON in UTF-8."""
    return spell(data).encode()


def answer(base: dict[str, Any], choices: Iterable[dict[str, Any]], fanout: Fanout, prfaas: Any) -> bytes:
    """A whole answer. Choices are encoded one by one: a single call for all would hold the interpreter for long."""
    tail = {"usage": usage(fanout)} | ({} if prfaas is None else {"prfaas": prfaas})
    parts = b",".join(dumps(choice) for choice in choices)
    return dumps(base)[:-1] + b',"choices":[' + parts + b"]," + dumps(tail)[1:]


def usage(fanout: Fanout) -> dict[str, Any]:
    """Token counts summed over prompts and choices; a prompt counts once however many choices it has."""
    num_prompt = sum(len(prompt.tokens) for prompt in fanout.prepared.prompts)
    num_output = sum(choice.num_tokens for choice in fanout.choices)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(report.num_cached_tokens for report in fanout.reports)},
    }


def prfaas_object(reports: Sequence[RequestReport], is_list: bool) -> dict[str, Any] | list[dict[str, Any]]:
    """Route, bytes and timing parts per prompt; a list when the client sent a list of prompts."""
    objects = [_report_object(report) for report in reports]
    return objects if is_list else objects[0]


def spell_logprob(value: float) -> float:
    """A log probability as JSON can carry it: no token is less likely than -9999."""
    return value if value > _LOWEST_LOGPROB else _LOWEST_LOGPROB  # NaN too


def _report_object(report: RequestReport) -> dict[str, Any]:
    warning = {"warning": report.warning} if report.warning else {}
    return {
        "request_id": report.request_id,
        "route": report.route,
        "peer": report.peer,
        "reason": report.reason,
        "prompt_tokens": report.num_prompt_tokens,
        "cached_tokens": report.num_cached_tokens,
        "uncached_tokens": report.uncached_tokens,
        "wire_bytes": report.wire_bytes,
        "raw_bytes": report.raw_bytes,
        "codec": report.codec,
        "predicted_ttft_s": report.predicted_ttft_s,
        "timing": {name: round(value, 6) for name, value in asdict(report.timing).items()},
        **warning,
    }
