"""Which prefixes are worth sending to a peer before anybody asks it to go on with them.

A prefix is hot when requests keep going on from the same point of it: a system prompt, a document that many ask about.
What it saves there is its computing, or a push while somebody waits. Pure; run by decoded/replicate.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from common.sched.prefixes import Prefixes

# So often must a point have been gone on from, within what is remembered.
MIN_USES = 2
# Shorter ones are not worth a message.
MIN_TOKENS = 128
# Points that are remembered, and tokens of all of them together: 8 bytes each.
MAX_PREFIXES, MAX_TOKENS = 256, 1 << 20


@dataclass(slots=True)
class Hot:
    """A point that requests went on from. `tokens` has one more than `num_tokens`: what is computed behind it."""

    tokens: tuple[int, ...]
    num_tokens: int
    tenant: str
    prefixes: Prefixes
    num_uses: int = 0


class HotPrefixes:
    """The points that were used lately, the latest ones kept."""

    def __init__(self) -> None:
        self._points: OrderedDict[bytes, Hot] = OrderedDict()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._points)

    def note(self, tokens: tuple[int, ...], num_tokens: int, tenant: str, prefixes: Prefixes) -> None:
        """A prompt was found to go on at `num_tokens`, and has tokens behind it."""
        if not MIN_TOKENS <= num_tokens < len(tokens):
            return
        name = prefixes.at(num_tokens)
        hot = self._points.pop(name, None)
        if hot is None:
            hot = Hot(tokens[: num_tokens + 1], num_tokens, tenant, prefixes)
            self._num_tokens += len(hot.tokens)
        hot.num_uses += 1
        self._points[name] = hot
        while len(self._points) > MAX_PREFIXES or self._num_tokens > MAX_TOKENS:
            self._num_tokens -= len(self._points.popitem(last=False)[1].tokens)

    def candidates(self, num_cached: Callable[[Prefixes, int], int]) -> Iterator[tuple[Hot, int]]:
        """Hot ones of which somebody holds less, with how much that is; what saves most is first.

        `num_cached`: where the other side could go on with a prompt, up to a limit.
        """
        hot = sorted(
            (h for h in self._points.values() if h.num_uses >= MIN_USES), key=lambda h: -h.num_uses * h.num_tokens
        )
        for each in hot:
            held = num_cached(each.prefixes, each.num_tokens)
            if each.num_tokens - held >= MIN_TOKENS:
                yield each, held

    def forget(self, hot: Hot) -> None:
        """It is of no use any more: what it stands for is gone here."""
        if self._points.pop(hot.prefixes.at(hot.num_tokens), None) is not None:
            self._num_tokens -= len(hot.tokens)
