"""Proofs of the shared key and comparison of identities: pure functions over bytes. Keys and nonces are passed in.

Used by connection.py alone; docs/protocol.md section 4 has the reasons.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Any

from common.errors import LayoutMismatch
from common.wire.messages import HelloAck

UNKEYED = bytes(32)
_DIGEST = re.compile(r"[0-9a-f]{16,}")
_IDENTITY = ("weights", "config", "tokenizer", "layout", "block_tokens", "hash_scheme")


def link_mac(key: bytes, role: str, session: bytes, link: int, client_hello: bytes, server_hello: bytes) -> bytes:
    """The proof that the end with this role holds `key`, for exactly these two Hello frames."""
    text = b"prfaas auth 1\0" + role.encode() + b"\0" + link.to_bytes(4, "big") + session
    return hmac.digest(key, text + _sized(client_hello) + _sized(server_hello), hashlib.sha256)


def key_id(key: bytes) -> bytes:
    """Eight bytes by which both ends find the key that they have in common; they tell nothing else about it."""
    return hmac.digest(key, b"prfaas key id 1", hashlib.sha256)[:8]


def session_key(key: bytes, session: bytes, client_hello: bytes, server_hello: bytes) -> bytes:
    """The key of a session's data links, bound to its control link's Hellos. `key` is the shared key, or with TLS the
    client's secret followed by the server's.
    """
    text = b"prfaas session 1\0" + session
    return hmac.digest(key, text + _sized(client_hello) + _sized(server_hello), hashlib.sha256)


def is_same_mac(a: bytes, b: bytes) -> bool:
    """Compare without telling by its duration where they differ."""
    return hmac.compare_digest(a, b)


def check_identity(ours: HelloAck, theirs: HelloAck, *, require_same_numerics: bool) -> None:
    """Refuse a peer with another model.

    Raises:
        LayoutMismatch: names every field that differs, ours and theirs; digests whole only in its `differences`.
    """
    pairs = {name: (getattr(ours, name), getattr(theirs, name)) for name in _IDENTITY}
    if require_same_numerics:
        for name in sorted(ours.numerics.keys() | theirs.numerics.keys()):
            pairs[f"numerics.{name}"] = (ours.numerics.get(name), theirs.numerics.get(name))
    wrong = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if not wrong:
        return
    if wrong.keys() & set(_IDENTITY) == {"layout"} and (causes := _causes(ours, theirs)):
        raise _mismatch(f"not the same state layout: {_settings(causes)}", {**wrong, **causes})
    what = "not the same model" if wrong.keys() & set(_IDENTITY) else "not the same numerics"
    short = ", ".join(f"{name} {_short(ours)}/{_short(theirs)}" for name, (ours, theirs) in wrong.items())
    raise _mismatch(f"{what} (ours/theirs): {short}", wrong)


def _mismatch(text: str, wrong: dict[str, tuple[Any, Any]]) -> LayoutMismatch:
    error = LayoutMismatch(text)
    error.differences = wrong
    return error


def _causes(ours: HelloAck, theirs: HelloAck) -> dict[str, tuple[Any, Any]]:
    """The settings that make one model's state another: kv_dtype is dtype unless it is set."""
    told = [n for n in ("dtype", "kv_dtype") if n in ours.numerics and n in theirs.numerics]
    pairs = {f"numerics.{name}": (ours.numerics[name], theirs.numerics[name]) for name in told}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _settings(causes: dict[str, tuple[Any, Any]]) -> str:
    """Which keys to set, with both values."""
    names = [name.removeprefix("numerics.") for name in causes]
    each = (f"{n} {_short(a)}/{_short(b)} (engine.{n})" for n, (a, b) in zip(names, causes.values(), strict=True))
    return f"{', '.join(each)}: set {'it' if len(names) == 1 else 'them'} alike at both ends"


def _short(value: object) -> str:
    """Enough of a digest to tell two apart; anything else as it is."""
    text = "-" if value is None else str(value)
    return text[:8] if _DIGEST.fullmatch(text) else text[:24]


def _sized(data: bytes) -> bytes:
    return len(data).to_bytes(2, "big") + data
