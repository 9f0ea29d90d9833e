"""Turns an HTTP body into a Prepared request without stopping the event loop.

Ordinary bodies are prepared in a thread. Parsing JSON and building id lists hold the interpreter lock, so bodies beyond
`bulk_body_bytes` go to one worker process (bulk_worker.py), started when first needed, killed when its client leaves.
Called by generate.py. The message format between the two processes is here, for both.
"""

from __future__ import annotations

import asyncio
import json
import struct
import sys
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import InvalidRequest
from common.text.tokenizer import Tokenizer
from decoded.api.bodies import BodyReader
from decoded.api.contract import ApiSettings
from decoded.api.errors import RequestRefused
from decoded.api.prepare import Prepared, prepare
from decoded.api.prompts import Prompt
from decoded.api.schema import Kind, Limits, parse_params
from decoded.api.turns import Turn

if TYPE_CHECKING:
    from aiohttp import web

HEADER = struct.Struct("<IQ")  # length of the JSON part, length of the raw part
_NUM_THREADS = 4


class Preparer:
    """Owns the threads and the worker process that parse and tokenise."""

    def __init__(self, tokenizer: Tokenizer, settings: ApiSettings) -> None:
        self._tokenizer, self._settings = tokenizer, settings
        self._bodies = BodyReader(settings)
        self.threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="prepare")
        self._worker = BulkWorker(tokenizer.source)

    async def prepare(self, kind: Kind, request: web.Request, limits: Limits) -> Prepared:
        """Read, parse, validate and tokenise a request's body.

        Raises:
            InvalidRequest: the body or a parameter is wrong.
            Overloaded: too many bodies are being read.
        """
        _check_content_type(request)
        async with self._bodies.read(request) as body:
            loop = asyncio.get_running_loop()
            if len(body) <= self._settings.bulk_body_bytes:
                return await loop.run_in_executor(self.threads, prepare, kind, body, limits, self._tokenizer)
            reply, raw = await self._worker.ask({"kind": kind, "limits": asdict(limits)}, body)
            del body
            return await loop.run_in_executor(self.threads, unpack_prepared, kind, reply, raw, limits)

    async def close(self) -> None:
        """Stop the threads and the worker."""
        await self._worker.close()
        self.threads.shutdown(wait=False, cancel_futures=True)


class BulkWorker:
    """The worker process, one request at a time."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def ask(self, head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """Have one body prepared. The process is replaced if it dies or the caller is cancelled meanwhile.

        Raises:
            RequestRefused: the process died.
        """
        async with self._turn:
            process = self._process or await self._start()
            self._process = None
            try:
                answer = await self._talk(process, head, body)
                self._process, process = process, None  # type: ignore[assignment]
                return answer
            except (OSError, EOFError) as error:
                message = "The process that reads large bodies ended unexpectedly."
                raise RequestRefused(message, None, "bulk_worker_failed", 503) from error
            finally:
                if process is not None:
                    _kill(process)

    async def close(self) -> None:
        """End the process, if it runs, and wait for it."""
        process, self._process = self._process, None
        if process is not None:
            _kill(process)
            await process.wait()

    async def _start(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "decoded.api.bulk_worker",
            self._source,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            start_new_session=True,  # Ctrl-C is for the daemon; the worker ends with its pipe
        )

    async def _talk(
        self, process: asyncio.subprocess.Process, head: dict[str, Any], body: bytes
    ) -> tuple[dict[str, Any], bytes]:
        if process.stdin is None or process.stdout is None:
            raise BrokenPipeError("the worker has no pipes")
        text = json.dumps(head).encode()
        process.stdin.write(HEADER.pack(len(text), len(body)) + text)
        process.stdin.write(body)
        await process.stdin.drain()
        num_json, num_raw = HEADER.unpack(await process.stdout.readexactly(HEADER.size))
        reply = json.loads(await process.stdout.readexactly(num_json))
        return reply, await process.stdout.readexactly(num_raw)


def pack_prepared(prepared: Prepared) -> tuple[dict[str, Any], bytes]:
    """The worker's reply: everything but token ids as JSON, token ids as raw 32-bit numbers."""
    prompts = [{"num_tokens": len(p.tokens), "text": p.text, "num_added": p.num_added} for p in prepared.prompts]
    tokens = array("I")
    for prompt in prepared.prompts:
        tokens.extend(prompt.tokens)
    turn = prepared.turn
    digests = turn and (turn.conversation.hex(), turn.before and turn.before.hex())
    facts = {"rest": prepared.rest, "is_list": prepared.is_list, "prompts": prompts, "turn": digests}
    return facts, tokens.tobytes()


def pack_error(error: InvalidRequest) -> dict[str, Any]:
    """The worker's reply for a wrong request."""
    code, status = (error.api_code, error.status) if isinstance(error, RequestRefused) else (None, 400)
    return {"error": {"message": str(error), "param": error.param, "api_code": code, "status": status}}


def unpack_prepared(kind: Kind, reply: dict[str, Any], raw: bytes, limits: Limits) -> Prepared:
    """The worker's reply as the Prepared it had.

    Raises:
        RequestRefused: what the worker refused the request with.
    """
    if "error" in reply:
        raise RequestRefused(**reply["error"])
    tokens = array("I", raw)
    prompts: list[Prompt] = []
    start = 0
    for entry in reply["prompts"]:
        stop = start + entry["num_tokens"]
        prompts.append(Prompt(tuple(tokens[start:stop]), entry["text"], entry["num_added"]))
        start = stop
    params = parse_params(kind, reply["rest"], limits)
    turn = None
    if reply["turn"] is not None:
        conversation, before = reply["turn"]
        turn = Turn(bytes.fromhex(conversation), bytes.fromhex(before) if before else None, raw)
    return Prepared(params, tuple(prompts), reply["is_list"], reply["rest"], turn)


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()


def _check_content_type(request: web.Request) -> None:
    charset = (request.charset or "utf-8").lower()
    is_json = request.content_type == "application/json"
    # What `curl -d` says, or nothing at all, is taken for JSON. Not from a browser, which posts such bodies to other
    # sites without asking anybody and always says where they come from.
    is_plain = "Content-Type" not in request.headers or request.content_type == "application/x-www-form-urlencoded"
    if not (is_json or (is_plain and "Origin" not in request.headers)) or charset not in ("utf-8", "utf8", "us-ascii"):
        shown = request.headers.get("Content-Type", "none")[:80]
        raise RequestRefused(
            f"The content type is {shown!r}; it must be application/json in UTF-8.",
            "Content-Type",
            "invalid_content_type",
            415,
        )
