"""Sealed records and frames: what opens, what does not, that no nonce repeats, and that guesses cannot be tested."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from common.errors import BadMessage, LinkLost, LocalProtocolError, SealBroken
from common.wire.connection import Closed, Received
from common.wire.frames import FRAME_BYTES, FrameHead, FrameType, Target, pack_head, parse_head
from common.wire.framing import SealedFraming, Unopened
from common.wire.messages import Piece, Ping, encode_frame, encode_header
from common.wire.seal import TAG_BYTES, OpenJob, SealJob, SealKey, direction_key
from tests.wire.kit import SESSION, client, closed, config, exchange, received, server
from tests.wire.test_messages import B16, B32, PIECE

SMALL = st.binary(max_size=300)
MODE_TLS = {"mode": "tls"}


def pair(key: bytes = B32) -> tuple[SealKey, SealKey]:
    """One direction's two ends."""
    return SealKey(key), SealKey(key)


def run(key: SealKey, aad: bytes, data: bytes) -> bytes:
    return key.seal(aad, (data,), len(data)).run()


# ---- records


@given(st.lists(st.tuples(SMALL, SMALL), max_size=8))
def test_what_was_sealed_opens_in_its_turn(records):
    ours, theirs = pair()
    for aad, data in records:
        sealed = run(ours, aad, data)
        assert len(sealed) == len(data) + TAG_BYTES
        assert theirs.open(aad, len(data)).run(sealed) == data


@given(st.binary(min_size=1, max_size=100), SMALL, st.data())
def test_an_altered_bit_anywhere_does_not_open(data, aad, draw):
    ours, theirs = pair()
    sealed = bytearray(run(ours, aad, data))
    at = draw.draw(st.integers(0, 8 * len(sealed) - 1))
    sealed[at // 8] ^= 1 << at % 8
    with pytest.raises(SealBroken, match="record 0"):
        theirs.open(aad, len(data)).run(sealed)


@given(SMALL, SMALL, SMALL)
def test_another_frame_header_does_not_open(data, aad, other):
    ours, theirs = pair()
    sealed = run(ours, aad, data)
    job = theirs.open(other, len(data))
    if aad == other:
        assert job.run(sealed) == data
    else:
        with pytest.raises(SealBroken):
            job.run(sealed)


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=2, max_size=8), st.data())
def test_repeated_moved_and_missing_records_do_not_open(texts, draw):
    """Any order but the one in which they were sealed fails at the first record that is not the expected one."""
    ours, theirs = pair()
    sealed = [run(ours, b"", text) for text in texts]
    order = draw.draw(st.lists(st.integers(0, len(texts) - 1), min_size=1, max_size=len(texts)))
    for turn, n in enumerate(order):
        job = theirs.open(b"", len(texts[n]))
        if n == turn:
            assert job.run(sealed[n]) == texts[n]
        else:
            with pytest.raises(SealBroken):
                job.run(sealed[n])
            return


@given(st.binary(min_size=1, max_size=60), st.integers(0, 75))
def test_a_cut_record_does_not_open(data, num):
    ours, theirs = pair()
    sealed = run(ours, b"", data)
    if num < len(sealed):
        with pytest.raises(SealBroken):
            theirs.open(b"", len(data)).run(sealed[:num])


def test_jobs_run_in_any_order_in_any_thread():
    ours, theirs = pair()
    texts = [bytes([n]) * (70_000 + n) for n in range(24)]
    jobs = [ours.seal(b"h%d" % n, (memoryview(t)[:9], memoryview(t)[9:]), len(t)) for n, t in enumerate(texts)]
    openers = [theirs.open(b"h%d" % n, len(t)) for n, t in enumerate(texts)]
    with ThreadPoolExecutor(4) as threads:
        sealed = list(threads.map(SealJob.run, reversed(jobs)))[::-1]
        assert list(threads.map(OpenJob.run, reversed(openers), reversed(sealed)))[::-1] == texts


def test_no_count_is_used_twice_and_the_nonce_is_the_count():
    ours, _ = pair()
    jobs = [ours.seal(b"", (b"x",), 1) for _ in range(1000)]
    assert [job.count for job in jobs] == list(range(1000))
    plain = AESGCM(B32).decrypt((7).to_bytes(12, "big"), jobs[7].run(), b"")
    assert plain == b"x"


@given(st.data())
def test_every_part_of_the_derivation_changes_the_key(draw):
    names = ("session_key", "session", "link", "sender", "client_nonce", "server_nonce")
    base = (B32, B16, 1, "prefill", B32, B32[::-1])
    changed = draw.draw(st.integers(0, 5))
    other = {2: 2, 3: "decode"}.get(changed, bytes(len(base[changed])) if isinstance(base[changed], bytes) else None)
    arguments = dict(zip(names, base, strict=True))
    assert direction_key(**arguments) != direction_key(**{**arguments, names[changed]: other})


def test_a_key_has_32_bytes():
    with pytest.raises(LocalProtocolError, match="16 bytes, must be 32"):
        SealKey(bytes(16))


def test_a_key_seals_and_opens_only_so_much():
    ours, theirs = SealKey(B32, max_blocks=5000), SealKey(B32, max_blocks=5000)
    assert ours.has_room(16 * 800) and not ours.has_room(16 * 1000), "what is left is for the last words"
    while ours.has_room(1600):
        data = run(ours, b"", bytes(1600))
        theirs.open(b"", 1600).run(data)
    last = run(ours, b"", bytes(1000))
    assert theirs.open(b"", 1000).run(last) == bytes(1000)
    with pytest.raises(LocalProtocolError, match="the limit is 5000"):
        for _ in range(100):
            ours.seal(b"", (bytes(1600),), 1600)
    with pytest.raises(SealBroken, match="more than 5000 blocks"):
        for _ in range(100):
            theirs.open(b"", 1600)


# ---- frames


def framings() -> tuple[SealedFraming, SealedFraming]:
    a, b = B32, B32[::-1]
    return SealedFraming(SealKey(a), SealKey(b)), SealedFraming(SealKey(b), SealKey(a))


def flat(parts) -> bytes:
    return b"".join(p.run() if isinstance(p, SealJob) else bytes(p) for p in parts)


def test_only_lengths_type_and_stream_of_a_frame_can_be_read():
    ours, _ = framings()
    data = flat(ours.encode(PIECE, 7, (b"statebyt",), 8))
    head = parse_head(data)
    header = encode_header(PIECE)
    assert (head.type, head.stream_id, head.header_bytes, head.payload_bytes) == (FrameType.PIECE, 7, len(header), 8)
    assert len(data) == FRAME_BYTES + len(header) + TAG_BYTES + 8 + TAG_BYTES
    assert PIECE.digest not in data and b"state" not in data
    assert head.header_check == 0, "a checksum of the header would tell whether a guess of it is right"


def test_equal_frames_do_not_look_equal():
    ours, _ = framings()
    first, second = (flat(ours.encode(Ping(7), 0, (), 0)) for _ in range(2))
    assert first[:FRAME_BYTES] == second[:FRAME_BYTES] and first[FRAME_BYTES:] != second[FRAME_BYTES:]


def test_a_payload_that_nobody_wants_keeps_its_turn():
    ours, theirs = framings()
    for payload, is_wanted in ((b"first", False), (b"second", True)):
        data = flat(ours.encode(PIECE, 7, (payload,), len(payload)))
        head = parse_head(data)
        behind = FRAME_BYTES + head.header_bytes + TAG_BYTES
        theirs.open_header(head, memoryview(data)[FRAME_BYTES:behind])
        target = Target([memoryview(bytearray(len(payload)))], len(payload))
        if not is_wanted:
            target.discard()
        sealed, unopened = theirs.receive_into(head, target)
        assert sealed.num_bytes == len(payload) + TAG_BYTES and sealed.is_discarded == (not is_wanted)
        if is_wanted:
            assert isinstance(unopened, Unopened) and unopened.target is target
            assert unopened.job.run(data[behind:]) == payload


def test_a_checksum_in_a_sealed_frame_is_refused():
    _, theirs = framings()
    head = parse_head(flat(framings()[0].encode(Ping(7), 0, (), 0)))
    with pytest.raises(BadMessage, match="must be 0"):
        theirs.open_header(head._replace(header_check=1), memoryview(bytes(21)))


# ---- links


def sealed_link(**args):
    """Both ends of data link 1 of a session with TLS, open."""
    key = b"1" * 32
    a = client(config("decode", **MODE_TLS), link=1, data_key=key, **args)
    b = server(config("prefill", **MODE_TLS), find_key=lambda s: key if s == SESSION else None, is_in_tls=False)
    exchange(a, b)
    assert a.is_open and b.is_open
    a.events(), b.events()
    return a, b


def piece_of(data: bytes) -> Piece:
    return Piece(0, 0, 1, (0,), "raw", len(data), len(data), 0, bytes(16), 1 << 16, 0)


def parts_of(connection) -> list[bytes]:
    return [p.run() if isinstance(p, SealJob) else bytes(p) for p in connection.data_to_send()]


def test_control_links_within_tls_agree_on_a_key_that_both_secrets_make():
    a, b = client(config("decode", **MODE_TLS)), server(config("prefill", **MODE_TLS))
    exchange(a, b)
    assert a.handshake.session_key == b.handshake.session_key is not None
    assert a.peer.secret is None and b.peer.secret is None, "it is not kept"
    for n in (0, 1):
        c, d = client(config("decode", **MODE_TLS)), server(config("prefill", **MODE_TLS))
        (c, d)[n].handshake._secret = b"other".ljust(32)
        exchange(c, d)
        assert c.handshake.session_key == d.handshake.session_key != a.handshake.session_key


@pytest.mark.parametrize("cut", [1, 7, 24, 41, 1000])
def test_sealed_frames_cut_anywhere(cut):
    a, b = sealed_link()
    payload = bytes(range(256)) * 3
    b.send(Ping(1))
    b.send(piece_of(payload), 5, (memoryview(payload)[:100], memoryview(payload)[100:]), len(payload))
    b.send(piece_of(b""), 5)
    stream = b"".join(parts_of(b))
    for i in range(0, len(stream), cut):
        a.receive(stream[i : i + cut], 0.0)
    first, second = received(a)
    assert isinstance(first.payload, Unopened) and first.payload.run() == payload
    assert first.payload.target.num_bytes == len(payload) and first.message == piece_of(payload)
    assert isinstance(second.payload, Target) and second.payload.num_bytes == 0
    assert b"".join(parts_of(a)).startswith(b"PF"), "the Pong"
    assert a.is_open


def test_flipped_bits_close_the_link_or_do_not_open():
    """Fixed header: checksum or the record's tag; sealed header: the tag; payload: its own tag, which a thread sees."""
    _, b = sealed_link()
    b.send(piece_of(b"payload!"), 5, (b"payload!",), 8)
    data = b"".join(parts_of(b))
    for bit in range(0, 8 * len(data), 5):
        a, _ = sealed_link()
        bad = bytearray(data)
        bad[bit // 8] ^= 1 << bit % 8
        a.receive(bad + bytes(100), 0.0)
        events = a.events()
        for event in events:
            if isinstance(event, Received):
                assert isinstance(event.payload, Unopened)
                with pytest.raises(SealBroken):
                    event.payload.run()
                break
        else:
            (event,) = events
            assert isinstance(event, Closed) and event.is_fault and event.code in ("checksum", "seal"), event


@pytest.mark.parametrize("order", [(0, 0), (1,), (1, 0), (0, 2), (0, 1, 1)])
def test_frames_repeated_moved_or_left_out_close_the_link(order):
    a, b = sealed_link()
    frames = []
    for n in range(3):
        b.send(Ping(n))
        frames.append(b"".join(parts_of(b)))
    b._ping_no = 2  # as if its timer had sent them: the Pongs are fine
    for n in order:
        a.receive(frames[n], 0.0)
    assert closed(a).code == "seal"
    exchange(a, b)
    assert closed(b).code == "seal", "the Error is sealed too, and the other end understands it"


def test_a_frame_of_an_earlier_connection_does_not_open():
    """The same session, link and key, other nonces: another epoch."""
    _, earlier = sealed_link()
    earlier.send(Ping(1))
    frame = b"".join(parts_of(earlier))
    a, _ = sealed_link(nonce=b"d" * 32)
    a.receive(frame, 0.0)
    assert closed(a).code == "seal"


def test_what_one_end_said_is_not_taken_from_the_other():
    a, b = sealed_link()
    b.send(Ping(1))
    own = b"".join(parts_of(b))
    b.receive(own, 0.0)
    assert closed(b).code == "seal"
    assert a.is_open


def test_clear_frames_on_a_sealed_link_are_refused():
    a, _ = sealed_link()
    a.receive(encode_frame(Ping(1)) + bytes(TAG_BYTES), 0.0)
    assert closed(a).code == "bad_message"
    a, _ = sealed_link()
    a.receive(pack_head(FrameHead(FrameType.PING, 0, 5, 0)) + encode_header(Ping(1)) + bytes(TAG_BYTES), 0.0)
    assert closed(a).code == "seal"


@given(st.lists(st.one_of(st.binary(max_size=200), st.sampled_from(["ping", "piece"])), max_size=6))
def test_whatever_comes_ends_in_frames_or_a_closed_link(parts):
    """Real frames among any other bytes: what was not sealed here is never handed on, and nothing is raised."""
    a, b = sealed_link()
    for part in parts:
        if part == "ping":
            b.send(Ping(1))
        elif part == "piece":
            b.send(piece_of(b"payload!"), 5, (b"payload!",), 8)
        a.receive(part if isinstance(part, bytes) else b"".join(parts_of(b)), 0.0)
    is_clean = not any(isinstance(part, bytes) and part for part in parts)
    assert a.is_open or not is_clean
    for event in a.events():
        assert isinstance(event, Received | Closed)
        if isinstance(event, Received):
            assert event.payload.run() == b"payload!"


def test_heartbeats_are_sealed():
    a, b = sealed_link()
    a.handle_timer(2.0)
    data = b"".join(parts_of(a))
    assert len(data) == FRAME_BYTES + len(encode_header(Ping(1))) + TAG_BYTES
    b.receive(data, 2.0)
    a.receive(b"".join(parts_of(b)), 2.5)
    assert a.rtt_s == 0.5


def test_a_used_up_key_ends_the_link_in_order():
    a, b = sealed_link()
    for end in (a, b):
        for key in (end._framing._send_key, end._framing._receive_key):
            key._max_blocks = 9000
    payload = bytes(20_000)
    num = 0
    while b.is_open:
        b.send(piece_of(payload), 5, (payload,), len(payload))
        num += 1
    assert num == 4, "the fourth would pass 9000 - 4096 blocks"
    event = closed(b)
    assert isinstance(event.error, LinkLost) and not event.is_fault
    a.receive(b"".join(parts_of(b)), 0.0)
    events = a.events()
    assert [type(e) for e in events] == [Received, Received, Received, Closed]
    assert [e.payload.run() for e in events[:3]] == [payload] * 3
    assert "made anew" in str(events[3].error) and events[3].is_remote
