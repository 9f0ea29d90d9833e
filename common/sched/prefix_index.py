"""Which prefixes somebody holds, and the longest point from which a prompt could go on.

An entry is a run of tokens that ends where its prefix's name says: a whole block, or the beginning of one (a *tail*).
What is held of it, its *groups*: ROWS of `full` and `latent` layers, WINDOW rows of `window` layers, and STATE of
`recurrent` layers, valid at its end only. A prompt can go on where every group that the model has is there: rows of all
blocks before, window rows as far back as the window reaches, and the state at exactly that point.

    block 0      block 1      block 2    tail        prompt: | 0 | 1 | 2 | tail + uncached ...
    ROWS         ROWS WINDOW  ROWS WIN.  ROWS WIN. STATE            <- window 100 reaches into block 1

Of an entry's window rows only the last may be there, as after a transfer, which brings what one point needs.

Pure bookkeeping, no bytes: the caches have one over what they hold, decoded one for each prefilld's (its directory).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from common.layout import BLOCK_TOKENS, StateLayout
from common.sched.prefixes import Prefixes

ROWS, WINDOW, STATE = 1, 2, 4


@dataclass(frozen=True, slots=True)
class Needs:
    """What a model's layers need to go on: bits of groups, and how far back windows reach (the token itself counts)."""

    groups: int
    window: int

    @classmethod
    def of(cls, layout: StateLayout) -> Needs:
        """Of a model."""
        groups = 0
        for spec in layout.states:
            groups |= group_of(spec.kind)
        return cls(groups, max((s.window for s in layout.states), default=0))

    def window_from(self, position: int) -> int:
        """First token whose window rows a continuation at `position` reads."""
        return max(0, position - self.window + 1) if self.window else position


def group_of(kind: str) -> int:
    """The group of a layer kind."""
    return {"window": WINDOW, "recurrent": STATE}.get(kind, ROWS)


@dataclass(frozen=True, slots=True)
class Entry:
    """Tokens [stop - num_tokens, stop) of the prefix `name`, which ends at `stop`; `parent`: the blocks before."""

    name: bytes
    parent: bytes
    stop: int
    num_tokens: int

    @property
    def start(self) -> int:
        """First token."""
        return self.stop - self.num_tokens


class Holding(NamedTuple):
    """What is held of an entry: its groups, and the first token of its window rows if not all that matter are there."""

    groups: int
    window_first: int = 0


NOTHING = Holding(0)


@dataclass(frozen=True, slots=True)
class Found:
    """How much of a prompt is held.

    Attributes:
        num_tokens: it can go on there; 0: from the beginning only.
        num_row_tokens: rows are held of [0, num_row_tokens), in whole blocks: where that is more, the prompt leaves a
            path that others took, and state kept there would serve the next one.
    """

    num_tokens: int = 0
    num_row_tokens: int = 0


class PrefixIndex:
    """Entries by name. Not safe for use by several threads."""

    def __init__(self, needs: Needs) -> None:
        self.needs = needs
        self._held: dict[bytes, Holding] = {}
        self._tails: dict[bytes, dict[int, int]] = {}  # parent -> tokens of a tail -> how many such

    def __len__(self) -> int:
        return len(self._held)

    def holding(self, name: bytes) -> Holding:
        """What is held under a name."""
        return self._held.get(name, NOTHING)

    def set(self, entry: Entry, holding: Holding) -> None:
        """From now on exactly this is held of an entry."""
        if entry.num_tokens < BLOCK_TOKENS and bool(holding.groups) != (entry.name in self._held):
            self._count_tail(entry, 1 if holding.groups else -1)
        if holding.groups:
            self._held[entry.name] = holding
        else:
            self._held.pop(entry.name, None)

    def clear(self) -> None:
        """Nothing is held."""
        self._held.clear()
        self._tails.clear()

    def find(self, prompt: Prefixes, limit: int) -> Found:
        """The longest point up to `limit` at which the prompt can go on."""
        covered = self._covered(prompt, min(limit // BLOCK_TOKENS, prompt.num_blocks))
        depth = len(covered) - 1
        row_tokens = depth * BLOCK_TOKENS if self.needs.groups & ROWS else 0
        for number in range(depth, -1, -1):
            for num_tokens in sorted(self._tails.get(prompt.block(number), ()), reverse=True):
                position = number * BLOCK_TOKENS + num_tokens
                if position <= limit and self._goes_on(prompt.at(position), position, covered[number]):
                    return Found(position, row_tokens)
            if number and self._goes_on(prompt.block(number), number * BLOCK_TOKENS, covered[number]):
                return Found(number * BLOCK_TOKENS, row_tokens)
        return Found(0, row_tokens)

    def _covered(self, prompt: Prefixes, num_blocks: int) -> list[int]:
        """For each number of blocks whose rows are all held: the first token since which window rows are, too."""
        needs_rows, since, found = self.needs.groups & ROWS, 0, [0]
        for number in range(1, num_blocks + 1):
            held = self._held.get(prompt.block(number), NOTHING)
            if needs_rows and not held.groups & ROWS:
                break
            since = (held.window_first or since) if held.groups & WINDOW else number * BLOCK_TOKENS
            found.append(since)
        return found

    def _goes_on(self, name: bytes, position: int, window_since: int) -> bool:
        needs, held = self.needs, self._held.get(name, NOTHING)
        wanted = needs.groups if needs.window > 1 else needs.groups & ~WINDOW
        since = held.window_first or window_since
        return held.groups & wanted == wanted and since <= needs.window_from(position)

    def _count_tail(self, entry: Entry, change: int) -> None:
        tails = self._tails.setdefault(entry.parent, {})
        num = tails.get(entry.num_tokens, 0) + change
        if num > 0:
            tails[entry.num_tokens] = num
        else:  # a peer may say of a name now this and now that
            tails.pop(entry.num_tokens, None)
        if not tails:
            del self._tails[entry.parent]
