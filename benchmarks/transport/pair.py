"""Two processes of ends.py or another sender, here or at the ends of an emulated link, and lines to and from them."""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.wan.wan import ADDRESS, Wan

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Process:
    """One of the two; `ask` sends a JSON line and answers the next one it says."""

    popen: subprocess.Popen[str]

    def ask(self, **line: Any) -> dict[str, Any]:
        self.tell(**line)
        return self.hear()

    def tell(self, **line: Any) -> None:
        if self.popen.stdin is None:
            raise RuntimeError("the process has no standard input")
        self.popen.stdin.write(json.dumps(line) + "\n")
        self.popen.stdin.flush()

    def hear(self, timeout_s: float | None = None) -> dict[str, Any]:
        """The next line. Raises RuntimeError when the process has ended instead, TimeoutError when nothing came."""
        if timeout_s is not None and self.popen.stdout is not None:
            with selectors.DefaultSelector() as selector:
                selector.register(self.popen.stdout, selectors.EVENT_READ)
                if not selector.select(timeout_s):
                    raise TimeoutError(f"nothing came within {timeout_s:g} s")
        line = "..."
        while line and not line.startswith("{"):  # some engines log to standard output
            line = self.popen.stdout.readline() if self.popen.stdout is not None else ""
        if not line:
            raise RuntimeError(f"{self.popen.args!r:.200} ended with status {self.popen.wait()}")
        heard: dict[str, Any] = json.loads(line)
        return heard


@contextmanager
def pair(
    module: str, setup: dict[str, Any], wan: Wan | None = None, env: dict[str, str] | None = None
) -> Iterator[tuple[Process, Process]]:
    """`module`'s serving end (at A) and fetching end (at B), connected; both are gone afterwards."""
    setup = setup | ({"host": ADDRESS["A"]} if wan is not None else {})
    serve = Process(_start(module, "serve", setup, wan, env))
    fetch = None
    try:
        fetch = Process(_start(module, "fetch", setup | serve.hear(), wan, env))
        fetch.hear()
        yield serve, fetch
    finally:
        for process in (serve, fetch):
            if process is not None:
                process.popen.kill()
                process.popen.wait()


def _start(
    module: str, role: str, setup: dict[str, Any], wan: Wan | None, env: dict[str, str] | None
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", f"benchmarks.transport.{module}", role, json.dumps(setup)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT, "env": env}
    if wan is None:
        return subprocess.Popen(command, **pipes)
    return wan.popen("A" if role == "serve" else "B", *command, **pipes)
