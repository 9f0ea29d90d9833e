"""systemd's notification protocol (sd_notify(3)) without a dependency: datagrams to $NOTIFY_SOCKET.

Without that variable everything is a no-op, so the daemons behave the same outside systemd. Called by daemon.py.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping


class Notifier:
    """Tells the service manager what this process does."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        self._socket: socket.socket | None = None
        if self._address.startswith("@"):
            self._address = "\0" + self._address[1:]
        if self._address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self.watchdog_s = _watchdog_interval(environ)

    @property
    def is_active(self) -> bool:
        """True when somebody listens."""
        return self._socket is not None

    def ready(self, status: str) -> None:
        """Start-up, or a reload, is finished."""
        self._send("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """A reload begins; must be followed by `ready`. The instant lets systemd pair the two."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self, status: str) -> None:
        """The way down begins."""
        self._send("STOPPING=1", f"STATUS={status}")

    def status(self, status: str) -> None:
        """One line for `systemctl status`."""
        self._send(f"STATUS={status}")

    def extend_timeout(self, seconds: float) -> None:
        """Ask for so long from now before systemd gives up on the start or stop in progress."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def watchdog(self) -> None:
        """Alive; to be sent at least every `watchdog_s`."""
        self._send("WATCHDOG=1")

    def close(self) -> None:
        """Nothing is sent after this."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, *lines: str) -> None:
        if self._socket is not None:
            text = "\n".join(line.replace("\n", " ") for line in lines)
            # A manager that went away or is slow must not take the daemon down.
            with contextlib.suppress(OSError):
                self._socket.sendto(text.encode(), self._address)


def restart_command(unit: str, environ: Mapping[str, str] = os.environ) -> str:
    """What restarts this process: a command when systemd runs it, else words."""
    is_unit = any(environ.get(name) for name in ("NOTIFY_SOCKET", "INVOCATION_ID"))
    return f"systemctl restart {unit}" if is_unit else "restart the daemon"


def _watchdog_interval(environ: Mapping[str, str]) -> float | None:
    """Seconds within which systemd wants a sign of life, or None when it wants none from this process."""
    text = environ.get("WATCHDOG_USEC", "")
    if not text.isdigit() or int(text) == 0 or environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(text) / 1e6
