"""An engine as a process of its own with an HTTP server: start, wait until it answers, stop by pid.

Knows no particular engine. Nothing that was started is left running.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What the caller's environment says about threads must not reach a peer: each engine gets its own settings.
_NOT_INHERITED = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VIRTUAL_ENV")


class CannotStart(RuntimeError):
    """The engine did not come up; the text ends with its log."""


@dataclass
class Server:
    """One engine process; `ready_path` answers 200 once it serves."""

    command: Sequence[str]
    port: int
    ready_path: str
    log_path: Path
    env: Mapping[str, str] = field(default_factory=dict)
    cpus: Sequence[int] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, timeout_s: float) -> float:
        """Start and wait; returns the seconds it took. Raises CannotStart."""
        env = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED} | dict(self.env)
        began = time.monotonic()
        with self.log_path.open("ab") as out:
            self.process = subprocess.Popen(
                _pinned(self.command, self.cpus), stdout=out, stderr=out, stdin=subprocess.DEVNULL,
                env=env, cwd=ROOT, start_new_session=True,
            )  # fmt: skip
        while time.monotonic() - began < timeout_s:
            if self.process.poll() is not None:
                raise CannotStart(f"it ended with status {self.process.returncode}; its log ends:\n{self.log_tail()}")
            if self._answers():
                return time.monotonic() - began
            time.sleep(0.05)
        self.stop()
        raise CannotStart(f"it is not ready after {timeout_s:g} s; its log ends:\n{self.log_tail()}")

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + self.ready_path, timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:  # URLError is one
            return False

    def stop(self, timeout_s: float = 30.0) -> None:
        """SIGTERM to the process; SIGKILL to what is left of its group when it does not end in time."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout_s)
        with contextlib.suppress(ProcessLookupError):  # the group is ours: it was made by start_new_session
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def log_tail(self, num_lines: int = 15) -> str:
        """The end of what the process wrote."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-num_lines:])


def _pinned(command: Sequence[str], cpus: Sequence[int]) -> list[str]:
    if not cpus:
        return list(command)
    return ["taskset", "--cpu-list", ",".join(map(str, cpus)), *command]
