"""Turns an HTTP body into a Prepared request without stopping the event loop.

Called by generate.py. Ordinary bodies are prepared in a thread.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web

from decoded.api.contract import ApiSettings
from decoded.api.errors import RequestRefused
from decoded.api.prepare import Prepared, prepare
from decoded.api.schema import Kind, Limits
from decoded.tokenizer import Tokenizer

_NUM_THREADS = 2


class Preparer:
    """Owns the threads that parse and tokenise."""

    def __init__(self, tokenizer: Tokenizer, settings: ApiSettings) -> None:
        self._tokenizer, self._settings = tokenizer, settings
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="prepare")

    async def prepare(self, kind: Kind, request: web.Request, limits: Limits) -> Prepared:
        """Read, parse, validate and tokenise a request's body.

        Raises:
            InvalidRequest: the body or a parameter is wrong.
        """
        _check_content_type(request)
        body = await request.read()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, prepare, kind, body, limits, self._tokenizer)

    async def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _check_content_type(request: web.Request) -> None:
    charset = (request.charset or "utf-8").lower()
    if request.content_type != "application/json" or charset not in ("utf-8", "utf8", "us-ascii"):
        shown = request.headers.get("Content-Type", "none")[:80]
        raise RequestRefused(
            f"The content type is {shown!r}; it must be application/json in UTF-8.",
            "Content-Type",
            "invalid_content_type",
            415,
        )
