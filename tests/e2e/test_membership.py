"""Two decodeds before the same prefillds: under load one joins and one leaves by reload, and no request notices."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cluster import WITH_CACHE, Cluster, Daemon, beside, make_cluster
from benchmarks.load import Job, LoadResult, run_load
from benchmarks.text import real_text

HEARTBEAT_S = 1.0
MAX_TOKENS = 3
LINKS = {"links": {"heartbeat": f"{HEARTBEAT_S:g}s"}, **WITH_CACHE}
# Everything goes to a prefilld, and a request that none can take fails.
ONLY_REMOTE = {"routing": {"mode": "remote-only"}, "fallback": {"local_prefill_tokens_per_s": 0}}


@dataclass
class Change:
    """Who is configured from some instant on: when it was asked for, and when each decoded had done it."""

    peers: list[str]
    asked_at: float = 0.0
    known_at: list[float] = field(default_factory=lambda: [0.0, 0.0])


@dataclass
class Site:
    """Both decodeds and all prefillds; the decodeds know of some of them. Each decoded has clients of its own."""

    clusters: list[Cluster]
    peers: list[dict[str, Any]]
    is_over: bool = False
    results: list[LoadResult] = field(default_factory=lambda: [LoadResult(), LoadResult()])

    @property
    def decodeds(self) -> list[Daemon]:
        return [c.decoded for c in self.clusters]

    def tell(self, members: tuple[int, ...]) -> None:
        """These prefillds are configured, at both."""
        for decoded in self.decodeds:
            decoded.config["peers"] = [self.peers[n] for n in members]
            decoded.write_config()

    async def reload(self, members: tuple[int, ...]) -> Change:
        """The same while they run."""
        self.tell(members)

        def one(decoded: Daemon) -> float:
            assert any("peers" in line for line in decoded.ctl("reload")["changed"])
            return time.monotonic()

        asked_at = time.monotonic()
        known_at = await asyncio.gather(*(asyncio.to_thread(one, d) for d in self.decodeds))
        return Change([self.peers[n]["name"] for n in members], asked_at, list(known_at))

    async def load(self, number: int, expected: dict[str, str], concurrency: int) -> None:
        """One decoded is asked everything once, until `is_over`."""

        def jobs() -> Iterator[Job]:
            for n, (prompt, text) in enumerate(expected.items()):
                if self.is_over:
                    return
                yield Job(asking(prompt) | {"stream": n % 2 == 1}, text)

        await run_load(self.clusters[number].url, jobs(), concurrency, breathe, self.results[number])

    async def served_by(self, change: Change) -> None:
        """Until every member has served both decodeds since then."""
        ends_at = time.monotonic() + 30

        def missing(number: int) -> set[str]:
            since = change.known_at[number]
            return set(change.peers) - {o.peer for o in self.results[number].outcomes if o.ended_at > since}

        while left := [missing(n) for n in range(2) if missing(n)]:
            assert time.monotonic() < ends_at, f"not served by {left}"
            await asyncio.sleep(0.05)


async def breathe() -> None:
    """Between a client's requests: the load is to last, not to saturate two cores that five daemons share."""
    await asyncio.sleep(0.3)


def asking(prompt: str) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}


def facts(daemon: Daemon, verb: str) -> Any:
    """A read-only control verb over HTTP: quicker than a process for each."""
    http = daemon.config["http"]
    with urllib.request.urlopen(f"http://{http['host']}:{http['port']}/control/{verb}", timeout=10) as reply:
        return json.load(reply)


@pytest.fixture
def site(smollm2_dir: Path) -> Iterator[Site]:
    """Two prefillds that both decodeds know, and a third one that is ready."""
    folder = Path(tempfile.mkdtemp(prefix="prfaas-"))
    first = make_cluster(folder, smollm2_dir, num_prefillds=3, decoded=ONLY_REMOTE | LINKS, prefilld=LINKS)
    second = beside(first, "decoded2")
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.callback(second.decoded.stop)
        stack.callback(first.stop)
        found = Site([first, second], first.decoded.config["peers"])
        found.tell((0, 1))
        second.decoded.start()
        first.start()
        second.decoded.wait_ready()
        second.wait_peers()
        yield found


async def answers(cluster: Cluster, num: int) -> dict[str, str]:
    """Prompts that begin alike, and what decoded makes of them by itself; it forgets them afterwards."""
    system = real_text(900)
    prompts = [f"{system}\nQuestion {n}: {real_text(30 + n % 16, skip=1000 + 130 * n)}" for n in range(num)]

    def ask(prompt: str) -> str:
        answer = cluster.post("/v1/completions", asking(prompt), {"X-Prfaas-Route": "local"})
        return str(answer["choices"][0]["text"])

    first = await asyncio.to_thread(ask, prompts[0])
    rest = await asyncio.gather(*(asyncio.to_thread(ask, prompt) for prompt in prompts[1:]))
    await asyncio.to_thread(cluster.decoded.ctl, "cache", "clear")
    return dict(zip(prompts, [first, *rest], strict=True))


def directories(site: Site, members: tuple[int, ...]) -> tuple[list[dict[str, int]], dict[str, int]]:
    """What each decoded says that its peers hold, and what they do."""
    told = [{p["name"]: p["num_cached_prefixes"] for p in facts(d, "peers")} for d in site.decodeds]
    prefillds = [site.clusters[0].prefillds[n] for n in members]
    return told, {p.name: int(facts(p, "cache")["num_entries"]) for p in prefillds}


async def at_rest(site: Site, members: tuple[int, ...]) -> None:
    """Both know those peers alone, and of each exactly what it holds."""
    told, true = directories(site, members)
    ends_at = time.monotonic() + 10
    while told != [true, true] and time.monotonic() < ends_at:
        await asyncio.sleep(0.1)
        told, true = directories(site, members)
    assert told == [true, true] and all(true.values())


async def changing(
    site: Site, changes: list[tuple[int, ...]], *, num: int, concurrency: int, seconds: float, join_s: float
) -> None:
    """Load on both decodeds while members change, once all served and after so many seconds; what must hold of it.

    `join_s`: so soon must who joined have answered somebody.
    """
    expected = await answers(site.clusters[0], num)
    history = [Change([p["name"] for p in site.peers[:2]])]
    loads = [asyncio.create_task(site.load(n, expected, concurrency)) for n in range(2)]
    for members in changes:
        await site.served_by(history[-1])
        await asyncio.sleep(seconds)
        history.append(await site.reload(members))
    await asyncio.sleep(2 * HEARTBEAT_S)
    await site.served_by(Change(history[-1].peers, known_at=[t + 2 * HEARTBEAT_S for t in history[-1].known_at]))
    over_at = time.monotonic()
    assert not any(each.done() for each in loads), "the load ended before the changes did"
    site.is_over = True
    await asyncio.gather(*loads)
    for number, result in enumerate(site.results):
        assert result.kinds == Counter(ok=len(result.outcomes)), [o for o in result.outcomes if o.kind != "ok"]
        assert set(result.routes) == {"remote"}
        for before, after, then in itertools.zip_longest(history, history[1:], history[2:]):
            if after is not None:
                until = then.asked_at if then is not None else over_at
                check_moved(result, before, after, (after.known_at[number], until), join_s)
    await at_rest(site, changes[-1])


def check_moved(result: LoadResult, before: Change, after: Change, within: tuple[float, float], join_s: float) -> None:
    """Traffic of one decoded is with the new members within two heartbeats, and with the joined ones in time."""
    known_at, until = within
    due_at = known_at + 2 * HEARTBEAT_S

    def served(first: float, last: float) -> set[str]:
        return {o.peer for o in result.outcomes if first < o.ended_at <= last}

    joined = set(after.peers) - set(before.peers)
    assert joined <= served(after.asked_at, known_at + join_s), "who joined got nothing in time"
    assert served(due_at, until) and served(due_at, until) <= set(after.peers), "who left still serves"


async def test_a_prefilld_joins_and_one_leaves_under_load(site):
    # So little load leaves who joined, and has nothing cached, idle for a while.
    await changing(site, [(1, 2)], num=60, concurrency=2, seconds=0.0, join_s=30.0)
    left = site.clusters[0].prefillds[0]
    assert facts(left, "peers") == [] and facts(left, "requests") == []


@pytest.mark.slow
async def test_members_come_and_go_under_load(site):
    changes = [(1, 2), (2, 0), (0, 1, 2), (1,), (0, 1), (2, 1), (0, 2), (0, 1, 2)]
    await changing(site, changes, num=700, concurrency=6, seconds=2.0, join_s=2 * HEARTBEAT_S)
