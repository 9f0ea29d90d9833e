"""The recall task: a text that says what sixteen names stand for, and a question about all of them far behind it.

    n3 k117 ... k117 v103 ... k9 v41 ... n3 k9 ... filler ... ? n3   ->   v41 n4 v120 n5 v17 ... n2 v88 <end>

A name (n) is bound to a key (k) again and again; the last binding counts, which is what a recurrent layer keeps and
attention without positions cannot tell. The table of keys and values (v) is larger than a small recurrent state holds,
which is what attention is for. Each value of the answer needs both. Text is words joined by single spaces.
Knows no torch. Called by train.py, evaluate.py and tests.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

NUM_NAMES = 16
NUM_KEYS = 128
NUM_VALUES = 128
PAD, END, UNKNOWN, ASK_KEYS, ASK_NAMES = "<pad>", "<end>", "<unk>", "!", "?"
_FILLER = """and the of to in is it that was for on are with as his they be at one have from or had by but some what"""
FILLER = tuple(_FILLER.split())
NAMES = tuple(f"n{i}" for i in range(NUM_NAMES))
KEYS = tuple(f"k{i}" for i in range(NUM_KEYS))
VALUES = tuple(f"v{i}" for i in range(NUM_VALUES))
WORDS = (PAD, END, UNKNOWN, ASK_KEYS, ASK_NAMES, *FILLER, *NAMES, *KEYS, *VALUES)
WORD_IDS = {word: i for i, word in enumerate(WORDS)}
ANSWER_WORDS = 2 * NUM_NAMES  # value, name, value, ... value, <end>; the first name is part of the question


@dataclass(frozen=True, slots=True)
class Shape:
    """How much of what a text holds, in words: pairs and bindings take two each, filler the rest of `num_words`."""

    num_words: int
    num_pairs: int
    num_rebinds: int
    num_tail: int  # filler between the last fact and the question
    num_symbols: int = NUM_KEYS  # only the first so many keys and values occur
    num_names: int = NUM_NAMES  # all, or 0 for a text that is only a table

    @property
    def num_filler(self) -> int:
        """Filler between the facts. Raises ValueError when the facts do not fit."""
        left = self.num_words - 2 * (self.num_pairs + self.num_names + self.num_rebinds) - self.num_tail
        if left < 0 or self.num_pairs > self.num_symbols:
            raise ValueError(f"{self} holds more facts than words or keys")
        return left


@dataclass(frozen=True, slots=True)
class Binding:
    """What a name stands for in the end, and the positions of the words that say so."""

    key: str
    value: str
    bound_at: int
    pair_at: int


@dataclass(frozen=True, slots=True)
class Text:
    """Facts and filler. `table` maps keys to (value, position); `bindings` is in the order of NAMES."""

    words: tuple[str, ...]
    table: dict[str, tuple[str, int]]
    bindings: tuple[Binding, ...]

    def question(self, first: int) -> list[str]:
        """The words of a prompt that asks for all names from `first` on."""
        return [*self.words, ASK_NAMES, NAMES[first]]

    def answer(self, first: int) -> list[str]:
        """The ANSWER_WORDS words that continue `question(first)`."""
        words: list[str] = []
        for i in _cycle(first):
            words += [NAMES[i], self.bindings[i].value]
        return [*words[1:], END]

    def key_question(self, key: str) -> list[str]:
        """The words of a prompt whose next word is the value of one key: the table alone."""
        return [*self.words, ASK_KEYS, key]

    def distances(self, first: int) -> list[int]:
        """For each value of the answer: words from the place that asks back to the nearer of its two facts."""
        start = len(self.words) + 1
        facts = [max(self.bindings[i].bound_at, self.bindings[i].pair_at) for i in _cycle(first)]
        return [start + 2 * n - at for n, at in enumerate(facts)]


def _cycle(first: int) -> list[int]:
    return [(first + n) % NUM_NAMES for n in range(NUM_NAMES)]


def shape_for(num_words: int) -> Shape:
    """The standard text of a length: up to 96 pairs, half of the names bound twice, the last third filler only."""
    num_rebinds = NUM_NAMES // 2
    num_tail = num_words // 3
    num_pairs = min(96, (num_words - num_tail - 2 * (NUM_NAMES + num_rebinds)) // 2 * 3 // 4)
    return Shape(num_words, num_pairs, num_rebinds, num_tail)


def make_text(rng: random.Random, shape: Shape) -> Text:
    """A random text of this shape; the same `rng` state gives the same text on every machine."""
    keys = rng.sample(KEYS[: shape.num_symbols], shape.num_pairs)
    bound = [*range(shape.num_names), *(rng.randrange(NUM_NAMES) for _ in range(shape.num_rebinds))]
    facts = [(key, rng.choice(VALUES[: shape.num_symbols])) for key in keys]
    facts += [(NAMES[i], rng.choice(keys)) for i in bound]
    rng.shuffle(facts)
    words: list[str] = []
    table: dict[str, tuple[str, int]] = {}
    last: dict[str, tuple[str, int]] = {}
    for fact, gap in zip(facts, _gaps(rng, shape.num_filler, len(facts)), strict=True):
        words += rng.choices(FILLER, k=gap)
        (last if fact[0] in NAMES else table)[fact[0]] = (fact[1], len(words))
        words += fact
    words += rng.choices(FILLER, k=shape.num_tail)
    return Text(tuple(words), table, tuple(_binding(table, *last[name]) for name in NAMES[: shape.num_names]))


def _binding(table: dict[str, tuple[str, int]], key: str, bound_at: int) -> Binding:
    value, pair_at = table[key]
    return Binding(key, value, bound_at, pair_at)


def _gaps(rng: random.Random, total: int, count: int) -> list[int]:
    """`count` random sizes that add up to `total`; many are small, some large."""
    cuts = sorted(rng.randint(0, total) for _ in range(count - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


def ids_of(words: Sequence[str]) -> list[int]:
    """Token ids; equal to what the tokenizer makes of the joined words."""
    return [WORD_IDS[word] for word in words]
