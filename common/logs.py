"""Structured logs: one line of key=value text or one JSON object per record, written by a thread of its own.

Code logs through the standard library and passes fields by name: `log.info("peer ready", extra={"peer": name})`.
`bound(request_id=...)` adds fields to everything logged inside it, across awaits. The event loop never waits for the
disk or a pipe: when the queue is full, lines are dropped and counted. Called by daemon.py; knows no configuration file.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import logging
import logging.handlers
import os
import queue
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

MAX_QUEUED_LINES = 10_000
CLOSE_TIMEOUT_S = 2.0
OURS = ("common", "prefilld", "decoded")

_fields: contextvars.ContextVar[dict[str, Any]] = contextvars.ContextVar("log_fields")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_PRIORITY = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}


@contextlib.contextmanager
def bound(**fields: Any) -> Iterator[None]:
    """Add fields to every record logged in this block by this task (and by tasks it creates)."""
    token = _fields.set({**_fields.get({}), **fields})
    try:
        yield
    finally:
        _fields.reset(token)


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """The bound fields and those passed by `extra`, in that order; the latter win."""
    extra = {k: v for k, v in vars(record).items() if k not in _STANDARD}
    return {**_fields.get({}), **extra}


class TextFormatter(logging.Formatter):
    """`2025-01-31T12:00:00.123Z info decoded.dispatch peer ready peer=p1`; no time and a priority for journald.

    Fields that are None or empty are left out.
    """

    def __init__(self, *, is_journal: bool = False) -> None:
        super().__init__()
        self._is_journal = is_journal

    def format(self, record: logging.LogRecord) -> str:
        head = f"<{_PRIORITY.get(record.levelno, 5)}>" if self._is_journal else f"{_timestamp(record)} "
        pairs = "".join(f" {k}={_text_value(v)}" for k, v in fields_of(record).items() if v is not None and v != "")
        message = record.getMessage().replace("\n", "\\n")
        line = f"{head}{record.levelname.lower()} {record.name} {message}{pairs}"
        if record.exc_info:
            trace = self.formatException(record.exc_info)
            line += "\n" + "\n".join(f"  | {t}" for t in trace.splitlines())
        return line


class JsonFormatter(logging.Formatter):
    """One object: time, level, logger, message, the fields, and traceback when there is one."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def _timestamp(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


def _text_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    is_plain = text and text.isprintable() and not any(c in text for c in ' "=')
    return text if is_plain else json.dumps(text, ensure_ascii=False)


class _LineQueue(logging.handlers.QueueHandler):
    """Formats in the caller, where the bound fields are, and hands the finished line to the writing thread."""

    num_dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        line = self.format(record)
        return logging.LogRecord(record.name, record.levelno, "", 0, line, None, None)

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.num_dropped += 1


class _Output(logging.Handler):
    """Writes finished lines; only the writing thread does.

    Without a lock, and past Python's own buffers where the stream has a descriptor: a write that hangs, since nobody
    reads the log, must not hold what the process waits for when it exits (logging.shutdown, flushing stderr).
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        try:
            self._fd = stream.fileno()
        except (OSError, AttributeError):
            self._fd = -1

    def createLock(self) -> None:  # noqa: N802
        """None: there is one writer."""
        self.lock = None

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage() + "\n"
        try:
            if self._fd < 0:
                self._stream.write(line)
                return
            data = line.encode(errors="backslashreplace")
            while data:
                data = data[os.write(self._fd, data) :]
        except (OSError, ValueError):
            pass  # A full disk, or a reader that is gone: there is nowhere left to tell.


class _Listener(logging.handlers.QueueListener):
    def __init__(self, lines: queue.Queue[Any], source: _LineQueue, out: logging.Handler) -> None:
        super().__init__(lines, out)
        self._lines, self._source = lines, source
        self.is_stuck = False
        """After stop: the thread hangs in a write."""
        self._num_told = 0

    def handle(self, record: logging.LogRecord) -> None:
        lost = self._source.num_dropped - self._num_told
        if lost:
            self._num_told += lost
            text = "%d log lines lost: the log's reader is too slow"
            told = logging.LogRecord(__name__, logging.WARNING, "", 0, text, (lost,), None)
            super().handle(self._source.prepare(told))
        super().handle(record)

    def stop(self) -> None:
        """End the thread; a log whose reader is stuck must not keep the daemon from exiting."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=CLOSE_TIMEOUT_S)  # None is the base class's own sign to end
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
            self.is_stuck = self._thread.is_alive()
            self._thread = None


class LogWriter:
    """The installed log; `close` writes what is queued."""

    def __init__(self, stream: TextIO, level: str, form: str) -> None:
        lines: queue.Queue[Any] = queue.Queue(MAX_QUEUED_LINES)
        self._handler = _LineQueue(lines)
        self._listener = _Listener(lines, self._handler, _Output(stream))
        self._listener.start()
        self.configure(level, form)
        root = logging.getLogger()
        root.handlers[:] = [self._handler]
        logging.captureWarnings(True)

    def configure(self, level: str, form: str) -> None:
        """Set level ("debug" ... "error") and format ("text" | "json"); takes effect with the next record."""
        number = logging.getLevelNamesMapping()[level.upper()]
        logging.getLogger().setLevel(max(number, logging.WARNING))
        for name in OURS:
            logging.getLogger(name).setLevel(number)
        journal = "JOURNAL_STREAM" in os.environ
        self._handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter(is_journal=journal))

    @property
    def num_dropped(self) -> int:
        """Lines lost because the reader of the log was too slow."""
        return self._handler.num_dropped

    def close(self) -> None:
        """Write what is queued and stop the thread. Later records go to the standard library's last resort.

        Where the log's reader is stuck they go nowhere: they would hang as well.
        """
        logging.getLogger().handlers[:] = []
        self._listener.stop()
        if self._listener.is_stuck:
            logging.getLogger().handlers[:] = [logging.NullHandler()]


class Damper:
    """Lets one line per key through at once and then one per `interval_s`, and counts those held back."""

    MAX_KEYS = 1000

    def __init__(self, interval_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s, self._clock = interval_s, clock
        self._told: dict[str, tuple[float, int]] = {}

    def admit(self, key: str) -> int | None:
        """How many lines of that key were held back since its last one; None when this one is to be held back too."""
        now = self._clock()
        told_at, num_held = self._told.pop(key, (None, 0))
        if told_at is not None and now - told_at < self._interval_s:
            self._told[key] = (told_at, num_held + 1)
            return None
        while len(self._told) >= self.MAX_KEYS:
            del self._told[next(iter(self._told))]
        self._told[key] = (now, 0)
        return num_held


def setup(level: str = "info", form: str = "text", stream: TextIO | None = None) -> LogWriter:
    """Install the log on `stream` (standard error). Other libraries' records are shown from warning on."""
    return LogWriter(stream or sys.stderr, level, form)
