"""Both sessions without sockets: transfers in any order, lost links, Resume, leases, credit, endings."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from common.errors import (
    BadMessage,
    LinkLost,
    LocalProtocolError,
    PeerCancelled,
    PeerDraining,
    PeerEngineFailed,
    PeerInvalid,
    PeerShed,
    PromptTooLong,
    RequestDamaged,
    StaleHandle,
    TransferIncomplete,
    UnknownFrame,
)
from common.wire.departures import OutPiece
from common.wire.digest import seal
from common.wire.messages import Accepted, Ack, Cancel, Complete, Credit, Prefill, Progress, Resume, Resumed
from common.wire.session import Out, StreamEnded, StreamRefused, StreamRequested
from common.wire.tables import Attach, Phase
from tests.wire.kit import FULL, LAYOUT, Ends, Sink, cut, fill

N = 60


def transfer(ends: Ends, num_tokens: int = N, start: int = 0, codec: str = "raw", chunk: int = 16):
    """A stream with everything queued and Complete said; (client's, server's, source, sink)."""
    source, sink = Sink(ends.layout, num_tokens).filled(), Sink(ends.layout, num_tokens)
    stream = ends.request(num_tokens, start, sink)
    served = ends.accepted(stream)
    segments = cut(ends.layout, start, num_tokens, chunk)
    ends.queue(served, source, segments, codec)
    served.complete(num_tokens, 1.5)
    ends.server.settle(served)
    return stream, served, source, sink


def pieces(ends: Ends, link: int = 1):
    out = []
    while (piece := ends.server.next_piece(link)) is not None:
        out.append(piece)
    return out


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("start", [0, 1, 37, N - 1, N])
def test_whole_transfer(codec, start):
    ends = Ends()
    stream, served, source, sink = transfer(ends, start=start, codec=codec)
    ends.run(sink)
    assert (stream.phase, served.phase) == (Phase.DONE, Phase.DONE)
    assert stream.error is None and served.error is None
    assert sink.equals(source, start, N)
    assert stream.verified_prefix() == N
    assert stream.arrivals.raw_bytes == LAYOUT.transfer_bytes(start, N) and served.staged_bytes == 0
    assert not ends.client.streams and not ends.server.streams
    assert stream.marks.prefill_s == 1.5


@pytest.mark.parametrize("seed", range(20))
def test_pieces_in_any_order_twice_over_any_link(seed):
    rng = random.Random(seed)
    ends = Ends()
    stream, served, source, sink = transfer(ends, num_tokens=700, codec="raw", chunk=400)
    waiting = pieces(ends)
    assert len(waiting) >= 20
    waiting += rng.sample(waiting, 10)
    rng.shuffle(waiting)
    for piece in waiting:
        ends.carry(piece, link=rng.randint(1, 4))
        if rng.random() < 0.3:
            ends.land(sink)
        if rng.random() < 0.3:
            ends.talk()
    ends.run(sink)
    assert stream.phase is Phase.DONE and served.phase is Phase.DONE and sink.equals(source, 0, 700)


def test_data_links_may_be_faster_than_the_control_link():
    ends = Ends()
    source, sink = Sink(LAYOUT, N).filled(), Sink(LAYOUT, N)
    stream = ends.request(N, 0, sink)
    for out in ends.client.take_outbox():
        ends.server.receive(out.stream_id, out.message, bytearray(out.payload))
    served = ends.server.streams[1]
    served.accept(b"h" * 16, 0, 0.0)
    served.start(0.0)
    ends.queue(served, source, cut(LAYOUT, 0, N, 16))
    for piece in pieces(ends):
        ends.carry(piece)
    assert stream.phase is Phase.REQUESTED and ends.land() == 0, "nothing is used before Accepted"
    served.complete(N, 0.0)
    ends.server.settle(served)
    ends.run(sink)
    assert stream.phase is Phase.DONE and sink.equals(source, 0, N)


def half(ends: Ends, piece, link: int):
    """A piece of which half has arrived; answers the target and the rest of the bytes."""
    data = b"".join(bytes(p) for p in piece.payload())
    target = ends.client.open_piece(link, piece.stream_id, piece.message, len(data))
    middle = len(data) // 2
    buffer = target.get_buffer()
    assert len(buffer) >= middle > 0
    buffer[:middle] = data[:middle]
    target.advance(middle)
    return target, data[middle:]


def test_second_copy_takes_over_from_a_half_piece():
    ends = Ends()
    stream, _, source, sink = transfer(ends)
    first, *others = pieces(ends)
    target, rest = half(ends, first, link=1)
    ends.carry(first, link=2)
    ends.land(sink)
    fill(target, bytes(len(rest)))
    ends.client.piece_arrived(1, first.message, target, 0.0)
    for piece in others:
        ends.carry(piece)
    ends.run(sink)
    assert stream.phase is Phase.DONE and sink.equals(source, 0, N), "zeros of the old copy went nowhere"


def test_nothing_is_written_after_the_end():
    ends = Ends()
    stream, _, _, sink = transfer(ends)
    piece = pieces(ends)[0]
    target, rest = half(ends, piece, link=1)
    ends.client.cancel(stream)
    before = {k: bytes(v) for k, v in sink.memory.items()}
    fill(target, b"\xff" * len(rest))
    ends.client.piece_arrived(1, piece.message, target, 0.0)
    ends.carry(piece)
    assert {k: bytes(v) for k, v in sink.memory.items()} == before
    assert ends.land() == 0


def test_lost_data_link_resends_what_is_not_acknowledged():
    ends = Ends()
    stream, served, source, sink = transfer(ends, num_tokens=700, chunk=200)
    first = [ends.server.next_piece(1) for _ in range(3)]
    second = [ends.server.next_piece(2) for _ in range(3)]
    for piece in second:
        ends.carry(piece, link=2)
    half(ends, first[0], link=1)
    ends.client.link_lost(1)
    ends.server.link_lost(1)
    again = [ends.server.next_piece(2) for _ in range(3)]
    assert [p.message for p in again] == [p.message for p in first]
    for piece in again:
        ends.carry(piece, link=2)
    ends.run(sink)
    assert stream.phase is Phase.DONE and served.phase is Phase.DONE and sink.equals(source, 0, 700)


# ---- Resume


@pytest.mark.parametrize("seed", range(10))
def test_session_lost_at_any_point_goes_on(seed):
    rng = random.Random(seed)
    ends = Ends()
    stream, served, source, sink = transfer(ends, num_tokens=700, chunk=100, codec=rng.choice(["raw", "zstd"]))
    for _ in range(3):
        for _ in range(rng.randint(0, 8)):
            piece = ends.server.next_piece(1)
            if piece is not None and rng.random() < 0.8:
                ends.carry(piece)
        ends.land(sink)
        if rng.random() < 0.5:
            ends.talk()
        ends.detach()
        assert not served.is_over and served.attach is Attach.DETACHED and ends.server.next_piece(1) is None
        ends.attach()
    ends.run(sink)
    assert stream.phase is Phase.DONE and served.phase is Phase.DONE and sink.equals(source, 0, 700)


def test_what_has_landed_is_not_sent_again():
    ends = Ends()
    _, served, _, sink = transfer(ends, num_tokens=700, chunk=100)
    for _ in range(6):
        ends.carry(ends.server.next_piece(1))
    landed = ends.land(sink)
    assert landed >= 2
    ends.detach()
    ends.attach()
    ends.talk()
    resent = {p.message.no for p in pieces(ends)}
    assert resent == set(range(served.departures.next_no)) - {
        n for n in range(served.departures.next_no) if n not in resent
    }
    assert len(resent) == served.departures.next_no - landed


def test_messages_are_repeated_after_resume():
    ends = Ends()
    stream = ends.request(N)
    served = ends.accepted(stream)
    served.progress(10)
    served.progress(20)
    ends.server.settle(served)
    ends.server.take_outbox()
    ends.detach()
    served.progress(30)
    ends.attach()
    ends.talk()
    assert stream.num_computed == 30 and stream.attach is Attach.ATTACHED and stream.phase is Phase.STREAMING


def test_stream_that_was_not_accepted_is_asked_for_again():
    ends = Ends()
    stream = ends.request(N)
    ends.talk()
    first = ends.server.streams[1]
    ends.detach()
    assert first.phase is Phase.CANCELLED and stream.phase is Phase.IDLE
    ends.attach()
    served = ends.accepted(stream)
    assert served is not first and stream.phase is Phase.STREAMING


def test_accepted_that_was_lost_starts_over():
    ends = Ends()
    source, sink = Sink(LAYOUT, N).filled(), Sink(LAYOUT, N)
    stream = ends.request(N, 0, sink)
    ends.talk()
    first = ends.server.streams[1]
    first.accept(b"h" * 16, 0, 0.0)
    first.start(0.0)
    ends.queue(first, source, cut(LAYOUT, 0, N, 16)[:3])
    for piece in pieces(ends):
        ends.carry(piece)
    assert ends.land(sink) == 0, "what the first attempt sent is not used"
    ends.detach()
    assert stream.phase is Phase.IDLE and stream.arrivals.wire_bytes == 0
    ends.attach()
    served = ends.accepted(stream)
    assert first.phase is Phase.CANCELLED and isinstance(first.error, PeerCancelled)
    ends.queue(served, source, cut(LAYOUT, 0, N, 7))
    served.complete(N, 0.0)
    ends.server.settle(served)
    ends.run(sink)
    assert stream.phase is Phase.DONE and sink.equals(source, 0, N)


def test_state_that_comes_when_the_control_link_is_lost_already_is_thrown_away():
    """Data links are closed a moment after their control link; what they still bring breaks no rule."""
    ends = Ends()
    source, sink = Sink(LAYOUT, N).filled(), Sink(LAYOUT, N)
    stream = ends.request(N, 0, sink)
    ends.talk()
    first = ends.server.streams[1]
    first.accept(b"h" * 16, 0, 0.0)
    first.start(0.0)
    ends.queue(first, source, cut(LAYOUT, 0, N, 16)[:3])
    late = pieces(ends)
    ends.detach()
    for piece in late:
        ends.carry(piece)
    assert stream.phase is Phase.IDLE and stream.error is None and stream.arrivals.wire_bytes == 0
    ends.attach()
    served = ends.accepted(stream)
    ends.queue(served, source, cut(LAYOUT, 0, N, 16))
    served.complete(N, 0.0)
    ends.server.settle(served)
    ends.run(sink)
    assert stream.phase is Phase.DONE and sink.equals(source, 0, N)


def resume_of(ends: Ends) -> tuple[int, Resume]:
    out = next(o for o in ends.client.take_outbox() if isinstance(o.message, Resume))
    return out.stream_id, out.message


@pytest.mark.parametrize("change", [{"handle": bytes(16)}, {"request_id": "other"}, {"token_hash": bytes(16)}])
def test_handle_is_bound_to_request_and_tokens(change):
    ends = Ends()
    stream = ends.request(N)
    served = ends.accepted(stream)
    ends.detach()
    ends.attach()
    stream_id, resume = resume_of(ends)
    ends.server.receive(stream_id, replace(resume, **change), None)
    ends.talk()
    assert isinstance(stream.error, StaleHandle)
    ends.server.receive(0, Resumed(), None)
    assert served.phase is Phase.CANCELLED


def test_handle_is_good_until_a_newer_one_was_shown():
    ends = Ends()
    stream = ends.request(N)
    ends.accepted(stream)
    shown = []
    for lost in (False, True, True, False, False):
        ends.detach()
        ends.attach()
        stream_id, resume = resume_of(ends)
        ends.server.receive(stream_id, resume, None)
        answer = [o for o in ends.server.take_outbox() if isinstance(o.message, Accepted)]
        if not lost:
            ends.client.receive(stream_id, answer[0].message, 0.0)
        shown.append(resume.handle)
    assert shown[1] == shown[2] == shown[3] and len(set(shown)) == 3, "without the answer the old one is shown again"
    ends.detach()
    ends.attach()
    stream_id, resume = resume_of(ends)
    ends.server.receive(stream_id, replace(resume, handle=shown[3]), None)
    ends.talk()
    assert isinstance(stream.error, StaleHandle)


def test_resume_of_a_stream_that_is_gone_or_attached():
    ends = Ends()
    stream = ends.request(N)
    served = ends.accepted(stream)
    ends.detach()
    ends.server.drop(LinkLost("lease"))
    ends.attach()
    ends.talk()
    assert isinstance(stream.error, StaleHandle) and isinstance(served.error, LinkLost)
    other = ends.request(N)
    ends.accepted(other)
    with pytest.raises(BadMessage, match="has a control link"):
        ends.server.receive(other.stream_id, Resume("r1", bytes(16), bytes(16), (), 0), None)


def test_streams_that_are_not_mentioned_are_gone():
    ends = Ends()
    stream = ends.request(N)
    served = ends.accepted(stream)
    ends.detach()
    ends.client.cancel(stream)
    ends.attach()
    ends.talk()
    assert served.phase is Phase.CANCELLED and not ends.server.streams


def test_nothing_is_said_before_accepted_of_the_resume():
    ends = Ends()
    stream = ends.request(N)
    ends.accepted(stream)
    ends.detach()
    ends.attach()
    with pytest.raises(UnknownFrame, match="before the Resume"):
        ends.client.receive(1, Progress(10, 0, bytes(16)), 0.0)
    with pytest.raises(UnknownFrame, match="before its Resume"):
        ends.server.receive(1, Credit(5), None)


def test_restarted_peer_fails_its_streams_at_once():
    ends = Ends()
    stream = ends.request(N)
    ends.accepted(stream)
    ends.detach()
    ends.attach(instance="prefill-2")
    assert isinstance(stream.error, LinkLost) and "restarted" in str(stream.error)
    assert any(isinstance(e, StreamEnded) for e in ends.client.events())


def test_lease_ends_on_both_sides():
    ends = Ends()
    stream = ends.request(N)
    served = ends.accepted(stream)
    ends.now = 100.0
    ends.detach()
    for now, is_over in ((129.9, False), (130.0, True)):
        ends.client.expire(now)
        ends.server.expire(now)
        assert (stream.is_over, served.is_over) == (is_over, is_over)
    assert isinstance(stream.error, LinkLost) and isinstance(served.error, LinkLost)
    assert served.staged_bytes == 0


# ---- endings


def broken_complete(**changes):
    ends = Ends()
    stream, served, _, sink = transfer(ends)
    out = ends.server.take_outbox()
    for o in out:
        message = replace(o.message, **changes) if isinstance(o.message, Complete) else o.message
        ends.client.receive(o.stream_id, message, 0.0)
    ends.run(sink)
    return stream, served


@pytest.mark.parametrize("change", [{"digest": bytes(16)}, {"encoded": 1}, {"num_segments": 1}, {"num_segments": 0}])
def test_complete_that_does_not_agree(change):
    stream, served = broken_complete(**change)
    assert isinstance(stream.error, TransferIncomplete) and stream.phase is Phase.FAILED
    assert served.phase is Phase.CANCELLED, "the peer was told"


def test_complete_for_other_tokens():
    with pytest.raises(BadMessage):
        broken_complete(num_tokens=N - 1)


def test_complete_counting_more_than_comes_waits():
    stream, _ = broken_complete(num_segments=1000)
    assert stream.phase is Phase.COMPLETING


def test_complete_without_a_required_row_is_not_whole():
    ends = Ends()
    source, sink = Sink(LAYOUT, N).filled(), Sink(LAYOUT, N)
    stream = ends.request(N, 0, sink)
    served = ends.accepted(stream)
    segments = cut(LAYOUT, 0, N, 16)
    ends.queue(served, source, [s for s in segments if s != (32, 48, (1,))])
    served.complete(N, 0.0)
    ends.server.settle(served)
    ends.run(sink)
    assert isinstance(stream.error, TransferIncomplete) and "layer 1 (full): row 32" in str(stream.error)


def test_verified_prefix_after_a_failure():
    ends = Ends(FULL)
    source, sink = Sink(FULL, N).filled(), Sink(FULL, N)
    stream = ends.request(N, 0, sink)
    served = ends.accepted(stream)
    for begin in (0, 16, 32):
        ends.queue(served, source, [(begin, begin + 16, (0,)), (begin, begin + 16, (1,))])
        if begin < 32:
            served.progress(begin + 16)
    ends.server.settle(served)
    ends.run(sink)
    assert stream.arrivals.num_landed == 6
    served.fail(PeerEngineFailed("out of memory"))
    ends.server.settle(served)
    ends.run(sink)
    assert isinstance(stream.error, PeerEngineFailed)
    assert stream.verified_prefix() == 32, "rows 32..48 landed but no digest covers them"


def test_progress_with_a_wrong_digest_ends_the_stream():
    ends = Ends()
    stream, _, _, sink = transfer(ends)
    ends.client.receive(1, Progress(16, 1, b"x" * 16), 0.0)
    ends.run(sink)
    assert isinstance(stream.error, TransferIncomplete) and stream.verified_prefix() == 0


@pytest.mark.parametrize(
    "progress", [Progress(5, 0, bytes(16)), Progress(10, 0, bytes(16)), Progress(N + 1, 9, bytes(16)),
                 Progress(30, 1, bytes(16))],
)  # fmt: skip
def test_progress_does_not_go_back(progress):
    ends = Ends()
    ends.accepted(ends.request(N))
    ends.client.receive(1, Progress(10, 2, b"d" * 16), 0.0)
    with pytest.raises(BadMessage):
        ends.client.receive(1, progress, 0.0)


def test_cancel_at_both_ends():
    ends = Ends()
    stream, served, _, _ = transfer(ends)
    ends.carry(ends.server.next_piece(1))
    ends.client.cancel(stream)
    ends.client.cancel(stream)
    assert isinstance(stream.error, PeerCancelled) and not ends.client.streams
    ends.talk()
    assert served.phase is Phase.CANCELLED and ends.server.next_piece(1) is None and served.staged_bytes == 0
    with pytest.raises(LocalProtocolError):
        served.progress(3)


def test_late_frames_for_a_stream_that_is_gone_are_ignored():
    ends = Ends()
    stream, _, _, _ = transfer(ends)
    late = pieces(ends)
    ends.client.cancel(stream)
    ends.client.receive(1, Accepted(bytes(16), 0, bytes(16)), 0.0)
    for piece in late:
        ends.carry(piece)
    ends.talk()
    ends.server.receive(1, Ack((0,), 10, False), None)
    ends.server.receive(1, Cancel("x", ""), None)
    assert [type(e) for e in ends.client.events()] == [StreamEnded]


@pytest.mark.parametrize("stream_id", [2, 99])
def test_frames_for_a_stream_that_never_was(stream_id):
    ends = Ends()
    _, _, _, _ = transfer(ends)
    piece = pieces(ends)[0]
    with pytest.raises(UnknownFrame):
        ends.client.receive(stream_id, Accepted(bytes(16), 0, bytes(16)), 0.0)
    with pytest.raises(UnknownFrame):
        ends.client.open_piece(1, stream_id, piece.message, piece.num_bytes)
    with pytest.raises(UnknownFrame):
        ends.server.receive(stream_id, Ack((0,), 10, False), None)


def test_ack_for_a_segment_that_was_not_sent():
    ends = Ends()
    _, served, _, _ = transfer(ends)
    ends.talk()
    with pytest.raises(BadMessage):
        ends.server.receive(1, Ack((served.departures.next_no,), 10, False), None)


def test_final_ack_only_after_complete():
    ends = Ends()
    ends.accepted(ends.request(N))
    with pytest.raises(UnknownFrame):
        ends.server.receive(1, Ack((), 10, True), None)


def test_refusals():
    ends = Ends(max_prompt_tokens=50, max_streams=2)
    with pytest.raises(PromptTooLong):
        ends.request(51)
    ends.server.is_draining = True
    stream = ends.request(50)
    ends.talk()
    assert isinstance(stream.error, PeerDraining) and not ends.server.streams
    ends.server.is_draining = False
    ends.request(50), ends.request(50)
    with pytest.raises(PeerShed):
        ends.request(50)


def test_server_guards_itself_against_a_client_without_limits():
    ends = Ends(max_prompt_tokens=50, max_streams=2)
    ends.talk()

    def ask(stream_id: int, num: int, tokens: bytes | None = None):
        payload = bytearray(tokens if tokens is not None else 4 * num)
        asked = seal(Prefill("r", 0, num, None, 0, b"", ("raw",), 1, bytes(16)), payload)
        ends.server.receive(stream_id, asked, payload)
        return [o.message.code for o in ends.server.take_outbox()]

    assert ask(1, 51) == ["prompt_too_long"]
    assert ask(2, 5) == [] and ask(3, 5) == []
    assert ask(4, 5) == ["shed"]
    with pytest.raises(BadMessage, match="in use"):
        ask(3, 5)
    with pytest.raises(BadMessage, match="vocabulary"):
        ask(5, 1, b"\xe8\x03\x00\x00")
    with pytest.raises(BadMessage, match="start"):
        asked = seal(Prefill("r", 6, 5, None, 0, b"", ("raw",), 1, bytes(16)), bytes(20))
        ends.server.receive(6, asked, bytearray(20))


def test_codecs_are_those_both_ends_name():
    ends = Ends()
    ends.talk()
    asked = ends.request(N, codecs=("lz9", "zstd"))
    assert asked.prefill.codecs == ("zstd",)
    with pytest.raises(PeerInvalid, match="lz9"):
        ends.request(N, codecs=("lz9",))
    ends.client.take_outbox()
    unknown = seal(replace(asked.prefill, codecs=("zstd", "lz9")), asked.tokens)
    ends.server.receive(9, unknown, bytearray(asked.tokens))
    assert [o.message.code for o in ends.server.take_outbox()] == ["invalid"] and not ends.server.streams


@pytest.mark.parametrize(
    "change",
    [{"request_id": "other"}, {"start": 1}, {"deadline_s": 3.0}, {"priority": 1}, {"salt": b"s"}, {"codecs": ("raw",)}],
)
def test_prefill_that_is_not_what_was_sent_is_refused(change):
    """Fields are under the frame's checksum too; what is asked for has a digest of its own from end to end."""
    ends = Ends()
    stream = ends.request(N)
    ends.client.take_outbox()
    ends.server.receive(1, replace(stream.prefill, **change), bytearray(stream.tokens))
    ends.talk()
    assert isinstance(stream.error, RequestDamaged) and stream.phase is Phase.FAILED
    (refused,) = (e for e in ends.server.events() if isinstance(e, StreamRefused))
    assert isinstance(refused.error, RequestDamaged)


def test_damaged_token_is_refused_and_the_session_goes_on():
    ends = Ends()
    stream = ends.request(N)
    ends.client.take_outbox()
    tokens = bytearray(stream.tokens)
    tokens[100] ^= 1
    ends.server.receive(1, stream.prefill, tokens)
    ends.talk()
    assert isinstance(stream.error, RequestDamaged) and not ends.server.streams
    again, _, source, sink = transfer(ends)
    ends.run(sink)
    assert again.phase is Phase.DONE and sink.equals(source, 0, N)


def test_accepted_for_other_tokens_ends_the_stream():
    ends = Ends()
    stream = ends.request(N)
    with pytest.raises(BadMessage, match="other tokens"):
        ends.client.receive(1, Accepted(bytes(16), 0, bytes(16)), 0.0)
    assert isinstance(stream.error, TransferIncomplete)


def test_state_of_other_tokens_is_not_taken():
    """Same rows, same layers, right digests of the bytes: but the chain began with another request."""
    ends = Ends()
    stream, _, _, sink = transfer(ends)
    other = replace(stream.prefill, token_hash=b"o" * 16)
    for out in ends.server.take_outbox():
        ends.client.receive(out.stream_id, out.message, 0.0)
    stream.arrivals._chain[0] = other.token_hash
    ends.run(sink)
    assert isinstance(stream.error, TransferIncomplete) and "digest" in str(stream.error)


def test_deadline_is_what_is_left_when_asked_again():
    ends = Ends()
    ends.now = 1.0
    stream = ends.request(N, deadline_s=10.0)
    ends.talk()
    ends.detach()
    ends.now = 5.0
    ends.attach()
    ends.talk()
    assert ends.server.streams[1].prefill.deadline_s == 6.0 and not stream.is_over


@pytest.mark.parametrize(
    "change", [{"request_id": "x" * 257}, {"priority": 1001}, {"deadline_s": -1.0}, {"codecs": ()}]
)
def test_what_the_peer_would_refuse_is_not_sent(change):
    ends = Ends()
    ends.talk()
    with pytest.raises(LocalProtocolError, match=next(iter(change))):
        ends.request(N, **change)
    assert ends.client.take_outbox() == [] and not ends.client.streams


def test_a_bug_of_the_service_does_not_cost_the_session():
    ends = Ends()
    stream = ends.request(N)
    served = ends.accepted(stream)
    with pytest.raises(LocalProtocolError, match="prefill_s"):
        served.complete(N, float("nan"))
    served.fail(PeerEngineFailed("x" * 5000))
    ends.server.settle(served)
    ends.talk()
    assert isinstance(stream.error, PeerEngineFailed) and len(str(stream.error)) == 1000


def test_no_session_no_request():
    ends = Ends()
    ends.detach()
    with pytest.raises(LinkLost):
        ends.request(N)


# ---- credit


def test_sender_stops_at_the_limit_and_goes_on_with_acks():
    ends = Ends(FULL, credit_bytes=8192, max_segment_bytes=8192)
    stream, served, source, sink = transfer(ends, num_tokens=1000, chunk=80)
    ends.talk()
    total = served.departures.next_at
    first = pieces(ends)
    assert 0 < sum(p.num_bytes for p in first) <= 8192 < total
    for piece in first:
        ends.carry(piece)
    assert ends.server.next_piece(1) is None
    ends.run(sink)
    assert stream.phase is Phase.DONE and sink.equals(source, 0, 1000)


def test_eight_streams_with_less_credit_than_one_needs_all_finish():
    ends = Ends(FULL, credit_bytes=16384, max_segment_bytes=8192)
    runs = [transfer(ends, num_tokens=600, chunk=80) for _ in range(8)]
    sinks = {stream.stream_id: sink for stream, _, _, sink in runs}
    assert all(served.departures.next_at > 16384 for _, served, _, _ in runs)
    for _ in range(10_000):
        ends.talk()
        piece = ends.server.next_piece(1)
        if piece is None:
            break
        ends.carry(piece)
        ends.land(sinks[piece.stream_id])
    assert all(stream.phase is Phase.DONE for stream, _, _, _ in runs)
    assert all(sink.equals(source, 0, 600) for _, _, source, sink in runs)


def test_states_go_whole_one_after_the_other():
    ends = Ends(FULL)
    for _ in range(3):
        transfer(ends, num_tokens=600, chunk=80)
    ends.talk()
    assert order_sent(ends) == [1, 2, 3]


def test_states_go_in_the_order_that_was_arranged():
    ends = Ends(FULL)
    for _ in range(4):
        transfer(ends, num_tokens=600, chunk=80)
    ends.talk()
    ends.server.arrange((3, 9, 2))  # one that is over
    assert order_sent(ends) == [3, 2, 1, 4]


def test_who_waits_for_its_turn_is_told_from_who_waits_for_the_client():
    ends = Ends(FULL)
    _, served, sink, _ = transfer(ends, num_tokens=600, chunk=300)
    ends.talk()
    sent = served.departures
    assert sent.waits_for_turn, "nothing was sent"
    pieces = [ends.server.next_piece(1)]
    assert sent.waits_for_turn, "a part of the first segment"
    while sent.num_waiting and pieces[-1].message.no == 0:
        pieces.append(ends.server.next_piece(1))
    assert not sent.waits_for_turn, "the first is whole and not acknowledged"
    for piece in pieces:
        ends.carry(piece)
    ends.land(sink)
    ends.talk()
    assert sent.waits_for_turn
    sent.limit = 0
    assert not sent.waits_for_turn, "the client takes no more"


def order_sent(ends):
    """Streams in the order in which they send all that they may."""
    order = [piece.stream_id for piece in iter(lambda: ends.server.next_piece(1), None)]
    assert len(order) > 2 * len(set(order)), "several pieces each"
    return [stream for n, stream in enumerate(order) if not n or order[n - 1] != stream]


# ---- pieces that lie


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"start": 100}, "rows"),
        ({"stop": N + 1}, "rows"),
        ({"stop": 0}, "rows"),
        ({"layers": (0, 0)}, "twice"),
        ({"layers": (9,)}, "not needed"),
        ({"layers": (2,)}, "not needed"),
        ({"layers": (4,)}, "not needed"),
        ({"layers": (0, 3)}, "raw"),
        ({"raw": 5}, "raw"),
        ({"encoded": 5}, "encoded"),
        ({"encoded": 2**40}, "encoded"),
        ({"codec": "lz4"}, "codec"),
        ({"codec": "zstd", "encoded": 2**30}, "encoded"),
        ({"piece": 65537}, "piece"),
        ({"at": 2**40}, "credit"),
        ({"at": 1 << 20}, "credit"),
        ({"offset": 1}, "offset"),
        ({"offset": 4096}, "offset"),
        ({"offset": 2**40 // 4096 * 4096}, "offset"),
    ],
)
def test_lying_piece_is_refused_before_anything_is_reserved(change, words):
    ends = Ends()
    asked = []
    source = Sink(LAYOUT, N).filled()
    stream = ends.request(N, 0, None)
    stream.arrivals.sink_buffers = lambda *args: asked.append(args) or ()
    served = ends.accepted(stream)
    ends.queue(served, source, [(0, 16, (0,))])
    piece = ends.server.next_piece(1)
    with pytest.raises(BadMessage, match=words):
        ends.client.open_piece(1, 1, replace(piece.message, **change), piece.num_bytes)
    assert asked == [] and not stream.arrivals.segments


@pytest.mark.parametrize("num_bytes", [0, 1, 767, 769, 65536])
def test_payload_of_another_length(num_bytes):
    ends = Ends()
    _, _, _, _ = transfer(ends)
    piece = pieces(ends)[0]
    assert piece.num_bytes == 768
    with pytest.raises(BadMessage, match="payload"):
        ends.client.open_piece(1, 1, piece.message, num_bytes)


def test_segment_that_changes_its_mind():
    ends = Ends()
    transfer(ends, num_tokens=700, chunk=700)
    first, second = pieces(ends)[:2]
    ends.carry(first)
    with pytest.raises(BadMessage, match="differs"):
        ends.client.open_piece(1, 1, replace(second.message, digest=bytes(16)), second.num_bytes)


def test_stream_that_was_lied_to_does_not_go_on():
    """A piece under a wrong number claims rows for good: resending would meet it again and again."""
    ends = Ends()
    stream, served, _, sink = transfer(ends)
    first = pieces(ends)[0]
    ends.carry(OutPiece(served.stream_id, first.segment, replace(first.message, no=7), first.num_bytes))
    with pytest.raises(BadMessage, match="overlap"):
        ends.carry(first)
    assert isinstance(stream.error, TransferIncomplete) and "overlap" in str(stream.error)
    ends.run(sink)
    assert served.phase is Phase.CANCELLED


def test_rows_are_claimed_once():
    ends = Ends()
    transfer(ends)
    first = pieces(ends)[0]
    ends.carry(first)
    with pytest.raises(BadMessage, match="overlap"):
        ends.client.open_piece(1, 1, replace(first.message, no=77), first.num_bytes)


def test_claims_together_stay_below_the_credit():
    ends = Ends(FULL, credit_bytes=8192, max_segment_bytes=8192)
    stream, _, _, _ = transfer(ends, num_tokens=1000, chunk=80)
    waiting = pieces(ends)
    ends.carry(waiting[0])
    lie = replace(waiting[0].message, no=5, start=200, stop=280, at=0)
    for no in range(5, 5 + 8192 // lie.encoded):
        at = 80 * no - 200
        with_room = stream.arrivals._claimed_bytes + lie.encoded <= stream.arrivals.limit
        message = replace(lie, no=no, start=200 + at, stop=280 + at)
        if with_room:
            ends.client.open_piece(1, 1, message, lie.encoded)
        else:
            with pytest.raises(BadMessage, match="credit"):
                ends.client.open_piece(1, 1, message, lie.encoded)
            return
    pytest.fail("the sum of the segments was never refused")


def test_events_name_what_happened():
    ends = Ends()
    stream = ends.request(N)
    ends.talk()
    (event,) = ends.server.events()
    assert isinstance(event, StreamRequested) and event.stream.prefill.num_tokens == N
    ends.client.cancel(stream)
    (event,) = ends.client.events()
    assert isinstance(event, StreamEnded) and event.stream is stream
    assert ends.client.take_outbox() == [Out(1, Cancel("cancelled", str(stream.error)))]
