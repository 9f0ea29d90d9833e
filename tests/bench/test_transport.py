"""What the transport benchmark prints, from records as it makes them; and that its ends work, on loopback."""

from __future__ import annotations

import pytest

from benchmarks.transport.__main__ import loopback_text, main, wide_text
from benchmarks.transport.pair import pair
from benchmarks.transport.wide import Path, plain


def test_ratios_are_paired_by_round() -> None:
    records = []
    for number, (own, other) in enumerate([(1.0, 2.0), (3.0, 4.0), (2.0, 2.0)]):
        costs = {"sender_s_per_gb": 0.25, "receiver_s_per_gb": 0.5}
        records.append({"round": number, "sender": "prfaas", "gb_per_s": own, **costs})
        records.append({"round": number, "sender": "iperf3", "gb_per_s": other, **costs})
    text = loopback_text(records)
    assert "prfaas         2.00 GB/s, CPU s/GB 0.25 sending 0.50 receiving" in text
    assert "prfaas / iperf3        0.75 (0.50-1.00)" in text


def test_a_line_for_a_path() -> None:
    first = {"steady_mbit": 90.0, "resent": 0.012, "queueing_ms": 5.4}
    records = [
        {"sender": name, "round": n, "small_s": 0.5 + n, "large_s": 3.0 + n, **(first if n == 0 else {})}
        for n in range(3)
        for name in ("prfaas", "sockets")
    ]
    text = wide_text(Path(100, 20, 0.01), records)
    assert text.startswith("100 Mbit/s, 20 ms, 1.0%")
    assert "steady 90.0/90.0 Mbit/s" in text
    assert "resent 1.20%/1.20%" in text
    assert "4 MiB 1.500/1.500 s" in text


def test_sessions_between_two_processes() -> None:
    with pair("ends", {"max_bytes": 1 << 20, "options": {"data_links": 2}}) as ends:
        took = ends[1].ask(num_bytes=1 << 20, num_requests=3, concurrency=2)
        assert len(took["requests_s"]) == 3
        assert took["status"]["bytes_in"] > 3 << 20
        assert took["cpu_s"] > 0


def test_plain_sockets_between_two_processes() -> None:
    with pair("raw", {"num_links": 3}) as ends:
        sender = plain(ends)
        before = sender.sent().num_bytes
        assert sender.get(1_000_000) > 0
        assert sender.sent().num_bytes - before >= 1_000_000


def test_help_says_what_it_needs(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "root and /dev/net/tun" in capsys.readouterr().out.replace("\n", " ")
