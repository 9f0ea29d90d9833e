"""Socket options that decide how the kernel sends: congestion control, pacing, send buffer, how much it takes unsent.

Linux only, as is everything here that matters on a wide-area link; elsewhere the functions say that nothing was set.
"""

from __future__ import annotations

import logging
import socket
import struct
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)
_CONGESTION = getattr(socket, "TCP_CONGESTION", 13)
_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)
_MAX_PACING_RATE, _SNDBUFFORCE = 47, 32  # asm-generic/socket.h; Python has no names for them
_AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
# What the kernel takes beyond what it may send: more would be bytes that no other link can carry any more.
NOTSENT_BYTES = 128 << 10
_UNPACED = (1 << 64) - 1


@cache
def best_congestion_control() -> str:
    """ "bbr" where the kernel has it, since loss that is not congestion costs cubic nearly everything; "" elsewhere."""
    try:
        return "bbr" if "bbr" in _AVAILABLE.read_text().split() else ""
    except OSError:
        return ""


def set_congestion_control(sock: socket.socket, wanted: str) -> str:
    """Set it ("auto": the best there is) and answer what the socket has now; a refusal is logged once per name."""
    name = best_congestion_control() if wanted == "auto" else wanted
    if name:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, _CONGESTION, name.encode())
        except OSError as e:
            _log_refusal(name, e.strerror or str(e))
    return congestion_control(sock)


def renew_congestion_control(sock: socket.socket, name: str) -> str:
    """Have it begin anew, with what the kernel knows of the round trip; answers what the socket has now.

    Setting the one that a socket has does nothing, so another, which every kernel has and allows, is set in between.
    """
    _try(sock, socket.IPPROTO_TCP, _CONGESTION, b"reno")
    return set_congestion_control(sock, name)


@cache
def _log_refusal(name: str, why: str) -> None:
    log.warning("the kernel refuses congestion control %s: %s; links keep its default", name, why)


def congestion_control(sock: socket.socket) -> str:
    """Its name; "" where the system does not tell."""
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, _CONGESTION, 16).split(b"\0", 1)[0].decode()
    except OSError:
        return ""


def set_notsent_limit(sock: socket.socket, num_bytes: int) -> None:
    """The kernel takes no more bytes while so many have not left yet."""
    _try(sock, socket.IPPROTO_TCP, _NOTSENT_LOWAT, struct.pack("=I", num_bytes))


def set_pacing(sock: socket.socket, bps: float | None) -> bool:
    """Send at most so many bits per second from now on; None is no limit. False where there is no such option."""
    rate = _UNPACED if bps is None else max(1, int(bps / 8))
    return _try(sock, socket.SOL_SOCKET, _MAX_PACING_RATE, struct.pack("=Q", rate))


def set_send_buffer(sock: socket.socket, num_bytes: int) -> bool:
    """Beyond the system's limit where we may. The kernel stops sizing the buffer by itself."""
    # Linux doubles what it is given, for its own bookkeeping.
    half = struct.pack("=I", min(num_bytes // 2, (1 << 31) - 1))
    return _try(sock, socket.SOL_SOCKET, _SNDBUFFORCE, half) or _try(sock, socket.SOL_SOCKET, socket.SO_SNDBUF, half)


def _try(sock: socket.socket, level: int, option: int, value: bytes) -> bool:
    try:
        sock.setsockopt(level, option, value)
    except OSError:
        return False
    return True
