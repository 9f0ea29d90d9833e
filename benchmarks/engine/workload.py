"""What is asked of every engine: the cells, their sizes, and prompts of real text as token ids. Pure but for one file.

Within a round every engine gets the same prompts; no two requests of a run share a beginning, so that no cache helps.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.text import real_text

Kind = Literal["decode", "prefill", "mixed"]
DEFAULT_CELLS = ("decode-1", "decode-4", "decode-16", "prefill-512", "prefill-2048", "prefill-6000", "mixed")
TEXT_CHARS = 400_000


@dataclass(frozen=True)
class Cell:
    """decode: `size` streams at once; prefill: a prompt of `size` tokens; mixed: streams and a long prompt."""

    kind: Kind
    size: int = 0

    @classmethod
    def parse(cls, text: str) -> Cell:
        """ "decode-4", "prefill-512", "mixed". Raises ValueError."""
        if text == "mixed":
            return cls("mixed")
        found = re.fullmatch(r"(decode|prefill)-([1-9][0-9]{0,5})", text)
        if found is None:
            raise ValueError(f'cell {text!r} is none of "decode-STREAMS", "prefill-TOKENS" and "mixed"')
        return cls("decode" if found[1] == "decode" else "prefill", int(found[2]))

    def __str__(self) -> str:
        return f"{self.kind}-{self.size}" if self.size else self.kind


@dataclass(frozen=True)
class Sizes:
    """How much a cell asks for, in tokens; `num_streams` run while the long prompt arrives."""

    decode_prompt: int = field(default=32, metadata={"help": "prompt tokens of each stream in the decode cells"})
    decode_output: int = field(default=64, metadata={"help": "output tokens of each stream in the decode cells"})
    num_streams: int = field(default=4, metadata={"help": "streams of the mixed cell"})
    quiet_output: int = field(default=24, metadata={"help": "output tokens of each before the long prompt is sent"})
    long_prompt: int = field(default=4000, metadata={"help": "tokens of the mixed cell's long prompt"})

    @property
    def max_context(self) -> int:
        """What a slot must hold beside the largest prefill cell."""
        return self.decode_prompt + STREAM_OUTPUT + 64


# Streams of the mixed cell are cut off when the long prompt is through; this only must not be reached before.
STREAM_OUTPUT = 3000


class Prompts:
    """Token ids of English prose, a different stretch for every (round, cell, index)."""

    def __init__(self, model: Path) -> None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._begin = tokenizer.encode("").ids  # what the model wants first, if anything
        self._ids: list[int] = tokenizer.encode(real_text(TEXT_CHARS), add_special_tokens=False).ids

    def take(self, num_tokens: int, key: tuple[int, str, int]) -> list[int]:
        """A prompt of exactly `num_tokens`; the same for the same key in every process."""
        body = num_tokens - len(self._begin)
        place = stretch(key, len(self._ids) - body)
        return self._begin + self._ids[place : place + body]

    def several(self, num: int, num_tokens: int, key: tuple[int, str]) -> list[list[int]]:
        """`num` prompts of a cell."""
        return [self.take(num_tokens, (*key, n)) for n in range(num)]


def stretch(key: tuple[int, str, int], room: int) -> int:
    """A place within 0 to `room` that goes with the key, in every process."""
    return zlib.crc32("/".join(map(str, key)).encode()) % max(room, 1)


def rotated(names: Sequence[str], number: int) -> list[str]:
    """The order of round `number`: each begins one further on, so that no engine always runs first."""
    shift = number % len(names) if names else 0
    return [*names[shift:], *names[:shift]]
