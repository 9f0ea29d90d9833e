"""Every error the product raises on purpose, as one tree.

PdError                         code, is_retryable, http_status
├─ ConfigError                  configuration is wrong; exit 78
├─ StartupError                 cannot bind, no weights, tampered model; exit 3
├─ InvalidRequest               the client's request is wrong (HTTP 400), names the parameter
├─ Overloaded                   refused now, come back later (HTTP 429 / 503 + Retry-After), names gate and setting
│  └─ NoPeer                    no peer, and the local fallback budget is spent
├─ Draining                     this daemon takes nothing new (HTTP 503 + Retry-After)
├─ ProtocolError (abstract)     the connection must close
│  ├─ LocalProtocolError        we tried something illegal: a bug of ours
│  └─ RemoteProtocolError       the peer did
├─ PeerError                    the peer said so in an Error or Refused message; one class per wire code
├─ TransferError                the state did not arrive; retry elsewhere or compute locally
├─ StateDamaged                 cached state on disk is not what was written
├─ EngineError                  RequestFailed (this sequence only), EngineDead (the process must exit)
└─ ControlError                 what a ctl prints; exit 1

Messages are full sentences with field, value and limit.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import ClassVar

EXIT_OK, EXIT_RUNTIME, EXIT_USAGE, EXIT_STARTUP, EXIT_CONFIG = 0, 1, 2, 3, 78


def unknown_key(key: str, known: Iterable[str]) -> str:
    """What to say of a key in a configuration, or in any other file of people's, that means nothing there."""
    known = list(known)
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"unknown key; did you mean {near[0]!r}?" if near else f"unknown key; known here: {', '.join(known)}"


class PdError(Exception):
    """Base of all errors of the product."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    is_retryable: ClassVar[bool] = False


class ConfigError(PdError):
    """The configuration is wrong. `problems` lists every one as "path: what is wrong"; `advice` says what helps."""

    code = "config"
    advice = ""

    def __init__(self, problems: list[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("; ".join(self.problems))


class StartupError(PdError):
    """The daemon cannot start: address in use, weights missing or tampered with, no such device."""

    code = "startup"


class InvalidRequest(PdError):
    """The client's request is wrong; `param` names the field (None when it is the body itself), `api_code` is for
    programs, as OpenAI has it in some errors.
    """

    code = "invalid_request"
    http_status = 400

    def __init__(self, message: str, param: str | None = None, api_code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.api_code = param, api_code


class Overloaded(PdError):
    """Refused now. Carries what the client and the operator need: gate, measured value, limit, setting.

    Args:
        status: 429 when the caller should slow down, 503 when the service cannot serve.
    """

    code = "overloaded"
    http_status = 503
    is_retryable = True

    def __init__(
        self,
        message: str,
        *,
        gate: str,
        value: float,
        limit: float,
        setting: str,
        retry_after_s: float,
        status: int = 503,
    ) -> None:
        super().__init__(message)
        self.gate, self.value, self.limit, self.setting = gate, value, limit, setting
        self.retry_after_s, self.status = retry_after_s, status


class NoPeer(Overloaded):
    """No prefill peer is usable and the local fallback budget is spent.

    Args:
        value: prompt tokens that would have to be computed here.
        limit: tokens per second of the budget.
    """

    code = "no_peer"

    def __init__(self, message: str, *, value: float, limit: float, retry_after_s: float = 1.0) -> None:
        setting = "fallback.local_prefill_tokens_per_s"
        super().__init__(
            message, gate="fallback", value=value, limit=limit, setting=setting, retry_after_s=retry_after_s
        )


class Draining(PdError):
    """This daemon is about to stop, or was told to take nothing new."""

    code = "draining"
    http_status = 503
    is_retryable = True
    retry_after_s: float = 5.0


class ProtocolError(PdError):
    """Abstract: raise LocalProtocolError or RemoteProtocolError."""

    code = "protocol"

    def __new__(cls, *args: object) -> ProtocolError:
        if cls is ProtocolError:
            raise TypeError("ProtocolError is abstract: raise LocalProtocolError or a RemoteProtocolError")
        return super().__new__(cls, *args)


class LocalProtocolError(ProtocolError):
    """We tried something the protocol forbids: a bug of ours, logged with its traceback."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something the protocol forbids. `wire_code` goes into the Error frame before closing."""

    wire_code: ClassVar[str] = "protocol"


class BadMagic(RemoteProtocolError):
    """The first bytes are not ours: something else speaks on this port."""

    wire_code = "bad_magic"


class VersionMismatch(RemoteProtocolError):
    """The peer speaks another protocol version."""

    wire_code = "version"


class FrameTooLarge(RemoteProtocolError):
    """A declared length passes a limit; nothing was allocated for it."""

    wire_code = "too_large"


class UnknownFrame(RemoteProtocolError):
    """A frame type that is not in the table, or not allowed in this state."""

    wire_code = "unknown_frame"


class BadMessage(RemoteProtocolError):
    """A message whose fields are missing, of the wrong type, out of range or against the layout."""

    wire_code = "bad_message"


class ChecksumMismatch(RemoteProtocolError):
    """Bytes arrived, but not the ones that were sent."""

    wire_code = "checksum"


class AuthFailed(RemoteProtocolError):
    """The peer did not prove who it is for this role, link and session, or its security mode is another one."""

    wire_code = "auth"


class SealBroken(RemoteProtocolError):
    """A sealed record does not open: altered, repeated, left out or moved on the way, or not the peer's."""

    wire_code = "seal"


class TlsFailed(RemoteProtocolError):
    """TLS with this peer did not come about, or broke; never said on the wire. `kind` is one of TLS_KINDS."""

    wire_code = "tls"

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


TLS_KINDS = (
    *("unknown_ca", "expired", "not_yet_valid", "wrong_name", "no_certificate", "bad_certificate"),
    *("plain", "refused", "failed"),
)
"""`refused`: the peer refused us; `plain`: it does not speak TLS."""


class PeerError(PdError):
    """The peer refused or failed, in its own words. Subclasses register themselves by wire code."""

    wire_code: ClassVar[str] = "peer"
    is_retryable = True
    _by_code: ClassVar[dict[str, type[PeerError]]] = {}

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if cls.wire_code in PeerError._by_code:
            raise TypeError(f"wire code {cls.wire_code!r} is used twice")
        PeerError._by_code[cls.wire_code] = cls

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    @staticmethod
    def from_wire(code: str, message: str, retry_after_s: float | None = None) -> PeerError:
        """The class registered for a received code; PeerError itself for one we do not know."""
        return PeerError._by_code.get(code, PeerError)(message, retry_after_s)


class PeerShed(PeerError):
    """The peer's queue is full."""

    wire_code = "shed"


class PeerDraining(PeerError):
    """The peer finishes what it has and takes nothing new."""

    wire_code = "draining"


class PromptTooLong(PeerError):
    """The prompt does not fit the peer's limits; asking again is pointless."""

    wire_code = "prompt_too_long"
    is_retryable = False


class LayoutMismatch(PeerError):
    """Identity fields differ: other weights, config, tokenizer or state layout.

    `differences` is field -> (ours, theirs) in full where this end compared; the message has them short.
    """

    wire_code = "layout_mismatch"
    is_retryable = False
    differences: Mapping[str, tuple[object, object]] = {}


class PeerInvalid(PeerError):
    """The request asks for what cannot be: nothing to compute, a codec nobody knows. Asking again is pointless."""

    wire_code = "invalid"
    is_retryable = False


class PeerTimeout(PeerError):
    """The peer gave up: the request's deadline passed, or nothing of its state was taken for too long."""

    wire_code = "timeout"


class RequestDamaged(PeerError):
    """The request did not reach the peer as it was sent; nothing was computed. Asking the same peer again may help."""

    wire_code = "damaged"


class StaleHandle(PeerError):
    """A handle that was used, expired, or belongs to another request."""

    wire_code = "stale_handle"
    is_retryable = False


class PeerCancelled(PeerError):
    """The peer stopped this stream because we asked it to, or because its lease ran out."""

    wire_code = "cancelled"


class PeerEngineFailed(PeerError):
    """The peer's engine failed on this request."""

    wire_code = "engine"


class TransferError(PdError):
    """The state did not arrive; retry elsewhere or compute locally."""

    code = "transfer"
    is_retryable = True


class LinkLost(TransferError):
    """The session ended and did not come back within the lease."""

    code = "link_lost"


class TransferTimeout(TransferError, TimeoutError):
    """The state did not arrive in time."""

    code = "transfer_timeout"


class TransferIncomplete(TransferError):
    """The stream ended, or its count or digest is wrong: no token may be made from it."""

    code = "transfer_incomplete"


class EngineError(PdError):
    """Something failed in the engine."""

    code = "engine"


class RequestFailed(EngineError):
    """This sequence only; the engine goes on."""


class EngineDead(EngineError):
    """The engine cannot go on; the process must exit and systemd restarts it."""

    code = "engine_dead"
    http_status = 503


class StateDamaged(PdError):
    """Cached state on disk is not what was written; it was removed, and is computed again."""

    code = "state_damaged"


class ControlError(PdError):
    """What a ctl prints before it exits with 1."""

    code = "control"
