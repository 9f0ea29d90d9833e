"""Which addresses stay on this machine. Used wherever an address decides whether a secret is needed."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """True for an address that never leaves the machine; names other than localhost count as leaving it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.split("%")[0]).is_loopback
    except ValueError:
        return False
