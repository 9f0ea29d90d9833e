"""What is kept of prefixes in one kind of memory, and what has to go when it is full.

Each group of an entry has its bytes, and each group its own limit. What goes is what saves the least computing per byte
and was not used for longest: GreedyDual-Size with frequency (Cherkasova, "Improving WWW Proxies Performance with
Greedy-Dual-Size-Frequency Caching Policy", HP Labs 1998), by the logarithm of the uses, since those of a chat that is
over say little. Rows that others build on stay as long as those do, so a path is given up from its end. Every operation
costs a logarithm. Pure; owned by PrefixCache.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from common.sched.prefix_index import ROWS, STATE, Entry


@dataclass(slots=True, eq=False)
class Part:
    """One group of an entry in a tier; `payload` is never looked into. Who pins it is using its bytes.

    `first`: its first token, 0 where all of the entry that matters is there.
    """

    entry: Entry
    group: int
    num_bytes: int
    payload: Any = field(repr=False)
    first: int = 0
    num_uses: int = 1
    num_pins: int = 0
    priority: float = 0.0
    is_held: bool = True

    @property
    def num_saved_tokens(self) -> int:
        """How much computing it saves: recurrent state alone all that is before it."""
        return self.entry.stop if self.group == STATE else self.entry.num_tokens


class Tier:
    """Parts by (name, group). `limits`: bytes by group; what is not in it is not kept."""

    def __init__(self, limits: dict[int, int]) -> None:
        self.limits = limits
        self.used: dict[int, int] = dict.fromkeys(limits, 0)
        self._parts: dict[tuple[bytes, int], Part] = {}
        self._heaps: dict[int, list[tuple[float, int, Part]]] = {group: [] for group in limits}
        self._clock: dict[int, float] = dict.fromkeys(limits, 0.0)
        self._num_children: dict[bytes, int] = {}
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Part]:
        return iter(list(self._parts.values()))

    def get(self, name: bytes, group: int) -> Part | None:
        """A part that is held."""
        return self._parts.get((name, group))

    def make_room(self, new: Part) -> list[Part] | None:
        """Give up what must go for another part; None, and nothing goes, where that is impossible."""
        group, num_bytes = new.group, new.num_bytes
        if num_bytes > self.limits.get(group, 0):
            return None
        gone: list[Part] = []
        while self.used[group] + num_bytes > self.limits[group]:
            part = self._least(group)
            if part is None:  # what is left is in use, or built on by what is
                for each in reversed(gone):
                    self.add(each)
                return None
            self._clock[group] = part.priority
            self.remove(part)
            gone.append(part)
        return gone

    def add(self, part: Part) -> None:
        """Keep a part, for which there is room."""
        key = (part.entry.name, part.group)
        self._parts[key] = part
        self.used[part.group] += part.num_bytes
        part.is_held = True
        if part.group == ROWS:
            self._num_children[part.entry.parent] = self._num_children.get(part.entry.parent, 0) + 1
        if not part.num_pins:  # else when it is unpinned
            self._rank(part)

    def remove(self, part: Part) -> None:
        """Forget a part; whoever pinned it keeps its payload."""
        if self._parts.pop((part.entry.name, part.group), None) is None:
            return
        part.is_held = False
        self.used[part.group] -= part.num_bytes
        if part.group == ROWS:
            self._lose_child(part.entry.parent)

    def use(self, part: Part) -> None:
        """Pin it: it was found, and will be read."""
        self.pin(part)
        part.num_uses += 1

    def pin(self, part: Part) -> None:
        """It must not go until it is unpinned."""
        part.num_pins += 1

    def unpin(self, part: Part) -> None:
        """Its bytes are not needed any more by whoever pinned it."""
        part.num_pins -= 1
        if part.is_held and not part.num_pins:
            self._rank(part)

    def _least(self, group: int) -> Part | None:
        heap = self._heaps[group]
        while heap:
            priority, _, part = heapq.heappop(heap)
            is_latest = part.is_held and part.priority == priority
            # Pinned parts and those others build on are ranked again when that ends.
            if is_latest and not part.num_pins and not self._is_built_on(part):
                return part
        return None

    def _is_built_on(self, part: Part) -> bool:
        return part.group == ROWS and self._num_children.get(part.entry.name, 0) > 0

    def worth(self, part: Part) -> float:
        """Of two parts that were used last at the same time the one that is worth less goes."""
        return (1.0 + math.log2(part.num_uses)) * part.num_saved_tokens / max(part.num_bytes, 1)

    def _rank(self, part: Part) -> None:
        part.priority = self._clock[part.group] + self.worth(part)
        heap = self._heaps[part.group]
        heapq.heappush(heap, (part.priority, next(self._order), part))
        if len(heap) > 64 + 4 * len(self._parts):
            heap[:] = [item for item in heap if item[2].is_held and item[2].priority == item[0]]
            heapq.heapify(heap)

    def _lose_child(self, name: bytes) -> None:
        self._num_children[name] -= 1
        if not self._num_children[name]:
            del self._num_children[name]
            if (parent := self.get(name, ROWS)) is not None and not parent.num_pins:
                # It may go from now on; its place is that of what built on it.
                heapq.heappush(self._heaps[ROWS], (parent.priority, next(self._order), parent))
