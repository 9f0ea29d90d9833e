"""Token ids to text, one at a time: no delta ends inside a character, joined deltas equal the decode of the whole.

Two decoders cover nearly all published models and are followed exactly: byte-level (each token is bytes, the text is
their lossy UTF-8) and byte-fallback (tokens are text, but <0xNN> is a byte; a run of such bytes is text only if all of
it is valid, so a run is held until it ends). Anything else decodes a sliding window with the library itself.
StopStrings holds back text that may still become a stop string. Knows nothing of requests. Called by tokenizer.py.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer as RustTokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_MAX_WINDOW_TOKENS = 32


class Detokenizer(Protocol):
    """Incremental decoder of one choice's tokens."""

    def add(self, token_id: int) -> str:
        """The text that became final with this token; "" while a character is incomplete or a token is skipped."""

    def flush(self) -> str:
        """The rest at the end: what never became a whole character, as U+FFFD."""


class PieceTable:
    """What each token id of one tokenizer stands for. Filled on demand, shared by all detokenizers."""

    def __init__(self, backend: RustTokenizer) -> None:
        self._backend = backend
        self._special = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
        self._replace = _replacements(decoder)
        self._strips_first_space = _is_step(decoder, "Strip")
        self.kind = _kind(decoder)
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str | int | None] = {}

    def detokenizer(self, skip_special_tokens: bool) -> Detokenizer:
        """A fresh detokenizer for one choice."""
        skipped = self._special if skip_special_tokens else frozenset()
        if self.kind == "byte_level":
            return _ByteLevel(self, skipped)
        if self.kind == "byte_fallback":
            return _ByteFallback(self, skipped, self._strips_first_space)
        return _Window(self._backend, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for by itself; empty for an id outside the vocabulary."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._lookup_bytes(token_id)
        return found

    def token_text(self, token_id: int) -> str | int | None:
        """For byte-fallback decoders: a token's text, its byte value when it is a byte token, None outside the
        vocabulary.
        """
        try:
            return self._texts[token_id]
        except KeyError:
            found = self._texts[token_id] = self._lookup_text(token_id)
            return found

    def _lookup_bytes(self, token_id: int) -> bytes:
        if self.kind == "byte_level":
            token = self._backend.id_to_token(token_id) or ""
            try:
                return bytes(BYTE_OF_CHAR[char] for char in token)
            except KeyError:  # an added token is plain text
                return token.encode()
        text = self.token_text(token_id)
        return bytes((text,)) if isinstance(text, int) else (text or "").encode()

    def _lookup_text(self, token_id: int) -> str | int | None:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return None
        for old, new in self._replace:
            token = token.replace(old, new)
        match = _BYTE_TOKEN.match(token)
        return int(match[1], 16) if match else token


class _ByteLevel:
    """Concatenated bytes through a lossy incremental UTF-8 decoder."""

    def __init__(self, table: PieceTable, skipped: frozenset[int]) -> None:
        self._table, self._skipped = table, skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(self._table.token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _ByteFallback:
    """Text tokens as they are; byte tokens collected until the run ends."""

    def __init__(self, table: PieceTable, skipped: frozenset[int], strip_first_space: bool) -> None:
        self._table, self._skipped = table, skipped
        self._run = bytearray()
        self._strip = strip_first_space

    def add(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        piece = self._table.token_text(token_id)
        if isinstance(piece, int):
            self._run.append(piece)
            return ""
        if piece is None:
            return ""
        return self._first(self._end_run() + piece) if self._run or self._strip else piece

    def flush(self) -> str:
        return self._first(self._end_run())

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _first(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class _Window:
    """For decoders whose output of a token depends on its neighbours: decode the last few tokens again each time."""

    def __init__(self, backend: RustTokenizer, skip_special_tokens: bool) -> None:
        self._backend, self._skip = backend, skip_special_tokens
        self._ids: list[int] = []
        self._num_done = 0

    def add(self, token_id: int) -> str:
        self._ids.append(token_id)
        before, after = self._decode(self._ids[: self._num_done]), self._decode(self._ids)
        is_open = after.endswith("\ufffd") and len(self._ids) - self._num_done < _MAX_WINDOW_TOKENS
        if is_open or len(after) <= len(before):
            return ""
        self._ids = self._ids[self._num_done :]
        self._num_done = len(self._ids)
        return after[len(before) :]

    def flush(self) -> str:
        before, after = self._decode(self._ids[: self._num_done]), self._decode(self._ids)
        self._num_done = len(self._ids)
        return after[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=self._skip))


class StopStrings:
    """Finds the first stop string in a stream of text, holding back only what may still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def add(self, delta: str, *, is_checked: bool = True) -> tuple[str, bool]:
        """Text that may leave now, and whether a stop string ended it (the stop string itself is left out).

        With `is_checked` false (before min_tokens) the text passes and can be no part of a stop string.
        """
        if not self._stops:
            return delta, False
        text, self._held = self._held + delta, ""
        if not is_checked:
            return text, False
        # The first to be complete counts, then the longest: the same as if every character came alone.
        hits = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            return text[: min(hits)[1]], True
        keep = min((_partial_from(text, stop) for stop in self._stops), default=len(text))
        self._held = text[keep:]
        return text[:keep], False

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


def _partial_from(text: str, stop: str) -> int:
    """First index from which the rest of the text is a proper prefix of the stop string; len(text) if none."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return at
        at = text.find(stop[0], at + 1)
    return len(text)


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    return list(decoder.get("decoders", [])) if decoder.get("type") == "Sequence" else [decoder]


def _kind(decoder: dict[str, Any]) -> str:
    steps = _steps(decoder)
    names = [step.get("type") for step in steps]
    if names == ["ByteLevel"]:
        return "byte_level"
    num_replace = len(_replacements(decoder))
    tail = names[num_replace:]
    if tail == ["ByteFallback", "Fuse"]:
        return "byte_fallback"
    one_space = {"content": " ", "start": 1, "stop": 0}
    if tail == ["ByteFallback", "Fuse", "Strip"] and all(steps[-1].get(k) == v for k, v in one_space.items()):
        return "byte_fallback"
    return "window"


def _is_step(decoder: dict[str, Any], name: str) -> bool:
    return any(step.get("type") == name for step in _steps(decoder))


def _replacements(decoder: dict[str, Any]) -> list[tuple[str, str]]:
    """The plain-string Replace steps a decoder begins with."""
    found: list[tuple[str, str]] = []
    for step in _steps(decoder):
        old = step.get("pattern", {}).get("String") if step.get("type") == "Replace" else None
        if old is None:
            break
        found.append((old, step["content"]))
    return found


def _byte_of_char() -> dict[str, int]:
    """The stand-ins of byte-level vocabularies: a printable byte is itself, the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + number): byte for number, byte in enumerate(others)})
    return table


BYTE_OF_CHAR = _byte_of_char()
