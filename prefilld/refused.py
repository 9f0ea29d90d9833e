"""Who was refused a moment ago for what it is, so that `peers` shows at this end too why a decoded does not get in.

Bounded, by host; handed the time. Used by service.py.
"""

from __future__ import annotations

from common.net.dialer import INCOMPATIBLE_CODES

MAX_HOSTS = 16
SHOWN_S = 30.0
"""A decoded that is refused calls again more often than that."""


class RefusedPeers:
    """The latest refusal of each host."""

    def __init__(self) -> None:
        self._latest: dict[str, tuple[float, str, str, str]] = {}

    def add(self, address: str, code: str, reason: str, now: float) -> None:
        """A connection from `address` was refused; what is no matter of keys, certificates or models is left out."""
        if code not in INCOMPATIBLE_CODES:
            return
        host = address.rpartition(":")[0]
        self._latest.pop(host, None)
        self._latest[host] = (now, address, code, reason)
        while len(self._latest) > MAX_HOSTS:
            del self._latest[next(iter(self._latest))]

    def rows(self, now: float) -> list[dict[str, object]]:
        """As rows of `peers`."""
        self._latest = {host: found for host, found in self._latest.items() if now - found[0] < SHOWN_S}
        return [
            {
                "name": "?",
                "address": address,
                "state": "incompatible",
                "reason": reason,
                "last_error": reason,
                "last_error_code": code,
                "last_error_age_s": round(now - at, 3),
            }
            for at, address, code, reason in self._latest.values()
        ]
