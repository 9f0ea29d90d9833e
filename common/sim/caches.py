"""A site's prefix cache in the simulation: blocks without bytes, of which goes what the daemons would give up, by the
same code (common/sched/tier.py).

A simulated block stands for one of theirs, and every block border can be continued at: that is a model all of whose
layers keep rows, or snapshots at each border. Nothing is on disk. Called by site.py and scenario.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from common.sched.prefix_index import ROWS, Entry
from common.sched.tier import Part, Tier

_NAME_BYTES = 8
_ROOT = b""


class BlockCache:
    """Room for `capacity_tokens`; 0 keeps nothing."""

    def __init__(self, capacity_tokens: float, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        # The size of a block is the unit, of tokens and of bytes.
        self._tier = Tier({ROWS: int(capacity_tokens // block_tokens)})

    def match(self, blocks: Sequence[int]) -> int:
        """Tokens of the longest prefix that is held."""
        return sum(1 for _ in self._held(blocks)) * self.block_tokens

    def add(self, blocks: Sequence[int]) -> None:
        """A prompt was computed: what it found has been used, the rest is held too, as far as there is room."""
        tier, before = self._tier, list(self._held(blocks))
        for part in before:
            tier.use(part)
        names = [_name(block) for block in blocks[max(0, len(before) - 1) :]]
        pairs = pairwise(names if before else [_ROOT, *names])
        for number, (parent, name) in enumerate(pairs, len(before) + 1):
            part = Part(Entry(name, parent, number, 1), ROWS, 1, True, num_pins=1)
            if tier.make_room(part) is None:
                break
            tier.add(part)
            before.append(part)
        for part in reversed(before):
            tier.unpin(part)

    def _held(self, blocks: Sequence[int]) -> Iterator[Part]:
        if self._tier.limits[ROWS]:
            for block in blocks:
                part = self._tier.get(_name(block), ROWS)
                if part is None:
                    return
                yield part


def _name(block: int) -> bytes:
    return block.to_bytes(_NAME_BYTES, "little", signed=True)
