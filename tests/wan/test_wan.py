"""The emulated link does what it is asked: delay, rate, change while running, cuts, and nothing left behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.wan.wan import ADDRESS, Wan, WanError

pytestmark = pytest.mark.wan

SERVER = """
import socket
s = socket.create_server(("10.9.0.1", 9000))
print("listening", flush=True)
while True:
    c, _ = s.accept()
    n = int(c.recv(64))
    c.sendall(b"x" * n)
    c.close()
"""
# Prints the seconds that the connection and the transfer took.
CLIENT = """
import socket, sys, time
began = time.monotonic()
c = socket.create_connection(("10.9.0.1", 9000), timeout=float(sys.argv[2]))
connected = time.monotonic()
c.sendall(sys.argv[1].encode())
left = int(sys.argv[1])
while left:
    left -= len(c.recv(1 << 16)) or sys.exit("closed early")
print(connected - began, time.monotonic() - connected)
"""


def fetch(wan: Wan, num_bytes: int, timeout_s: float = 20) -> tuple[float, float]:
    """(connect, transfer) in seconds."""
    done = wan.exec("B", sys.executable, "-c", CLIENT, str(num_bytes), str(timeout_s), timeout=60)
    connect_s, transfer_s = map(float, done.stdout.split())
    return connect_s, transfer_s


@pytest.fixture(scope="module")
def wan() -> Iterator[Wan]:
    with Wan(rate_mbit=20, delay_ms=15) as link:
        server = link.popen("A", sys.executable, "-c", SERVER, stdout=subprocess.PIPE)
        assert server.stdout is not None
        assert server.stdout.readline() == "listening\n"
        yield link
        server.kill()
        server.wait()


def test_delay_is_there_and_back(wan: Wan) -> None:
    connect_s, _ = fetch(wan, 1)
    assert 0.030 <= connect_s < 0.1


def test_rate_limits_and_changes_while_running(wan: Wan) -> None:
    _, slow_s = fetch(wan, 1_000_000)
    assert 8 / 20 < slow_s < 3 * 8 / 20
    wan.set(rate_mbit=100)
    _, fast_s = fetch(wan, 1_000_000)
    assert fast_s < 0.8 * slow_s
    wan.set(rate_mbit=20)


def test_cut_and_restore(wan: Wan) -> None:
    wan.cut()
    with pytest.raises(subprocess.CalledProcessError):
        fetch(wan, 1, timeout_s=0.5)
    wan.restore()
    fetch(wan, 1)
    assert wan.stats()["B>A"].num_lost > 0


def test_stats_count_what_crossed(wan: Wan) -> None:
    before = wan.stats()["A>B"]
    fetch(wan, 500_000)
    after = wan.stats()["A>B"]
    assert 0.5 <= after.megabytes - before.megabytes < 0.7
    assert after.num_packets > before.num_packets


def test_two_links_are_apart_and_leave_nothing() -> None:
    with Wan(0, 1) as one, Wan(0, 1) as two:
        assert one.command("A") != two.command("A")
        assert ADDRESS["B"] in one.exec("B", "ip", "-brief", "addr").stdout
        names = {one.command(end)[3] for end in ("A", "B")} | {two.command(end)[3] for end in ("A", "B")}
        assert names <= set(list_namespaces())
    assert not names & set(list_namespaces())
    one.down()


def list_namespaces() -> list[str]:
    listing = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listing.splitlines()]


def test_what_goes_wrong_is_said() -> None:
    link = Wan(rate_mbit=1, delay_ms=1)
    with link:
        pass
    with pytest.raises(WanError, match="no link called"):
        link.set(rate_mbit=2)
