"""Token ids as they are in a Prefill's payload: u32 little-endian each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from common.errors import LocalProtocolError


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """The payload of these token ids. Raises LocalProtocolError when one does not fit 32 bits."""
    ids = np.asarray(tokens, np.int64)
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < 2**32:
        raise LocalProtocolError(f"token ids {int(ids.min())}..{int(ids.max())} do not fit 0..{2**32 - 1}")
    return ids.astype("<u4").tobytes()


def unpack_tokens(payload: bytes | bytearray | memoryview) -> tuple[int, ...]:
    """The token ids of a payload."""
    return tuple(np.frombuffer(payload, "<u4").tolist())


def largest_token(payload: bytes | bytearray | memoryview) -> int:
    """The largest token id of a payload, -1 when there is none."""
    return int(np.frombuffer(payload, "<u4").max()) if payload else -1
