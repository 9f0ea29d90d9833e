"""What prefilld tells each decoded that it can count on: by chunks, and by bytes where there is a budget."""

from __future__ import annotations

from math import inf

import pytest

from prefilld.sharing import Sharing


def row(name: str, sent: int, address: str = "10.0.0.2:40000") -> dict[str, object]:
    return {"name": name, "instance_id": f"i-{name}", "address": address, "bytes_out": sent}


def test_each_is_told_what_the_others_leave():
    sharing = Sharing()
    for now in range(1, 300):
        sharing.computed("a", 0.2, float(now))
        sharing.computed("b", 0.4, float(now))
    told = {name: sharing.load(name, inf, 300.0) for name in "abc"}
    assert told["a"] == {"compute_share": pytest.approx(0.6, abs=0.02)}
    assert told["b"] == {"compute_share": pytest.approx(0.8, abs=0.02)}
    assert told["c"] == {"compute_share": pytest.approx(0.4, abs=0.02)}
    assert sharing.busy_shares(300.0) == {"a": pytest.approx(0.2, abs=0.02), "b": pytest.approx(0.4, abs=0.02)}


def test_of_a_budget_what_others_send_is_not_left_and_loopback_takes_none_of_it():
    sharing = Sharing()
    for half in range(600):
        sent = int(half * 0.5 * 30e6 / 8)
        rows = [row("a", 0), row("b", 10**9 + sent), row("near", sent, "127.0.0.1:40000")]
        sharing.look(rows, 1.0 + half / 2)
    assert "egress_bps" not in sharing.load("a", inf, 300.0)
    assert sharing.load("a", 100e6, 300.0)["egress_bps"] == pytest.approx(70e6, rel=0.02)
    assert sharing.load("b", 100e6, 300.0)["egress_bps"] == 100e6


def test_a_session_that_begins_anew_is_no_burst():
    sharing = Sharing()
    sharing.look([row("b", 10**12)], 1.0)
    sharing.look([], 1.5)
    sharing.look([row("b", 10**12)], 2.0)
    assert sharing.load("a", 1e6, 2.0)["egress_bps"] == 1e6


def test_a_session_that_was_cut_and_counts_from_nothing_gives_nothing_back():
    sharing, sent = Sharing(), 0
    for second in range(300):
        sent = 0 if second == 200 else sent + int(30e6 / 8)
        sharing.look([row("a", 0), row("b", sent)], 1.0 + second)
    assert sharing.load("a", 100e6, 300.0)["egress_bps"] == pytest.approx(70e6, rel=0.03)
