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
from common.wire.frames import MAGIC, VERSION
from tests.net import independent_client
from tests.net.independent_client import COMPLETE, PIECE, PROGRESS, Client, Link, needed
from tests.net.rig import FAST, KEY, WIDE, Proxy, Rig, both_loops, end, on_uvloop

WIDTHS = {"float32": 4, "bfloat16": 2}
LAYOUT = [(s.kind, s.window, [math.prod(t.shape) * WIDTHS[t.dtype] for t in s.tensors]) for s in WIDE.states]
# Where in the msgpack headers of that server: the last byte of num_tokens, and one of the digest of Progress(256, ..).
COMPLETE_TOKENS = len(b"\x86\xaanum_tokens\xcd\x0b")
PROGRESS_DIGEST = len(b"\x83\xacnum_computed\xcd\x01\x00\xacnum_segments\x01\xa6digest\xc4\x10")


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
    """Changes one bit of the first frame of a type on its way down: `at` counts from its msgpack header on."""

    def __init__(self, kind: int, at: int, *, link: int = 0, is_sealed: bool = False) -> None:
        self.start, self.at, self.link, self.is_sealed = MAGIC + bytes((VERSION, kind)), at, link, is_sealed
        self.is_done = False

    def __call__(self, index: int, data: bytes) -> bytes:
        begin = data.find(self.start)
        if self.is_done or begin < 0 or index != self.link or begin + 24 + self.at >= len(data):
            return data
        self.is_done = True
        out = bytearray(data)
        out[begin + 24 + self.at] ^= 1
        if self.is_sealed:  # by somebody who knows checksums
            (length,) = struct.unpack_from(">H", data, begin + 6)
            struct.pack_into(">I", out, begin + 16, zlib.crc32(out[begin + 24 : begin + 24 + length]))
            struct.pack_into(">I", out, begin + 20, zlib.crc32(out[begin : begin + 20]))
        return bytes(out)


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
        proxy.mangle = forger = Forger(PIECE, 300, link=link)  # in the payload: the header has about 130 bytes
        with pytest.raises(ValueError, match="digest of segment"):
            await fetch(proxy.port, ("r", range(3000), 0, [codec]))
        assert forger.is_done


@pytest.mark.parametrize(
    ("forger", "message"),
    [
        (Forger(PIECE, 5, link=1), "header check"),
        (Forger(PROGRESS, PROGRESS_DIGEST, is_sealed=True), "running digest"),
        (Forger(COMPLETE, COMPLETE_TOKENS, is_sealed=True), "3001.*not.*3000"),
    ],
)
@on_uvloop
async def test_a_changed_frame_is_noticed(forger, message):
    async with served() as (_rig, proxy):
        proxy.mangle = forger
        with pytest.raises(ValueError, match=message):
            await fetch(proxy.port, ("r", range(3000)))
        assert forger.is_done


@on_uvloop
async def test_a_flipped_token_is_refused(monkeypatch):
    send = Link.send

    def damaged(self: Link, kind: int, stream: int = 0, payload: bytes = b"", **fields: object) -> bytes:
        return send(self, kind, stream, payload and bytes([payload[0] ^ 1]) + payload[1:], **fields)

    monkeypatch.setattr(Link, "send", damaged)
    async with served() as (rig, _):
        with pytest.raises(ValueError, match=r"type 18:.*damaged"):
            await fetch(rig.server.port, ("r", range(3000)))
        assert not rig.streams


@on_uvloop
async def test_another_key_is_refused():
    async with served() as (rig, _):
        with pytest.raises(ValueError, match=r"type 6:.*auth"):
            await fetch(rig.server.port, key=b"x" * 32)
