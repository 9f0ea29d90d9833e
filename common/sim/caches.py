"""A site's prefix cache in the simulation: whole blocks by chained id, the least recently used go first.

Simpler than the daemons' (common/sched): every block border can be continued at, as with snapshots at each. Called by
cluster.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockCache:
    """Room for `capacity_tokens`; 0 keeps nothing."""

    def __init__(self, capacity_tokens: float, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._max_blocks = int(capacity_tokens // block_tokens)
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def match(self, blocks: Sequence[int]) -> int:
        """Tokens of the longest prefix that is held."""
        count = 0
        for block in blocks:
            if block not in self._blocks:
                break
            count += 1
        return count * self.block_tokens

    def add(self, blocks: Sequence[int]) -> None:
        """Hold these too. The start of a chain counts as used last: without it the rest is of no use."""
        if not self._max_blocks:
            return
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)
