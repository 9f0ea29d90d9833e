"""`make bench-overload`: what becomes of requests when five times as many come as decoded can serve.

One decoded alone, at first asked as fast as it answers (its capacity), then by Poisson arrivals at a multiple of that,
half of them of a high and half of a low class, over four API keys of which one sends most. Every request has a deadline
for its first token. TTFT and the time of a refusal are by the client's clock: from sending to the first token, and to
the whole answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.cli import make_parser
from benchmarks.cluster import Cluster, running_cluster

SHARES = {"high": 0.5, "low": 0.2}
KEYS = ("greedy", "second", "third", "fourth")
MAX_RUNNING = 12
TIMEOUT_S = 60.0


@dataclass
class Outcome:
    """One request. `kind`: ok, refused (a clean 429 or 503), failed (another clean error), broken."""

    service_class: str
    key: str
    kind: str
    took_s: float
    gate: str = ""
    ttft_s: float = 0.0
    num_tokens: int = 0


@dataclass
class Run:
    """All outcomes of a run, and the most memory decoded had meanwhile."""

    outcomes: list[Outcome] = field(default_factory=list)
    wall_s: float = 0.0
    max_rss_bytes: int = 0
    max_reserved_bytes: int = 0
    given_up: dict[str, int] = field(default_factory=dict)

    def of(self, kind: str, service_class: str = "") -> list[Outcome]:
        return [o for o in self.outcomes if o.kind == kind and service_class in ("", o.service_class)]

    @property
    def kinds(self) -> Counter[str]:
        return Counter(o.kind for o in self.outcomes)

    def service_share(self, service_class: str) -> float:
        """Its part of all prompt and output tokens of requests that were served."""
        total = sum(o.num_tokens for o in self.of("ok"))
        return sum(o.num_tokens for o in self.of("ok", service_class)) / total if total else 0.0


def config(deadline_s: float, folder: Path, *, is_fake: bool) -> dict[str, Any]:
    """decoded's configuration: two classes, four keys, a queue that the deadline bounds."""
    keys = folder / "api.keys"
    keys.write_text("\n".join(KEYS) + "\n")
    keys.chmod(0o600)
    classes = [
        {"name": "low", "priority": 0, "share": SHARES["low"]},
        {"name": "high", "priority": 10, "share": SHARES["high"]},
    ]
    fake = {"engine": {"backend": "fake"}, "fake": {"prefill_tokens_per_s": 8000, "decode_tokens_per_s": 50}}
    return {
        **(fake if is_fake else {}),
        "routing": {"mode": "local-only"},
        "http": {"api_key_file": str(keys)},
        "batch": {"max_batch": 8},
        "slo": {"ttft": f"{deadline_s:g}s"},
        "admission": {
            "max_running_requests": MAX_RUNNING,
            "max_queued_requests": 64,
            "deadline": f"{deadline_s:g}s",
            "classes": classes,
        },
    }


def body_of(rng: random.Random) -> dict[str, Any]:
    """A completion of 50 to 400 prompt tokens and 8 to 48 output tokens."""
    prompt = [3 + rng.randrange(200) for _ in range(rng.randint(50, 400))]
    # Log probabilities have every token make an event, also one that is no text yet.
    return {"prompt": prompt, "max_tokens": rng.randint(8, 48), "temperature": 0, "ignore_eos": True, "stream": True,
            "logprobs": 0}  # fmt: skip


async def ask(session: aiohttp.ClientSession, body: dict[str, Any], service_class: str, key: str) -> Outcome:
    """Send one request; never raises for what the server or the network does."""
    headers = {"Authorization": f"Bearer {key}", "X-Prfaas-Class": service_class}
    sent_at = time.monotonic()
    outcome = Outcome(service_class, key, "broken", 0.0)
    try:
        async with session.post("/v1/completions", json=body, headers=headers) as reply:
            if reply.status != 200:
                error = (await reply.json())["error"]
                is_clean = reply.status in (429, 503) and "Retry-After" in reply.headers and "gate" in error
                outcome.kind, outcome.gate = ("refused" if is_clean else "failed"), error.get("gate", error["code"])
            else:
                await _read(reply, body, outcome, sent_at)
    except (aiohttp.ClientError, ConnectionError, TimeoutError, ValueError, KeyError) as e:
        outcome.gate = type(e).__name__
    outcome.took_s = time.monotonic() - sent_at
    return outcome


async def _read(reply: aiohttp.ClientResponse, body: dict[str, Any], outcome: Outcome, sent_at: float) -> None:
    async for line in reply.content:
        if not line.startswith(b"data: "):
            continue
        if line[6:].strip() == b"[DONE]":
            outcome.kind, outcome.num_tokens = "ok", len(body["prompt"]) + body["max_tokens"]
            return
        event = json.loads(line[6:])
        if "error" in event:
            outcome.kind, outcome.gate = "refused", event["error"].get("gate", event["error"]["code"])
            return
        outcome.ttft_s = outcome.ttft_s or time.monotonic() - sent_at


async def find_capacity(cluster: Cluster, seconds: float, seed: int = 1) -> float:
    """Requests per second when there is always another one, without deadlines that matter."""
    rng, ends_at, num = random.Random(seed), time.monotonic() + seconds, 0
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(cluster.url, connector=connector) as session:

        async def client() -> None:
            nonlocal num
            while time.monotonic() < ends_at:
                headers = {"Authorization": f"Bearer {KEYS[1]}", "X-Prfaas-Deadline": "3600"}
                async with session.post("/v1/completions", json=body_of(rng), headers=headers) as reply:
                    await reply.read()
                num += reply.status == 200

        began = time.monotonic()
        await asyncio.gather(*(client() for _ in range(MAX_RUNNING)))
        return num / (time.monotonic() - began)


async def overload(cluster: Cluster, rate_rps: float, seconds: float, seed: int = 2) -> Run:
    """Poisson arrivals for so long, then wait for whatever is left."""
    rng, run, tasks = random.Random(seed), Run(), []
    timeout, connector = aiohttp.ClientTimeout(total=TIMEOUT_S), aiohttp.TCPConnector(limit=0)
    began = time.monotonic()
    watch = asyncio.create_task(_watch(cluster, run))
    async with aiohttp.ClientSession(cluster.url, timeout=timeout, connector=connector) as session:
        next_at = began
        while (next_at := next_at + rng.expovariate(rate_rps)) < began + seconds:
            await asyncio.sleep(max(0.0, next_at - time.monotonic()))
            key = KEYS[0] if rng.random() < 0.7 else rng.choice(KEYS[1:])
            tasks.append(asyncio.create_task(ask(session, body_of(rng), rng.choice(["high", "low"]), key)))
        run.outcomes = await asyncio.gather(*tasks)
    run.wall_s = time.monotonic() - began
    watch.cancel()
    found = await asyncio.to_thread(metrics, cluster)
    run.given_up = {s: int(found[f'prfaas_deadline_misses_total{{stage="{s}"}}']) for s in ("queue", "prefill")}
    return run


async def _watch(cluster: Cluster, run: Run) -> None:
    while True:
        found = await asyncio.to_thread(metrics, cluster)
        run.max_rss_bytes = max(run.max_rss_bytes, int(found["process_resident_memory_bytes"]))
        run.max_reserved_bytes = max(run.max_reserved_bytes, int(found["prfaas_reserved_state_bytes"]))
        await asyncio.sleep(1.0)


def metrics(cluster: Cluster) -> dict[str, float]:
    """Every sample of decoded's /metrics by name and labels."""
    request = urllib.request.Request(cluster.url + "/metrics", headers={"Authorization": f"Bearer {KEYS[0]}"})
    with urllib.request.urlopen(request, timeout=10) as response:
        lines = response.read().decode().splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


def percentile(values: Sequence[float], part: float) -> float:
    """By rank; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


def table(run: Run, deadline_s: float) -> list[str]:
    """A line for each class, then what all have in common."""
    lines = [
        f"{'class':6} {'offered':>8} {'served':>7} {'refused':>8} {'share':>6} {'sure of':>8} {'TTFT p50':>9}"
        f" {'p99':>8} {'in time':>8}"
    ]
    for name, share in SHARES.items():
        ttfts = [o.ttft_s for o in run.of("ok", name)]
        in_time = sum(t <= deadline_s for t in ttfts) / len(ttfts) if ttfts else 0.0
        offered = sum(o.service_class == name for o in run.outcomes)
        lines.append(
            f"{name:6} {offered:8d} {len(ttfts):7d} {len(run.of('refused', name)):8d} {run.service_share(name):6.2f}"
            f" {share:8.2f} {percentile(ttfts, 0.5):7.3f} s {percentile(ttfts, 0.99):6.3f} s {in_time:8.1%}"
        )
    at_once = [o.took_s for o in run.of("refused") if o.gate != "deadline" or o.took_s < deadline_s]
    by_key = Counter(o.key for o in run.of("ok"))
    lines += [
        f"refused at once: {len(at_once)}, answered in p50 {statistics.median(at_once or [0]) * 1e3:.1f} ms,"
        f" p99 {percentile(at_once, 0.99) * 1e3:.1f} ms, max {max(at_once or [0]) * 1e3:.1f} ms",
        f"given up at the deadline: {run.given_up}; failed: {run.kinds['failed']}; broken: {run.kinds['broken']}",
        f"gates: {dict(Counter(o.gate for o in run.of('refused')))}",
        f"served by key: {', '.join(f'{k} {by_key[k]}' for k in KEYS)} ({KEYS[0]} sends 70 %)",
        f"most memory: {run.max_rss_bytes / 1e6:.0f} MB, reserved for state {run.max_reserved_bytes / 1e6:.0f} MB",
    ]
    return lines


def main(argv: list[str] | None = None) -> int:
    """Print the capacity and the table; the exit code is 1 when a request broke."""
    parser = make_parser("make bench-overload ARGS='...'", __doc__)
    parser.add_argument("--model", type=Path, help="model directory; none is the fake engine with set speeds")
    parser.add_argument("--times", type=float, default=5.0, help="arrivals, in multiples of the capacity")
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload")
    parser.add_argument("--deadline", type=float, default=3.0, help="for the first token, in seconds")
    args = parser.parse_args(argv)
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        decoded = config(args.deadline, Path(folder), is_fake=args.model is None)
        with running_cluster(args.model, num_prefillds=0, decoded=decoded) as cluster:
            os.sched_setaffinity(0, {cores[-1]})  # decoded has the first one
            try:
                cluster.wait_warm()
                capacity = asyncio.run(find_capacity(cluster, min(15.0, args.seconds)))
                run = asyncio.run(overload(cluster, args.times * capacity, args.seconds))
            finally:
                os.sched_setaffinity(0, cores)
    sys.stdout.write(
        f"capacity {capacity:.2f} requests/s; {args.times:g} times that for {args.seconds:g} s, deadline"
        f" {args.deadline:g} s\n" + "\n".join(table(run, args.deadline)) + "\n"
    )
    return 1 if run.kinds["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
