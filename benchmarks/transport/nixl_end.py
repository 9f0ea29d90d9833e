"""Both ends of NIXL with its UCX backend over TCP, as pair.py drives them. Runs with peers.py's packages on the path.

    serve    holds `max_bytes` of registered memory until stdin ends; each line of input is answered with CPU seconds
    fetch    reads as each line says: {"num_bytes", "num_requests", "concurrency"}; answers what it took, or an error

`is_tuned`: no progress thread; the ends poll, and give the core away between polls.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import threading
from time import monotonic
from typing import Any

import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config

from benchmarks.transport.ends import cpu_s, say


def main() -> None:
    """As `role` says."""
    role, text = sys.argv[1:]
    setup = json.loads(text)
    is_tuned = setup.get("is_tuned", False)
    agent = nixl_agent(role, nixl_agent_config(enable_prog_thread=not is_tuned, backends=["UCX"]))
    if role == "serve":
        memory = np.ones(setup["max_bytes"], np.uint8)
        agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
        say({"metadata": base64.b64encode(agent.get_agent_metadata()).decode(), "address": memory.ctypes.data})
        if is_tuned:
            threading.Thread(target=progress, args=(agent,), daemon=True).start()
        for _ in sys.stdin:
            say({"cpu_s": cpu_s()})
        return
    memories = [np.ones(setup["max_bytes"], np.uint8) for _ in range(2)]
    for memory in memories:
        agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    peer = agent.add_remote_agent(base64.b64decode(setup["metadata"]))
    say({})
    for line in sys.stdin:
        say(fetch(agent, peer, setup["address"], memories, json.loads(line)))


def fetch(agent: Any, peer: Any, address: int, memories: list[Any], wanted: dict[str, int]) -> dict[str, Any]:
    """So many reads of so many bytes, as many at a time as wanted."""
    began, cpu, left = monotonic(), cpu_s(), wanted["num_requests"]
    running: list[tuple[Any, int]] = []
    free = list(range(wanted["concurrency"]))
    while left or running:
        while free and left:
            own, left = free.pop(), left - 1
            running.append((start(agent, peer, address, memories[own], wanted["num_bytes"]), own))
        for handle, own in list(running):
            state = agent.check_xfer_state(handle)
            if state == "ERR":
                return {"error": "a read failed", "wall_s": monotonic() - began, "cpu_s": cpu_s() - cpu}
            if state == "DONE":
                agent.release_xfer_handle(handle)
                running.remove((handle, own))
                free.append(own)
        os.sched_yield()
    return {"wall_s": monotonic() - began, "cpu_s": cpu_s() - cpu}


def start(agent: Any, peer: Any, address: int, memory: Any, num_bytes: int) -> Any:
    """One read, under way."""
    here = agent.get_xfer_descs([(memory.ctypes.data, num_bytes, 0)], "DRAM")
    there = agent.get_xfer_descs([(address, num_bytes, 0)], "DRAM")
    handle = agent.initialize_xfer("READ", here, there, peer, b"")
    if agent.transfer(handle) == "ERR":
        raise SystemExit("a read could not be started")
    return handle


def progress(agent: Any) -> None:
    """Without a progress thread an end moves only while it is asked something."""
    while True:
        agent.get_new_notifs()
        os.sched_yield()


if __name__ == "__main__":
    main()
