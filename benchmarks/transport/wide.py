"""Sessions over emulated wide-area links against plain sockets with the same congestion control and number.

For each link the two take turns: steady goodput over some seconds, then transfers of 4 and 32 MiB on warm links after a
pause each. Retransmissions are the kernel's; queueing is what round trips take beyond the shortest.
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.transport.pair import Process, pair
from benchmarks.transport.peers import Peer, environment
from benchmarks.wan.wan import ADDRESS, Wan

SMALL_BYTES, LARGE_BYTES = 4 << 20, 32 << 20
PAUSE_S = 1.0
# Other engines get so long for a transfer.
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Path:
    """An emulated link; `rtt_ms` there and back, `loss` of packets in each direction."""

    rate_mbit: float
    rtt_ms: float
    loss: float

    @property
    def name(self) -> str:
        return f"{self.rate_mbit:g} Mbit/s, {self.rtt_ms:g} ms, {self.loss:.1%}"


PATHS = tuple(Path(rate, rtt, loss) for rate in (100, 250) for rtt in (20, 80) for loss in (0.0, 0.001, 0.01))


@dataclass
class Sent:
    """Cumulative counters of a sender's sockets, and their momentary round trip (the longest)."""

    num_bytes: int
    num_resent: int
    rtt_s: float


class Sender:
    """One of the two, connected: `get(num_bytes)` answers how long that many took, in seconds."""

    def __init__(self, name: str, get: Callable[[int], float], sent: Callable[[], Sent]) -> None:
        self.name, self.get, self.sent = name, get, sent


def ours(ends: tuple[Process, Process]) -> Sender:
    serve, fetch = ends

    def get(num_bytes: int) -> float:
        num = max(1, num_bytes // LARGE_BYTES)
        took = fetch.ask(num_bytes=min(num_bytes, LARGE_BYTES), num_requests=num, concurrency=min(num, 2))
        return float(took["wall_s"])

    def sent() -> Sent:
        links = serve.ask()["sessions"][0]["data_links"]
        return Sent(
            sum(link["bytes_sent"] for link in links),
            sum(link["bytes_retrans"] for link in links),
            max(link["rtt_s"] for link in links),
        )

    return Sender("prfaas", get, sent)


def plain(ends: tuple[Process, Process]) -> Sender:
    serve, fetch = ends

    def get(num_bytes: int) -> float:
        return float(fetch.ask(num_bytes=num_bytes, timeout_s=600)["wall_s"])

    def sent() -> Sent:
        links = serve.ask(is_status=True)["links"]
        return Sent(
            sum(link["bytes_sent"] for link in links),
            sum(link["bytes_retrans"] for link in links),
            max(link["rtt_s"] for link in links),
        )

    return Sender("sockets", get, sent)


def measure(
    path: Path, *, num_links: int, congestion_control: str, seconds: float, rounds: int, peers: list[Peer]
) -> list[dict[str, Any]]:
    """One record per round and sender; of other engines a single one."""
    options = {"data_links": num_links, "congestion_control": congestion_control}
    raw = {"num_links": num_links, "congestion_control": congestion_control}
    records = []
    with (
        Wan(rate_mbit=path.rate_mbit, delay_ms=path.rtt_ms / 2, loss=path.loss) as wan,
        pair("ends", {"max_bytes": LARGE_BYTES, "options": options}, wan) as a,
        pair("raw", raw, wan) as b,
    ):
        senders = [ours(a), plain(b)]
        for number in range(rounds):
            for sender in senders if number % 2 == 0 else reversed(senders):
                figures = _turn(sender, path, seconds if number == 0 else 0)
                records.append({"path": asdict(path), "round": number, "sender": sender.name, **figures})
    system = pathlib.Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    for peer in peers:
        sender = f"{peer.name}, {system}"
        records.append({"path": asdict(path), "round": 0, "sender": sender, **_other(peer, path)})
    return records


def _other(peer: Peer, path: Path) -> dict[str, Any]:
    """4 and 32 MiB by another engine over a fresh link, warmed by 4 MiB; "error" where it did not get so far.

    It takes the system's congestion control.
    """
    figures: dict[str, Any] = {}
    setup = {"max_bytes": LARGE_BYTES, "fetch_host": ADDRESS["B"], **peer.setup}
    try:
        with (
            Wan(rate_mbit=path.rate_mbit, delay_ms=path.rtt_ms / 2, loss=path.loss) as wan,
            pair(peer.module, setup, wan, environment(peer)) as (_, fetch),
        ):
            for name, num_bytes in (("warm_s", SMALL_BYTES), ("small_s", SMALL_BYTES), ("large_s", LARGE_BYTES)):
                time.sleep(PAUSE_S)
                fetch.tell(num_bytes=num_bytes, num_requests=1, concurrency=1)
                took = fetch.hear(PATIENCE_S)
                if "error" in took:
                    return figures | {"error": f"{name}: {took['error']} after {took['wall_s']:.1f} s"}
                figures[name] = took["wall_s"]
    except (TimeoutError, RuntimeError) as e:
        return figures | {"error": f"after {len(figures)} transfers: {e}"[:200]}
    return figures


def _turn(sender: Sender, path: Path, seconds: float) -> dict[str, float]:
    figures = {}
    if seconds:
        sender.get(LARGE_BYTES)  # out of slow start
        num_bytes = int(path.rate_mbit * 1e6 / 8 * seconds * (0.9 if path.loss < 0.005 else 0.8)) // LARGE_BYTES
        num_bytes = max(1, num_bytes) * LARGE_BYTES
        before = sender.sent()
        figures["steady_mbit"] = num_bytes * 8e-6 / sender.get(num_bytes)
        after = sender.sent()
        figures["resent"] = (after.num_resent - before.num_resent) / max(1, after.num_bytes - before.num_bytes)
        figures["queueing_ms"] = max(0.0, after.rtt_s * 1e3 - path.rtt_ms)
    for name, num_bytes in (("small_s", SMALL_BYTES), ("large_s", LARGE_BYTES)):
        time.sleep(PAUSE_S)
        figures[name] = sender.get(num_bytes)
    return figures
