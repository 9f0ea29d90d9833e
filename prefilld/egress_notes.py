"""Where a limit of [egress] does not hold, in words: `peers` shows it, and the log, once for each peer on loopback.

Knows rows of `peers` and limits, no links. Used by service.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from math import inf
from typing import Any

from common.hosts import is_loopback
from common.logs import Damper
from common.policy.egress import EgressLimits

log = logging.getLogger(__name__)
_DAY_S = 86400.0


def egress_note(limits: EgressLimits, row: Mapping[str, Any]) -> str:
    """Which limits that are set do nothing for the peer of a row of `peers` now, and why; "" when all hold."""
    if is_local(row):
        names = [n for n, is_set in (("max_bps", limits.max_bps < inf), ("share", limits.share < 1)) if is_set]
        verb = "do" if len(names) > 1 else "does"
        return f"{' and '.join(f'egress.{n}' for n in names)} {verb} nothing on loopback" if names else ""
    is_known = bool((row.get("path") or {}).get("capacity_bps"))
    if limits.share < 1 and row.get("address") and not is_known:
        return "egress.share holds once the capacity of the path is known"
    return ""


class EgressWarnings:
    """Tells the log of limits that do nothing. After a change of the limits: a new one."""

    def __init__(self, limits: EgressLimits) -> None:
        self._limits = limits
        self._told = Damper(_DAY_S)

    def look(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """At the rows of `peers`, now and then."""
        for row in rows:
            text = egress_note(self._limits, row) if is_local(row) else ""
            if text and self._told.admit(str(row["name"])) is not None:
                log.warning("%s: nothing sent to this peer is held back", text, extra={"peer": row["name"]})


def is_local(row: Mapping[str, Any]) -> bool:
    """Whether a row of `peers` is of one on this machine."""
    return is_loopback(str(row.get("address") or "").rpartition(":")[0])
