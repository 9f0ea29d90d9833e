"""Which prefixes are hot, which of them a peer lacks, and what is remembered."""

from __future__ import annotations

from common.sched import hot_prefixes
from common.sched.hot_prefixes import MIN_TOKENS, MIN_USES, HotPrefixes
from common.sched.prefixes import Prefixes


def prompt(first: int, num_shared: int = 200, num_own: int = 50, seed: int = 7) -> tuple[int, ...]:
    return (*range(seed, seed + num_shared), *range(first, first + num_own))


def seen(hot: HotPrefixes, tokens: tuple[int, ...], at: int, num: int = MIN_USES, tenant: str = "") -> None:
    for _ in range(num):
        hot.note(tokens, at, tenant, Prefixes(tokens, tenant.encode()))


def nothing(prefixes: Prefixes, limit: int) -> int:
    return 0


def test_a_point_is_hot_once_it_was_gone_on_from_often_enough():
    hot = HotPrefixes()
    for n in range(MIN_USES):
        assert list(hot.candidates(nothing)) == []
        tokens = prompt(10_000 * (n + 1))
        hot.note(tokens, 192, "", Prefixes(tokens))
    [(found, held)] = hot.candidates(nothing)
    assert (found.num_tokens, held, found.num_uses) == (192, 0, MIN_USES)
    assert found.tokens == prompt(10_000)[:193]


def test_turns_of_one_chat_are_not_hot():
    hot = HotPrefixes()
    for n in range(8):
        tokens = prompt(10_000, num_own=100 * n + 1)
        hot.note(tokens, len(tokens) - 1, "", Prefixes(tokens))
    assert list(hot.candidates(nothing)) == []


def test_what_the_other_side_has_is_left_out_and_what_saves_most_is_first():
    hot = HotPrefixes()
    seen(hot, prompt(10_000, 300, seed=1), 300)
    seen(hot, prompt(10_000, 1000, seed=2), 1000)
    seen(hot, prompt(10_000, 200, seed=3), 200, num=50)
    order = [each.num_tokens for each, _ in hot.candidates(nothing)]
    assert order == [200, 1000, 300]
    held = {each.num_tokens: n for each, n in hot.candidates(lambda p, limit: min(limit, 256))}
    assert held == {1000: 256}, "the others lack less than a message is worth"


def test_tenants_have_their_own():
    hot = HotPrefixes()
    seen(hot, prompt(10_000), 192, num=1, tenant="a")
    seen(hot, prompt(20_000), 192, num=1, tenant="b")
    assert len(hot) == 2 and list(hot.candidates(nothing)) == []


def test_short_prefixes_and_whole_prompts_are_nothing_to_send():
    hot = HotPrefixes()
    seen(hot, prompt(10_000), MIN_TOKENS - 1)
    seen(hot, prompt(10_000), 250)
    assert len(hot) == 0


def test_memory_is_bounded_and_the_oldest_go(monkeypatch):
    monkeypatch.setattr(hot_prefixes, "MAX_PREFIXES", 3)
    monkeypatch.setattr(hot_prefixes, "MAX_TOKENS", 700)
    hot = HotPrefixes()
    for seed in range(5):
        seen(hot, prompt(10_000, seed=1000 * seed), 200)
    assert [each.tokens[0] for each, _ in hot.candidates(nothing)] == [2000, 3000, 4000]
    seen(hot, prompt(10_000, 500, seed=9000), 500)
    assert len(hot) == 1
    [(each, _)] = hot.candidates(nothing)
    hot.forget(each)
    hot.forget(each)
    assert len(hot) == 0 and hot._num_tokens == 0
