"""Whether a request met its targets: what goodput counts. Pure; the daemon and the simulator use it alike."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

TARGETS = ("ttft", "tpot", "all")


@dataclass(frozen=True, slots=True)
class SloTargets:
    """Longest time to the first token, and longest mean time between two tokens of a choice, in seconds."""

    ttft_s: float = inf
    tpot_s: float = inf

    def judge(self, ttft_s: float, tpot_s: float) -> dict[str, bool]:
        """By target, whether it was met; inf is what never came."""
        ttft, tpot = ttft_s <= self.ttft_s and ttft_s < inf, tpot_s <= self.tpot_s and tpot_s < inf
        return {"ttft": ttft, "tpot": tpot, "all": ttft and tpot}
