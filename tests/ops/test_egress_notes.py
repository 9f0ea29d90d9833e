"""What prefilld says of limits of [egress] that do not hold for a peer, and when."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from common.policy.egress import EgressLimits
from prefilld.egress_notes import EgressWarnings, egress_note

LOCAL, FAR = "127.0.0.1:40000", "203.0.113.5:40000"
BOTH = "egress.max_bps and egress.share do nothing on loopback"
LATER = "egress.share holds once the capacity of the path is known"


def row(address: str, capacity_bps: float | None = None, name: str = "a1") -> dict[str, Any]:
    return {"name": name, "address": address, "path": None if capacity_bps is None else {"capacity_bps": capacity_bps}}


@pytest.mark.parametrize(
    ("limits", "row", "note"),
    [
        (EgressLimits(), row(LOCAL), ""),
        (EgressLimits(max_bps=2e8), row(LOCAL), "egress.max_bps does nothing on loopback"),
        (EgressLimits(2e8, 0.5), row("::1:40000"), BOTH),
        (EgressLimits(max_bps=2e8), row(FAR), ""),
        (EgressLimits(share=0.5), row(FAR), LATER),
        (EgressLimits(share=0.5), row(FAR, 0.0), LATER),
        (EgressLimits(share=0.5), row(FAR, 1e8), ""),
        (EgressLimits(2e8, 0.5), row(""), ""),  # detached
    ],
)
def test_which_limits_do_not_hold(limits: EgressLimits, row: dict[str, Any], note: str) -> None:
    assert egress_note(limits, row) == note


def test_the_log_has_it_once_for_each_peer_on_loopback(caplog: pytest.LogCaptureFixture) -> None:
    warnings = EgressWarnings(EgressLimits(2e8, 0.5))
    for _ in range(3):
        warnings.look([row(LOCAL), row("127.0.0.1:40001"), row(LOCAL, name="a2"), row(FAR, name="a3")])
    assert [(r.levelname, r.__dict__["peer"]) for r in caplog.records] == [("WARNING", "a1"), ("WARNING", "a2")]
    assert caplog.records[0].getMessage() == f"{BOTH}: nothing sent to this peer is held back"
    caplog.clear()
    with caplog.at_level(logging.DEBUG):
        EgressWarnings(EgressLimits()).look([row(LOCAL)])
    assert not caplog.records
