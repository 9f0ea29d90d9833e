"""Who may talk to whom, over real sockets: keys, identities, addresses. And how segments are cut."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from hashlib import sha256

import pytest

from common.backend import ComputedSegment
from common.errors import LinkLost, LocalProtocolError, StartupError
from common.hosts import is_loopback
from common.layout import StateLayout, StateSpec, TensorSpec
from common.net.options import LinkOptions
from common.net.pool import PeerClient
from common.net.server import PrefillServer
from common.net.split import split_segment
from common.wire.auth import key_id
from common.wire.frames import FrameHead, FrameType, pack_head
from common.wire.messages import Hello, encode_frame
from tests.net.rig import FAST, KEY, WIDE, Rig, State, end, model_info, on_uvloop, rigged


async def refused(rig: Rig, **args):
    """Start the rig; answers the reason for which the client is incompatible."""
    return (await refused_status(rig, **args))["reason"]


async def refused_status(rig: Rig, **args):
    await rig.start(**args)
    try:
        await rig.state("incompatible", timeout=1)
        with pytest.raises(LinkLost):
            rig.ask(10)
        assert rig.client.status()["reason"] == rig.client.reason
        return rig.client.status()
    finally:
        await rig.close()


@on_uvloop
async def test_wrong_key():
    reason = await refused(Rig(), client_end=end("decode", key=b"w" * 32))
    assert "shared key" in reason


@on_uvloop
@pytest.mark.parametrize(("client_key", "server_key"), [(None, KEY), (KEY, None)])
async def test_key_at_one_end_only(client_key, server_key):
    reason = await refused(Rig(), client_end=end("decode", key=client_key), server_end=end("prefill", key=server_key))
    assert "shared key" in reason


@on_uvloop
async def test_unkeyed_on_loopback():
    async with rigged(client_end=end("decode", key=None), server_end=end("prefill", key=None)) as rig:
        prefill, sink = rig.ask(10)
        await rig.finish(prefill, sink)


@on_uvloop
async def test_unkeyed_beyond_loopback_is_refused_at_both_ends():
    async def handler(stream):
        raise AssertionError

    server = PrefillServer(end("prefill", key=None), FAST, handler)
    for host in ("0.0.0.0", "::", "10.1.2.3"):
        with pytest.raises(StartupError, match="shared key"):
            await server.start(host, 0)
    client = PeerClient("p", "10.1.2.3", 7400, local=end("decode", key=None), options=FAST)
    await client.start()
    assert client.state == "incompatible" and "shared key" in client.reason
    await client.close()


@on_uvloop
async def test_address_in_use():
    async with rigged() as rig:
        with pytest.raises(StartupError, match=str(rig.server.port)):
            await rig.start_server(port=rig.server.port)


@on_uvloop
@pytest.mark.parametrize("field", ["weights_digest", "config_digest", "tokenizer_digest", "layout"])
async def test_other_model_is_refused_within_a_second_naming_the_field(field):
    other = StateLayout(WIDE.states[:2]) if field == "layout" else "other"
    reason = await refused(Rig(), server_end=end("prefill", info=model_info(**{field: other})))
    name = field.removesuffix("_digest")
    assert reason.startswith(f"not the same model (ours/theirs): {name} ")
    if field != "layout":
        assert reason.endswith(f"{name} {name}/other")


@on_uvloop
async def test_reason_is_short_and_the_status_has_whole_digests():
    fields = ("weights_digest", "config_digest", "tokenizer_digest")
    ours, theirs = ({f: sha256(f"{who} {f}".encode()).hexdigest() for f in fields} for who in ("ours", "theirs"))
    status = await refused_status(
        Rig(),
        client_end=end("decode", info=model_info(**ours)),
        server_end=end("prefill", info=model_info(**theirs)),
    )
    pairs = [f"{f.removesuffix('_digest')} {ours[f][:8]}/{theirs[f][:8]}" for f in fields]
    assert status["reason"] == "not the same model (ours/theirs): " + ", ".join(pairs)
    assert len(status["reason"]) < 120
    assert status["mismatch"] == {f.removesuffix("_digest"): {"ours": ours[f], "theirs": theirs[f]} for f in fields}
    assert status["last_error"] == status["reason"]
    assert 0 <= status["last_error_age_s"] < 5


@on_uvloop
async def test_other_blocks_and_hashes_are_refused():
    assert "block_tokens" in await refused(Rig(), server_end=end("prefill", block_tokens=32))
    assert "hash_scheme" in await refused(Rig(), server_end=end("prefill", hash_scheme="other"))


@on_uvloop
async def test_numerics_are_shown_and_refused_only_on_request():
    other = model_info(numerics={"dtype": "bfloat16"})
    async with rigged(server_end=end("prefill", info=other)) as rig:
        assert rig.client.status()["numerics"] == {"dtype": "bfloat16"}
    reason = await refused(
        Rig(), server_end=end("prefill", info=other), client_end=end("decode", require_same_numerics=True)
    )
    assert reason == "not the same numerics (ours/theirs): numerics.dtype float32/bfloat16"


@on_uvloop
async def test_incompatible_peer_is_tried_again_and_may_become_right():
    rig = await Rig().start(proxy=True, server_end=end("prefill", info=model_info(weights_digest="old")))
    await rig.state("incompatible")
    other = await rig.start_server()
    rig.proxy.target = other.port
    await rig.state("ready")
    await rig.close()
    await other.close()


@on_uvloop
async def test_smaller_limits_of_either_end_hold():
    small = LinkOptions(piece_bytes=4096, max_segment_bytes=8192, max_prompt_tokens=700)
    async with rigged(server_options=small) as rig:
        prefill, sink = rig.ask(600)
        await rig.finish(prefill, sink)
        pieces = [f for e, f in rig.trace if e == "piece_written"]
        assert max(f["num_bytes"] for f in pieces) <= 4096
        assert max(f["encoded_bytes"] for f in pieces) <= 8192


@on_uvloop
async def test_nothing_large_is_taken_before_the_proof():
    async with rigged() as rig:
        hello = encode_frame(Hello("decode", b"n" * 32, b"s" * 16, 0, "key", (key_id(KEY),)))
        for data in (
            pack_head(FrameHead(FrameType.PREFILL, 1, 100, 4000)),
            pack_head(FrameHead(FrameType.HELLO, 0, 60000, 0)) + bytes(60000),
            hello + pack_head(FrameHead(FrameType.HELLO_ACK, 0, 9, 0)),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.port)
            writer.write(data)
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                answer = await asyncio.wait_for(reader.read(), 5)
            assert b"weights" not in answer and b"prefill-1" not in answer and len(answer) < 600
            writer.close()


def test_loopback():
    assert all(map(is_loopback, ["127.0.0.1", "127.9.9.9", "::1", "localhost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "", "::", "10.0.0.1", "example.org", "169.254.1.1"]))


# ---- cutting segments


def pieces_of(segment: ComputedSegment, max_bytes: int) -> list[ComputedSegment]:
    return list(split_segment(WIDE, segment, max_bytes))


@pytest.mark.parametrize("max_bytes", [768, 1000, 5000, 20_000, 50_000, 10**9])
@pytest.mark.parametrize("layers", [(0,), (0, 2), (2, 0, 1), (0, 1, 2)])
def test_cut_segments_hold_the_same_bytes(layers, max_bytes):
    state = State(WIDE, 120)
    whole = state.segment(50, 110, layers)
    parts = pieces_of(whole, max_bytes)
    seen: dict[tuple[int, int], bytes] = {}
    for part in parts:
        assert WIDE.segment_bytes(part.start, part.stop, part.layers) <= max_bytes
        assert b"".join(map(bytes, part.buffers)) == b"".join(
            map(bytes, state.sink.buffers(part.start, part.stop, part.layers))
        )
        for n in part.layers:
            for row in range(part.start, part.stop):
                assert (n, row) not in seen
                seen[n, row] = b""
    assert set(seen) == {(n, row) for n in layers for row in range(50, 110)}
    if max_bytes == 10**9:
        assert parts == [whole]


def test_segments_that_cannot_be_cut_or_do_not_fit_the_layout():
    state = State(WIDE, 120)
    with pytest.raises(LocalProtocolError, match="cannot be cut"):
        pieces_of(state.segment(0, 10, (0,)), 511)
    with pytest.raises(LocalProtocolError, match="cannot be cut"):
        pieces_of(state.segment(119, 120, (3,)), 1000)
    with pytest.raises(LocalProtocolError, match="buffers of rows"):
        pieces_of(replace(state.segment(0, 10, (0,)), stop=11), 10**9)
    for wrong in ({"layers": (9,)}, {"start": 10}, {"start": 11}):
        with pytest.raises(LocalProtocolError, match="not in the layout"):
            pieces_of(replace(state.segment(0, 10, (0,)), **wrong), 10**9)


def test_layout_with_an_empty_tensor():
    layout = StateLayout((StateSpec(0, "full", (TensorSpec("k", (0,), "float32"),)),))
    segment = ComputedSegment(0, 5, (0,), (memoryview(b""),), 0.0)
    assert list(split_segment(layout, segment, 10)) == [segment]
