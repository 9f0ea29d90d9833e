"""What prefilld tells of its prefix cache: one record for each prefix of which it holds something, in CacheEvent.

    name 16 | parent 16 | u32 stop | u8 num_tokens | u8 groups | u32 window_first          big-endian, 42 bytes

Pure; what the fields mean is common/sched/prefix_index.py's business. See docs/protocol.md section 6.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from common.errors import BadMessage
from common.layout import BLOCK_TOKENS
from common.wire.messages import CacheEvent

_RECORD = struct.Struct(">16s16sIBBI")
RECORD_BYTES = _RECORD.size
MAX_RECORDS = 384
_MAX_GROUPS = 7


class Holding(NamedTuple):
    """One prefix: the tokens of its last block, or of the beginning of one, and which groups of state are held of them.

    `window_first`: the first token of its window rows where not all that matter are held, else 0.
    """

    name: bytes
    parent: bytes
    stop: int
    num_tokens: int
    groups: int
    window_first: int


def cache_events(first_no: int, holdings: Iterable[Holding], *, is_anew: bool) -> Iterator[CacheEvent]:
    """Messages that say all of them, numbered from `first_no` on; `is_anew`: and that nothing else is held."""
    left, no = iter(holdings), first_no
    while (some := list(islice(left, MAX_RECORDS))) or (is_anew and no == first_no):
        yield CacheEvent(no, is_anew and no == first_no, b"".join(_RECORD.pack(*each) for each in some))
        no += 1


def read_holdings(event: CacheEvent) -> list[Holding]:
    """The records of a message.

    Raises:
        BadMessage: names the record and what is wrong with it.
    """
    if len(event.records) % RECORD_BYTES:
        raise BadMessage(f"CACHE_EVENT.records has {len(event.records)} bytes, must be a multiple of {RECORD_BYTES}")
    found = [Holding(*fields) for fields in _RECORD.iter_unpack(event.records)]
    for each in found:
        is_run = 0 < each.num_tokens <= BLOCK_TOKENS and each.num_tokens <= each.stop < 2**31
        first = each.window_first
        is_window = not first or each.stop - each.num_tokens < first < each.stop
        if not is_run or not is_window or each.groups > _MAX_GROUPS:
            raise BadMessage(f"CACHE_EVENT: {each} is no run of 1..{BLOCK_TOKENS} tokens with groups 0..{_MAX_GROUPS}")
    return found
