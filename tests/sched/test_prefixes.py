"""Names of prefixes: what the document says, and the same whichever way a sequence grew."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.sched.prefixes import Prefixes


def named(tokens: list[int], salt: bytes = b"") -> bytes:
    """By the definition."""
    name = hashlib.sha256(b"prfaas prefix 1\0" + salt).digest()[:16]
    for first in range(0, len(tokens), 64):
        block = tokens[first : first + 64]
        name = hashlib.sha256(name + struct.pack(f"<{len(block)}I", *block)).digest()[:16]
    return name


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=400), st.binary(max_size=32), st.integers(0, 400))
def test_names_are_those_of_the_definition(tokens, salt, cut):
    cut = min(cut, len(tokens))
    grown = Prefixes(tokens[:cut], salt)
    longer = grown.extended(tokens[cut:])
    assert len(grown) == cut and len(longer) == len(tokens)
    grown.extend(tokens[cut:])
    for each in (grown, longer, Prefixes(tokens, salt)):
        assert each.num_blocks == len(tokens) // 64
        for position in {0, cut, len(tokens), len(tokens) // 64 * 64}:
            assert each.at(position) == named(tokens[:position], salt)
            assert position % 64 or each.block(position // 64) == each.at(position)


def test_another_salt_is_another_name_everywhere():
    ours, theirs = Prefixes(range(200), b"a"), Prefixes(range(200), b"b")
    assert not {ours.at(n) for n in range(201)} & {theirs.at(n) for n in range(201)}


def test_what_cannot_be_named():
    with pytest.raises(IndexError, match="201"):
        Prefixes(range(200)).at(201)
    with pytest.raises(OverflowError):
        Prefixes([-1])
