"""A chat over two real daemons: what was computed or said is neither computed nor sent again, for nobody else."""

from __future__ import annotations

import itertools
import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cluster import WITH_CACHE, Cluster, Daemon, running_cluster
from benchmarks.text import real_text

NUM_TURNS, MAX_TOKENS = 8, 24
LOCAL, REMOTE = "local", "remote"
KEYS = {"here": "k" * 20, "there": "l" * 20, "to and fro": "m" * 20, "nobody's": "n" * 20}


@pytest.fixture(scope="module", params=["smollm2_dir", "gemma3_dir"])
def chatting(request, tmp_path_factory) -> Iterator[Cluster]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("\n".join(KEYS.values()) + "\n")
    keys.chmod(0o600)
    decoded = {**WITH_CACHE, "http": {"api_key_file": str(keys)}}
    model: Path = request.getfixturevalue(request.param)
    with running_cluster(model, decoded=decoded, prefilld=WITH_CACHE) as cluster:
        yield cluster


def ask(cluster: Cluster, prompt: str, who: str, route: str) -> dict[str, Any]:
    """A greedy completion, and what happened to it. Waits until both caches have taken it in and decoded knows."""
    body = {
        "model": model_of(cluster),
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    headers = {"Authorization": f"Bearer {KEYS[who]}", "X-Prfaas-Timing": "1", "X-Prfaas-Route": route}
    answer = cluster.post("/v1/completions", body, headers)
    settle(cluster)
    return {**answer["prfaas"], "text": answer["choices"][0]["text"], "usage": answer["usage"]}


def model_of(cluster: Cluster) -> str:
    return Path(cluster.decoded.config["model"]["path"]).name


def facts(cluster: Cluster, daemon: Daemon, verb: str) -> Any:
    """A read-only control verb over HTTP: quicker than a process for each."""
    http = daemon.config["http"]
    request = urllib.request.Request(f"http://{http['host']}:{http['port']}/control/{verb}")
    request.add_header("Authorization", f"Bearer {KEYS['here']}")
    with urllib.request.urlopen(request, timeout=10) as reply:
        return json.load(reply)


def settle(cluster: Cluster) -> None:
    """Until both caches have taken in what there is, and decoded knows."""
    last: list[int] = []
    for _ in range(200):
        entries = [int(facts(cluster, d, "cache")["num_entries"]) for d in cluster.daemons]
        entries += [int(p["num_cached_prefixes"]) for p in facts(cluster, cluster.decoded, "peers")]
        if entries == last:
            return
        last = entries
        time.sleep(0.12)
    raise AssertionError(f"the caches do not come to rest: {last}")


def converse(cluster: Cluster, who: str, routes: list[str]) -> list[dict[str, Any]]:
    """Eight turns behind one system prompt; each goes where `routes` says."""
    told, prompt = [], real_text(7000)
    for turn in range(NUM_TURNS):
        prompt += f"\nQuestion {turn}: what does line {turn + 3} of the text say?\nAnswer:"
        told.append(ask(cluster, prompt, who, routes[turn % len(routes)]) | {"prompt": prompt})
        prompt += told[-1]["text"]
    return told


ROUTES = {"here": [LOCAL], "there": [REMOTE], "to and fro": [REMOTE, LOCAL, LOCAL, REMOTE, REMOTE]}


def test_a_chat_computes_and_sends_what_is_new(chatting: Cluster):
    chats = {who: converse(chatting, who, routes) for who, routes in ROUTES.items()}
    texts = {who: [turn["text"] for turn in chat] for who, chat in chats.items()}
    assert texts["here"] == texts["there"] == texts["to and fro"]
    for who, chat in chats.items():
        assert chat[0]["usage"]["prompt_tokens"] > 1400
        assert chat[0]["cached_tokens"] == 0, "nobody finds what others said, nor what they asked"
        for before, turn in itertools.pairwise(chat):
            said = before["usage"]["prompt_tokens"] + MAX_TOKENS
            # Text that is tokenised again may begin anew within the answer: at worst a block is computed again.
            least = before["usage"]["prompt_tokens"] - 1
            assert turn["usage"]["prompt_tokens_details"]["cached_tokens"] == turn["cached_tokens"], who
            assert least // 64 * 64 <= turn["cached_tokens"] <= said, (who, turn["route"], turn["cached_tokens"])
        for turn in chat:
            lacked = turn["usage"]["prompt_tokens"] - 1
            assert turn["uncached_tokens"] <= lacked
    last = chats["here"][-1]
    fresh = ask(chatting, last["prompt"], "nobody's", LOCAL)
    assert fresh["cached_tokens"] == 0 and fresh["text"] == last["text"]


def test_a_repeated_prompt_is_computed_by_nobody(chatting: Cluster):
    prompt = real_text(9000)[2000:]
    first = ask(chatting, prompt, "here", REMOTE)
    assert first["route"] == REMOTE and first["wire_bytes"] > 0
    again = ask(chatting, prompt, "here", REMOTE)
    assert (again["route"], again["reason"]) == (LOCAL, "nothing_to_compute")
    assert again["cached_tokens"] == first["usage"]["prompt_tokens"] - 1
    assert again["wire_bytes"] == 0 and again["uncached_tokens"] == 0
    assert again["text"] == first["text"]
    assert again["timing"]["ttft_s"] < first["timing"]["ttft_s"] / 3
    other = ask(chatting, prompt, "there", REMOTE)
    assert other["route"] == REMOTE and other["cached_tokens"] == 0 and other["text"] == first["text"]


def test_the_directory_follows_the_truth(chatting: Cluster):
    [prefilld], [peer] = chatting.prefillds, chatting.decoded.ctl("peers")
    held = prefilld.ctl("cache", "stats")["num_entries"]
    assert peer["num_cached_prefixes"] == held > 0
    prefilld.ctl("cache", "clear")
    settle(chatting)
    assert chatting.decoded.ctl("peers")[0]["num_cached_prefixes"] == 0
    ask(chatting, real_text(5000), "there", REMOTE)
    assert chatting.decoded.ctl("peers")[0]["num_cached_prefixes"] == prefilld.ctl("cache", "stats")["num_entries"] > 0
    prefilld.kill()
    prefilld.start().wait_ready()
    chatting.wait_peers()
    settle(chatting)
    assert chatting.decoded.ctl("peers")[0]["num_cached_prefixes"] == 0
