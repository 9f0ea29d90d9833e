"""API keys and request ids: who asks, and under which name.

Keys are compared as digests in constant time; the tenant is a digest too, so no key is kept anywhere else. Called by
the app's middleware and handlers.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable

from aiohttp import web

from decoded.api.contract import read_api_key
from decoded.api.errors import RequestRefused

TENANT = web.RequestKey("tenant", str)
KEY_CLASS = web.RequestKey("key_class", str)
"""The priority class that the API key is bound to, or ""."""
REQUEST_ID = web.RequestKey("request_id", str)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}\Z")


class KeyRing:
    """The accepted API keys. Without any, everybody is let in as the tenant ""."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._classes: dict[bytes, str] = {}
        self.replace(lines)

    def replace(self, lines: Iterable[str]) -> tuple[int, int, int]:
        """Accept the keys of these lines (read_api_key) from now on; how many are new, gone, and of another class."""
        before, self._classes = self._classes, {_digest(k.encode()): c for k, c in map(read_api_key, lines)}
        both = before.keys() & self._classes.keys()
        num_moved = sum(before[digest] != self._classes[digest] for digest in both)
        return len(self._classes) - len(both), len(before) - len(both), num_moved

    def identify(self, authorization: str | None) -> tuple[str, str]:
        """The tenant of an Authorization header, and the priority class its key is bound to ("": to none).

        Raises:
            RequestRefused: with 401 when keys are set and the header has none of them.
        """
        if not self._classes:
            return "", ""
        scheme, _, key = (authorization or "").partition(" ")
        digest = _digest(key.strip().encode("utf-8", "surrogateescape"))
        # All, whichever matches.
        matches = [name for known, name in self._classes.items() if hmac.compare_digest(digest, known)]
        if scheme.lower() != "bearer" or not matches:
            raise RequestRefused(
                "This server needs an API key: send the header 'Authorization: Bearer KEY'.",
                None,
                "invalid_api_key",
                401,
            )
        return hashlib.sha256(b"prfaas tenant" + digest).hexdigest()[:32], matches[0]


def read_request_id(header: str | None) -> str:
    """The client's X-Request-Id, or a new one.

    Raises:
        RequestRefused: the header is not 1 to 128 letters, digits, dots, colons, dashes or underscores.
    """
    if header is None:
        return secrets.token_hex(12)
    if not _REQUEST_ID.match(header):
        raise RequestRefused(
            "X-Request-Id must be 1 to 128 letters, digits, dots, colons, dashes or underscores.",
            "X-Request-Id",
            "invalid_value",
        )
    return header


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
