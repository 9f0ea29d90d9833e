"""Two decodeds before two prefillds: what one uses the other no longer counts on, and has back when that one stops."""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cluster import Cluster, beside, make_cluster

# prefillds are twice as fast as decodeds: without the other a good part of all prompts is worth sending there.
FAKE = {"decode_tokens_per_s": 400, "num_layers": 2, "num_heads": 1, "head_dim": 8}
DECODED = {
    "engine": {"backend": "fake"},
    "fake": {**FAKE, "prefill_tokens_per_s": 4000},
    "links": {"heartbeat": "0.5s"},
    "routing": {"mode": "threshold", "threshold_tokens": "auto"},
}
PREFILLD = {
    "engine": {"backend": "fake"},
    "fake": {**FAKE, "prefill_tokens_per_s": 8000},
    "links": {"heartbeat": "0.5s"},
}
REMOTE = {"X-Prfaas-Route": "remote"}


@pytest.fixture
def sites() -> Iterator[tuple[Cluster, Cluster]]:
    folder = Path(tempfile.mkdtemp(prefix="prfaas-"))
    first = make_cluster(folder, None, num_prefillds=2, decoded=DECODED, prefilld=PREFILLD)
    second = beside(first, "decoded2")
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.callback(second.decoded.stop)
        stack.callback(first.stop)
        first.start()
        second.decoded.start().wait_ready()
        second.wait_peers()
        yield first, second


def ask(cluster: Cluster, num_tokens: int, seed: int, headers: dict[str, str] | None = None) -> None:
    rng = random.Random(seed)
    prompt = [3 + rng.randrange(200) for _ in range(num_tokens)]
    cluster.post("/v1/completions", {"prompt": prompt, "max_tokens": 4, "ignore_eos": True}, headers)


def routing(cluster: Cluster) -> dict[str, Any]:
    return dict(cluster.decoded.ctl("status")["routing"])


def solved_of(facts: dict[str, Any]) -> float:
    """What the slow loop found; the fast one multiplies it."""
    return float(facts["threshold_tokens"] / facts["factor"])


def until(holds: Callable[[], bool], seconds: float) -> None:
    ends_at = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends_at
        time.sleep(0.5)


@contextmanager
def load(cluster: Cluster) -> Iterator[None]:
    """Keeps both prefillds busy for a decoded."""
    is_over = threading.Event()

    def run(number: int) -> None:
        for seed in count(1_000_000 * (number + 1)):
            if is_over.is_set():
                return
            ask(cluster, 8000, seed, REMOTE)

    with ThreadPoolExecutor(4) as pool:
        users = [pool.submit(run, number) for number in range(4)]
        try:
            yield
        finally:
            is_over.set()
    for user in users:
        user.result()


def test_what_another_decoded_uses_is_not_counted_on_and_comes_back(sites):
    first, second = sites
    assert set(routing(first)["peer_shares"].values()) == {1.0}
    with load(second):
        until(lambda: max(routing(first)["peer_shares"].values()) < 0.85, 60)
        assert set(routing(second)["peer_shares"].values()) == {1.0}, "nobody else asks for anything"
        ask(first, 3000, 7, REMOTE)
    low = max(routing(first)["peer_shares"].values())
    rows = {row["name"]: row for row in first.prefillds[0].ctl("peers")}
    assert rows["decoded2"]["busy_share"] > 0.1 > rows["decoded"]["busy_share"]
    assert 'prfaas_peer_share_ratio{peer="prefilld0"} 0.' in first.get("/metrics")
    until(lambda: max(routing(first)["peer_shares"].values()) > low + 0.03, 60)


@pytest.mark.slow
def test_the_threshold_goes_up_with_the_load_of_another_decoded_and_comes_back(sites):
    """The slow loop solves once a minute: some minutes in all."""
    first, second = sites
    for n in range(120):
        ask(first, 100 + 50 * n, n)
    until(lambda: routing(first)["is_solved"], 5)
    alone = routing(first)
    with load(second):
        until(lambda: solved_of(routing(first)) > 1.1 * solved_of(alone), 150)
        shared = routing(first)
        assert shared["can_serve_rps"] < 0.95 * alone["can_serve_rps"]
    # Not quite to where it was: what prompts cost is learned on, too.
    until(lambda: solved_of(routing(first)) < (solved_of(alone) + solved_of(shared)) / 2, 240)
    assert routing(first)["can_serve_rps"] > (alone["can_serve_rps"] + shared["can_serve_rps"]) / 2
