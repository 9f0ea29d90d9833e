"""Plain data of the net layer: who we are, how links behave, what is asked for and what came of it. No I/O.

Used by pool.py (decoded), server.py (prefilld) and the services above them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from common.layout import BLOCK_TOKENS, HASH_SCHEME, ModelInfo
from common.net.tls import CertificateFacts, TlsEnd
from common.wire.handshake import Mode

Role = Literal["decode", "prefill"]
PeerState = Literal["connecting", "ready", "draining", "incompatible", "down"]
Trace = Callable[..., None]
"""trace(event, now=monotonic seconds, **fields): segment_ready, segment_encoded, piece_written, segment_acked."""


@dataclass(frozen=True, slots=True)
class Security:
    """How this end proves who it is, and what it asks of peers.

    "none": nothing, on loopback only. "key": `keys`, the shared key first, then the one before while it still holds.
    "tls": certificates on the control link, sealed data links; a server takes clients whose certificate has one of
    `allowed_names`, or any that a CA of ours signed when there are none.
    """

    mode: Mode = "none"
    keys: tuple[bytes, ...] = field(default=(), repr=False)
    tls: TlsEnd | None = None
    allowed_names: tuple[str, ...] = ()
    certificate: CertificateFacts | None = None
    """Our own, for status and metrics."""


@dataclass(frozen=True, slots=True)
class LocalEnd:
    """What this process is. `instance_id` is new at every start.

    `numerics` (compute dtype, device, chunk size, threads, ...) is shown to the peer and compared only with
    `require_same_numerics`.
    """

    role: Role
    name: str
    instance_id: str
    info: ModelInfo
    security: Security = Security()
    require_same_numerics: bool = False
    numerics: dict[str, str] = field(default_factory=dict)
    block_tokens: int = BLOCK_TOKENS
    hash_scheme: str = HASH_SCHEME


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """How sessions behave. Durations in seconds, sizes in bytes.

    `data_links` 0 means 1 on loopback, else 4 and, as the sender asks, up to 8. `congestion_control`: of links that are
    not on loopback; "auto" is the best the kernel has. `piece_bytes`: the largest. `credit_bytes` is what one session
    may have unlanded beyond the reserved minimum of one `max_segment_bytes` per stream. `gone_after_s`: a peer whose
    port refuses connections for so long is taken for dead, and its streams fail without waiting for the lease.
    """

    data_links: int = 0
    congestion_control: str = "auto"
    heartbeat_s: float = 2.0
    lease_s: float = 30.0
    piece_bytes: int = 1 << 20
    max_segment_bytes: int = 8 << 20
    credit_bytes: int = 64 << 20
    max_stream_bytes: int = 4 << 30
    max_prompt_tokens: int = 1 << 20
    max_streams: int = 1024
    connect_timeout_s: float = 5.0
    gone_after_s: float = 2.0
    codec: str = "zstd"
    reconnect_min_s: float = 0.1
    reconnect_max_s: float = 5.0
    codec_threads: int = 2


@dataclass(frozen=True, slots=True)
class RemoteRequest:
    """Compute the state of `tokens` (the prompt without its last token) from `start` on.

    `codecs` in order of preference; empty = what LinkOptions.codec says. `deadline_s` and `due_s` count from prefill():
    how long to wait, and within how many seconds the state would be in time. `pushes`: the state of [held, start) is
    sent to the peer, which need not compute it and should have [0, held) in its cache.
    """

    request_id: str
    tokens: Sequence[int]
    start: int = 0
    deadline_s: float | None = None
    priority: int = 0
    tenant_salt: bytes = b""
    codecs: tuple[str, ...] = ()
    pushes: bool = False
    held: int = 0
    due_s: float | None = None


@dataclass(frozen=True, slots=True)
class TransferProgress:
    """A snapshot of a remote prefill; two differ when anything moved. Instants are local, monotonic, 0.0 = not yet.

    `num_peer_moves` grows with whatever the peer does for any prefill of ours; it makes no difference.
    """

    num_computed_tokens: int = 0
    num_queued: int = 0
    wire_bytes: int = 0
    raw_bytes: int = 0
    num_segments: int = 0
    pushed_bytes: int = 0
    requested_at: float = 0.0
    accepted_at: float = 0.0
    first_chunk_at: float = 0.0
    first_byte_at: float = 0.0
    prefill_ended_at: float = 0.0
    last_byte_at: float = 0.0
    verified_at: float = 0.0
    num_peer_moves: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What a remote prefill amounted to. Instants are local; `remote_queue_s` (Accepted until the first chunk) and
    `prefill_s` are the peer's durations. `verified_tokens`: every layer can continue at that position (start if
    nothing more was verified). `wire_bytes` counts encoded segment bytes, without frame headers and resends; so does
    `pushed_bytes`, for the prefix that this end sent.
    """

    wire_bytes: int
    raw_bytes: int
    codec: str
    num_tokens: int
    num_segments: int
    remote_queue_s: float
    prefill_s: float
    verified_tokens: int
    requested_at: float
    accepted_at: float
    first_chunk_at: float
    first_byte_at: float
    prefill_ended_at: float
    last_byte_at: float
    verified_at: float
    pushed_bytes: int = 0
    pushed_raw_bytes: int = 0
    codecs: Mapping[str, int] = field(default_factory=dict)
    """How many segments came in each codec."""
    num_cached_tokens: int = 0
    """Tokens that the peer needed not compute: found in its cache, or pushed."""


@dataclass(frozen=True, slots=True)
class PeerId:
    """Who is at the other end of a session."""

    name: str
    instance: str
    address: str = ""
