"""`python -m benchmarks.eviction --trace FILE`: what a prefix cache finds of a trace, by what it gives up first.

The cache's own books (common/sched/prefix_cache.py) over the block ids of a trace in Mooncake's format, with other ways
to rank parts in place of its own. Prints the part of all prompt tokens that were found. A minute or two for each cell.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.cli import make_parser
from common.layout import BLOCK_TOKENS
from common.sched.prefix_cache import PrefixCache
from common.sched.prefix_index import ROWS, Needs
from common.sched.prefixes import Prefixes
from common.sched.tier import Part, Tier

TRACE_BLOCK_TOKENS = 512
# At so many tokens attention takes about as long as all else.
ATTENTION_TOKENS = 8192
_turn = itertools.count(1)


def _depth(part: Part) -> float:
    return 1.0 + part.entry.stop / ATTENTION_TOKENS


RANKS: dict[str, Callable[[Part], float] | None] = {
    "log of uses": None,  # as it is
    "recency": lambda _part: float(next(_turn)),
    "uses": lambda part: float(part.num_uses),
    "uses and depth": lambda part: part.num_uses * _depth(part),
    "log of uses and depth": lambda part: (1 + math.log2(part.num_uses)) * _depth(part),
}


class RankedTier(Tier):
    """Another order of what goes; all blocks are of one size here."""

    def __init__(self, limits: dict[int, int], worth: Callable[[Part], float]) -> None:
        super().__init__(limits)
        self._worth = worth

    def worth(self, part: Part) -> float:
        """By the rank that is compared."""
        return self._worth(part)


class TracedPrompt(Prefixes):
    """The names of a prompt of which only the trace's block ids are known; it cannot grow."""

    def __init__(self, ids: list[int], num_tokens: int) -> None:
        per_id = range(TRACE_BLOCK_TOKENS // BLOCK_TOKENS)
        names = [b"", *(b"%d.%d" % (number, n) for number in ids for n in per_id)]
        self._names = names[: num_tokens // BLOCK_TOKENS + 1]

    def at(self, position: int) -> bytes:
        """There are no tails here."""
        return self._names[position // BLOCK_TOKENS]


def prompts(trace: Path) -> Iterator[tuple[TracedPrompt, int]]:
    """Prompts of the trace in order, with their lengths in tokens."""
    for line in trace.read_text().splitlines():
        told = json.loads(line)
        yield TracedPrompt(told["hash_ids"], told["input_length"]), told["input_length"]


def found(trace: Path, num_blocks: int, worth: Callable[[Part], float] | None) -> float:
    """The part of all prompt tokens that a cache of so many blocks has when they are asked for."""
    limits = {ROWS: num_blocks * BLOCK_TOKENS}
    cache = PrefixCache(Needs(ROWS, 0), limits)
    if worth is not None:
        cache.memory = RankedTier(limits, worth)
    num_found = total = 0
    for prompt, num_tokens in prompts(trace):
        held = cache.find(prompt, num_tokens - 1).num_tokens
        num_found, total = num_found + held, total + num_tokens
        pinned = cache.use(prompt, held, {ROWS: 0}) or []
        for entry in cache.entries(prompt, prompt.num_blocks * BLOCK_TOKENS, held):
            if cache.wants(entry, ROWS):
                part, _ = cache.reserve(cache.memory, entry, ROWS, BLOCK_TOKENS)
                if part is None:
                    break
                cache.commit(cache.memory, part, b"x")
        cache.release(pinned)
    return num_found / total


def main(argv: list[str] | None = None) -> int:
    """Print a line for each cell."""
    parser: argparse.ArgumentParser = make_parser("python -m benchmarks.eviction", __doc__ or "")
    parser.add_argument("--trace", type=Path, required=True, help="JSON lines with input_length and hash_ids")
    parser.add_argument("--blocks", type=int, nargs="+", default=[20_000, 100_000, 400_000], help="that fit")
    parser.add_argument("--ranks", nargs="+", default=list(RANKS), choices=list(RANKS), help="what counts")
    args = parser.parse_args(argv)
    for num_blocks, rank in itertools.product(args.blocks, args.ranks):
        print(f"{num_blocks} blocks, by {rank}: {found(args.trace, num_blocks, RANKS[rank]):.3f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
