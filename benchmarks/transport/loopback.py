"""Session goodput over loopback against iperf3 with one stream and other transfer engines, alternating.

Also CPU seconds per GB of both ends.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.transport.pair import Process, pair
from benchmarks.transport.peers import Peer, environment

STATE_BYTES = 64 << 20
# What is in one segment, and in one frame: as large as is hashed without changing threads.
PIECE_BYTES = 2 << 20
SETUP = {
    "max_bytes": STATE_BYTES,
    "segment_bytes": PIECE_BYTES,
    "options": {"data_links": 1, "piece_bytes": PIECE_BYTES, "max_segment_bytes": PIECE_BYTES},
}


def measure(rounds: int, num_requests: int, seconds: int, peers: list[Peer]) -> list[dict[str, Any]]:
    """One record per round and sender: bytes per second, CPU seconds per GB at the sender and the receiver."""
    senders: list[tuple[str, Callable[[], dict[str, float]]]] = [
        ("prfaas", partial(turn, "ends", SETUP, None, num_requests)),
        ("iperf3", partial(iperf3, seconds)),
    ]
    for peer in peers:
        setup = {"max_bytes": STATE_BYTES, **peer.setup}
        senders.append((peer.name, partial(turn, peer.module, setup, environment(peer), num_requests)))
    records = []
    for number in range(rounds):
        for name, run in senders if number % 2 == 0 else reversed(senders):
            records.append({"round": number, "sender": name, **run()})
    return records


def turn(module: str, setup: dict[str, Any], env: dict[str, str] | None, num_requests: int) -> dict[str, float]:
    """Two fresh processes, warmed up: some engines keep a core busy while they wait."""
    with pair(module, setup, env=env) as ends:
        fetched(ends, 4)
        return fetched(ends, num_requests)


def fetched(ends: tuple[Process, Process], num_requests: int) -> dict[str, float]:
    """64 MiB of state per request, raw, two requests at a time."""
    serve, fetch = ends
    before = serve.ask()["cpu_s"]
    took = fetch.ask(num_bytes=STATE_BYTES, num_requests=num_requests, concurrency=2)
    if "error" in took:
        raise RuntimeError(took["error"])
    num_gb = num_requests * STATE_BYTES / 1e9
    return {
        "gb_per_s": num_gb / took["wall_s"],
        "sender_s_per_gb": (serve.ask()["cpu_s"] - before) / num_gb,
        "receiver_s_per_gb": took["cpu_s"] / num_gb,
    }


def iperf3(seconds: int) -> dict[str, float]:
    """One TCP stream, blocking calls. Raises RuntimeError when iperf3 is not there or fails."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    server = subprocess.Popen(["iperf3", "-s", "-1", "-p", port], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(50):
            time.sleep(0.1)
            done = subprocess.run(
                ["iperf3", "-c", "127.0.0.1", "-p", port, "-t", str(seconds), "-J"], capture_output=True, check=False
            )
            if done.returncode == 0:
                return _figures(json.loads(done.stdout)["end"])
        raise RuntimeError(f"iperf3 failed: {done.stdout[-300:]!r}")
    finally:
        server.kill()
        server.wait()


def _figures(end: dict[str, Any]) -> dict[str, float]:
    total, cpu = end["sum_received"], end["cpu_utilization_percent"]
    num_gb = total["bytes"] / 1e9
    return {
        "gb_per_s": num_gb / total["seconds"],
        "sender_s_per_gb": cpu["host_total"] / 100 * total["seconds"] / num_gb,
        "receiver_s_per_gb": cpu["remote_total"] / 100 * total["seconds"] / num_gb,
    }
