"""A trace of what happened when, as JSON lines: segments, pieces, chunks. Off unless `log.trace_file` is set.

For measuring the overlap of compute and transfer (benchmarks/overlap.py), not for logs. Instants are monotonic seconds.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from common.errors import StartupError


class TraceWriter:
    """Callable as trace(event, now=..., **fields) from any thread."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("a", buffering=1 << 16)
        except OSError as e:
            raise StartupError(f"log.trace_file {path} cannot be opened: {e.strerror}") from e
        self._lock = threading.Lock()

    def __call__(self, event: str, *, now: float, **fields: Any) -> None:
        line = json.dumps({"event": event, "at": now, **fields}) + "\n"
        with self._lock:
            if not self._file.closed:
                self._file.write(line)

    def flush(self) -> None:
        """Write out what is buffered."""
        with self._lock:
            if not self._file.closed:
                self._file.flush()

    def close(self) -> None:
        """Flush and close; later events are dropped."""
        with self._lock:
            self._file.close()
