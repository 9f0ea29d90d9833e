"""Both ends of Mooncake's transfer engine over TCP, as pair.py drives them. Runs with peers.py's packages on the path.

serve    holds `max_bytes` of registered memory until stdin ends; each line of input is answered with CPU seconds
fetch    reads as each line says: {"num_bytes", "num_requests", "concurrency"}; answers what it took, or an error
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any

import numpy as np
from mooncake.engine import TransferEngine

from benchmarks.transport.ends import cpu_s, say


def main() -> None:
    """As `role` says."""
    role, text = sys.argv[1:]
    setup = json.loads(text)
    host = setup.get("host", "127.0.0.1")
    own_host = setup.get("fetch_host", host) if role == "fetch" else host
    engine = TransferEngine()
    if engine.initialize(own_host, "P2PHANDSHAKE", "tcp", "") != 0:
        raise SystemExit("the transfer engine did not start")
    if role == "serve":
        memory = registered(engine, setup["max_bytes"])
        say({"session": f"{own_host}:{engine.get_rpc_port()}", "address": memory.ctypes.data})
        for _ in sys.stdin:
            say({"cpu_s": cpu_s()})
        return
    memories = [registered(engine, setup["max_bytes"]) for _ in range(2)]
    say({})
    for line in sys.stdin:
        say(fetch(engine, setup, memories, json.loads(line)))


def fetch(engine: Any, setup: dict[str, Any], memories: list[Any], wanted: dict[str, int]) -> dict[str, Any]:
    """So many reads of so many bytes, as many at a time as wanted."""

    def read(number: int) -> int:
        own = memories[number % len(memories)].ctypes.data
        return int(engine.transfer_sync_read(setup["session"], own, setup["address"], wanted["num_bytes"]))

    began, cpu = monotonic(), cpu_s()
    with ThreadPoolExecutor(wanted["concurrency"]) as pool:
        failed = sum(status != 0 for status in pool.map(read, range(wanted["num_requests"])))
    took = {"wall_s": monotonic() - began, "cpu_s": cpu_s() - cpu}
    return took | ({"error": f"{failed} of {wanted['num_requests']} reads failed"} if failed else {})


def registered(engine: Any, num_bytes: int) -> Any:
    """Touched memory that the engine knows."""
    memory = np.ones(num_bytes, np.uint8)
    if engine.register_memory(memory.ctypes.data, num_bytes) != 0:
        raise SystemExit("memory could not be registered")
    return memory


if __name__ == "__main__":
    main()
