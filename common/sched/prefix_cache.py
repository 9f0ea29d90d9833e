"""The books of a prefix cache: what is held of which prefixes, in memory and on disk, and what is to go.

A part (one group of an entry) is reserved, filled by whoever copies bytes, and committed; only then is it found. What
memory gives up may be reserved on disk. Without its rows an entry is worth nothing, so its other groups go with them.
Every change of what is held is noted for the peers' directories. Pure bookkeeping on one thread; payloads are never
looked into. Owned by common/state_cache.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from common.layout import BLOCK_TOKENS
from common.sched.prefix_index import ROWS, STATE, WINDOW, Entry, Found, Holding, Needs, PrefixIndex
from common.sched.prefixes import Prefixes
from common.sched.tier import Part, Tier

GROUPS = (ROWS, WINDOW, STATE)
# Changes kept for those who have not asked yet; with more of them they are told everything anew.
MAX_CHANGES = 1 << 16


class PrefixCache:
    """Two tiers over one index. `limits` and `disk_limits`: bytes by group."""

    def __init__(self, needs: Needs, limits: Mapping[int, int], disk_limits: Mapping[int, int] | None = None) -> None:
        wanted = [group for group in GROUPS if needs.groups & group]
        self.needs = needs
        self.memory = Tier({group: limits.get(group, 0) for group in wanted})
        self.disk = Tier({group: (disk_limits or {}).get(group, 0) for group in wanted})
        self.index = PrefixIndex(needs)
        self._entries: dict[bytes, Entry] = {}
        self._changes: list[tuple[Entry, Holding]] | None = []

    # -- finding

    def find(self, prompt: Prefixes, limit: int) -> Found:
        """The longest point up to `limit` at which the prompt can go on."""
        return self.index.find(prompt, limit)

    def entries(self, prompt: Prefixes, num_tokens: int, start: int = 0) -> Iterator[Entry]:
        """The entries that have a token of [start, num_tokens): whole blocks, then a tail."""
        for number in range(start // BLOCK_TOKENS + 1, num_tokens // BLOCK_TOKENS + 1):
            yield Entry(prompt.block(number), prompt.block(number - 1), number * BLOCK_TOKENS, BLOCK_TOKENS)
        if rest := num_tokens % BLOCK_TOKENS:
            yield Entry(prompt.at(num_tokens), prompt.block(num_tokens // BLOCK_TOKENS), num_tokens, rest)

    def use(self, prompt: Prefixes, num_tokens: int, groups_from: Mapping[int, int]) -> list[tuple[Tier, Part]] | None:
        """Pin what a continuation at `num_tokens` reads, from the end; None when a part is not there any more.

        `groups_from`: for each group the first token whose bytes are read.
        """
        pinned: list[tuple[Tier, Part]] = []
        for entry in reversed(list(self.entries(prompt, num_tokens))):
            for group, first in groups_from.items():
                if entry.stop <= first or (group == STATE and entry.stop != num_tokens):
                    continue
                found = self._ready(entry.name, group)
                if found is None:
                    self.release(pinned)
                    return None
                found[0].use(found[1])
                pinned.append(found)
        return pinned

    def release(self, pinned: list[tuple[Tier, Part]]) -> None:
        """Parts that were pinned are not read any more."""
        for tier, part in pinned:
            tier.unpin(part)

    # -- keeping

    def wants(self, entry: Entry, group: int, first: int = 0) -> bool:
        """Whether it is neither held nor on its way, or held from a later token on, and there could be room for it."""
        if not self.memory.limits.get(group, 0):
            return False
        tiers = (self.memory, self.disk)
        return all(first < part.first for tier in tiers if (part := tier.get(entry.name, group)) is not None)

    def reserve(
        self, tier: Tier, entry: Entry, group: int, num_bytes: int, first: int = 0
    ) -> tuple[Part | None, list[Part]]:
        """Room for a part that will be filled, or None; and the parts that went for it.

        Rows need those before them: nothing is kept behind a gap, nor at the price of what it goes on from.
        """
        older = tier.get(entry.name, group)
        if older is not None and (older.payload is None or older.first <= first):
            return None, []
        before = self._rows_before(entry) if group == ROWS else []
        if before is None:
            return None, []
        part = Part(entry, group, num_bytes, None, first, num_pins=1)
        for where, each in before:
            where.pin(each)
        gone = tier.make_room(part)
        self.release(before)
        if gone is None:
            return None, []
        if older is not None and older.is_held:
            tier.remove(older)
            gone.append(older)
        tier.add(part)
        for each in gone:
            self._refresh(each.entry)
        return part, gone

    def commit(self, tier: Tier, part: Part, payload: Any) -> None:
        """A reserved part is filled: it can be found."""
        part.payload = payload
        tier.unpin(part)
        self._refresh(part.entry)

    def abandon(self, tier: Tier, part: Part) -> None:
        """A part is not to be used: it could not be filled, or is damaged."""
        tier.remove(part)
        self._refresh(part.entry)

    def clear(self) -> int:
        """Forget everything that is not being filled; answers how many parts."""
        gone = [(tier, part) for tier in (self.memory, self.disk) for part in tier if part.payload is not None]
        for tier, part in gone:
            self.abandon(tier, part)
        return len(gone)

    # -- telling

    def take_changes(self) -> list[tuple[Entry, Holding]] | None:
        """Entries of which something else is held than the last time, in order; None: too many to keep."""
        changes, self._changes = self._changes, []
        return changes

    def held(self) -> Iterator[tuple[Entry, Holding]]:
        """Every entry and what is held of it."""
        for name, entry in self._entries.items():
            yield entry, self.index.holding(name)

    def _rows_before(self, entry: Entry) -> list[tuple[Tier, Part]] | None:
        """The parts with the rows of the block before, held or on their way; None when there are none."""
        if entry.start == 0:
            return []
        tiers = (self.memory, self.disk)
        return [(tier, p) for tier in tiers if (p := tier.get(entry.parent, ROWS)) is not None] or None

    def _ready(self, name: bytes, group: int) -> tuple[Tier, Part] | None:
        """The part that can be read, memory first; where they differ the one that reaches further back."""
        found: tuple[Tier, Part] | None = None
        for tier in (self.memory, self.disk):
            part = tier.get(name, group)
            if part is not None and part.payload is not None and (found is None or part.first < found[1].first):
                found = tier, part
        return found

    def _refresh(self, entry: Entry) -> None:
        found = {group: part for group in self.memory.limits if (part := self._ready(entry.name, group)) is not None}
        if self.needs.groups & ROWS and ROWS not in found:
            for tier in (self.memory, self.disk):
                for group in (WINDOW, STATE):
                    useless = tier.get(entry.name, group)
                    if useless is not None and useless.payload is not None:
                        tier.remove(useless)
            found = {}
        holding = Holding(sum(found), found[WINDOW][1].first if WINDOW in found else 0)
        if holding == self.index.holding(entry.name):
            return
        self.index.set(entry, holding)
        if found:
            self._entries[entry.name] = entry
        else:
            self._entries.pop(entry.name, None)
        if self._changes is not None:
            self._changes.append((entry, holding))
            if len(self._changes) > MAX_CHANGES:
                self._changes = None
