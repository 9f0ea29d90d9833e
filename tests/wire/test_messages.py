"""Golden bytes of every message as docs/protocol.md prints them, and the refusal of every field that lies."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import msgpack
import pytest

from common.errors import BadMessage, FrameTooLarge
from common.layout import StateLayout, StateSpec, TensorSpec
from common.wire.auth import key_id, link_mac, session_key
from common.wire.codec import Codec, TensorRun
from common.wire.digest import extend, seal, segment_digest, token_hash
from common.wire.frames import FRAME_BYTES, MAX_HEADER_BYTES, FrameHead, FrameType, checksum, parse_head
from common.wire.framing import SealedFraming
from common.wire.holdings import Holding, cache_events
from common.wire.messages import (
    Accepted,
    Ack,
    Auth,
    CacheEvent,
    Cancel,
    Complete,
    Credit,
    Drain,
    Error,
    Filler,
    Hello,
    HelloAck,
    Measure,
    Piece,
    Ping,
    Pong,
    Prefill,
    Progress,
    PushAck,
    Pushed,
    Refused,
    Resume,
    Resumed,
    Started,
    Status,
    decode_message,
    encode_frame,
)
from common.wire.seal import SealJob, SealKey, direction_key
from common.wire.tokens import largest_token, pack_tokens, unpack_tokens

B16, B32 = bytes(range(16)), bytes(range(32))
TOKENS = pack_tokens([1, 2, 300])
HELLO_C = Hello("decode", B32, B16, 0, "key", (key_id(B32), key_id(B32[::-1])))
HELLO_S = Hello("prefill", B32[::-1], B16, 0, "key", (key_id(B32),))
PREFILL = seal(Prefill("r1", 0, 3, None, 0, b"", ("zstd", "raw"), 1 << 20, bytes(16)), TOKENS)
PIECE = Piece(2, 64, 128, (0, 1), "raw", 8, 8, 4096, segment_digest([b"statebyt"]), 1 << 20, 0)
CACHED = b"".join(e.records for e in cache_events(0, [Holding(B16, B16[::-1], 70, 6, 3, 66)], is_anew=True))
SAMPLES = {
    "Hello C": (HELLO_C, 0, b""),
    "Hello S": (HELLO_S, 0, b""),
    "Auth C": (Auth(link_mac(B32, "decode", B16, 0, encode_frame(HELLO_C), encode_frame(HELLO_S))), 0, b""),
    "Auth S": (Auth(link_mac(B32, "prefill", B16, 0, encode_frame(HELLO_C), encode_frame(HELLO_S))), 0, b""),
    "HelloAck": (
        HelloAck("p1", "i1", "aa", "bb", "cc", "dd", 64, "sha256-chain-1", {"dtype": "float32"}, ("raw", "zstd"),
                 1 << 20, 8 << 20, 4096, 16, 2.0, 30.0), 0, b""),
    "HelloAck within TLS": (
        HelloAck("p1", "i1", "aa", "bb", "cc", "dd", 64, "sha256-chain-1", {"dtype": "float32"}, ("raw", "zstd"),
                 1 << 20, 8 << 20, 4096, 16, 2.0, 30.0, B32), 0, b""),
    "Ping": (Ping(7), 0, b""),
    "Pong": (Pong(7), 0, b""),
    "Error": (Error("auth", "no", None), 0, b""),
    "Drain": (Drain(True), 0, b""),
    "Status": (Status({"num_queued": 2}), 0, b""),
    "Prefill": (PREFILL, 1, TOKENS),
    "Accepted": (Accepted(B16, 1, PREFILL.token_hash), 1, b""),
    "Refused": (Refused("shed", "queue full", 1.5), 1, b""),
    "Started": (Started(0.25, 2), 1, b""),
    "Progress": (Progress(128, 3, B16), 1, b""),
    "Piece": (PIECE, 1, b"statebyt"),
    "Complete": (Complete(3, 1, 8, B16, 0.25, 1.5), 1, b""),
    "Ack": (Ack((0, 1), 1 << 21, False), 1, b""),
    "Credit": (Credit(1 << 21), 1, b""),
    "Cancel": (Cancel("cancelled", "bye"), 1, b""),
    "Resume": (Resume("r1", B16, PREFILL.token_hash, (0, 2), 1 << 21), 1, b""),
    "Resumed": (Resumed(), 0, b""),
    "Measure": (Measure(3, 1 << 20), 0, b""),
    "Filler": (Filler(3, 4), 0, bytes(4)),
    "CacheEvent": (CacheEvent(0, True, CACHED), 0, b""),
    "Pushed": (Pushed(2, 8192, B16), 1, b""),
    "PushAck": (PushAck((0, 1), 1 << 21), 1, b""),
}  # fmt: skip
TO_CLIENT, TO_SERVER = (direction_key(B32, B16, 1, sender, B32, B32[::-1]) for sender in ("prefill", "decode"))


def sealed() -> dict[str, bytes]:
    """The first two frames of a sealed link 1, from the server."""
    framing = SealedFraming(SealKey(TO_CLIENT), SealKey(TO_SERVER))
    frames = [framing.encode(Ping(7), 0, (), 0), framing.encode(PIECE, 1, (b"state", b"byt"), 8)]
    ping, piece = (b"".join(p.run() if isinstance(p, SealJob) else p for p in parts) for parts in frames)
    return {"sealed Ping, the first frame": ping, "sealed Piece, the second": piece}


OTHERS = {
    "key id": key_id(B32),
    "session key within TLS": session_key(B32 + B32[::-1], B16, encode_frame(HELLO_C), encode_frame(HELLO_S)),
    "sealing key of link 1, server to client": TO_CLIENT,
    "sealing key of link 1, client to server": TO_SERVER,
    **sealed(),
    "session key": session_key(B32, B16, encode_frame(HELLO_C), encode_frame(HELLO_S)),
    "segment digest of 'statebyt'": segment_digest([b"state", b"byt"]),
    "running digest after Piece": extend(PREFILL.token_hash, PIECE),
    "token hash of Prefill": token_hash(PREFILL, TOKENS),
    "token hash of Prefill with deadline 2.5, due 1.5 and salt 'ab'": token_hash(
        replace(PREFILL, deadline_s=2.5, due_s=1.5, salt=b"ab"), TOKENS
    ),
}
DOC = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()


WINDOW = StateSpec(0, "window", tuple(TensorSpec(name, (1, 64), "bfloat16") for name in "kv"), 512)
BLOCK_RAW = bytes.fromhex("0001020304050607")
BLOCK = bytes.fromhex("00000008 02 00 00000004 00 00000004 00020406 01030507")
# 0x0100 0x0302 0x0504 0x0706 rotated left by one bit; their high bytes 02 06 0a 0e less 02 06 are 00 00 08 08.
FRAME = bytes.fromhex("28b52ffd 20 04 21 0000 00000808")
TURNED = bytes.fromhex("00000008 82 00 00000004 02 00000011 0004080c 0002 0206") + FRAME
OTHERS |= {
    "layout digest of the list in section 4": bytes.fromhex(StateLayout((WINDOW,)).digest),
    "zstd block of the bfloat16 bytes 0001020304050607, planes stored": BLOCK,
    "zstd block of the same, turned, the last plane as differences in two columns": TURNED,
}


def documented() -> dict[str, str]:
    vectors = DOC[DOC.index("## 10. Golden vectors") :]
    return {name: re.sub(r"\s", "", data) for name, data in re.findall(r"^(\S.*?):((?:\s+[0-9a-f]+)+)$", vectors, re.M)}


def print_vectors() -> None:
    """What section 10 of docs/protocol.md must show (run with python -m tests.wire.test_messages)."""
    found = {n: (encode_frame(m, s, len(p)) + p).hex() for n, (m, s, p) in SAMPLES.items()}
    found |= {n: d.hex() for n, d in OTHERS.items()}
    for name, data in found.items():
        lines = "\n".join("    " + data[i : i + 112] for i in range(0, len(data), 112))
        print(f"{name}:\n{lines}")


@pytest.mark.parametrize("name", SAMPLES)
def test_golden(name):
    message, stream_id, payload = SAMPLES[name]
    data = bytes.fromhex(documented()[name])
    assert encode_frame(message, stream_id, len(payload)) + payload == data
    head = parse_head(data)
    header = data[FRAME_BYTES : len(data) - len(payload)]
    assert head == FrameHead(message.type, stream_id, len(header), len(payload), checksum(header))
    assert decode_message(head, header) == message


@pytest.mark.parametrize("name", OTHERS)
def test_golden_digests(name):
    assert OTHERS[name].hex() == documented()[name]


@pytest.mark.parametrize("block", [BLOCK, TURNED])
def test_golden_zstd_blocks(block):
    out = bytearray(8)
    Codec().decode("zstd", memoryview(block), (memoryview(out),), [TensorRun(4, 1, "bfloat16")])
    assert bytes(out) == BLOCK_RAW


def test_every_message_has_a_vector():
    assert {m.type for m, _, _ in SAMPLES.values()} == set(FrameType)
    assert set(documented()) == set(SAMPLES) | set(OTHERS)


def test_every_message_and_field_is_in_the_documents_table():
    section = DOC[DOC.index("## 3. Messages") : DOC.index("## 4. ")]
    rows = {m[2]: (int(m[1]), m[0]) for m in re.finditer(r"^\| (\d+) \| (\w+) \|.*$", section, re.M)}
    for message, _, _ in SAMPLES.values():
        number, row = rows[type(message).__name__]
        assert number == message.type
        for f in fields(message):
            assert f"`{f.name}`" in row, (type(message).__name__, f.name)


def header(message: object, /, **changes: object) -> bytes:
    values = {f.name: getattr(message, f.name) for f in fields(message)}
    values |= changes
    return msgpack.packb({k: v for k, v in values.items() if v is not ...})


def refuse(message, data: bytes, stream_id: int) -> str:
    with pytest.raises(BadMessage) as e:
        decode_message(FrameHead(message.type, stream_id, len(data), 0), data)
    return str(e.value)


FIELDS = [(n, f.name) for n, (m, _, _) in SAMPLES.items() for f in fields(m)]


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_every_field_is_checked(name, field):
    message, stream_id, _ = SAMPLES[name]
    assert "fields must be" in refuse(message, header(message, **{field: ...}), stream_id)
    wrong = [[[]], -1, -(2**40), 2**63, float("nan"), float("inf"), b"x", "x" * 2000, {"a": {}}, {"a" * 99: "b"},
             ["x" * 99], [None], list(range(5000)), msgpack.Timestamp(1)]  # fmt: skip
    refused = 0
    for value in wrong:
        try:
            decode_message(FrameHead(message.type, stream_id, 0, 0), header(message, **{field: value}))
        except BadMessage as e:
            assert str(e).startswith(f"{message.type.name}.{field}"), e
            refused += 1
    assert refused >= len(wrong) - 2


@pytest.mark.parametrize("name", SAMPLES)
def test_unknown_field_and_bytes_behind_and_wrong_stream(name):
    message, stream_id, _ = SAMPLES[name]
    good = header(message)
    assert "fields must be" in refuse(message, _with(message, "extra"), stream_id)
    assert "not one msgpack map" in refuse(message, good + b"\xc0", stream_id)
    if not isinstance(message, Error):
        assert "stream id" in refuse(message, good, 0 if stream_id else 5)


def _with(message, extra: str) -> bytes:
    return msgpack.packb({**{f.name: getattr(message, f.name) for f in fields(message)}, extra: 1})


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", b"\x81", b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\x91" * 5000, b"\x80\x80", b"\xc0",
     b"\x81\x90\x01", b"\x81\xa2no\xc7\x05\x01abcde", b"\x81\xa1\xff\x01", b"\xc6\xff\xff\xff\xff"],
)  # fmt: skip
def test_broken_msgpack_is_a_typed_error(data):
    refuse(Ping(1), data, 0)


def test_too_large_header_is_ours_to_avoid():
    with pytest.raises(FrameTooLarge):
        encode_frame(Status({str(i): float(i) for i in range(4000)}))
    assert (
        len(encode_frame(Resume("r" * 256, B16, B16, tuple(range(2**20 - 2048, 2**20)), 2**62), 1)) < MAX_HEADER_BYTES
    )


def test_tokens():
    assert unpack_tokens(TOKENS) == (1, 2, 300) and largest_token(TOKENS) == 300
    assert pack_tokens([]) == b"" and largest_token(b"") == -1
    assert TOKENS.hex() == "01000000020000002c010000"


if __name__ == "__main__":
    print_vectors()
