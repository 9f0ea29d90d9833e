"""The control protocol's framing, where the socket is, and a blocking client. Standard library only: it starts a ctl.

    +----------------+----------------------------------------------------------------+
    | length (4, BE) | UTF-8 JSON                                                     |
    +----------------+----------------------------------------------------------------+
    request  {"verb": "status", "params": {...}}
    reply    {"ok": true, "data": ...} or {"ok": false, "error": {"code": "...", "message": "..."}}

One connection carries any number of requests, one after the other. The server (control.py) uses the same framing.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ControlError

SYSTEM_RUN = Path("/run")
HEADER = struct.Struct(">I")
MAX_REQUEST_BYTES = 1 << 20
MAX_REPLY_BYTES = 64 << 20


def encode_frame(message: dict[str, Any]) -> bytes:
    """A message with its length in front. Values JSON does not know are written as strings."""
    body = json.dumps(message, separators=(",", ":"), default=str).encode()
    return HEADER.pack(len(body)) + body


def frame_length(header: bytes, max_bytes: int) -> int:
    """The declared length; checked before anything is allocated. Raises ControlError."""
    (length,) = HEADER.unpack(header)
    if not 0 < length <= max_bytes:
        raise ControlError(f"a control frame of {length} bytes is not between 1 and {max_bytes}")
    return int(length)


def decode_body(body: bytes) -> dict[str, Any]:
    """The message of a frame. Raises ControlError when it is not a JSON object."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ControlError(f"a control frame is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise ControlError("a control frame is not a JSON object")
    return message


@dataclass(frozen=True, slots=True)
class SocketPath:
    """Where the control socket is and how we know, for the message when nobody answers there."""

    path: Path
    source: str


def runtime_dir(daemon: str, environ: Mapping[str, str] = os.environ) -> SocketPath:
    """The daemon's directory under /run, or the user's own."""
    if given := environ.get("RUNTIME_DIRECTORY", "").split(":")[0]:
        return SocketPath(Path(given), "$RUNTIME_DIRECTORY")
    if os.geteuid() == 0:
        return SocketPath(SYSTEM_RUN / daemon, "the default for root")
    if xdg := environ.get("XDG_RUNTIME_DIR", ""):
        return SocketPath(Path(xdg) / daemon, "the default under $XDG_RUNTIME_DIR")
    return SocketPath(Path(f"/tmp/{daemon}-{os.geteuid()}"), "the default without $XDG_RUNTIME_DIR")


def default_socket(daemon: str, environ: Mapping[str, str] = os.environ) -> SocketPath:
    """Where the daemon listens when control.socket is empty."""
    found = runtime_dir(daemon, environ)
    return SocketPath(found.path / "control.sock", found.source)


def find_socket(daemon: str, given: str | None, config: str | None) -> SocketPath:
    """The socket a ctl talks to: --socket, else the key in --config, else the default (the system's if ours is absent).

    Raises:
        ControlError: the configuration file cannot be read or is not TOML.
    """
    if given:
        return SocketPath(Path(given), "--socket")
    if config:
        return _from_config(daemon, Path(config))
    ours = default_socket(daemon)
    system = SYSTEM_RUN / daemon / "control.sock"
    if not ours.path.exists() and system.exists():
        return SocketPath(system, "found, as the default of systemd units")
    return ours


def _from_config(daemon: str, config: Path) -> SocketPath:
    import tomllib  # Late: most calls need no TOML, and a ctl has to start fast.

    try:
        section = tomllib.loads(config.read_text(encoding="utf-8")).get("control", {})
    except OSError as error:
        raise ControlError(f"{config} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ControlError(f"{config} is not valid TOML: {error}") from error
    value = section.get("socket", "") if isinstance(section, dict) else ""
    if isinstance(value, str) and value:
        return SocketPath(config.parent / Path(value).expanduser(), f"control.socket in {config}")
    found = default_socket(daemon)
    return SocketPath(found.path, f"{found.source}; {config} sets no control.socket")


class Refused(ControlError):
    """The daemon's configuration file is wrong, or needs a restart: every problem, and what helps ("" is nothing)."""

    def __init__(self, problems: list[str], advice: str) -> None:
        super().__init__("; ".join(problems))
        self.problems, self.advice = problems, advice


def _refusal(failure: object) -> ControlError:
    if not isinstance(failure, dict):
        return ControlError("the daemon's reply is malformed")
    problems = failure.get("problems")
    if isinstance(problems, list):
        return Refused([str(p) for p in problems], str(failure.get("advice", "")))
    return ControlError(str(failure.get("message")))


class ControlClient:
    """A blocking connection to a daemon's control socket; use as a context manager."""

    def __init__(self, where: SocketPath, timeout_s: float = 30.0) -> None:
        self._where = where
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(str(where.path))
        except OSError as error:
            self._socket.close()
            raise ControlError(self._no_connection(error)) from error

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def call(self, verb: str, params: Mapping[str, Any] | None = None) -> Any:
        """The data of the reply.

        Raises:
            ControlError: the daemon refused, answered nonsense, or went away; with its own words where it has some.
        """
        try:
            self._socket.sendall(encode_frame({"verb": verb, "params": dict(params or {})}))
            length = frame_length(self._read(HEADER.size), MAX_REPLY_BYTES)
            reply = decode_body(self._read(length))
        except TimeoutError as error:
            seconds = self._socket.gettimeout()
            raise ControlError(f"no answer from {self._where.path} within {seconds:g} s") from error
        except OSError as error:
            raise ControlError(f"lost the daemon at {self._where.path}: {error.strerror or error}") from error
        if reply.get("ok") is True:
            return reply.get("data")
        raise _refusal(reply.get("error"))

    def _read(self, num_bytes: int) -> bytes:
        parts = bytearray()
        while len(parts) < num_bytes:
            piece = self._socket.recv(min(num_bytes - len(parts), 1 << 16))
            if not piece:
                raise ControlError(f"the daemon at {self._where.path} closed the connection; its log says why")
            parts += piece
        return bytes(parts)

    def _no_connection(self, error: OSError) -> str:
        reasons: dict[type[OSError], str] = {
            FileNotFoundError: "no such socket: is the daemon running?",
            ConnectionRefusedError: "nobody listens there: the daemon that made it is gone",
            PermissionError: "permission denied: only the daemon's user and root may use it",
        }
        reason = reasons.get(type(error), error.strerror or str(error))
        return f"cannot reach the daemon at {self._where.path} ({self._where.source}): {reason}"
