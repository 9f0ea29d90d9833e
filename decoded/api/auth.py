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

from decoded.api.errors import RequestRefused

TENANT = web.RequestKey("tenant", str)
REQUEST_ID = web.RequestKey("request_id", str)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}\Z")


class KeyRing:
    """The accepted API keys. Without any, everybody is let in as the tenant ""."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests: frozenset[bytes] = frozenset()
        self.replace(keys)

    def replace(self, keys: Iterable[str]) -> tuple[int, int]:
        """Accept these from now on; answers how many are new and how many are gone."""
        before, self._digests = self._digests, frozenset(_digest(key.encode()) for key in keys)
        return len(self._digests - before), len(before - self._digests)

    def tenant(self, authorization: str | None) -> str:
        """The tenant of an Authorization header.

        Raises:
            RequestRefused: with 401 when keys are set and the header has none of them.
        """
        if not self._digests:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        digest = _digest(key.strip().encode("utf-8", "surrogateescape"))
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all, whichever matches
        if scheme.lower() != "bearer" or not any(matches):
            raise RequestRefused(
                "This server needs an API key: send the header 'Authorization: Bearer KEY'.",
                None,
                "invalid_api_key",
                401,
            )
        return hashlib.sha256(b"prfaas tenant" + digest).hexdigest()[:32]


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
