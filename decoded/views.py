"""The router's facts from live objects: what decoded, its peers and one request look like now.

Decides nothing; the views are plain numbers that `common.policy.views.record` can write down. Called by dispatch.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.backend import BackendStats
from common.layout import ModelInfo
from common.net.pool import PeerClient
from common.policy.views import LocalView, PeerView, RequestView
from common.request import Request
from decoded.active import ActiveRequest
from decoded.learned import Learned


def request_view(
    info: ModelInfo, request: Request, failed_peers: tuple[str, ...], num_kept_tokens: int, *, waited_s: float = 0.0
) -> RequestView:
    """`num_kept_tokens` are left of attempts that failed: rows that decoded holds and can continue at."""
    num_tokens = request.num_prompt_tokens - 1
    late = [spec for spec in info.layout.states if spec.kind in ("window", "recurrent")]
    rows = [spec for spec in info.layout.states if spec.kind in ("full", "latent")]
    return RequestView(
        request.request_id,
        request.num_prompt_tokens,
        num_uncached_tokens=num_tokens - num_kept_tokens,
        wants_prompt_logprobs=request.prompt_logprobs is not None,
        forced_route=request.forced_route,
        failed_peers=failed_peers,
        num_cached_tokens=num_kept_tokens,
        num_held_tokens=num_kept_tokens,
        raw_bytes=info.layout.transfer_bytes(num_kept_tokens, num_tokens),
        final_bytes=sum(s.num_bytes(num_tokens - max(num_kept_tokens, s.needed_from(num_tokens))) for s in late),
        fixed_bytes=sum(s.num_bytes(max(1, s.window - 1)) for s in late),
        token_bytes=float(sum(s.num_bytes(1) for s in rows)),
        ttft_slo_s=request.deadline_s,
        waited_s=waited_s,
    )


def peer_view(client: PeerClient, info: ModelInfo, active: Iterable[ActiveRequest], learned: Learned) -> PeerView:
    """One peer, by what it told of its load and path, and by what decoded itself waits for from it."""
    is_usable = client.state == "ready"
    load = client.load
    rate = load.get("prefill_tokens_per_s", 0.0)
    stage = f"prefill at {client.name}"
    waits = [a.request.num_prompt_tokens for a in active if a.shown_stage == stage]
    return PeerView(
        client.name,
        is_usable,
        "" if is_usable else f"{client.state}: {client.reason}",
        client.num_streams,
        # What was sent since its last word counts too, or a burst within one heartbeat would all go to one peer.
        num_queued_tokens=max(int(load.get("num_queued_tokens", 0)), sum(waits)),
        num_queued=max(int(load.get("num_queued", 0) + load.get("num_running", 0)), len(waits)),
        cost=learned.cost(client.name, rate),
        rtt_s=client.rtt_s,
        codec_ratio=learned.codec_ratio(client.name),
        capacity_bps=load.get("path_capacity_bps", 0.0),
        goodput_bps=load.get("path_goodput_bps", 0.0),
        confidence=load.get("path_confidence", 0.0),
        retransmitted=load.get("path_loss", 0.0),
        queued_bytes=float(sum(info.layout.transfer_bytes(0, n - 1) for n in waits)),
    )


def local_view(stats: BackendStats, active: Iterable[ActiveRequest], learned: Learned) -> LocalView:
    """decoded itself, at the rates it was seen to compute prompts at."""
    alone, mixed = stats.alone_tokens_per_s, stats.mixed_tokens_per_s
    rate = alone or mixed
    waits = [a.request.num_prompt_tokens for a in active if a.shown_stage == "prefill local"]
    return LocalView(
        num_queued_tokens=sum(waits),
        num_queued=len(waits),
        cost=learned.cost("", rate),
        num_rows=stats.num_rows,
        mixed_slowdown=max(1.0, alone / mixed) if alone and mixed else 1.0,
    )
