"""A prefix that the client pushes, over both sessions in memory: whole, cut, lied about, resumed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.errors import BadMessage, PeerCancelled, RemoteProtocolError, RequestDamaged, UnknownFrame
from common.wire.departures import OutPiece
from common.wire.messages import PushAck, Pushed
from common.wire.session import PushMoved, SegmentArrived
from common.wire.tables import Phase
from tests.wire.kit import FULL, LAYOUT, Ends, Sink, cut, fill

N, START = 60, 25


def pushing(
    layout=LAYOUT,
    *,
    credit_bytes: int = 1 << 20,
    codec: str = "raw",
    queue: bool = True,
    accepts: bool = True,
    **limits,
):
    """A stream whose prefix is asked for, and queued; the server's side of it, source and sink."""
    ends = Ends(layout, credit_bytes, **limits)
    source, sink = Sink(layout, START).filled(), Sink(layout, START)
    stream = ends.request(N, START, pushes=True)
    ends.talk()
    served = ends.server.streams[stream.stream_id]
    served.accept(ends._handle(), 0, 0.0)
    ends.server.settle(served)
    ends.talk()
    assert ends.client.next_piece(1) is None, "nothing may be sent before it is asked for"
    if accepts:
        ends.server.accept_push(served, sink.buffers)
        ends.talk()
    if queue:
        ends.queue_push(stream, source, cut(layout, 0, START, 7), codec)
        ends.client.push_all(stream)
    return ends, stream, served, source, sink


def moved(events) -> int:
    return sum(isinstance(event, PushMoved) for event in events)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("credit_bytes", [0, 1 << 20])
def test_a_prefix_arrives_whole(codec, credit_bytes):
    ends, stream, served, source, sink = pushing(codec=codec, credit_bytes=credit_bytes, max_segment_bytes=4096)
    assert any(isinstance(e, PushMoved) and e.stream is stream for e in ends.client.events())
    assert moved(ends.push(sink)) == 1
    assert served.is_pushed and sink.equals(source, 0, START)
    assert stream.push.staged_bytes == 0
    served.start(1.0)
    ends.server.settle(served)
    ends.talk()
    assert not stream.is_pushing and stream.phase is Phase.STREAMING


def test_what_is_asked_for_comes_afterwards():
    ends, stream, served, _, _ = pushing()
    ends.push()
    served.start(1.0)
    whole = Sink(LAYOUT, N).filled(3)
    ends.queue(served, whole, cut(LAYOUT, START, N, 16))
    served.complete(N, 0.5)
    ends.server.settle(served)
    ends.run()
    assert stream.phase is Phase.DONE and served.phase is Phase.DONE
    assert ends.server._credit.outstanding_bytes == 0


def test_a_server_may_begin_without_it():
    ends, stream, served, _, sink = pushing()
    piece = ends.client.next_piece(1)
    served.start(1.0)
    ends.server.settle(served)
    ends.talk()
    assert ends.client.next_piece(1) is None and stream.push.staged_bytes == 0
    ends.carry_up(piece)  # it was on its way
    assert not sink.landings and not any(isinstance(e, SegmentArrived) for e in ends.land_push(sink))


def test_only_what_was_granted_may_come():
    ends, stream, _, source, _ = pushing(queue=False, accepts=False)
    ends.queue_push(stream, source, cut(LAYOUT, 0, START, 7))
    stream.push.limit = 1 << 40
    with pytest.raises(BadMessage, match="not asked for"):
        ends.carry_up(ends.client.next_piece(1))
    ends.talk()
    assert isinstance(stream.error, RequestDamaged), "the stream ends: sent again it would be the same"


def test_a_stream_without_a_prefix_takes_none():
    ends = Ends()
    stream = ends.request(N)
    served = ends.accepted(stream)
    source = Sink(LAYOUT, N).filled()
    ends.queue(served, source, cut(LAYOUT, 0, N, 16))
    piece = ends.server.next_piece(1)
    ends.server.open_piece(1, stream.stream_id, piece.message, piece.num_bytes)  # streaming: thrown away
    with pytest.raises(UnknownFrame):
        ends.server.open_piece(1, 99, piece.message, piece.num_bytes)
    with pytest.raises(BadMessage, match="start is 0"):
        ends.request(N, 0, pushes=True)
        ends.talk()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": (9,)}, "not needed"),
        ({"start": START, "stop": START + 7}, "not within"),
        ({"codec": "q8"}, "not offered"),
        ({"raw": 1}, "the layout says"),
        ({"at": 1 << 40}, "credit"),
    ],
)
def test_a_lying_piece_ends_the_stream(change, words):
    ends, stream, served, _, _ = pushing()
    piece = ends.client.next_piece(1)
    with pytest.raises(BadMessage, match=words):
        ends.carry_up(OutPiece(piece.stream_id, piece.segment, replace(piece.message, **change), piece.num_bytes))
    ends.talk()
    assert served.phase is Phase.FAILED and isinstance(stream.error, RequestDamaged)


@pytest.mark.parametrize("change", [{"digest": bytes(16)}, {"encoded": 1}, {"num_segments": 1}])
def test_a_sum_that_is_wrong_ends_the_stream(change):
    ends, stream, served, _, _ = pushing()
    while (piece := ends.client.next_piece(1)) is not None:
        ends.carry_up(piece)
    ends.land_push()
    for out in ends.client.take_outbox():
        message = replace(out.message, **change) if isinstance(out.message, Pushed) else out.message
        ends.server.receive(out.stream_id, message, None)
    ends.talk()
    assert not served.is_pushed and isinstance(stream.error, RequestDamaged)


def test_a_prefix_with_a_hole_is_not_whole():
    ends, stream, served, source, _ = pushing(FULL, queue=False)
    ends.queue_push(stream, source, [s for s in cut(FULL, 0, START, 7) if s[:2] != (7, 14)])
    ends.client.push_all(stream)
    ends.push()
    assert not served.is_pushed and isinstance(stream.error, RequestDamaged) and "row 7" in str(stream.error)


def test_a_lost_data_link_costs_its_pieces_only():
    ends, _, served, source, sink = pushing()
    pieces = [ends.client.next_piece(1 + n % 2) for n in range(6)]
    for piece in pieces[::2]:
        ends.carry_up(piece)
    ends.land_push(sink)
    ends.talk()
    ends.client.link_lost(2)
    again = []
    while (piece := ends.client.next_piece(1)) is not None:
        again.append(piece.message.no)
        ends.carry_up(piece)
    assert {p.message.no for p in pieces[1::2]} <= set(again)
    assert not {p.message.no for p in pieces[::2]} & set(again)
    ends.push(sink)
    assert served.is_pushed and sink.equals(source, 0, START)


@pytest.mark.parametrize("num_before", [0, 3, 100])
def test_a_lost_control_link_costs_what_was_not_acknowledged(num_before):
    ends, stream, served, source, sink = pushing()
    for _ in range(num_before):
        if (piece := ends.client.next_piece(1)) is not None:
            ends.carry_up(piece)
    landed = {e.segment.head.no for e in ends.land_push(sink) if hasattr(e, "segment")}
    ends.detach()
    assert ends.client.next_piece(1) is None
    ends.attach()
    ends.talk()
    assert stream.is_pushing
    again = set()
    while (piece := ends.client.next_piece(1)) is not None:
        again.add(piece.message.no)
        ends.carry_up(piece)
    assert not landed & again
    ends.push(sink)
    assert served.is_pushed and sink.equals(source, 0, START)


def test_permission_given_while_the_client_is_away_is_given_when_it_is_back():
    ends, stream, served, source, sink = pushing(queue=False, accepts=False)
    ends.detach()
    ends.server.accept_push(served, sink.buffers)
    ends.attach()
    ends.talk()
    ends.queue_push(stream, source, cut(LAYOUT, 0, START, 7))
    ends.client.push_all(stream)
    ends.push(sink)
    assert served.is_pushed and sink.equals(source, 0, START)


def test_a_cancel_ends_it():
    ends, stream, served, _, _ = pushing()
    ends.client.cancel(stream)
    ends.talk()
    assert served.phase is Phase.CANCELLED and isinstance(stream.error, PeerCancelled)
    assert ends.client.next_piece(1) is None and ends.server._credit.outstanding_bytes == 0


def test_a_damaged_segment_never_counts():
    ends, _, served, _, _ = pushing()
    ends.carry_up(ends.client.next_piece(1), flip=True)
    with pytest.raises(AssertionError):  # the kit verifies digests as net/ does
        ends.land_push()
    assert not served.is_pushed


def test_an_acknowledgement_of_nothing_sent_is_an_error():
    ends, _, served, _, _ = pushing(queue=False)
    with pytest.raises(RemoteProtocolError, match="names more than"):
        ends.client.receive(1, PushAck((5,), 1), 0.0)
    assert served is not None


def test_prefixes_go_whole_one_after_the_other():
    ends = Ends(max_segment_bytes=4096)
    source = Sink(LAYOUT, START).filled()
    for _ in range(3):
        stream = ends.request(N, START, pushes=True)
        ends.talk()
        served = ends.server.streams[stream.stream_id]
        served.accept(ends._handle(), 0, 0.0)
        ends.server.settle(served)
        ends.server.accept_push(served, Sink(LAYOUT, START).buffers)
        ends.talk()
        ends.queue_push(stream, source, cut(LAYOUT, 0, START, 7))
    order = [piece.stream_id for piece in iter(lambda: ends.client.next_piece(1), None)]
    assert order == sorted(order) and set(order) == {1, 2, 3}


def test_sums_that_contradict_each_other_end_the_stream():
    ends, stream, served, _, _ = pushing()
    [said] = [o.message for o in ends.client.take_outbox() if isinstance(o.message, Pushed)]
    ends.server.receive(1, said, None)
    with pytest.raises(BadMessage):
        ends.server.receive(1, replace(said, num_segments=said.num_segments + 1), None)
    ends.talk()
    assert served.phase is Phase.FAILED and isinstance(stream.error, RequestDamaged)


def test_a_server_that_begins_without_it_writes_nothing_more():
    ends, _, served, source, sink = pushing()
    piece = ends.client.next_piece(1)
    data = b"".join(bytes(p) for p in piece.payload())
    target = ends.server.open_piece(1, 1, piece.message, len(data))
    served.start(1.0)
    ends.server.settle(served)
    fill(target, data)
    assert not any(sink.memory[key] != bytearray(len(sink.memory[key])) for key in sink.memory)
    assert ends.server._credit.outstanding_bytes == 0 and source is not sink
