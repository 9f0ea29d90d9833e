"""`decodectl explain`"""

from __future__ import annotations

import argparse
from typing import Any

from common.ctl import Context, Verb
from common.ctl_render import pairs


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request_id", metavar="REQUEST_ID", help="as in the response's `id`, the log, or `requests`")


def _run(context: Context) -> int:
    data = context.call("explain", {"request_id": context.args.request_id})
    return context.show(data, explain_text(data))


def explain_text(data: Any) -> str:
    """Blocks of every request: what it was, each decision with all its terms, what came of it."""
    return "\n\n".join("\n".join(pairs(_blocks(one))) for one in (data if isinstance(data, list) else [data]))


def _blocks(data: dict[str, Any]) -> dict[str, Any]:
    report = dict(data.get("report", {}))
    decisions = data.get("decisions", [])
    told = {"route", "peer", "reason", "uncached_tokens"} if decisions else set()
    told |= {key for key in ("wire_bytes", "raw_bytes", "codec", "num_cached_tokens") if not report.get(key)}
    told |= {"num_prompt_tokens"} if decisions else set()
    head = {key: report.pop(key) for key in ("request_id", "outcome") if key in report}
    if data.get("stage") != "finished":
        head = {key: value for key, value in head.items() if key != "outcome"}
    blocks: dict[str, Any] = {**head, **{key: data[key] for key in ("num_output_tokens", "stage") if key in data}}
    for number, decision in enumerate(decisions, 1):
        name = "decision" if len(decisions) == 1 else f"decision {number}"
        facts = {key: value for key, value in decision.items() if key != "terms" and value is not None}
        blocks[name] = {**facts, **{k: v for k, v in decision.get("terms", {}).items() if v or v == 0}}
    return {**blocks, **{key: value for key, value in report.items() if key not in told}}


VERB = Verb(
    "explain",
    "why a request went where it went, and what its time was spent on",
    "Every decision with its rule and numbers, the bytes, and the measured parts of the time to first token of one\n"
    "request, in flight or recent. REQUEST_ID is the response's `id`, with or without its prefix; that of a list of\n"
    "prompts shows one after the other, and `ID-0`, `ID-1` ... are the single ones.",
    _run,
    _arguments,
)
