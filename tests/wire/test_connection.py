"""Handshake and its attacks, frames cut at every byte, limits before allocation, heartbeats with literal times."""

from __future__ import annotations

import msgpack
import pytest

from common.errors import (
    AuthFailed,
    BadMagic,
    BadMessage,
    ChecksumMismatch,
    FrameTooLarge,
    LayoutMismatch,
    LinkLost,
    LocalProtocolError,
    PeerError,
    UnknownFrame,
    VersionMismatch,
)
from common.wire.connection import Closed, Opened, Received
from common.wire.frames import FrameHead, FrameType, Target, checksum, pack_head
from common.wire.messages import Auth, Credit, Drain, Error, Hello, Ping, Prefill, Resumed, Status, encode_frame
from common.wire.tables import Conn
from common.wire.tokens import pack_tokens
from tests.wire.kit import (
    KEY,
    KEY_ID,
    SESSION,
    client,
    closed,
    config,
    exchange,
    is_opened,
    opened,
    received,
    sent,
    server,
)
from tests.wire.test_messages import PIECE, SAMPLES

# ---- handshake


def test_control_link_opens_and_tells_who_is_there():
    a, b = opened()
    (event_a,), (event_b,) = a.events(), b.events()
    assert isinstance(event_a, Opened) and event_a.peer.name == "p1"
    assert isinstance(event_b, Opened) and event_b.peer.name == "d1"
    assert a.handshake.session_key == b.handshake.session_key is not None
    assert a.is_open and b.is_open


def test_nothing_of_the_identity_is_said_before_both_proofs():
    a, b = client(), server()
    first = sent(a)
    b.receive(first, 0.0)
    second = sent(b)
    a.receive(second, 0.0)
    third = sent(a)
    for said in (first, second, third):
        assert b"d1" not in said and b"p1" not in said and b"float32" not in said
    b.receive(third, 0.0)
    assert b"p1" in sent(b), "the server's HelloAck follows its proof"


def test_unkeyed_ends_open_too():
    a, b = opened(config("decode", None), config("prefill", None))
    assert is_opened(a) and is_opened(b)


@pytest.mark.parametrize(("ours", "theirs"), [(KEY, None), (None, KEY)])
def test_keyed_and_unkeyed_do_not_mix(ours, theirs):
    a, b = opened(config("decode", ours), config("prefill", theirs))
    assert isinstance(closed(b).error, AuthFailed)
    assert closed(a).code == "auth"


def test_wrong_key_is_refused_by_the_server_first():
    a, b = opened(config("decode", b"x" * 32), config("prefill", KEY))
    end = closed(b)
    assert isinstance(end.error, AuthFailed) and end.code == "auth"
    end = closed(a)
    assert end.is_remote and end.code == "auth" and isinstance(end.error, PeerError)


def test_server_with_the_wrong_key_is_refused_by_the_client():
    a, b = client(), server()
    b.receive(sent(a), 0.0)
    a.receive(sent(b), 0.0)
    a.data_to_send()
    a.receive(encode_frame(Auth(b"\0" * 32)), 0.0)
    assert isinstance(closed(a).error, AuthFailed)


def test_reflected_hello_is_refused():
    a = client()
    a.receive(sent(a), 0.0)
    assert isinstance(closed(a).error, AuthFailed)


def test_reflected_hello_with_the_other_role_and_our_nonce_is_refused():
    a = client(nonce=b"n" * 32)
    a.data_to_send()
    a.receive(encode_frame(Hello("prefill", b"n" * 32, SESSION, 0, "key", (KEY_ID,))), 0.0)
    assert isinstance(closed(a).error, AuthFailed)


def test_reflected_proof_is_refused():
    """Someone without the key answers with a Hello of its own and sends the client's proof back."""
    a = client()
    a.data_to_send()
    a.receive(encode_frame(Hello("prefill", b"z" * 32, SESSION, 0, "key", (KEY_ID,))), 0.0)
    proof = sent(a)
    a.receive(proof, 0.0)
    assert isinstance(closed(a).error, AuthFailed)


def test_proof_of_another_run_is_refused():
    """A recorded client proof does not open a link with another server nonce."""
    a, b = client(), server()
    hello = sent(a)
    b.receive(hello, 0.0)
    a.receive(sent(b), 0.0)
    proof = sent(a)
    other = server(nonce=b"q" * 32)
    other.receive(hello + proof, 0.0)
    assert isinstance(closed(other).error, AuthFailed)


def data_pair(server_key, client_key, session=SESSION, link=1):
    a = client(session=session, link=link, data_key=client_key)
    b = server(find_key=lambda s: server_key if s == SESSION else None)
    exchange(a, b)
    return a, b


def test_data_link_joins_its_own_session():
    a, b = data_pair(b"1" * 32, b"1" * 32)
    assert is_opened(a) and is_opened(b) and b.link == 1 and b.session == SESSION


def test_data_link_cannot_join_another_session():
    key_of_another_session = b"2" * 32
    a, b = data_pair(b"1" * 32, key_of_another_session)
    assert isinstance(closed(b).error, AuthFailed) and closed(a).code == "auth"


def test_data_link_of_an_unknown_session_looks_like_a_wrong_proof():
    a, b = data_pair(b"1" * 32, b"1" * 32, session=b"?" * 16)
    c, d = data_pair(b"1" * 32, b"2" * 32)
    assert str(closed(b).error) == str(closed(d).error)
    assert str(closed(a).error) == str(closed(c).error)


def test_shared_key_alone_does_not_open_a_data_link():
    _, b = data_pair(b"1" * 32, KEY)
    assert isinstance(closed(b).error, AuthFailed)


@pytest.mark.parametrize(("session", "link"), [(b"t" * 16, 1), (SESSION, 2), (SESSION, 0)])
def test_proof_for_another_link_or_session_is_refused(session, link):
    """A man in the middle that rewrites the Hello of a data link gains nothing: the proof covers it."""
    key = b"1" * 32
    a = client(link=1, data_key=key)
    b = server(find_key=lambda s: key)
    a.data_to_send()
    b.receive(encode_frame(Hello("decode", b"c" * 32, session, link, "key", (KEY_ID,))), 0.0)
    answer = encode_frame(Hello("prefill", b"p" * 32, SESSION, 1, "key", (KEY_ID,)))
    b.data_to_send()
    a.receive(answer, 0.0)
    b.receive(sent(a), 0.0)
    assert isinstance(closed(b).error, AuthFailed)


def test_session_keys_differ_by_control_link():
    a, _ = opened(nonce=b"1" * 32)
    c, _ = opened(nonce=b"2" * 32)
    assert a.handshake.session_key != c.handshake.session_key


def test_server_that_answers_for_another_session_is_refused():
    a = client()
    a.data_to_send()
    a.receive(encode_frame(Hello("prefill", b"p" * 32, b"t" * 16, 0, "key", (KEY_ID,))), 0.0)
    assert isinstance(closed(a).error, AuthFailed)


@pytest.mark.parametrize("field", ["weights", "config", "tokenizer", "layout", "block_tokens", "hash_scheme"])
def test_identity_mismatch_names_field_ours_and_theirs(field):
    ours, theirs = (1, 2) if field == "block_tokens" else ("aaa", "bbb")
    a, b = opened(config("decode", **{field: ours}), config("prefill", **{field: theirs}))
    ends = [closed(a), closed(b)]
    assert {e.code for e in ends} == {"layout_mismatch"}
    assert all(isinstance(e.error, LayoutMismatch) for e in ends)
    says = f"not the same model (ours/theirs): {field} "
    assert [str(e.error) for e in ends] == [f"{says}{ours}/{theirs}", f"{says}{theirs}/{ours}"]
    assert [e.error.differences for e in ends] == [{field: (ours, theirs)}, {field: (theirs, ours)}]


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        ({"dtype": "float32", "kv_dtype": "bfloat16"}, "kv_dtype float32/bfloat16 (engine.kv_dtype): set it"),
        (
            {"dtype": "bfloat16", "kv_dtype": "bfloat16"},
            "dtype float32/bfloat16 (engine.dtype), kv_dtype float32/bfloat16 (engine.kv_dtype): set them",
        ),
    ],
)
def test_another_layout_that_comes_from_settings_names_them(theirs, says):
    ours = {"dtype": "float32", "kv_dtype": "float32"}
    a, _ = opened(
        config("decode", layout="aaa", numerics=ours),
        config("prefill", layout="bbb", numerics=theirs | {"weights": "x"}),
    )
    error = closed(a).error
    assert isinstance(error, LayoutMismatch)
    assert str(error) == f"not the same state layout: {says} alike at both ends"
    assert error.differences["layout"] == ("aaa", "bbb")
    assert error.differences["numerics.kv_dtype"] == ("float32", "bfloat16")
    a, _ = opened(
        config("decode", weights="other", layout="aaa", numerics=ours), config("prefill", layout="bbb", numerics=theirs)
    )
    assert str(closed(a).error).startswith("not the same model (ours/theirs): weights ")


def test_numerics_matter_only_when_asked():
    other = {"dtype": "bfloat16"}
    a, b = opened(config("decode"), config("prefill", numerics=other))
    assert a.is_open and b.is_open and a.peer.numerics == other
    a, b = opened(config("decode", require_same_numerics=True), config("prefill", numerics=other))
    end = closed(a)
    assert isinstance(end.error, LayoutMismatch) and "numerics.dtype" in str(end.error)


# ---- frames


def stream_of_frames() -> bytes:
    """Everything a client may receive on a data link, twice."""
    piece = encode_frame(PIECE, 3, 8) + b"statebyt"
    return encode_frame(Ping(0)) + piece + encode_frame(Ping(1)) + piece


def run_cut(data: bytes, cuts: list[int]):
    memory: list[bytearray] = []

    def open_piece(stream_id, piece, num_bytes):
        memory.append(bytearray(num_bytes))
        views = [memoryview(memory[-1])[:3], memoryview(memory[-1])[3:]]
        return Target(views, num_bytes)

    key = b"k" * 32
    a, b = client(link=1, data_key=key, open_piece=open_piece), server(find_key=lambda s: key)
    exchange(a, b)
    a.events()
    for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        a.receive(data[begin:end], 0.0)
    return [(e.stream_id, e.message) for e in received(a)], [bytes(m) for m in memory], sent(a)


def test_split_at_every_byte_gives_the_same_events():
    data = stream_of_frames()
    whole = run_cut(data, [])
    assert whole[1] == [b"statebyt"] * 2 and len(whole[0]) == 2
    for at in range(1, len(data)):
        assert run_cut(data, [at]) == whole, at
    assert run_cut(data, list(range(1, len(data)))) == whole


def test_handshake_and_control_frames_cut_at_every_byte():
    a, b = client(), server()
    b.receive(sent(a), 0.0)
    a.receive(sent(b), 0.0)
    b.receive(sent(a), 0.0)
    tail = b"".join(
        encode_frame(m, s) for n, (m, s, _) in SAMPLES.items() if n in ("Drain", "Status", "Accepted", "Started")
    )
    data = sent(b) + tail + encode_frame(Status({"x": 1.0}))

    def run(cuts):
        c, d = client(), server()
        d.receive(sent(c), 0.0)
        c.receive(sent(d), 0.0)
        c.data_to_send()
        for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            c.receive(data[begin:end], 0.0)
        return c.events(), c.state

    whole = run([])
    assert len(whole[0]) == 6 and whole[1] is Conn.DRAINING
    for at in range(1, len(data)):
        assert run([at]) == whole, at
    assert run(list(range(1, len(data)))) == whole


def test_get_buffer_is_idempotent_at_every_byte():
    a, b = opened()
    a.events()
    data = encode_frame(Status({"x": 1.0})) + encode_frame(Drain(True))
    for i in range(len(data)):
        first, again = a.get_buffer(), a.get_buffer()
        assert len(first) == len(again) > 0
        again[0] = data[i]
        assert first[0] == data[i], "both are the same memory"
        a.buffer_updated(1, 0.0)
    assert len(received(a)) == 2
    assert b.is_open


def test_payload_lands_in_the_views_without_a_copy():
    memory = bytearray(1 << 16)
    key = b"k" * 32
    a = client(link=1, data_key=key, open_piece=lambda s, p, n: Target([memoryview(memory)], n))
    b = server(find_key=lambda s: key)
    exchange(a, b)
    a.events()
    a.receive(encode_frame(PIECE, 3, len(memory)), 0.0)
    buffer = a.get_buffer()
    assert buffer.obj is memory and len(buffer) == len(memory)


def test_prefill_carries_its_tokens():
    a, b = opened()
    b.events()
    tokens = pack_tokens(range(1000))
    a.send(Prefill("r", 0, 1000, None, 0, b"", ("raw",), 1, bytes(16)), 1, (tokens,), len(tokens))
    b.receive(sent(a), 0.0)
    (event,) = received(b)
    assert isinstance(event, Received) and bytes(event.payload) == tokens


# ---- limits


def fed(data: bytes, role: str = "prefill"):
    a, b = opened()
    mine = b if role == "prefill" else a
    mine.events()
    mine.receive(data, 0.0)
    return closed(mine).error


def test_wrong_magic_and_version():
    for data, error in ((b"GET / HTTP/1.1\r\nHost: p\r\n", BadMagic), (b"PF\x01" + bytes(21), VersionMismatch)):
        b = server()
        b.receive(data, 0.0)
        assert isinstance(closed(b).error, error)
        assert isinstance(fed(data), ChecksumMismatch), "a peer does not change its protocol in the middle of a link"


def test_header_over_the_limit_is_refused_unread():
    assert isinstance(fed(pack_head(FrameHead(FrameType.CREDIT, 1, 16385, 0))), FrameTooLarge)
    b = server()
    b.receive(pack_head(FrameHead(FrameType.HELLO, 0, 513, 0)), 0.0)
    assert isinstance(closed(b).error, FrameTooLarge)


def test_payload_where_none_belongs():
    assert isinstance(fed(pack_head(FrameHead(FrameType.CREDIT, 1, 10, 1))), FrameTooLarge)


def test_tokens_over_the_limit_are_refused_unread():
    error = fed(pack_head(FrameHead(FrameType.PREFILL, 1, 100, 4 * 4097)))
    assert isinstance(error, FrameTooLarge) and "16388" in str(error) and "16384" in str(error)


def test_tokens_and_payload_must_agree():
    message = Prefill("r", 0, 3, None, 0, b"", ("raw",), 1, bytes(16))
    assert isinstance(fed(encode_frame(message, 1, 16) + bytes(16)), BadMessage)


def test_piece_over_the_limit_is_refused_before_memory_is_asked_for():
    asked = []
    key = b"k" * 32
    a = client(link=1, data_key=key, open_piece=lambda s, p, n: asked.append(n))
    b = server(find_key=lambda s: key)
    exchange(a, b)
    a.events()
    a.receive(encode_frame(PIECE, 1, 65537), 0.0)
    assert isinstance(closed(a).error, FrameTooLarge) and asked == []


def test_client_may_not_fail_streams():
    assert isinstance(fed(encode_frame(Error("engine", "x", None), 3)), UnknownFrame)


def test_error_says_why_and_closes_the_other_end():
    a, b = opened()
    a.events(), b.events()
    a.fail(BadMessage("field x is 3, must be 1..2"))
    assert a.state is Conn.CLOSED
    b.receive(sent(a), 0.0)
    end = closed(b)
    assert end.is_remote and end.code == "bad_message" and "field x is 3" in str(end.error)
    a.send(Resumed())
    assert a.data_to_send() == [], "nothing is sent on a closed link"


def test_send_before_the_handshake_is_our_bug():
    with pytest.raises(LocalProtocolError):
        client().send(Credit(1), 1)


def test_early_link_holds_little_memory():
    assert len(server().get_buffer()) <= 536


# ---- time


def test_handshake_has_a_deadline():
    b = server(now=100.0)
    assert b.next_timer() == 105.0
    b.handle_timer(104.9)
    assert b.state is Conn.HELLO
    b.handle_timer(105.0)
    assert isinstance(closed(b).error, LinkLost)


def test_ping_each_heartbeat_and_rtt():
    a, b = opened(now=10.0)
    assert a.next_timer() == 0.0, "the first Ping goes out at once"
    a.handle_timer(10.0)
    b.receive(sent(a), 10.02)
    a.receive(sent(b), 10.05)
    assert a.rtt_s == pytest.approx(0.05)
    assert a.next_timer() == 12.0


def test_silence_of_two_and_a_half_heartbeats_is_a_loss():
    a, b = opened()
    a.events()
    for at in (0.0, 2.0, 4.0):
        a.handle_timer(at)
        assert a.is_open
    b.receive(sent(a), 4.0)
    a.handle_timer(4.99)
    assert a.is_open
    a.handle_timer(5.0)
    end = closed(a)
    assert isinstance(end.error, LinkLost) and "5.0 s" in str(end.error)


def test_any_byte_is_life():
    a, _ = opened()
    a.events()
    for at in (0.0, 2.0, 4.0):
        a.handle_timer(at)
    a.receive(b"P", 4.9)
    a.handle_timer(5.0)
    assert a.is_open and a.next_timer() <= 7.4


def test_late_timer_is_our_own_sleep():
    a, b = opened()
    a.events()
    a.handle_timer(0.0)
    b.receive(sent(a), 0.0)
    waiting = sent(b)
    a.handle_timer(60.0)
    assert a.is_open, "what the peer said meanwhile is still in the socket"
    a.receive(waiting, 60.0)
    a.handle_timer(62.0)
    assert a.is_open


def test_late_timer_with_nothing_in_the_socket_ends_after_one_more_heartbeat():
    a, _ = opened()
    a.events()
    a.handle_timer(0.0)
    a.handle_timer(60.0)
    a.handle_timer(61.0)
    a.handle_timer(62.0)
    assert isinstance(closed(a).error, LinkLost)


def test_pong_that_answers_nothing():
    a, _ = opened()
    a.events()
    answer = msgpack.packb({"no": 9})
    a.receive(pack_head(FrameHead(FrameType.PONG, 0, len(answer), 0, checksum(answer))) + answer, 0.0)
    assert isinstance(closed(a).error, BadMessage)


def test_eof_is_a_loss():
    a, _ = opened()
    a.events()
    a.receive_eof()
    a.receive_eof()
    (end,) = a.events()
    assert isinstance(end, Closed) and end.code == "eof" and not end.is_remote


def test_drain_and_back():
    a, b = opened()
    a.events()
    b.send(Drain(True))
    a.receive(sent(b), 0.0)
    assert a.state is Conn.DRAINING and a.is_open
    b.send(Drain(False))
    a.receive(sent(b), 0.0)
    assert a.state is Conn.OPEN
