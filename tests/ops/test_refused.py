"""What prefilld's `peers` shows of those it did not let in."""

from __future__ import annotations

from prefilld.refused import MAX_HOSTS, SHOWN_S, RefusedPeers


def test_the_latest_refusal_of_each_host_for_a_while() -> None:
    refused = RefusedPeers()
    refused.add("10.0.0.1:1000", "auth", "another key", 100.0)
    refused.add("10.0.0.1:1001", "tls_expired", "expired", 101.0)
    refused.add("::1:1002", "bad_magic", "not ours", 101.5)
    first, second = refused.rows(102.0)
    assert (first["address"], first["state"], first["reason"]) == ("10.0.0.1:1001", "incompatible", "expired")
    assert (first["last_error_code"], first["last_error_age_s"]) == ("tls_expired", 1.0)
    assert second["address"] == "::1:1002"
    assert [row["address"] for row in refused.rows(101.0 + SHOWN_S)] == ["::1:1002"]
    assert refused.rows(200.0) == []


def test_lost_links_are_no_refusals_and_hosts_are_bounded() -> None:
    refused = RefusedPeers()
    refused.add("10.0.0.1:1000", "eof", "the peer closed the connection", 1.0)
    assert refused.rows(1.0) == []
    for n in range(MAX_HOSTS + 5):
        refused.add(f"10.0.0.{n}:1", "auth", "no", 1.0)
    rows = refused.rows(1.0)
    assert len(rows) == MAX_HOSTS and rows[-1]["address"] == f"10.0.0.{MAX_HOSTS + 4}:1"
