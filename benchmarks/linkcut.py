"""What routing does when the path loses nine tenths of its rate in mid-run, and gets them back.

decoded and a prefilld that computes ten times as fast, both with the fake engine (set speeds, state as large as that of
a small model), on either side of an emulated link (root and /dev/net/tun). The same requests at the same instants go to
a second decoded that computes everything itself. Printed per phase: the offloaded share, and TTFT percentiles of both.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.cli import make_parser
from benchmarks.cluster import Cluster, Daemon, free_port, make_cluster
from benchmarks.wan.wan import ADDRESS, Wan

FAST, SLOW = 20_000, 2_000
"""Prompt tokens per second at the prefilld, at decoded."""
SETTLE_S = 30.0
"""From a change of the link until the routing must have followed."""


@dataclass(frozen=True)
class Answer:
    """One request by the client's clock, since the start of the run."""

    sent_at: float
    ttft_s: float
    route: str


@dataclass(frozen=True)
class Phase:
    """What came of the requests that were sent within [start, stop)."""

    name: str
    start: float
    stop: float
    offloaded: float
    p50_s: float
    p95_s: float
    local_p50_s: float
    local_p95_s: float

    def line(self) -> str:
        """For people."""
        return (
            f"{self.name:<28} {self.offloaded:6.0%} offloaded   TTFT p50 {self.p50_s:6.2f} p95 {self.p95_s:6.2f} s   "
            f"all local p50 {self.local_p50_s:6.2f} p95 {self.local_p95_s:6.2f} s"
        )


def sites(folder: Path, mode: str) -> tuple[Cluster, Daemon]:
    """A pair across the link, and a decoded alone; nothing is started."""
    fake = {"engine": {"backend": "fake"}}
    routing = {"routing": {"mode": mode, "threshold_tokens": "auto"}, "batch": {"max_batch": 64}}
    shape = {"num_layers": 4, "num_heads": 2, "head_dim": 32}
    key = folder / "key"
    key.write_text("0123456789abcdef0123456789abcdef\n")
    key.chmod(0o600)
    secure = {"security": {"key_file": str(key)}}
    pair = make_cluster(
        folder,
        None,
        decoded={**fake, **routing, **secure, "fake": {"prefill_tokens_per_s": SLOW, **shape}},
        prefilld={**fake, **secure, "fake": {"prefill_tokens_per_s": FAST, **shape}},
    )
    server = pair.prefillds[0]
    server.config["listen"]["host"] = ADDRESS["A"]
    pair.decoded.config["peers"] = [{"name": "far", "address": f"{ADDRESS['A']}:{server.config['listen']['port']}"}]
    config = json.loads(json.dumps(pair.decoded.config)) | {"peers": [], "routing": {"mode": "local-only"}}
    config["http"]["port"], config["control"] = free_port(), {"socket": str(folder / "alone.sock")}
    config["node"] = {"name": "alone", "state_dir": str(folder / "alone.state")}
    return pair, Daemon("alone", "decoded", config, folder)


def arrivals(rate_rps: float, seconds: float, seed: int) -> list[tuple[float, int]]:
    """(instant, prompt tokens): Poisson, log-normal between 50 and 8,000."""
    rng, at, out = random.Random(seed), 0.0, []
    while (at := at + rng.expovariate(rate_rps)) < seconds:
        out.append((at, int(min(8000, max(50, rng.lognormvariate(6.3, 1.0))))))
    return out


async def drive(sockets: Sequence[str], requests: Sequence[tuple[float, int]]) -> list[list[Answer]]:
    """Send every request to each of the addresses at its instant; the answers of each."""
    began, tasks = time.monotonic(), []
    timeout, connector = aiohttp.ClientTimeout(total=300), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        for number, (at, num_tokens) in enumerate(requests):
            await asyncio.sleep(max(0.0, began + at - time.monotonic()))
            for url in sockets:
                tasks.append(asyncio.create_task(_ask(session, url, number, num_tokens, began)))
        answers = await asyncio.gather(*tasks)
    return [list(answers[n :: len(sockets)]) for n in range(len(sockets))]


async def _ask(session: aiohttp.ClientSession, url: str, number: int, num_tokens: int, began: float) -> Answer:
    rng = random.Random(number)
    body: dict[str, Any] = {
        "prompt": [rng.randrange(3, 30_000) for _ in range(num_tokens)], "max_tokens": 2, "temperature": 0,
        "ignore_eos": True,
    }  # fmt: skip
    sent_at = time.monotonic()
    async with session.post(f"{url}/v1/completions", json=body, headers={"X-Prfaas-Timing": "1"}) as reply:
        answer = await reply.json()
        if reply.status != 200:
            raise RuntimeError(f"request {number} failed: {answer}")
    return Answer(sent_at - began, answer["prfaas"]["timing"]["ttft_s"], answer["prfaas"]["route"])


def phases(pair: Sequence[Answer], alone: Sequence[Answer], cut_at: float, back_at: float, end: float) -> list[Phase]:
    """Before, right after the cut, settled, and the same of the restoration."""
    bounds = [
        ("before the cut", 10.0, cut_at),
        ("cut, first 30 s", cut_at, cut_at + SETTLE_S),
        ("cut, from then on", cut_at + SETTLE_S, back_at),
        ("restored, first 30 s", back_at, back_at + SETTLE_S),
        ("restored, from then on", back_at + SETTLE_S, end),
    ]
    return [_phase(name, start, stop, pair, alone) for name, start, stop in bounds if stop > start]


def _phase(name: str, start: float, stop: float, pair: Sequence[Answer], alone: Sequence[Answer]) -> Phase:
    here = [a for a in pair if start <= a.sent_at < stop]
    times, local = (sorted(a.ttft_s for a in of if start <= a.sent_at < stop) for of in (pair, alone))
    share = sum(a.route == "remote" for a in here) / len(here)
    return Phase(
        name, start, stop, share, times[len(times) // 2], times[int(0.95 * len(times))],
        local[len(local) // 2], local[int(0.95 * len(local))],
    )  # fmt: skip


def run(mode: str, rate_mbit: float, rate_rps: float, cut_at: float, back_at: float, seconds: float) -> list[Phase]:
    """One run of `seconds`: the link has a tenth of its rate within [cut_at, back_at)."""
    with tempfile.TemporaryDirectory(prefix="prfaas-") as name, Wan(rate_mbit=rate_mbit, delay_ms=10) as wan:
        folder = Path(name)
        pair, alone = sites(folder, mode)
        pair.prefillds[0].prefix = tuple(wan.command("A"))
        pair.decoded.prefix = alone.prefix = tuple(wan.command("B"))
        urls = [f"http://127.0.0.1:{d.config['http']['port']}" for d in (pair.decoded, alone)]
        requests = arrivals(rate_rps, seconds, seed=1)
        try:
            pair.start()
            alone.start().wait_ready()
            loop = asyncio.new_event_loop()
            loop.run_in_executor(None, _change, wan, rate_mbit, cut_at, back_at)
            # The clients share the network of decoded.
            mine, local = wan.call("B", lambda: asyncio.new_event_loop().run_until_complete(drive(urls, requests)))
            loop.close()
        finally:
            alone.stop()
            pair.stop()
    return phases(mine, local, cut_at, back_at, seconds)


def _change(wan: Wan, rate_mbit: float, cut_at: float, back_at: float) -> None:
    time.sleep(cut_at)
    wan.set(rate_mbit=rate_mbit / 10)
    time.sleep(back_at - cut_at)
    wan.set(rate_mbit=rate_mbit)


def main() -> int:
    parser = make_parser("benchmarks.linkcut", __doc__ or "")
    parser.add_argument("--mode", default="adaptive", choices=["adaptive", "threshold"])
    parser.add_argument("--rate", type=float, default=60.0, help="Mbit/s of the link")
    parser.add_argument("--rps", type=float, default=1.5, help="requests per second")
    args = parser.parse_args()
    for phase in run(args.mode, args.rate, args.rps, 60.0, 150.0, 240.0):
        print(phase.line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
