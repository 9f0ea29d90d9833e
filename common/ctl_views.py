"""What the verbs that both ctls have print for people: the essentials of a reply; `--json` has all of it.

Every view is a pure function from the reply to text and copes with keys that are missing. Standard library only. Called
by ctl_verbs.py.
"""

from __future__ import annotations

from typing import Any

from common.ctl_render import pairs, table, value_text
from common.layout import numerics_text

PEER_COLUMNS = {
    "name": "name",
    "state": "state",
    "address": "address",
    "num_links": "links",
    "num_streams": "streams",
    "busy_share": "busy",
    "security": "security",
    "certificate": "certificate",
    "certificate_expires_s": "expires_s",
    "rtt_s": "rtt_s",
    "bytes_in": "in_bytes",
    "bytes_out": "out_bytes",
    "delivery_bps": "rate_bps",
}


def status_text(data: dict[str, Any]) -> str:
    """All of it but what goes without saying: `ready` says that it is ready and healthy."""
    shown = {key: value for key, value in data.items() if not _is_said(key, value, data)}
    # "state" is taken: these are the memory of the state.
    for key, name in (("state_bytes", "state_memory_bytes"), ("admitted_state_bytes", "admitted_memory_bytes")):
        shown = {name if k == key else k: (v or 0) if k == key else v for k, v in shown.items()}
    if isinstance(model := shown.get("model"), dict):
        shown["model"] = {k: v for k, v in model.items() if k != "kv_dtype" or v != model.get("dtype")}
    return "\n".join(pairs(shown))


def _is_said(key: str, value: Any, data: dict[str, Any]) -> bool:
    return (key in ("is_ready", "is_healthy") and value is True) or (key == "why" and value in ("", data.get("state")))


def peers_text(rows: list[dict[str, Any]]) -> str:
    """One line each; the reason stands last and whole."""
    if not rows:
        return "(none)"
    names = {key: name for key, name in PEER_COLUMNS.items() if any(key in row for row in rows)}
    for key in ("delivery_bps", "certificate", "certificate_expires_s"):
        # The rate is known to the side that sends, once enough was sent; certificates are there with TLS.
        if not any(row.get(key) for row in rows):
            names.pop(key, None)
    lines = table([{name: row.get(key) for key, name in names.items()} for row in rows]).splitlines()
    reasons = [_reason(row) for row in rows]
    if not any(reasons):
        return "\n".join(lines)
    width = max(map(len, lines))
    return "\n".join(f"{a:<{width}}  {b}".rstrip() for a, b in zip(lines, ["reason", *reasons], strict=True))


def _reason(row: dict[str, Any]) -> str:
    """Why a peer is not usable; of one that is, what to know about it."""
    reason = " ".join(str(row.get("reason") or "").split())
    notes = (numerics_text(row.get("numerics_differ") or {}), str(row.get("egress_note") or ""))
    return reason or "; ".join(filter(None, notes))


def state_text(data: dict[str, Any], ctl: str) -> str:
    """State and what is in flight in one line, with the way back when it takes nothing new."""
    state = str(data.get("state"))
    num = sum(n for key in ("num_running", "num_queued") if isinstance(n := data.get(key), int))
    known = any(key in data for key in ("num_running", "num_queued"))
    text = f"{state}, {value_text('', num)} in flight" if known else state
    return text + (f"; `{ctl} resume` takes work again" if state in ("draining", "drained") else "")


def reload_text(data: dict[str, Any]) -> str:
    """The file and what changed, one line per key."""
    changed = data.get("changed") or []
    head = f"reloaded {data.get('config', '')}".rstrip()
    return "\n".join([f"{head}:", *(f"  {line}" for line in changed)]) if changed else f"{head}: nothing changed"


def refusal_text(problems: list[str], advice: str) -> str:
    """Why a reload was refused, one line per problem, and what the daemon says helps."""
    lines = ["reload refused, the old configuration stays:", *(f"  {problem}" for problem in problems)]
    return "\n".join([*lines, *([advice] if advice else [])])
