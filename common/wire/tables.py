"""The state machines as literal tables: connection, stream phase of either end, attachment. See docs/protocol.md.

Rule: what is not in a table is a protocol error. This file knows no message contents and no I/O.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Literal

from common.errors import LocalProtocolError, UnknownFrame
from common.wire.frames import FrameType as F

Role = Literal["decode", "prefill"]
LinkKind = Literal["control", "data"]


class Conn(Enum):
    """State of one link."""

    HELLO = auto()
    AUTH = auto()
    IDENTITY = auto()
    OPEN = auto()
    DRAINING = auto()
    CLOSED = auto()


class Phase(Enum):
    """State of one stream at either end."""

    IDLE = auto()
    REQUESTED = auto()
    ACCEPTED = auto()
    STREAMING = auto()
    COMPLETING = auto()
    DONE = auto()
    FAILED = auto()
    CANCELLED = auto()


class Attach(Enum):
    """Whether a live stream has a control link."""

    ATTACHED = auto()
    DETACHED = auto()
    RESUMING = auto()


class Do(Enum):
    """Inputs that do not come from the peer, and FINAL_ACK, which is an Ack with is_final."""

    REQUEST = auto()
    ACCEPT = auto()
    REFUSE = auto()
    START = auto()
    SEGMENT = auto()
    PROGRESS = auto()
    COMPLETE = auto()
    VERIFIED = auto()
    FAIL = auto()
    CANCEL = auto()
    DETACH = auto()
    RESUME = auto()
    FINAL_ACK = auto()


Input = F | Do
FINAL = frozenset({Phase.DONE, Phase.FAILED, Phase.CANCELLED})

CONTROL_OF_CLIENT: dict[Conn, dict[F, Conn]] = {
    Conn.HELLO: {F.HELLO: Conn.AUTH, F.ERROR: Conn.CLOSED},
    Conn.AUTH: {F.AUTH: Conn.IDENTITY, F.ERROR: Conn.CLOSED},
    Conn.IDENTITY: {F.HELLO_ACK: Conn.OPEN, F.ERROR: Conn.CLOSED},
    Conn.OPEN: {
        F.PING: Conn.OPEN,
        F.PONG: Conn.OPEN,
        F.ERROR: Conn.OPEN,
        F.DRAIN: Conn.OPEN,
        F.STATUS: Conn.OPEN,
        F.ACCEPTED: Conn.OPEN,
        F.REFUSED: Conn.OPEN,
        F.STARTED: Conn.OPEN,
        F.PROGRESS: Conn.OPEN,
        F.COMPLETE: Conn.OPEN,
        F.PUSH_ACK: Conn.OPEN,
        F.CACHE_EVENT: Conn.OPEN,
    },
    Conn.DRAINING: {
        F.PING: Conn.DRAINING,
        F.PONG: Conn.DRAINING,
        F.ERROR: Conn.DRAINING,
        F.DRAIN: Conn.DRAINING,
        F.STATUS: Conn.DRAINING,
        F.ACCEPTED: Conn.DRAINING,
        F.REFUSED: Conn.DRAINING,
        F.STARTED: Conn.DRAINING,
        F.PROGRESS: Conn.DRAINING,
        F.COMPLETE: Conn.DRAINING,
        F.PUSH_ACK: Conn.DRAINING,
        F.CACHE_EVENT: Conn.DRAINING,
    },
}
CONTROL_OF_SERVER: dict[Conn, dict[F, Conn]] = {
    Conn.HELLO: {F.HELLO: Conn.AUTH, F.ERROR: Conn.CLOSED},
    Conn.AUTH: {F.AUTH: Conn.IDENTITY, F.ERROR: Conn.CLOSED},
    Conn.IDENTITY: {F.HELLO_ACK: Conn.OPEN, F.ERROR: Conn.CLOSED},
    Conn.OPEN: {
        F.PING: Conn.OPEN,
        F.PONG: Conn.OPEN,
        F.ERROR: Conn.OPEN,
        F.PREFILL: Conn.OPEN,
        F.ACK: Conn.OPEN,
        F.CREDIT: Conn.OPEN,
        F.CANCEL: Conn.OPEN,
        F.RESUME: Conn.OPEN,
        F.RESUMED: Conn.OPEN,
        F.MEASURE: Conn.OPEN,
        F.PUSHED: Conn.OPEN,
    },
}
DATA_OF_CLIENT: dict[Conn, dict[F, Conn]] = {
    Conn.HELLO: {F.HELLO: Conn.AUTH, F.ERROR: Conn.CLOSED},
    Conn.AUTH: {F.AUTH: Conn.OPEN, F.ERROR: Conn.CLOSED},
    Conn.OPEN: {F.PING: Conn.OPEN, F.PONG: Conn.OPEN, F.ERROR: Conn.OPEN, F.PIECE: Conn.OPEN, F.FILLER: Conn.OPEN},
}
DATA_OF_SERVER: dict[Conn, dict[F, Conn]] = {
    Conn.HELLO: {F.HELLO: Conn.AUTH, F.ERROR: Conn.CLOSED},
    Conn.AUTH: {F.AUTH: Conn.OPEN, F.ERROR: Conn.CLOSED},
    Conn.OPEN: {F.PING: Conn.OPEN, F.PONG: Conn.OPEN, F.ERROR: Conn.OPEN, F.PIECE: Conn.OPEN},
}
CONNECTION: dict[tuple[Role, LinkKind], dict[Conn, dict[F, Conn]]] = {
    ("decode", "control"): CONTROL_OF_CLIENT,
    ("prefill", "control"): CONTROL_OF_SERVER,
    ("decode", "data"): DATA_OF_CLIENT,
    ("prefill", "data"): DATA_OF_SERVER,
}

_LATE_FOR_CLIENT = (F.ACCEPTED, F.PUSH_ACK, F.REFUSED, F.STARTED, F.PROGRESS, F.PIECE, F.COMPLETE, F.ERROR)
_LATE_FOR_SERVER = (F.PIECE, F.PUSHED, F.ACK, Do.FINAL_ACK, F.CREDIT, F.CANCEL)
_LATE_LOCALLY = (Do.FAIL, Do.CANCEL, Do.DETACH)

CLIENT_STREAM: dict[Phase, dict[Input, Phase]] = {
    Phase.IDLE: {
        F.PIECE: Phase.IDLE,
        Do.REQUEST: Phase.REQUESTED,
        Do.FAIL: Phase.FAILED,
        Do.CANCEL: Phase.CANCELLED,
        Do.DETACH: Phase.IDLE,
    },
    Phase.REQUESTED: {
        F.ACCEPTED: Phase.ACCEPTED,
        F.REFUSED: Phase.FAILED,
        F.ERROR: Phase.FAILED,
        F.PIECE: Phase.REQUESTED,
        Do.FAIL: Phase.FAILED,
        Do.CANCEL: Phase.CANCELLED,
        Do.DETACH: Phase.IDLE,
    },
    Phase.ACCEPTED: {
        F.ACCEPTED: Phase.ACCEPTED,
        F.PUSH_ACK: Phase.ACCEPTED,
        F.STARTED: Phase.STREAMING,
        F.PIECE: Phase.ACCEPTED,
        F.COMPLETE: Phase.COMPLETING,
        F.REFUSED: Phase.FAILED,
        F.ERROR: Phase.FAILED,
        Do.FAIL: Phase.FAILED,
        Do.CANCEL: Phase.CANCELLED,
        Do.DETACH: Phase.ACCEPTED,
        Do.RESUME: Phase.ACCEPTED,
    },
    Phase.STREAMING: {
        F.ACCEPTED: Phase.STREAMING,
        F.STARTED: Phase.STREAMING,
        F.PROGRESS: Phase.STREAMING,
        F.PIECE: Phase.STREAMING,
        F.COMPLETE: Phase.COMPLETING,
        F.REFUSED: Phase.FAILED,
        F.ERROR: Phase.FAILED,
        Do.FAIL: Phase.FAILED,
        Do.CANCEL: Phase.CANCELLED,
        Do.DETACH: Phase.STREAMING,
        Do.RESUME: Phase.STREAMING,
    },
    Phase.COMPLETING: {
        F.ACCEPTED: Phase.COMPLETING,
        F.STARTED: Phase.COMPLETING,
        F.PROGRESS: Phase.COMPLETING,
        F.PIECE: Phase.COMPLETING,
        F.COMPLETE: Phase.COMPLETING,
        F.REFUSED: Phase.FAILED,
        F.ERROR: Phase.FAILED,
        Do.VERIFIED: Phase.DONE,
        Do.FAIL: Phase.FAILED,
        Do.CANCEL: Phase.CANCELLED,
        Do.DETACH: Phase.COMPLETING,
        Do.RESUME: Phase.COMPLETING,
    },
    Phase.DONE: dict.fromkeys((*_LATE_FOR_CLIENT, *_LATE_LOCALLY), Phase.DONE),
    Phase.FAILED: dict.fromkeys((*_LATE_FOR_CLIENT, *_LATE_LOCALLY), Phase.FAILED),
    Phase.CANCELLED: dict.fromkeys((*_LATE_FOR_CLIENT, *_LATE_LOCALLY), Phase.CANCELLED),
}

SERVER_STREAM: dict[Phase, dict[Input, Phase]] = {
    Phase.IDLE: {F.PREFILL: Phase.REQUESTED},
    Phase.REQUESTED: {
        F.CREDIT: Phase.REQUESTED,
        F.CANCEL: Phase.CANCELLED,
        Do.ACCEPT: Phase.ACCEPTED,
        Do.REFUSE: Phase.FAILED,
        Do.FAIL: Phase.FAILED,
        Do.CANCEL: Phase.CANCELLED,
        Do.DETACH: Phase.CANCELLED,
    },
    Phase.ACCEPTED: {
        F.PIECE: Phase.ACCEPTED,
        F.PUSHED: Phase.ACCEPTED,
        F.ACK: Phase.ACCEPTED,
        F.CREDIT: Phase.ACCEPTED,
        F.CANCEL: Phase.CANCELLED,
        F.RESUME: Phase.ACCEPTED,
        Do.START: Phase.STREAMING,
        Do.FAIL: Phase.FAILED,
        Do.CANCEL: Phase.CANCELLED,
        Do.DETACH: Phase.ACCEPTED,
    },
    Phase.STREAMING: {
        F.PIECE: Phase.STREAMING,
        F.PUSHED: Phase.STREAMING,
        F.ACK: Phase.STREAMING,
        F.CREDIT: Phase.STREAMING,
        F.CANCEL: Phase.CANCELLED,
        F.RESUME: Phase.STREAMING,
        Do.SEGMENT: Phase.STREAMING,
        Do.PROGRESS: Phase.STREAMING,
        Do.COMPLETE: Phase.COMPLETING,
        Do.FAIL: Phase.FAILED,
        Do.CANCEL: Phase.CANCELLED,
        Do.DETACH: Phase.STREAMING,
    },
    Phase.COMPLETING: {
        F.PIECE: Phase.COMPLETING,
        F.PUSHED: Phase.COMPLETING,
        F.ACK: Phase.COMPLETING,
        Do.FINAL_ACK: Phase.DONE,
        F.CREDIT: Phase.COMPLETING,
        F.CANCEL: Phase.CANCELLED,
        F.RESUME: Phase.COMPLETING,
        Do.FAIL: Phase.FAILED,
        Do.CANCEL: Phase.CANCELLED,
        Do.DETACH: Phase.COMPLETING,
    },
    Phase.DONE: dict.fromkeys((*_LATE_FOR_SERVER, *_LATE_LOCALLY), Phase.DONE),
    Phase.FAILED: dict.fromkeys((*_LATE_FOR_SERVER, *_LATE_LOCALLY), Phase.FAILED),
    Phase.CANCELLED: dict.fromkeys((*_LATE_FOR_SERVER, *_LATE_LOCALLY), Phase.CANCELLED),
}

CLIENT_ATTACH: dict[Attach, dict[Input, Attach]] = {
    Attach.ATTACHED: {Do.DETACH: Attach.DETACHED},
    Attach.DETACHED: {Do.RESUME: Attach.RESUMING},
    Attach.RESUMING: {F.ACCEPTED: Attach.ATTACHED, Do.DETACH: Attach.DETACHED},
}
SERVER_ATTACH: dict[Attach, dict[Input, Attach]] = {
    Attach.ATTACHED: {Do.DETACH: Attach.DETACHED},
    Attach.DETACHED: {F.RESUME: Attach.ATTACHED},
}


def step(table: dict[Phase, dict[Input, Phase]], phase: Phase, given: Input, what: str) -> Phase:
    """The next phase.

    Raises:
        UnknownFrame: the peer's frame is not allowed now.
        LocalProtocolError: our own call is not allowed now.
    """
    following = table[phase].get(given)
    if following is None:
        if isinstance(given, F) or given is Do.FINAL_ACK:
            raise UnknownFrame(f"{what}: {given.name} is not allowed in phase {phase.name}")
        raise LocalProtocolError(f"{what}: {given.name} is not allowed in phase {phase.name}")
    return following
