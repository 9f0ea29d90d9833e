"""docs/protocol.md suffices to write a client: one that shares no code with the product gets every byte of state."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import math
import struct
import zlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from common.net.options import LinkOptions
from common.net.server import ServerStream
from tests.net import independent_client
from tests.net.independent_client import COMPLETE, PIECE, PROGRESS, Client, needed
from tests.net.rig import FAST, KEY, WIDE, Proxy, Rig, both_loops, end, on_uvloop

WIDTHS = {"float32": 4, "bfloat16": 2}
LAYOUT = [(s.kind, s.window, [math.prod(t.shape) * WIDTHS[t.dtype] for t in s.tensors]) for s in WIDE.states]


@contextlib.asynccontextmanager
async def served(key: bytes | None = KEY, options: LinkOptions = FAST) -> AsyncIterator[tuple[Rig, Proxy]]:
    rig = Rig(options=options)
    rig.server = await rig.start_server(end("prefill", info=rig.info, key=key))
    proxy = Proxy(rig.server.port)
    await proxy.start()
    try:
        yield rig, proxy
    finally:
        await proxy.close()
        await rig.server.close()


async def fetch(port: int, *requests: tuple, key: bytes | None = KEY) -> list:
    """What these prefills, one after the other in one session, answer, and the codecs of their segments."""

    def run() -> list:
        with contextlib.closing(Client(("127.0.0.1", port), LAYOUT, key)) as client:
            return [(client.prefill(*r), {s["codec"] for s in client.landed.values()}) for r in requests]

    return await asyncio.wait_for(asyncio.to_thread(run), 20)


class Forger:
    """Changes one bit in the first whole frame of a type on its way down: `at` is where in the msgpack header."""

    def __init__(self, kind: int, at: int, *, is_sealed: bool) -> None:
        self.start, self.at, self.is_sealed, self.is_done = b"PF\x03" + bytes([kind]), at, is_sealed, False

    def __call__(self, index: int, data: bytes) -> bytes:
        begin = data.find(self.start)
        if self.is_done or begin < 0:
            return data
        (length,) = struct.unpack_from(">H", data, begin + 6)
        head, header = bytearray(data[begin : begin + 24]), bytearray(data[begin + 24 : begin + 24 + length])
        if len(header) < length:
            return data
        self.is_done = True
        header[self.at] ^= 1
        if self.is_sealed:  # by somebody who knows checksums
            struct.pack_into(">I", head, 16, zlib.crc32(header))
            struct.pack_into(">I", head, 20, zlib.crc32(head[:20]))
        return data[:begin] + head + header + data[begin + 24 + length :]


def test_nothing_of_the_product_is_imported():
    tree = ast.parse(Path(independent_client.__file__).read_text())
    assert not any(isinstance(node, ast.ImportFrom) for node in ast.walk(tree))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert names - {"msgpack", "xxhash", "zstandard"} == {
        "hashlib", "hmac", "os", "select", "socket", "struct", "zlib"
    }  # fmt: skip


def check(rig: Rig, name: str, start: int, stop: int, answer: list) -> None:
    """Compare every byte."""
    for n, (kind, window, _) in enumerate(LAYOUT):
        rows = needed(kind, window, start, stop)
        assert tuple(answer[n]) == rig.states[name].sink.buffers(rows.start, rows.stop, (n,))


@pytest.mark.parametrize("key", [KEY, None], ids=["key", "none"])
@pytest.mark.parametrize("codec", ["raw", "zstd"])
@both_loops
async def test_every_byte_arrives(codec, key):
    asked = [("whole", 0, 3000), ("rest", 777, 1500), ("last", 1499, 1500)]
    async with served(key) as (rig, _):
        requests = [(name, range(stop), start, [codec]) for name, start, stop in asked]
        answers = await fetch(rig.server.port, *requests, key=key)
    for what, (answer, codecs) in zip(asked, answers, strict=True):
        check(rig, *what, answer)
        assert codecs == {codec}
    assert rig.ended == {"whole": None, "rest": None, "last": None}


@on_uvloop
async def test_pings_are_answered_while_a_stream_waits():
    async def serve(stream: ServerStream) -> None:
        await asyncio.sleep(1.2)  # twice the silence after which a link is lost
        await rig.serve(stream)

    async with served(options=replace(FAST, heartbeat_s=0.2)) as (rig, _):
        rig.handler = serve
        ((answer, _),) = await fetch(rig.server.port, ("r", range(700)))
    check(rig, "r", 0, 700, answer)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("link", [1, 2])
@on_uvloop
async def test_a_flipped_byte_of_a_piece_is_noticed(link, codec):
    async with served() as (_rig, proxy):
        proxy.flip_at[link] = 20_000  # in the payload of its first piece
        with pytest.raises(ValueError, match="digest of segment"):
            await fetch(proxy.port, ("r", range(3000), 0, [codec]))
        assert not proxy.flip_at


@pytest.mark.parametrize(
    ("kind", "at", "is_sealed", "message"),
    [
        (PIECE, 5, False, "header check"),
        (PROGRESS, -1, True, "running digest"),
        (COMPLETE, 14, True, "3001.*not.*3000"),  # num_tokens
    ],
)
@on_uvloop
async def test_a_changed_frame_is_noticed(kind, at, is_sealed, message):
    async with served() as (_rig, proxy):
        proxy.mangle = forger = Forger(kind, at, is_sealed=is_sealed)
        with pytest.raises(ValueError, match=message):
            await fetch(proxy.port, ("r", range(3000)))
        assert forger.is_done


@on_uvloop
async def test_a_flipped_token_is_refused():
    async with served() as (rig, proxy):
        proxy.flip_last_up = 1000
        with pytest.raises(ValueError, match=r"type 18:.*damaged"):
            await fetch(proxy.port, ("r", range(3000)))
        assert not proxy.flip_last_up and not rig.streams


@on_uvloop
async def test_another_key_is_refused():
    async with served() as (rig, _):
        with pytest.raises(ValueError, match=r"type 6:.*auth"):
            await fetch(rig.server.port, key=b"x" * 32)
