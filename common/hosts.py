"""What an address tells: whether it stays on this machine and so needs no secret; whether a certificate can have it."""

from __future__ import annotations

import ipaddress
import re

_HOST_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


def is_loopback(host: str) -> bool:
    """True for an address that never leaves the machine; names other than localhost count as leaving it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.split("%")[0]).is_loopback
    except ValueError:
        return False


def is_certificate_name(text: str) -> bool:
    """True for what the name of a peer in its certificate may be: an IP address or a host name."""
    try:
        ipaddress.ip_address(text)
        return True
    except ValueError:
        pass
    try:
        return _HOST_NAME.fullmatch(text.encode("idna").decode()) is not None
    except UnicodeError:
        return False
