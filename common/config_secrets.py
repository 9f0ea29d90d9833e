"""Secrets in files and the addresses that need them: the shared key, API keys, private keys.

Knows no section; called by the configuration's checks and by the daemons when they need the secret itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pwd
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from common.config_types import Problem
from common.errors import ConfigError
from common.hosts import is_loopback
from common.units import MIB, exact_size

MIN_KEY_BYTES = 32
MIN_KEY_SYMBOLS = 8
MAX_FILE_BYTES = 1 * MIB


def check_bind(path: str, host: str, is_guarded: bool, secret_key: str, or_else: str = "") -> Iterator[Problem]:
    """The rule of both daemons: an address that others can reach needs a secret."""
    if not is_loopback(host) and not is_guarded:
        message = f"{host!r} can be reached from other machines: set {secret_key}{or_else}, or use 127.0.0.1"
        yield Problem((path, secret_key), message)


def unreadable(path: str, read: Callable[[Path], object], file: Path) -> Iterator[Problem]:
    """The problem with a secret's file, if it has one."""
    try:
        read(file)
    except ConfigError as error:
        yield Problem((path,), str(error))


def read_key(path: Path) -> bytes:
    """The shared secret as 32 bytes for HMAC: SHA-256 of the file without trailing line ends.

    Raises:
        ConfigError: missing, open to others, or less than 32 bytes of secret.
    """
    secret = read_secret(path).rstrip(b"\r\n")
    if len(secret) < MIN_KEY_BYTES:
        raise ConfigError(f"{path} holds {len(secret)} bytes of secret, at least {MIN_KEY_BYTES} are needed")
    if len(set(secret)) < MIN_KEY_SYMBOLS:
        raise ConfigError(f"{path} holds only {len(set(secret))} different bytes: that is no secret")
    return hashlib.sha256(secret).digest()


def read_lines(path: Path) -> tuple[str, ...]:
    """The secrets of a file with one per line; empty lines and lines that begin with # are left out.

    Raises:
        ConfigError: missing, open to others, not text, or empty.
    """
    try:
        text = read_secret(path).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text") from error
    lines = tuple(s for line in text.splitlines() if (s := line.strip()) and not s.startswith("#"))
    if not lines:
        raise ConfigError(f"{path} holds no key")
    return lines


def read_secret(path: Path) -> bytes:
    """A file that others may not read. Raises ConfigError."""
    return read_file(path, is_secret=True)


def read_file(path: Path, *, is_secret: bool = False) -> bytes:
    """A small regular file. Raises ConfigError."""
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):
            raise ConfigError(f"{path} is not a regular file")
        if is_secret and facts.st_mode & stat.S_IRWXO:
            mode = stat.S_IMODE(facts.st_mode)
            raise ConfigError(f"{path} has mode {mode:04o}, which lets every user in: chmod o= {path}")
        if facts.st_size > MAX_FILE_BYTES:
            kind = "a key file" if is_secret else "a file of certificates"
            raise ConfigError(f"{path} is larger than {exact_size(MAX_FILE_BYTES)}: not {kind}")
        return path.read_bytes()
    except PermissionError as error:
        raise ConfigError(f"{path} may not be read by {_user(os.geteuid())}: {_who_may(path)}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error


def _who_may(path: Path) -> str:
    """Owner and mode of a file, or of the directory on the way to it that may not be entered."""
    for part in (path, *path.parents):
        with contextlib.suppress(OSError):
            facts = part.stat()
            return f"{part} belongs to {_user(facts.st_uid)} and has mode {stat.S_IMODE(facts.st_mode):04o}"
    return "permission denied"


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"
