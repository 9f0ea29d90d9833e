"""Parts of a prefix cache as files: one file each, with a header that says what it is and a digest of all its bytes.

    folder/<identity>/<first 2 hex digits>/<name>.<group>      magic | header (JSON) | bytes      written aside, renamed

A file that is not what its header and name say is removed when it is met: nothing of it is ever used. The folder of
another model, or of a state of other shape, is another one. Blocking I/O, for worker threads; knows no event loop.
"""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from common.errors import StateDamaged
from common.layout import HASH_SCHEME
from common.sched.prefix_index import Entry
from common.sched.prefixes import NAME_BYTES
from common.state_parts import Bytes

log = logging.getLogger(__name__)
_MAGIC = b"PRFAAS-STATE-1\n"
_MAX_HEADER = 1024


@dataclass(frozen=True, slots=True)
class DiskPart:
    """A part on disk."""

    entry: Entry
    group: int
    first: int
    num_bytes: int
    path: Path


class PartFiles:
    """The files of one model's parts. Methods may be called from any thread."""

    def __init__(self, folder: Path, identity: str) -> None:
        self.folder = folder / identity
        self.num_refused = 0

    def write(self, entry: Entry, group: int, first: int, part: Bytes) -> DiskPart:
        """Write a part, whole or not at all; `first` as in tier.Part. Raises OSError."""
        path = self._path(entry.name, group)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        aside = path.with_suffix(f"{path.suffix}.{os.getpid()}.new")
        try:
            with aside.open("wb") as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(_MAGIC + _header(_facts(entry, group, first), part))
                file.write(part.data)
            aside.replace(path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise
        return DiskPart(entry, group, first, part.size, path)

    def read(self, part: DiskPart) -> Bytes:
        """The bytes of a part.

        Raises:
            StateDamaged: they are not what was written; the file is removed.
        """
        try:
            with part.path.open("rb") as file:
                entry, group, first, digest, offset = _read_header(file.read(len(_MAGIC) + _MAX_HEADER))
                file.seek(offset)
                found = np.fromfile(file, np.uint8)
            if (entry, group, first, found.size) != (part.entry, part.group, part.first, part.num_bytes):
                raise ValueError(f"holds {found.size} bytes of {entry}, not {part.num_bytes} of {part.entry}")
            if _digest(_facts(entry, group, first), found) != digest:
                raise ValueError("its bytes are not those that were written")
        except (OSError, ValueError) as e:
            self.remove(part)
            raise StateDamaged(f"{part.path}: {e}") from None
        return found

    def remove(self, part: DiskPart) -> None:
        """Delete the file, if it is there."""
        with suppress(OSError):
            part.path.unlink(missing_ok=True)

    def scan(self) -> Iterator[DiskPart]:
        """What is there, oldest first; what is not ours, or cut off, is removed. Bytes are verified when read."""
        found: list[tuple[float, DiskPart]] = []
        for path in sorted(self.folder.glob("*/*")):
            try:
                facts = path.stat()
                if not stat.S_ISREG(facts.st_mode):
                    raise ValueError("it is no regular file")  # opening a pipe would wait for a writer
                with path.open("rb") as file:
                    entry, group, first, _, offset = _read_header(file.read(len(_MAGIC) + _MAX_HEADER))
                if path != self._path(entry.name, group):
                    raise ValueError("it does not have the name of what it holds")
            except (OSError, ValueError) as e:
                log.warning("removing a file that is no part of the cache: %s", e, extra={"path": str(path)})
                self.num_refused += 1
                with suppress(OSError):
                    path.unlink()
                continue
            found.append((facts.st_mtime, DiskPart(entry, group, first, facts.st_size - offset, path)))
        yield from (part for _, part in sorted(found, key=lambda item: item[0]))

    def _path(self, name: bytes, group: int) -> Path:
        text = name.hex()
        return self.folder / text[:2] / f"{text}.{group}"


def _facts(entry: Entry, group: int, first: int) -> dict[str, object]:
    names = {"scheme": HASH_SCHEME, "name": entry.name.hex(), "parent": entry.parent.hex()}
    return {**names, "stop": entry.stop, "num_tokens": entry.num_tokens, "group": group, "first": first}


def _digest(facts: dict[str, object], part: Bytes) -> str:
    state = xxhash.xxh3_128(json.dumps(facts).encode())
    state.update(part.data)
    return state.hexdigest()


def _header(facts: dict[str, object], part: Bytes) -> bytes:
    return json.dumps({**facts, "digest": _digest(facts, part)}).encode() + b"\n"


def _read_header(data: bytes) -> tuple[Entry, int, int, str, int]:
    """Entry, group, first token, digest, and where the bytes begin. Raises ValueError."""
    end = data.find(b"\n", len(_MAGIC))
    if not data.startswith(_MAGIC) or end < 0:
        raise ValueError("it does not begin like a part of a prefix cache")
    try:
        facts = json.loads(data[len(_MAGIC) : end])
        name, parent = bytes.fromhex(facts["name"]), bytes.fromhex(facts["parent"])
        stop, num_tokens, group, first = (facts[key] for key in ("stop", "num_tokens", "group", "first"))
        digest, scheme = str(facts["digest"]), facts["scheme"]
    except (KeyError, TypeError, json.JSONDecodeError, RecursionError) as e:
        raise ValueError(f"its header cannot be read: {e!r:.200}") from None
    if not all(type(number) is int for number in (stop, num_tokens, group, first)):
        raise ValueError(f"its header has other than whole numbers: {facts!r:.300}")
    entry = Entry(name, parent, stop, num_tokens)
    if scheme != HASH_SCHEME or len(name) != NAME_BYTES or len(parent) != NAME_BYTES:
        raise ValueError(f"its header is of another kind: {facts}")
    return entry, group, first, digest, end + 1
