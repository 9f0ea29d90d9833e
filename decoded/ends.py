"""The line in the log that every request leaves. Used by active.py."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from common.request import Request, RequestReport

log = logging.getLogger("decoded.active")


def log_end(
    request: Request,
    report: RequestReport,
    outcome: str,
    seconds: float,
    num_output_tokens: int,
    finish_reasons: Mapping[int, str],
) -> None:
    """What it was, where it went, and what came of it after so long; what does not apply is left out."""
    timing = report.timing
    facts: dict[str, object] = {
        "request_id": request.request_id,
        "route": report.route,
        "peer": report.peer,
        "reason": report.reason,
        "class": request.service_class,
        "outcome": outcome,
        "why": report.outcome.partition(": ")[2],
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_output_tokens": num_output_tokens,
        "num_choices": request.num_choices,
        "finish_reasons": ",".join(reason for _, reason in sorted(finish_reasons.items())),
        "duration_s": round(seconds, 3),
        "failed_remote_s": round(timing.failed_remote_s, 3),
        "ttft_s": round(timing.ttft_s, 3),
        "predicted_ttft_s": report.predicted_ttft_s,
    }
    level, text = (logging.WARNING, "request failed") if outcome == "error" else (logging.INFO, "request done")
    log.log(level, text, extra={key: value for key, value in facts.items() if value or key.startswith("num_")})
