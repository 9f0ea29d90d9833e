"""`make bench`: throughput and latency of a pair on this machine, each route and concurrency alternating in one run.

TTFT: from sending to the first token, by the clock of the client. ITL: gap between two tokens. Rates: total over time.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from benchmarks.cli import make_parser
from benchmarks.cluster import Cluster, prfaas_home, running_cluster
from benchmarks.text import real_text


@dataclass
class Sample:
    """All requests of one cell."""

    ttfts: list[float] = field(default_factory=list)
    itls: list[float] = field(default_factory=list)
    num_output_tokens: int = 0
    wall_s: float = 0.0

    def add(self, other: Sample) -> None:
        self.ttfts += other.ttfts
        self.itls += other.itls
        self.num_output_tokens += other.num_output_tokens
        self.wall_s += other.wall_s

    def line(self) -> str:
        itl = statistics.median(self.itls) * 1e3 if self.itls else 0.0
        worst = max(self.itls) * 1e3 if self.itls else 0.0
        ttft = statistics.median(self.ttfts)
        rate = self.num_output_tokens / self.wall_s
        return f"TTFT p50 {ttft:7.3f} s  ITL p50 {itl:6.1f} ms  max {worst:7.1f} ms  {rate:7.1f} output tokens/s"


async def one(session: aiohttp.ClientSession, prompt: str, route: str, max_tokens: int) -> Sample:
    """Stream one completion."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    sample, last_at = Sample(), 0.0
    sent_at = time.monotonic()
    async with session.post("/v1/completions", json=body, headers={"X-Prfaas-Route": route}) as reply:
        reply.raise_for_status()
        async for line in reply.content:
            if not line.startswith(b"data: {") or not json.loads(line[6:])["choices"][0]["text"]:
                continue
            now = time.monotonic()
            (sample.itls if last_at else sample.ttfts).append(now - (last_at or sent_at))
            last_at = now
            sample.num_output_tokens += 1
    return sample


async def cell(cluster: Cluster, route: str, concurrency: int, num_chars: int, max_tokens: int) -> Sample:
    """`concurrency` different prompts at once."""
    total = Sample()
    began = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=1800)
    async with aiohttp.ClientSession(cluster.url, timeout=timeout) as session:
        prompts = [real_text(num_chars, skip=num_chars * i) for i in range(concurrency)]
        for sample in await asyncio.gather(*(one(session, p, route, max_tokens) for p in prompts)):
            total.add(sample)
    total.wall_s = time.monotonic() - began
    return total


def main(argv: list[str] | None = None) -> int:
    """Print one line for each route, prompt length and concurrency."""
    parser = make_parser("make bench ARGS='...'", __doc__)
    parser.add_argument(
        "--model", type=Path, default=prfaas_home() / "models" / "smollm2-135m-instruct", help="model directory"
    )
    parser.add_argument("--rounds", type=int, default=2, help="repetitions of every cell")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4], help="requests at a time, a cell each")
    parser.add_argument(
        "--chars", type=int, nargs="+", default=[800, 6000], help="prompt lengths in characters, a cell each"
    )
    parser.add_argument("--max-tokens", type=int, default=32, help="output tokens of each request")
    args = parser.parse_args(argv)
    cells: dict[tuple[int, int, str], Sample] = {}
    with running_cluster(args.model) as cluster:
        for _ in range(args.rounds):
            for num_chars in args.chars:
                for concurrency in args.concurrency:
                    for route in ("local", "remote"):
                        sample = asyncio.run(cell(cluster, route, concurrency, num_chars, args.max_tokens))
                        cells.setdefault((num_chars, concurrency, route), Sample()).add(sample)
    for (num_chars, concurrency, route), sample in cells.items():
        sys.stdout.write(f"{num_chars:6d} chars  concurrency {concurrency:2d}  {route:6s}  {sample.line()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
