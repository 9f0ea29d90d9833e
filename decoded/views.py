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
        token_bytes=float(info.layout.token_bytes),
        ttft_slo_s=request.deadline_s,
        waited_s=waited_s,
    )


def peer_view(
    client: PeerClient, active: Iterable[ActiveRequest], learned: Learned, *, num_cached_tokens: int, push_bytes: int
) -> PeerView:
    """One peer, by what it told of its load and path, and by what decoded itself waits for from it.

    `num_cached_tokens`, `push_bytes`: what it holds of the prompt, and what would have to be sent for it to hold more.
    """
    is_usable = client.state == "ready"
    load = client.load
    rate = load.get("prefill_tokens_per_s", 0.0)
    stage = f"prefill at {client.name}"
    waits = [a for a in active if a.shown_stage == stage]
    num_tokens = sum(a.request.num_prompt_tokens for a in waits)
    return PeerView(
        client.name,
        is_usable,
        "" if is_usable else f"{client.state}: {client.reason}",
        client.num_streams,
        # What was sent since its last word counts too, or a burst within one heartbeat would all go to one peer.
        num_queued_tokens=max(int(load.get("num_queued_tokens", 0)), num_tokens),
        num_queued=max(int(load.get("num_queued", 0) + load.get("num_running", 0)), len(waits)),
        cost=learned.cost(client.name, rate),
        rtt_s=client.rtt_s,
        codec_ratio=learned.codec_ratio(client.name),
        capacity_bps=load.get("path_capacity_bps", 0.0),
        goodput_bps=load.get("path_goodput_bps", 0.0),
        confidence=load.get("path_confidence", 0.0),
        retransmitted=load.get("path_loss", 0.0),
        queued_bytes=float(sum(a.transfer_bytes for a in waits)),
        num_cached_tokens=num_cached_tokens,
        push_bytes=push_bytes,
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
