"""Every (state, input) pair of every table, against the tables themselves and against living objects."""

from __future__ import annotations

from itertools import product

import pytest

from common.errors import LocalProtocolError, UnknownFrame
from common.wire.connection import Closed
from common.wire.frames import FrameHead, FrameType, pack_head
from common.wire.tables import (
    CLIENT_ATTACH,
    CLIENT_STREAM,
    CONNECTION,
    FINAL,
    SERVER_ATTACH,
    SERVER_STREAM,
    Attach,
    Conn,
    Do,
    Phase,
    step,
)
from tests.wire.kit import SESSION, client, exchange, opened, sent, server

INPUTS = [*FrameType, *Do]
LIVE = [p for p in Phase if p not in FINAL]


@pytest.mark.parametrize("table", [CLIENT_STREAM, SERVER_STREAM], ids=["client", "server"])
@pytest.mark.parametrize(("phase", "given"), list(product(Phase, INPUTS)), ids=lambda v: v.name)
def test_stream_step(table, phase, given):
    following = table[phase].get(given)
    if following is not None:
        assert step(table, phase, given, "stream 1") is following
        return
    is_remote = isinstance(given, FrameType) or given is Do.FINAL_ACK
    with pytest.raises(UnknownFrame if is_remote else LocalProtocolError, match=f"{given.name}.*{phase.name}"):
        step(table, phase, given, "stream 1")


@pytest.mark.parametrize("table", [CLIENT_STREAM, SERVER_STREAM], ids=["client", "server"])
def test_tables_are_whole(table):
    assert set(table) == set(Phase)
    for phase in FINAL:
        assert set(table[phase].values()) == {phase}, "a final phase is never left"
    for phase in LIVE:
        if table is CLIENT_STREAM or phase is not Phase.IDLE:
            assert table[phase][Do.FAIL] is Phase.FAILED and table[phase][Do.CANCEL] is Phase.CANCELLED
    reachable, todo = {Phase.IDLE}, [Phase.IDLE]
    while todo:
        new = set(table[todo.pop()].values()) - reachable
        reachable |= new
        todo += new
    assert reachable == set(Phase)


def test_done_has_one_way_in():
    ways = {(p, i) for p in Phase for i, f in CLIENT_STREAM[p].items() if f is Phase.DONE and p is not Phase.DONE}
    assert ways == {(Phase.COMPLETING, Do.VERIFIED)}
    ways = {(p, i) for p in Phase for i, f in SERVER_STREAM[p].items() if f is Phase.DONE and p is not Phase.DONE}
    assert ways == {(Phase.COMPLETING, Do.FINAL_ACK)}


def test_attachment_tables():
    assert CLIENT_ATTACH[Attach.RESUMING] == {FrameType.ACCEPTED: Attach.ATTACHED, Do.DETACH: Attach.DETACHED}
    assert SERVER_ATTACH[Attach.DETACHED] == {FrameType.RESUME: Attach.ATTACHED}


def in_state(role, kind, state):
    """A living connection in that state and the bytes of nothing yet."""
    link = 0 if kind == "control" else 1
    key = b"k" * 32
    a = client(link=link, data_key=key if link else None)
    b = server(find_key=lambda session: key)
    mine = a if role == "decode" else b
    if state is Conn.HELLO:
        return mine
    if role == "prefill":
        b.receive(sent(a), 0.0)
    if role == "decode":
        b.receive(sent(a), 0.0)
        a.receive(sent(b), 0.0)
    if state is Conn.AUTH:
        return mine
    if state is Conn.IDENTITY and role == "decode":
        b.receive(sent(a), 0.0)
        frames = sent(b)
        a.receive(frames[: 24 + int.from_bytes(frames[6:8], "big")], 0.0)
        return mine
    if state is Conn.IDENTITY:
        a.receive(sent(b), 0.0)
        b.receive(sent(a), 0.0)
        return mine
    exchange(a, b)
    if state is Conn.DRAINING:
        from common.wire.messages import Drain

        b.send(Drain(True))
        exchange(a, b)
    return mine


STATES = [(role, kind, s) for (role, kind), table in CONNECTION.items() for s in table]


@pytest.mark.parametrize(("role", "kind", "state"), STATES, ids=lambda v: getattr(v, "name", v))
@pytest.mark.parametrize("frame", list(FrameType), ids=lambda f: f.name)
def test_connection_takes_exactly_what_its_table_names(role, kind, state, frame):
    connection = in_state(role, kind, state)
    assert connection.state is state and connection.session in (SESSION, b"")
    connection.events()
    # An empty header: a frame that is allowed fails at its fields, one that is not at its type.
    stream = 0 if frame.value < 16 or frame is FrameType.RESUMED else 1
    connection.receive(pack_head(FrameHead(frame, stream, 0, 0)), 0.0)
    error = next((e.error for e in connection.events() if isinstance(e, Closed)), None)
    if frame in CONNECTION[role, kind][state] or (state is Conn.HELLO and role == "prefill" and frame in
                                                  CONNECTION[role, "control"][state]):  # fmt: skip
        assert not isinstance(error, UnknownFrame)
    else:
        assert isinstance(error, UnknownFrame)


@pytest.mark.parametrize("frame", list(FrameType), ids=lambda f: f.name)
def test_closed_connection_reads_nothing(frame):
    a, _ = opened()
    a.receive_eof()
    a.events()
    assert a.state is Conn.CLOSED
    a.receive(pack_head(FrameHead(frame, 0, 0, 0)) * 10_000, 0.0)
    assert a.events() == [] and a.data_to_send() == []
