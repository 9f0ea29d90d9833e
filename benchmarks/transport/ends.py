"""Both ends of a session as two processes, for the transport benchmarks: state that is ready at once, no engine.

    serve    python -m benchmarks.transport.ends serve '{"host": ..., ...}'    prints its port; a fact per line of input
    fetch    python -m benchmarks.transport.ends fetch '{"port": ..., ...}'    a JSON line per line of input

Everything between the state in memory at one end and the verified state in memory at the other is the product's:
sessions, striping, credit, digests, codecs. The layout is 8 `full` layers in bfloat16; a token is `TOKEN_BYTES`.
"""

from __future__ import annotations

import asyncio
import json
import math
import resource
import sys
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import numpy as np
import uvloop

from common.backend import ComputedSegment
from common.layout import ModelInfo, StateLayout, StateSpec, TensorSpec
from common.net.options import LinkOptions, LocalEnd, RemoteRequest, Security
from common.net.pool import PeerClient
from common.net.server import PrefillServer, ServerStream
from common.policy.egress import Egress, EgressLimits
from common.sched.specs import plan_segments

NUM_LAYERS, ROW_BYTES, CHUNK_TOKENS = 8, 4096, 256
TOKEN_BYTES = NUM_LAYERS * 2 * ROW_BYTES
KEY = b"benchmark only, 32 bytes of key."
_ROW = (ROW_BYTES // 2,)
LAYOUT = StateLayout(
    tuple(
        StateSpec(n, "full", (TensorSpec("k", _ROW, "bfloat16"), TensorSpec("v", _ROW, "bfloat16")))
        for n in range(NUM_LAYERS)
    )
)


@dataclass(frozen=True)
class Setup:
    """What is measured. At most `max_bytes` of state per request, cut to segments of about `segment_bytes`.

    `options` are LinkOptions of both ends; `paces`: with the product's egress control, and at
    most `max_bps`. Requests land in the same
    memory again and again, so that page faults of fresh memory are not part of it.
    """

    host: str = "127.0.0.1"
    port: int = 0
    max_bytes: int = 64 << 20
    segment_bytes: int = 1 << 20
    codec: str = "raw"
    paces: bool = True
    max_bps: float = math.inf
    options: dict[str, Any] = field(default_factory=dict)

    def link_options(self) -> LinkOptions:
        """Of either end."""
        return LinkOptions(codec=self.codec, **self.options)


class Memory:
    """State of one request: K and V of each layer, token-major (the StateSink protocol)."""

    def __init__(self, num_tokens: int, seed: int | None = None) -> None:
        size = (NUM_LAYERS, 2, num_tokens * ROW_BYTES)
        self.state = np.zeros(size, np.uint8)
        if seed is not None:
            values = np.random.default_rng(seed).standard_normal(self.state.size // 2, np.float32)
            self.state = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(size)

    def buffers(self, start: int, stop: int, layers: tuple[int, ...]) -> tuple[memoryview, ...]:
        return tuple(
            memoryview(self.state[n, t])[start * ROW_BYTES : stop * ROW_BYTES] for n in layers for t in range(2)
        )

    def landed(self, start: int, stop: int, layers: tuple[int, ...]) -> None:
        pass


def tokens_of(num_bytes: int) -> int:
    """Whose state has so many bytes; at least one."""
    return max(1, num_bytes // TOKEN_BYTES)


def cpu_s() -> float:
    """CPU seconds of this process so far, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def local_end(role: Any) -> LocalEnd:
    info = ModelInfo("bench", "w", "c", "t", LAYOUT, 1 << 20, 1 << 20, (0,), {})
    return LocalEnd(role, role, f"{role}-{monotonic()}", info, Security("key", (KEY,)))


async def serve(setup: Setup) -> None:
    """Serve the same state to every request until stdin ends; each line of input is answered with CPU seconds."""
    memory = Memory(tokens_of(setup.max_bytes), seed=0)

    async def handler(stream: ServerStream) -> None:
        await stream.accept(0)
        await stream.started(monotonic())
        num_tokens = len(stream.request.tokens)
        for start in range(0, num_tokens, CHUNK_TOKENS):
            rows = (start, min(start + CHUNK_TOKENS, num_tokens))
            for plan in plan_segments(LAYOUT, rows, (0, num_tokens), setup.segment_bytes):
                buffers = memory.buffers(plan.start, plan.stop, plan.layers)
                await stream.send_segment(ComputedSegment(plan.start, plan.stop, plan.layers, buffers, monotonic()))
        await stream.complete(num_tokens, 0.0)

    egress = Egress(EgressLimits(setup.max_bps)) if setup.paces else None
    server = PrefillServer(local_end("prefill"), setup.link_options(), handler, egress=egress)
    await server.start(setup.host, setup.port)
    say({"port": server.port})
    async for _line in lines():
        say({"cpu_s": cpu_s(), "sessions": server.sessions})
    await server.close()


async def fetch(setup: Setup) -> None:
    """Fetch as each line of input says: {"num_bytes", "num_requests", "concurrency"}; answers what it took."""
    client = PeerClient("bench", setup.host, setup.port, local=local_end("decode"), options=setup.link_options())
    ready = asyncio.Event()
    client.on_state = lambda client: ready.set() if client.state == "ready" else None
    await client.start()
    await ready.wait()
    say({"status": client.status()})
    memories: list[Memory] = []
    async for line in lines():
        wanted = json.loads(line)
        while len(memories) < wanted["concurrency"]:
            memories.append(Memory(tokens_of(setup.max_bytes)))
        began, cpu = monotonic(), cpu_s()
        num_tokens, own = tokens_of(wanted["num_bytes"]), memories[: wanted["concurrency"]]
        seconds = await fetch_all(client, num_tokens, wanted["num_requests"], own)
        say({"wall_s": monotonic() - began, "cpu_s": cpu_s() - cpu, "requests_s": seconds, "status": client.status()})
    await client.close()


async def fetch_all(client: PeerClient, num_tokens: int, num_requests: int, memories: list[Memory]) -> list[float]:
    """So many requests, as many at a time as there are memories; answers how long each took, in seconds."""
    left, seconds = iter(range(num_requests)), []
    tokens = list(range(num_tokens))

    async def worker(memory: Memory) -> None:
        for number in left:
            began = monotonic()
            await client.prefill(RemoteRequest(f"r{number}", tokens), memory).wait()
            seconds.append(monotonic() - began)

    await asyncio.gather(*(worker(memory) for memory in memories))
    return seconds


async def lines() -> Any:
    """Lines of stdin until it ends."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        yield line


def say(fact: dict[str, Any]) -> None:
    print(json.dumps(fact), flush=True)


def main() -> None:
    role, text = sys.argv[1:]
    end = {"serve": serve, "fetch": fetch}[role]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(end(Setup(**json.loads(text))))


if __name__ == "__main__":
    main()
