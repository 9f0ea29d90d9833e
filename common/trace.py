"""A trace of what happened when, as JSON lines: segments, pieces, chunks. Off unless `log.trace_file` is set.

For measuring the overlap of compute and transfer (benchmarks/overlap.py), not for logs. Instants are monotonic seconds.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import StartupError

log = logging.getLogger(__name__)


class TraceWriter:
    """Callable as trace(event, now=..., **fields) from any thread."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("a", buffering=1 << 16)
        except OSError as e:
            raise StartupError(f"log.trace_file {path} cannot be opened: {e.strerror}") from e
        self._lock = threading.Lock()
        self._is_broken = False

    def __call__(self, event: str, *, now: float, **fields: Any) -> None:
        line = json.dumps({"event": event, "at": now, **fields}) + "\n"
        self._guarded(lambda: self._file.write(line))

    def flush(self) -> None:
        """Write out what is buffered."""
        self._guarded(self._file.flush)

    def close(self) -> None:
        """Flush and close; later events are dropped."""
        self._guarded(self._file.close)

    def _guarded(self, action: Callable[[], object]) -> None:
        """A trace that cannot be written (disk full) ends; serving goes on."""
        with self._lock:
            if self._is_broken or self._file.closed:
                return
            try:
                action()
            except OSError as e:
                self._is_broken = True
                log.error("the trace ends here, serving goes on: %s: %s", self._file.name, e.strerror)
