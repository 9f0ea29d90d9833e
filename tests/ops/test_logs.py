from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common import logs

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    levels = {name: logging.getLogger(name).level for name in logs.OURS}
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, old in levels.items():
        logging.getLogger(name).setLevel(old)
    logging.captureWarnings(False)


def written(form: str = "text", level: str = "info") -> tuple[io.StringIO, logs.LogWriter]:
    stream = io.StringIO()
    return stream, logs.setup(level, form, stream)


def test_text_lines_carry_fields(root_logger: None) -> None:
    stream, writer = written()
    log = logging.getLogger("decoded.test")
    with logs.bound(request_id="r1"):
        log.info("peer %s", "ready", extra={"peer": "p 1", "rtt_s": 0.123456789, "empty": "", "none": None})
        log.debug("hidden")
    log.warning("two\nlines")
    writer.close()
    first, second = stream.getvalue().splitlines()
    assert first.endswith('Z info decoded.test peer ready request_id=r1 peer="p 1" rtt_s=0.123457')
    assert second.endswith("Z warning decoded.test two\\nlines")


def test_json_lines_are_objects(root_logger: None) -> None:
    stream, writer = written("json")
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("common.x").exception("failed", extra={"request_id": "r2", "odd": {1, 2}})
    writer.close()
    entry = json.loads(stream.getvalue())
    assert (entry["level"], entry["logger"], entry["message"], entry["request_id"]) == (
        "error",
        "common.x",
        "failed",
        "r2",
    )
    assert "ValueError: no" in entry["traceback"]


async def test_bound_fields_follow_the_task(root_logger: None) -> None:
    stream, writer = written()
    log = logging.getLogger("common.x")

    async def request(name: str, gate: asyncio.Event) -> None:
        with logs.bound(request_id=name):
            await gate.wait()
            log.info("done")

    gate = asyncio.Event()
    tasks = [asyncio.create_task(request(n, gate)) for n in "ab"]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*tasks)
    log.info("outside")
    writer.close()
    lines = stream.getvalue().splitlines()
    assert [line.split(" ", 3)[3] for line in lines] == ["done request_id=a", "done request_id=b", "outside"]


def test_level_and_format_change_while_running(root_logger: None) -> None:
    stream, writer = written(level="warning")
    log = logging.getLogger("prefilld.x")
    log.info("no")
    writer.configure("debug", "json")
    log.debug("yes")
    logging.getLogger("aiohttp.access").info("another library's chatter stays out")
    writer.close()
    assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == ["yes"]


class StuckStream(io.StringIO):
    """A pipe whose reader does not read, until it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.free = [os.pipe() for _ in range(2)]

    def write(self, text: str) -> int:
        os.write(self.entered[1], b"x")
        os.read(self.free[0], 1)
        return super().write(text)


def test_a_stuck_reader_costs_lines_not_time(root_logger: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_QUEUED_LINES", 3)
    stream = StuckStream()
    writer = logs.setup("info", "text", stream)
    log = logging.getLogger("common.x")
    log.info("first")
    os.read(stream.entered[0], 1)
    for n in range(10):
        log.info("n%d", n)
    assert writer.num_dropped == 7
    os.write(stream.free[1], b"x" * 100)
    writer.close()
    lines = [line.split(" ", 3)[-1] for line in stream.getvalue().splitlines()]
    assert lines[0] == "first"
    assert "7 log lines lost: the log's reader is too slow" in lines
    assert [line for line in lines if line.startswith("n")] == ["n0", "n1", "n2"]


def test_closing_does_not_wait_for_a_stuck_reader(root_logger: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_QUEUED_LINES", 1)
    monkeypatch.setattr(logs, "CLOSE_TIMEOUT_S", 0.01)
    stream = StuckStream()
    writer = logs.setup("info", "text", stream)
    for _ in range(3):
        logging.getLogger("common.x").info("x")
    writer.close()
    assert stream.getvalue() == ""
    os.write(stream.free[1], b"x" * 100)


def test_a_process_whose_log_nobody_reads_ends_by_itself() -> None:
    """Python's exit waits for handlers' locks and flushes stderr: neither may hang with the writing thread."""
    program = (
        "import logging; from common import logs; writer = logs.setup('info'); log = logging.getLogger('common.x')\n"
        "for n in range(3000): log.info('x' * 80)\n"
        "logs.CLOSE_TIMEOUT_S = 0.2; writer.close(); log.error('late'); raise SystemExit(7)"
    )
    reader, written = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", program], stderr=written, cwd=ROOT)
    os.close(written)
    try:
        assert process.wait(30) == 7
    finally:
        process.kill()
        os.close(reader)


def test_under_journald_the_priority_leads(root_logger: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOURNAL_STREAM", "1:2")
    stream, writer = written()
    logging.getLogger("common.x").error("bad")
    writer.close()
    assert stream.getvalue() == "<3>error common.x bad\n"


def test_damper_tells_the_first_and_then_one_a_minute_per_key() -> None:
    now = 0.0
    damper = logs.Damper(60.0, clock=lambda: now)
    assert damper.admit("a") == 0
    assert [damper.admit("a") for _ in range(500)] == [None] * 500
    assert damper.admit("b") == 0
    now = 59.9
    assert damper.admit("a") is None
    now = 60.0
    assert [damper.admit("a"), damper.admit("a")] == [501, None]
    now = 200.0
    assert damper.admit("a") == 1


def test_damper_forgets_the_quietest_when_there_are_too_many_keys() -> None:
    damper = logs.Damper(60.0, clock=lambda: 0.0)
    damper.admit("loud")
    for n in range(3 * damper.MAX_KEYS):
        damper.admit(f"k{n}")
        assert damper.admit("loud") is None
    assert damper.admit("k0") == 0
