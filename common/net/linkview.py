"""What `peers` shows of links: the kernel's view, how they were tuned, how a session is secured. Used by both ends."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from math import isfinite

from common.linkfacts import PathEstimate
from common.net.link import Link, unix_now
from common.net.tcpinfo import tcp_info

_SHOWN = ("rtt_s", "min_rtt_s", "cwnd_bytes", "bytes_acked", "bytes_sent", "bytes_retrans", "delivery_bps")
_MIN_RATE_BYTES = 1 << 20


def link_rows(links: Collection[Link]) -> list[dict[str, object]]:
    """One per link."""
    return [_row(link) for link in links]


def _row(link: Link) -> dict[str, object]:
    info = tcp_info(link.socket())
    facts: dict[str, object] = {"link": link.index, "congestion_control": link.congestion_control}
    if info is not None:
        facts |= {name: getattr(info, name) for name in _SHOWN}
    if link.plan is not None:
        facts |= asdict(link.plan)
    return facts


def delivery_bps(links: Collection[Link]) -> float | None:
    """Bits per second at which the kernel last saw our bytes arrive, over all links.

    None before there were enough of them to measure, and on loopback, where it is the speed of memory.
    """
    busy = [link for link in links if link.bytes_out >= _MIN_RATE_BYTES and not link.is_loopback]
    rates = [info.delivery_bps for link in busy if (info := tcp_info(link.socket())) is not None]
    return sum(rates) if rates else None


def path_facts(path: PathEstimate) -> dict[str, float]:
    """What a client is told of its path."""
    return {
        "path_goodput_bps": path.goodput_bps,
        "path_capacity_bps": path.capacity_bps,
        "path_confidence": path.confidence,
        "path_queueing_s": path.queueing_s,
        "path_loss": path.loss,
        **({"path_age_s": path.age_s} if isfinite(path.age_s) else {}),
    }


def security_facts(mode: str, control: Link | None) -> dict[str, object]:
    """How a session is secured, and the certificate at its other end."""
    certificate = control.certificate if control is not None else None
    return {
        "security": mode,
        "certificate": certificate.name if certificate else None,
        "certificate_expires_s": round(certificate.expires_at - unix_now()) if certificate else None,
    }
