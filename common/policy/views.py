"""Frozen facts that policies look at. The daemons build them from live objects, the simulator from simulated ones.

Every fact is a plain number, string or another view, so that a decision can be written down as JSON and decided again
(`record`, `replayed`). Facts that nobody knows have the default that changes no decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from common.policy.costs import PrefillCost
from common.request import Route

Site = Literal["own", "remote"]
PushMode = Literal["auto", "always", "never"]


@dataclass(frozen=True, slots=True)
class PeerView:
    """One prefill peer as the router sees it, for one request.

    Attributes:
        num_queued_tokens: uncached prompt tokens ahead of a new request there, of `num_queued` requests.
        queued_s: seconds until the peer could start a new request; None: from its tokens and its cost model.
        cost: what computing takes there; None before it is known. `is_assumed`: nothing was seen of this one yet, it is
            taken to be like the others.
        site: "own" stands beside decoded (PD-P in the paper's words), "remote" behind the slow path (PrfaaS).
        num_cached_tokens: the longest point of this prompt at which the peer can continue.
        chunk_tokens: of one step there; 0 when unknown.
        capacity_bps, goodput_bps, confidence, retransmitted: the path to decoded; capacity 0 when unknown, the others
            0 to 1 or bits per second as measured lately.
        path: peers with the same one share its capacity; "" is a path of its own.
        queued_bytes: encoded bytes from this peer that decoded waits for, on the path or still to be computed.
        rtt_s: round trip.
        codec_ratio, codec_s_per_byte: encoded by raw bytes; seconds per raw byte that are not hidden behind compute.
        push_bytes: raw bytes that would let the peer continue where decoded can; 0: cannot be sent, or of no use.
        push_bps: bits per second of the way there; 0: as wide as the way here.
        share, egress_bps: what of the peer's time, and bits per second of its budget for all it sends (0: none), others
            leave for decoded over minutes; what they have queued at the moment is in the queue.
    """

    name: str
    is_usable: bool
    why_not: str = ""
    num_streams: int = 0
    num_queued_tokens: int = 0
    num_queued: int = 0
    queued_s: float | None = None
    cost: PrefillCost | None = None
    is_assumed: bool = False
    site: Site = "remote"
    num_cached_tokens: int = 0
    chunk_tokens: int = 0
    capacity_bps: float = 0.0
    goodput_bps: float = 0.0
    confidence: float = 0.0
    retransmitted: float = 0.0
    path: str = ""
    queued_bytes: float = 0.0
    rtt_s: float = 0.0
    codec_ratio: float = 1.0
    codec_s_per_byte: float = 0.0
    push_bytes: int = 0
    push_bps: float = 0.0
    share: float = 1.0
    egress_bps: float = 0.0

    @property
    def lasting_bps(self) -> float:
        """What the way here carries over minutes: path and budget, as far as they are known; 0 when neither is."""
        if self.capacity_bps and self.egress_bps:
            return min(self.capacity_bps, self.egress_bps)
        return self.capacity_bps or self.egress_bps


@dataclass(frozen=True, slots=True)
class LocalView:
    """decoded itself: what waits for local prefill, and what it would do to the running streams.

    Attributes:
        can_prefill: False where decoded only decodes (prefill nodes stand beside it) and local prefill is for fallback.
        queued_s: seconds until a new prompt could start; None: from `num_queued_tokens` and the cost model.
        cost: local prefill while nothing is decoded; None before it is known.
        num_rows, step_s: the running batch and what one decode step takes.
        mixed_slowdown: how many times as long local prefill takes beside running streams.
        row_wait_s: until a finished prefill finds a free row in the batch, wherever it was computed.
    """

    can_prefill: bool = True
    num_queued_tokens: int = 0
    num_queued: int = 0
    queued_s: float | None = None
    cost: PrefillCost | None = None
    num_rows: int = 0
    step_s: float = 0.0
    mixed_slowdown: float = 1.0
    row_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestView:
    """What routing needs to know of a request. `num_uncached_tokens` counts prompt tokens whose state must be computed
    before the last prompt token, that is of [0, n-1), when decoded does it with what it has cached.

    Attributes:
        num_cached_tokens: the longest point at which decoded itself can continue.
        num_held_tokens: leading tokens whose rows decoded holds, so that they need not cross.
        raw_bytes: state that would cross from a remote peer; `final_bytes` of it leave with the last chunk only.
        fixed_bytes, token_bytes: what any prompt's state takes, and each of its tokens.
        ttft_slo_s: what the time to first token may be; None asks for nothing.
        waited_s: what of it has passed already.
    """

    request_id: str
    num_prompt_tokens: int
    num_uncached_tokens: int
    wants_prompt_logprobs: bool = False
    forced_route: Route | None = None
    failed_peers: tuple[str, ...] = ()
    num_cached_tokens: int = 0
    num_held_tokens: int = 0
    raw_bytes: int = 0
    final_bytes: int = 0
    fixed_bytes: int = 0
    token_bytes: float = 0.0
    ttft_slo_s: float | None = None
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ServiceClass:
    """A priority class. `share` is the part of all service (prompt and output tokens) that it is sure of while it has
    requests; what is left goes by `priority`, higher first.
    """

    name: str = "default"
    priority: int = 0
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks of a node: prompt tokens to compute and bytes of state memory to hold.

    Attributes:
        max_output_tokens: of all its choices together.
        num_rows: sequences it brings into the batch.
        service_class: "" or an unknown name is the first class.
        tenant: whose request it is; "" when nobody knows.
        deadline_s: seconds from arrival within which its first token must be out; `deadline_setting` said so.
        waited_s: seconds since it arrived.
    """

    request_id: str
    num_prompt_tokens: int
    state_bytes: int
    max_output_tokens: int = 0
    num_rows: int = 1
    service_class: str = ""
    tenant: str = ""
    deadline_s: float | None = None
    deadline_setting: str = ""
    waited_s: float = 0.0


def record(request: RequestView, peers: Sequence[PeerView], local: LocalView) -> dict[str, Any]:
    """The facts of one decision as JSON can hold them."""
    return {"request": asdict(request), "peers": [asdict(p) for p in peers], "local": asdict(local)}


def replayed(facts: Mapping[str, Any]) -> tuple[RequestView, list[PeerView], LocalView]:
    """What `record` wrote down.

    Raises:
        ValueError: a part or a field is missing, or not one of ours.
    """
    try:
        request = dict(facts["request"])
        request["failed_peers"] = tuple(request.get("failed_peers", ()))
        peers = [PeerView(**_with_cost(PeerView, p)) for p in facts["peers"]]
        return RequestView(**request), peers, LocalView(**_with_cost(LocalView, facts["local"]))
    except (KeyError, TypeError) as e:
        raise ValueError(f"not a recorded decision: {e}") from e


def _with_cost(kind: type[PeerView] | type[LocalView], told: Mapping[str, Any]) -> dict[str, Any]:
    unknown = set(told) - {f.name for f in fields(kind)}
    if unknown:
        raise ValueError(f"not a recorded decision: {kind.__name__} has no {', '.join(sorted(unknown))}")
    cost = told.get("cost")
    return {**told, "cost": None if cost is None else PrefillCost(**cost)}
