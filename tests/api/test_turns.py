"""Chats that go on: whether the next turn begins with the tokens of the last is counted, with a real chat template."""

from __future__ import annotations

import asyncio
import logging
import random
from array import array
from concurrent.futures import ThreadPoolExecutor

import pytest

from common.text.tokenizer import Tokenizer
from decoded.api import turns
from decoded.api.turns import Turn, TurnMemory, turn_of

ASK = {"role": "user", "content": "What is the capital of France?"}
MORE = {"role": "user", "content": "And of Spain?"}
COUNTER = "prfaas_template_continuations_total"


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir) -> Tokenizer:
    return Tokenizer.load(smollm2_dir)


@pytest.fixture
def says(serve, tokenizer, spell):
    """A server that answers with these token ids, then others for each further choice, and the end of the turn."""

    async def start(*answers, **settings):
        (end,) = tokenizer.encode("<|im_end|>", add_special_tokens=False)

        async def play(active):
            for choice in range(active.request.num_choices):
                for output in spell([*answers[choice], end], choice, finish="stop"):
                    yield output

        return await serve(play, tokenizer=tokenizer, max_context=8192, **settings)

    return start


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


async def chat(server, *messages, key="", **body):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    status, answer = await server.post("/v1/chat/completions", {"messages": messages, **body}, **headers)
    assert status == 200, answer
    return [choice["message"] for choice in answer["choices"]]


def counts(server) -> tuple[float, float]:
    same, diverged = (server.registry.get_sample_value(COUNTER, {"result": r}) for r in ("same", "diverged"))
    return same, diverged


async def counted(server, same: int, diverged: int) -> None:
    """The comparison is done by another thread, after the request went its way."""
    async with asyncio.timeout(5):
        while counts(server) != (same, diverged):
            await asyncio.sleep(0.005)


async def test_an_answer_sent_back_as_it_came_is_the_same(says, tokenizer):
    server = await says(ids(tokenizer, "Paris is the capital of France.\n\nIt has   many museums."))
    assert counts(server) == (0, 0)
    [said] = await chat(server, ASK)
    assert said["content"].endswith("museums.")
    await counted(server, 0, 0)
    [more] = await chat(server, ASK, said, MORE)
    await counted(server, 1, 0)
    await chat(server, ASK, said, MORE, more, ASK)
    await counted(server, 2, 0)
    prompt = server.dispatcher.submitted[1].request.prompt_tokens
    before = server.dispatcher.submitted[0].request.prompt_tokens
    assert prompt[: len(before)] == before, "what is counted is so"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_trims_the_answer_diverges_at_its_end(says, tokenizer, caplog, stream):
    answer = ids(tokenizer, "Paris. \n\n")
    server = await says(answer)
    body = {"messages": [ASK], "stream": stream}
    async with server.session.post("/v1/chat/completions", json=body) as reply:
        assert reply.status == 200 and await reply.read()
    with caplog.at_level(logging.DEBUG, "decoded.api.turns"):
        await chat(server, ASK, {"role": "assistant", "content": "Paris."}, MORE)
        await counted(server, 0, 1)
    [record] = [r for r in caplog.records if r.name == "decoded.api.turns"]
    first, second = (s.request.prompt_tokens for s in server.dispatcher.submitted)
    computed = [*first, *answer]
    assert record.num_computed_tokens == len(computed)
    assert computed[: record.at_token] == list(second[: record.at_token])
    assert computed[record.at_token] != second[record.at_token] and record.at_token >= len(first)


async def test_a_text_spelled_in_other_tokens_than_the_tokenizer_would_diverges(says, tokenizer):
    spelled = [token for letter in "museums" for token in ids(tokenizer, letter)]
    assert spelled != ids(tokenizer, "museums")
    server = await says(spelled)
    [said] = await chat(server, ASK)
    assert said["content"] == "museums"
    await chat(server, ASK, said, MORE)
    await counted(server, 0, 1)


async def test_every_choice_may_go_on(says, tokenizer):
    server = await says(ids(tokenizer, "Paris."), ids(tokenizer, "Paris, of course."))
    for number, said in enumerate(await chat(server, ASK, n=2), start=1):
        await chat(server, ASK, said, MORE)
        await counted(server, number, 0)
    await chat(server, ASK, {"role": "assistant", "content": "Paris, of late."}, MORE)
    await counted(server, 2, 1)


async def test_conversations_of_other_tenants_and_those_never_answered_are_unknown(says, tokenizer):
    server = await says(ids(tokenizer, "Paris."), api_keys=("one", "two"))
    [said] = await chat(server, ASK, key="one")
    for key, messages in (("two", (ASK, said, MORE)), ("one", (MORE, said, ASK)), ("one", (MORE,))):
        await chat(server, *messages, key=key)
    await chat(server, ASK, said, MORE, key="one")
    await counted(server, 1, 0)


async def test_bodies_that_another_process_reads_count_as_well(says, tokenizer):
    server = await says(ids(tokenizer, "Paris. \n"), bulk_body_bytes=200)
    asked = {"role": "user", "content": "What is the capital of France? " * 20}
    [said] = await chat(server, asked)
    await chat(server, asked, said, MORE)
    await counted(server, 1, 0)
    await chat(server, asked, {**said, "content": said["content"].strip()}, MORE)
    await counted(server, 1, 1)


async def test_a_client_that_left_is_not_remembered(serve, tokenizer, spell):
    async def play(active):
        for output in spell(ids(tokenizer, "Paris is the"), finish=None):
            yield output
        await active.gone.wait()

    server = await serve(play, tokenizer=tokenizer)
    body = {"messages": [ASK], "stream": True}
    async with server.session.post("/v1/chat/completions", json=body) as reply:
        await reply.content.readline()
    await server.dispatcher.submitted[0].gone.wait()

    async def answer(active):
        for output in spell(ids(tokenizer, "Madrid.")):
            yield output

    server.dispatcher.play = answer
    await chat(server, ASK, {"role": "assistant", "content": "Paris is the"}, MORE)
    [said] = await chat(server, MORE)
    await chat(server, MORE, said, ASK)
    await counted(server, 1, 0)


# ---- the memory alone


class Counts(dict):
    def labels(self, result):
        counts = self

        class One:
            def inc(self):
                counts[result] = counts.get(result, 0) + 1

        return One()


@pytest.fixture
def memory():
    with ThreadPoolExecutor(1) as threads:
        yield TurnMemory(Counts(), threads)


def turn(number: int, tokens: list[int], before: int | None = None) -> Turn:
    return Turn(bytes([number]), bytes([before]) if before is not None else None, array("I", tokens).tobytes())


def test_memory_is_bounded_by_conversations_and_by_tokens(memory, monkeypatch):
    monkeypatch.setattr(turns, "MAX_CONVERSATIONS", 5)
    monkeypatch.setattr(turns, "MAX_TOKENS", 1000)
    rng = random.Random(3)
    for _ in range(500):
        tokens = list(range(rng.choice((1, 50, 400, 1200))))
        memory.answered(rng.choice("ab"), turn(rng.randrange(12), tokens), tokens[: rng.randrange(1, 60)])
        assert len(memory) <= 5 and memory.num_tokens <= 1000
        assert memory.num_tokens == sum(known.num_tokens for known in memory._known.values())
    assert len(memory) > 1


def test_what_goes_on_stays_longest(memory, monkeypatch):
    monkeypatch.setattr(turns, "MAX_CONVERSATIONS", 2)
    for number in (1, 2):
        memory.answered("a", turn(number, [number]), [7, 8])
    memory.asked("a", turn(9, [1, 7, 5], before=1), "r")
    memory.answered("a", turn(3, [3]), [7, 8])
    memory.asked("a", turn(9, [2, 7, 5], before=2), "r")
    memory.asked("a", turn(9, [1, 6, 5], before=1), "r")
    memory._threads.shutdown()
    assert memory._continuations == {"same": 1, "diverged": 1}
    memory.asked("a", turn(9, [1, 6, 5], before=1), "r")  # the threads are gone, and nobody minds


def test_tokens_shared_are_found_wherever_they_end():
    rng = random.Random(5)
    for _ in range(300):
        a = [rng.randrange(1 << 20) for _ in range(rng.randrange(60))]
        b = a[: rng.randrange(61)] + [1 << 21] * rng.randrange(3)
        right = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        assert turns._num_shared(array("I", a).tobytes(), array("I", b).tobytes()) == right


def test_messages_are_told_apart_by_all_they_say():
    said = {"role": "assistant", "content": "a"}
    first = turn_of([ASK], [1])
    assert turn_of([ASK, said, MORE], [1]).before == first.conversation and first.before is None
    others = ([MORE], [ASK, ASK], [{**ASK, "name": "x"}], [{**ASK, "role": "system"}])
    assert len({first.conversation, *(turn_of(each, [1]).conversation for each in others)}) == 5
    last = turn_of([ASK, said, MORE, said, ASK], [1])
    assert last.before == turn_of([ASK, said, MORE], [1]).conversation
