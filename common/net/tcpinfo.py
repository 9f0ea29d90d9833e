"""The few fields of Linux's TCP_INFO that status shows. Answers None where the kernel has no such option."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

_TCP_INFO = getattr(socket, "TCP_INFO", 11)
_RTT_AT, _RETRANS_AT, _DELIVERY_AT, _MIN_BYTES = 68, 100, 160, 168


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """Kernel's view of one connection. `delivery_bps` is only meaningful when the application was not the limit."""

    rtt_s: float
    num_retransmits: int
    delivery_bps: float
    is_app_limited: bool


def tcp_info(sock: socket.socket | None) -> TcpInfo | None:
    """Read TCP_INFO; None without a socket or on a kernel that tells less."""
    if sock is None:
        return None
    try:
        data = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 512)
    except OSError:
        return None
    if len(data) < _MIN_BYTES:
        return None
    (rtt_us,) = struct.unpack_from("=I", data, _RTT_AT)
    (retransmits,) = struct.unpack_from("=I", data, _RETRANS_AT)
    (delivery,) = struct.unpack_from("=Q", data, _DELIVERY_AT)
    return TcpInfo(rtt_us / 1e6, retransmits, delivery * 8.0, bool(data[7] & 1))
