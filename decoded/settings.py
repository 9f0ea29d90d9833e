"""What of the configuration decides where requests go and when they are given up; reload replaces it as a whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from common.policy.routing import Mode
from common.policy.slo import SloTargets
from common.policy.views import PushMode


@dataclass(slots=True)
class DispatchSettings:
    """`threshold_tokens` None: solved while running; it is also set by `decodectl threshold`. `max_stretch` is the most
    that the allocation may set. `own_peers` stand beside decoded, not behind the slow path.
    """

    mode: Mode
    threshold_tokens: float | None
    max_attempts: int
    progress_timeout_s: float
    stall_s: float
    push: PushMode = "auto"
    deadline_s: float = inf
    slo: SloTargets = field(default_factory=SloTargets)
    max_stretch: float = 3.0
    own_peers: frozenset[str] = frozenset()
