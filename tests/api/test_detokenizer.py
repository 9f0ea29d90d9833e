"""Incremental text: joined deltas equal the whole decode, no delta ends inside a character, stop strings are found."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from common.text.detokenizer import BYTE_OF_CHAR, PieceTable, StopStrings

SPECIAL = "<|end|>"


def byte_level() -> Tokenizer:
    """Bytes, a few merged pieces, a special and an ordinary added token."""
    vocab = dict(BYTE_OF_CHAR)
    char_of_byte = {byte: char for char, byte in vocab.items()}
    merges = []
    for piece in ("he", "ll", "\u4f60"[:1]):
        chars = [char_of_byte[b] for b in piece.encode()]
        for _ in range(len(chars) - 1):
            merged = chars[0] + chars[1]
            if merged not in vocab:
                vocab[merged] = len(vocab)
                merges.append((chars[0], chars[1]))
            chars = [merged, *chars[2:]]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(SPECIAL, special=True)])
    backend.add_tokens(["<caf\u00e9 \u4f60>"])
    return backend


def byte_fallback(*, strip: bool) -> Tokenizer:
    """Pieces with byte fallback, as SentencePiece models are converted."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["\u2581", "\u2581he", "llo", "a", "\u4f60", "\u1100", "\ufffd", "<0xZZ>", "\u2581\u2581"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return backend


def other() -> Tokenizer:
    """A decoder we have no exact copy of."""
    backend = byte_fallback(strip=False)
    backend.decoder = decoders.Sequence([decoders.Replace(Regex("\u2581"), " "), decoders.Fuse()])
    return backend


TABLES = {
    "byte_level": byte_level(),
    "byte_fallback": byte_fallback(strip=False),
    "stripped": byte_fallback(strip=True),
    "window": other(),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("byte_level", "byte_level"),
        ("byte_fallback", "byte_fallback"),
        ("stripped", "byte_fallback"),
        ("window", "window"),
    ],
)
def test_kinds(name, kind):
    assert PieceTable(TABLES[name]).kind == kind


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_joined_deltas_equal_the_whole(name, skip, data):
    backend = TABLES[name]
    ids = data.draw(st.lists(st.integers(0, backend.get_vocab_size() + 2), max_size=24))
    detokenizer = PieceTable(backend).detokenizer(skip)
    joined = "".join(detokenizer.add(token) for token in ids) + detokenizer.flush()
    assert joined == backend.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=30))
@settings(max_examples=300, deadline=None)
def test_no_delta_splits_a_character(name, text):
    backend = TABLES[name]
    detokenizer = PieceTable(backend).detokenizer(True)
    deltas = [detokenizer.add(token) for token in backend.encode(text).ids]
    assert not any("\ufffd" in delta for delta in deltas)
    assert "".join(deltas) + detokenizer.flush() == backend.decode(backend.encode(text).ids)


@given(
    st.text(alphabet="ab\u4f60", max_size=40),
    st.lists(st.text(alphabet="ab\u4f60", min_size=1, max_size=4), max_size=4),
)
@settings(max_examples=1000, deadline=None)
def test_stop_strings_whatever_the_cuts(text, stops):
    rng = random.Random(text)
    matcher, shown, position, is_stopped = StopStrings(stops), "", 0, False
    while position < len(text) and not is_stopped:
        step = rng.randrange(1, 4)
        emitted, is_stopped = matcher.add(text[position : position + step])
        shown, position = shown + emitted, position + step
    shown += "" if is_stopped else matcher.flush()
    hits = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert is_stopped == bool(hits)
    assert shown == (text[: min(hits)[1]] if hits else text)


def test_text_is_held_no_longer_than_needed():
    matcher = StopStrings(["STOP", "TOAST"])
    assert matcher.add("to S") == ("to ", False)
    assert matcher.add("TO") == ("", False)
    assert matcher.add("A") == ("S", False)  # no STOP any more, but TOA may become TOAST
    assert matcher.add("D") == ("TOAD", False)
    assert matcher.add("ST") == ("", False)
    assert matcher.flush() == "ST" and matcher.flush() == ""


def test_unchecked_text_passes_and_is_no_part_of_a_stop():
    matcher = StopStrings(["ab"])
    assert matcher.add("ab", is_checked=False) == ("ab", False)
    assert matcher.add("a", is_checked=False) == ("a", False)
    assert matcher.add("b") == ("b", False)


def test_a_window_never_holds_for_ever():
    backend = TABLES["window"]
    detokenizer = PieceTable(backend).detokenizer(True)
    broken = backend.token_to_id("\ufffd")
    deltas = [detokenizer.add(broken) for _ in range(100)]
    assert len("".join(deltas)) >= 60
