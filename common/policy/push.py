"""Whether decoded should send a prefix that it holds to a prefilld, or let that one compute it again.

The prefix is what was verified of an attempt that failed. Pure; the terms are shown by `decodectl explain`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PushMode = Literal["auto", "always", "never"]
# What the kernel moves between two processes of one machine is no limit next to a forward pass.
LOOPBACK_BPS = 8e9


@dataclass(frozen=True, slots=True)
class PushPlan:
    """Seconds that either way would take; None where nothing is known to predict it from."""

    pushes: bool
    push_s: float | None
    compute_s: float | None

    @property
    def terms(self) -> dict[str, object]:
        """For people."""
        facts = {"predicted_push_s": self.push_s, "predicted_recompute_s": self.compute_s}
        return {"pushes_prefix": self.pushes} | {k: round(v, 3) for k, v in facts.items() if v is not None}


def plan_push(mode: PushMode, num_bytes: int, path_bps: float, num_tokens: int, tokens_per_s: float) -> PushPlan:
    """For a prefix of `num_tokens`, whose state has `num_bytes`.

    `path_bps`: bits per second that the way to the peer carries; `tokens_per_s`: at which the peer computes prompts; 0
    is not known. Where either is not known nothing is pushed: computing is what every peer can do.
    """
    push_s = 8 * num_bytes / path_bps if path_bps else None
    compute_s = num_tokens / tokens_per_s if tokens_per_s else None
    pays = push_s is not None and compute_s is not None and push_s < compute_s
    return PushPlan(num_tokens > 0 and (mode == "always" or (mode == "auto" and pays)), push_s, compute_s)
