"""Where a prompt is prefilled: the paper's rule on uncached tokens, with every term kept for `decodectl explain`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from common.policy.views import PeerView, RequestView
from common.request import Route

Mode = Literal["threshold", "local-only", "remote-only"]

# Every reason of a decision, by its route; the last three of "local" are fallbacks.
FALLBACK_REASONS = ("no_peer", "peer_failed", "attempts_spent")
REASONS: dict[Route, tuple[str, ...]] = {
    "remote": ("above_threshold", "remote_only", "forced"),
    "local": (
        "below_threshold", "local_only", "forced", "nothing_to_compute", "prompt_logprobs", *FALLBACK_REASONS,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """A route and why. `is_fallback` means that remote was wanted but no peer is usable: the local fallback budget
    must allow it. `terms` are the facts the decision rests on, for people.
    """

    route: Route
    reason: str
    peer: str | None = None
    is_fallback: bool = False
    terms: dict[str, object] = field(default_factory=dict)


def decide(
    request: RequestView, peers: Sequence[PeerView], *, mode: Mode, threshold_tokens: float, max_attempts: int
) -> RouteDecision:
    """Route one request.

    Remote when uncached tokens exceed the threshold (paper.md section 3.2, scarce branch, with one cache): 0 sends
    everything that has something to compute, inf nothing. What cannot go remote is decided before the rule.
    """
    uncached = request.num_uncached_tokens
    terms: dict[str, object] = {
        "mode": mode,
        "num_prompt_tokens": request.num_prompt_tokens,
        "uncached_tokens": uncached,
        "threshold_tokens": "inf" if math.isinf(threshold_tokens) else threshold_tokens,
        "inequality": _inequality(uncached, threshold_tokens),
        "peers": {p.name: "usable" if p.is_usable else p.why_not for p in peers},
        "failed_peers": list(request.failed_peers),
    }
    if uncached <= 0:
        return RouteDecision("local", "nothing_to_compute", terms=terms)
    if request.wants_prompt_logprobs:
        return RouteDecision("local", "prompt_logprobs", terms=terms)
    wish, reason = _wish(request, mode, threshold_tokens)
    if wish == "local":
        return RouteDecision("local", reason, terms=terms)
    if len(request.failed_peers) >= max_attempts:
        return RouteDecision("local", "attempts_spent", is_fallback=True, terms=terms)
    usable = [p for p in peers if p.is_usable and p.name not in request.failed_peers]
    if not usable:
        why = "peer_failed" if request.failed_peers else "no_peer"
        return RouteDecision("local", why, is_fallback=True, terms=terms)
    best = min(usable, key=lambda p: (p.num_queued_tokens, p.num_streams, p.name))
    return RouteDecision("remote", reason, peer=best.name, terms=terms)


def _inequality(uncached: int, threshold: float) -> str:
    """The relation that holds between the two, in full digits."""
    sign = ">" if uncached > threshold else "<="
    return f"{uncached} {sign} {threshold if math.isinf(threshold) or threshold % 1 else int(threshold)}"


def _wish(request: RequestView, mode: Mode, threshold_tokens: float) -> tuple[Route, str]:
    if request.forced_route is not None:
        return request.forced_route, "forced"
    if mode == "local-only":
        return "local", "local_only"
    if mode == "remote-only":
        return "remote", "remote_only"
    if request.num_uncached_tokens > threshold_tokens:
        return "remote", "above_threshold"
    return "local", "below_threshold"
