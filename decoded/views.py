"""The router's facts from live objects: what decoded, its peers and one request look like now.

Decides nothing; the views are plain numbers that `common.policy.views.record` can write down. Called by router.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import astuple, replace
from statistics import fmean

from common.backend import BackendStats
from common.hosts import is_loopback
from common.layout import ModelInfo
from common.net.pool import PeerClient
from common.policy.costs import PrefillCost
from common.policy.views import LocalView, PeerView, RequestView, Site
from common.request import Request
from decoded.active import ActiveRequest
from decoded.learned import Learned, told_cost, told_share

# What the kernel moves between two processes of one machine is no limit next to a forward pass.
LOOPBACK_BPS = 8e9


def prompt_view(info: ModelInfo, request_id: str, num_prompt_tokens: int, num_held_tokens: int) -> RequestView:
    """A prompt of which decoded has `num_held_tokens`, cached or left of attempts that failed: it can go on there, and
    has all rows.
    """
    num_tokens, layout = num_prompt_tokens - 1, info.layout
    late = [spec for spec in layout.states if spec.kind in ("window", "recurrent")]
    return RequestView(
        request_id,
        num_prompt_tokens,
        num_uncached_tokens=num_tokens - num_held_tokens,
        num_cached_tokens=num_held_tokens,
        num_held_tokens=num_held_tokens,
        raw_bytes=layout.transfer_bytes(num_held_tokens, num_tokens),
        final_bytes=sum(s.num_bytes(num_tokens - max(num_held_tokens, s.needed_from(num_tokens))) for s in late),
        fixed_bytes=layout.fixed_bytes,
        token_bytes=float(layout.token_bytes),
    )


def request_view(
    info: ModelInfo,
    request: Request,
    failed_peers: tuple[str, ...],
    num_held_tokens: int,
    *,
    ttft_slo_s: float | None = None,
    waited_s: float = 0.0,
) -> RequestView:
    """The same of a request, and what it wants."""
    return replace(
        prompt_view(info, request.request_id, request.num_prompt_tokens, num_held_tokens),
        wants_prompt_logprobs=request.prompt_logprobs is not None,
        forced_route=request.forced_route,
        failed_peers=failed_peers,
        ttft_slo_s=ttft_slo_s,
        waited_s=waited_s,
    )


def peer_view(
    client: PeerClient,
    active: Collection[ActiveRequest],
    learned: Learned,
    *,
    site: Site,
    num_cached_tokens: int = 0,
    push_bytes: int = 0,
    push_bps: float = 0.0,
) -> PeerView:
    """One peer, by what it told of its load and path, and by what decoded itself waits for from it.

    `num_cached_tokens`, `push_bytes`: what it holds of the prompt, and what would have to be sent for it to hold more.
    """
    is_usable, load = client.state == "ready", client.load
    waits = [a for a in active if a.prefills_at == client.name]
    num_left = [a.num_uncomputed_tokens for a in waits]
    return PeerView(
        client.name,
        is_usable,
        "" if is_usable else f"{client.state}: {client.reason}",
        client.num_streams,
        # What was sent since its last word counts too, or a burst within one heartbeat would all go to one peer.
        num_queued_tokens=max(int(load.get("num_queued_tokens", 0)), sum(num_left)),
        num_queued=max(int(load.get("num_queued", 0) + load.get("num_running", 0)), sum(num > 0 for num in num_left)),
        cost=told_cost(load),
        site=site,
        chunk_tokens=int(load.get("chunk_tokens", 0)),
        rtt_s=client.rtt_s,
        codec_ratio=learned.codec_ratio(client.name),
        capacity_bps=load.get("path_capacity_bps", 0.0),
        goodput_bps=load.get("path_goodput_bps", 0.0),
        confidence=load.get("path_confidence", 0.0),
        retransmitted=load.get("path_loss", 0.0),
        queued_bytes=learned.codec_ratio(client.name) * sum(a.num_missing_bytes for a in waits),
        num_cached_tokens=num_cached_tokens,
        push_bytes=push_bytes,
        # The way out is taken for as wide as the widest way in: what is shared is this site's line.
        push_bps=LOOPBACK_BPS if is_loopback(client.host) else push_bps,
        share=told_share(load),
        egress_bps=load.get("egress_bps", 0.0),
    )


def with_speeds(peers: Sequence[PeerView]) -> list[PeerView]:
    """A peer of which nothing was seen yet is taken to be like the others of its site: a newcomer gets its part."""
    known: dict[Site, list[PrefillCost]] = {}
    for peer in peers:
        if peer.is_usable and peer.cost is not None:
            known.setdefault(peer.site, []).append(peer.cost)
    typical = {site: PrefillCost(*map(fmean, zip(*map(astuple, costs), strict=True))) for site, costs in known.items()}
    return [
        replace(peer, cost=typical[peer.site], is_assumed=True) if peer.cost is None and peer.site in typical else peer
        for peer in peers
    ]


def local_view(
    stats: BackendStats, active: Collection[ActiveRequest], learned: Learned, *, max_rows: int, max_stretch: float
) -> LocalView:
    """decoded itself, at the speed it was seen to compute prompts and tokens at."""
    alone, mixed = stats.alone_tokens_per_s, stats.mixed_tokens_per_s
    waits = [a.num_uncomputed_tokens for a in active if a.prefills_at == ""]
    cost, step_s, row_wait_s = learned.decode_cost, 0.0, 0.0
    if cost is not None:
        context = sum(a.request.num_prompt_tokens + a.num_output_tokens for a in active if a.stage == "decoding")
        step_s = cost.step_s(max(1, stats.num_rows), context)
        if stats.num_rows >= max_rows:
            # Rows come free one after another, evenly.
            ahead = 1 + stats.num_running - stats.num_rows
            row_wait_s = ahead * learned.output_tokens.value * step_s / max_rows
    return LocalView(
        num_queued_tokens=sum(waits),
        num_queued=sum(num > 0 for num in waits),
        cost=learned.local_cost(alone or mixed),
        num_rows=stats.num_rows,
        step_s=step_s,
        mixed_slowdown=max(1.0, alone / mixed) if alone and mixed else max_stretch / (max_stretch - 1.0),
        row_wait_s=row_wait_s,
    )
