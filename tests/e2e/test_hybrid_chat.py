"""A chat over two daemons with models whose state has no rows to cut: each turn computes and sends what is new to it.

Prompts are token ids that go on with the ids that were generated: the text of random weights need not come back as it
was said. Sizes of state are those of the families' papers, not the engine's.
"""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.cluster import WITH_CACHE, Cluster, running_cluster
from tests.e2e.test_cache import KEYS, LOCAL, MAX_TOKENS, REMOTE, ROUTES, ask
from tests.e2e.test_exact import prompts_of
from tests.engine.families import FAMILIES

NUM_NEW = 17
"""Tokens of a question."""
# KDA + MLA; Mamba 2 and attention in one layer; recurrent state only; windows and sinks. With tokens of the system
# prompt, and turns.
SLOW = [pytest.param((name, 1500, 8), marks=pytest.mark.slow) for name in ("FalconH1", "Mamba2", "MiMoV2Flash")]
CHATS = [("KimiLinear", 260, 4), pytest.param(("KimiLinear", 1500, 8), marks=pytest.mark.slow), *SLOW]


@dataclass
class Chat:
    """Daemons of one family, and a conversation as transformers has it: prompts that go on with the answers before."""

    cluster: Cluster
    family: str
    prompts: list[list[int]]
    texts: list[str]

    def state_bytes(self, start: int, stop: int) -> int:
        """Rows of the tokens in [start, stop) as far as they matter later, and what is of fixed size; float32."""
        family, num = FAMILIES[self.family], 0
        for row in family.formula(family.config()):
            num_rows = min(stop - start, row.window - 1) if row.window else stop - start
            num += row.elements * (1 if row.kind == "recurrent" else num_rows)
        return 4 * num

    def computed_there(self) -> float:
        """Prompt tokens that prefilld has computed."""
        http = self.cluster.prefillds[0].config["http"]
        with urllib.request.urlopen(f"http://{http['host']}:{http['port']}/metrics", timeout=10) as reply:
            found = re.search(r"^prfaas_prompt_tokens_total (\S+)", reply.read().decode(), re.MULTILINE)
        assert found
        return float(found[1])


def converse(model_dir: Path, num_system: int, num_turns: int) -> tuple[list[list[int]], list[str]]:
    """Prompts and greedy answers by transformers' own generate."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    system, *questions = prompts_of(model_dir, [num_system, *[NUM_NEW] * num_turns])
    prompts, texts, so_far = [], [], system
    for question in questions:
        prompts.append(so_far + question)
        ids = torch.tensor([prompts[-1]])
        options = {"do_sample": False, "num_beams": 1, "max_new_tokens": MAX_TOKENS}
        [so_far] = model.generate(ids, attention_mask=torch.ones_like(ids), **options).tolist()
        said = so_far[len(prompts[-1]) :]
        assert len(said) == MAX_TOKENS, "it ends before its time: another seed is needed"
        texts.append(tokenizer.decode(said, skip_special_tokens=True))
    return prompts, texts


@pytest.fixture(scope="module", params=CHATS, ids=lambda p: f"{p[0]}-{p[2]}-turns")
def chat(request, import_family, tmp_path_factory) -> Iterator[Chat]:
    family, num_system, num_turns = request.param
    model_dir = import_family(family)
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("\n".join(KEYS.values()) + "\n")
    keys.chmod(0o600)
    decoded = {**WITH_CACHE, "http": {"api_key_file": str(keys)}, "routing": {"push": "always"}}
    prompts, texts = converse(model_dir, num_system, num_turns)
    with running_cluster(model_dir, decoded=decoded, prefilld=WITH_CACHE) as cluster:
        yield Chat(cluster, family, prompts, texts)


def test_every_turn_computes_and_sends_what_is_new(chat: Chat):
    for who, routes in ROUTES.items():
        for turn, prompt in enumerate(chat.prompts):
            route, before = routes[turn % len(routes)], chat.computed_there()
            told = ask(chat.cluster, prompt, who, route)
            assert (told["route"], told["text"]) == (route, chat.texts[turn]), (who, turn)
            # All but the last token of the answer before was computed; of the prompt, all but its last token will be.
            said = len(chat.prompts[turn - 1]) + MAX_TOKENS - 1 if turn else 0
            num_new = len(prompt) - 1 - said
            assert told["cached_tokens"] == said, (who, turn, "computed again, or nobody's")
            assert chat.computed_there() - before == (num_new if route == REMOTE else 0), (who, turn)
            lacked = chat.state_bytes(said, len(prompt) - 1) if route == REMOTE else 0
            assert told["raw_bytes"] <= lacked and (told["wire_bytes"] > 0) == (route == REMOTE), (who, turn)


def test_a_repeated_prompt_is_computed_by_nobody_and_found_by_nobody_else(chat: Chat):
    [prompt] = prompts_of(Path(chat.cluster.decoded.config["model"]["path"]), [333])
    first = ask(chat.cluster, prompt, "here", REMOTE)
    before = chat.computed_there()
    again = ask(chat.cluster, prompt, "here", REMOTE)
    assert (again["route"], again["reason"]) == (LOCAL, "nothing_to_compute")
    assert (again["cached_tokens"], again["uncached_tokens"], again["wire_bytes"]) == (332, 0, 0)
    assert chat.computed_there() == before
    other = ask(chat.cluster, prompt, "nobody's", REMOTE)
    assert (other["route"], other["cached_tokens"]) == (REMOTE, 0)
    assert chat.computed_there() - before == 332
    assert first["text"] == again["text"] == other["text"]
