from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAKE = ROOT / "tests" / "ops" / "fake_daemon.py"
DEADLINE_S = 30.0


def child_env(**extra: str) -> dict[str, str]:
    drop = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "JOURNAL_STREAM", "RUNTIME_DIRECTORY")
    env = {k: v for k, v in os.environ.items() if k not in drop and not k.startswith("FAKE_")}
    return {**env, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **extra}


class NotifySocket:
    """What systemd would receive."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen: list[dict[str, str]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))

    def wait_for(self, key: str, value: str | None = None, timeout_s: float = DEADLINE_S) -> dict[str, str]:
        """The next message with the key (and value); earlier ones are kept in `seen`."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([self._socket], [], [], left)[0]:
                break
            message = dict(line.split("=", 1) for line in self._socket.recv(4096).decode().splitlines())
            self.seen.append(message)
            if key in message and (value is None or message[key] == value):
                return message
        raise AssertionError(f"no {key}={value} within {timeout_s} s; seen: {self.seen}")

    def drain_now(self) -> list[dict[str, str]]:
        messages = []
        while select.select([self._socket], [], [], 0)[0]:
            messages.append(dict(line.split("=", 1) for line in self._socket.recv(4096).decode().splitlines()))
        return messages

    def close(self) -> None:
        self._socket.close()


class FakeDaemon:
    """The fake service as a process, with its configuration, log and notification socket."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "d.toml"
        self.socket = folder / "c.sock"
        self.log = folder / "d.log"
        self.notify = NotifySocket(folder / "notify.sock")
        self.process: subprocess.Popen[bytes] | None = None
        self.write()

    def write(self, extra: str = "", *, level: str = "info", port: int = 0, drain: str = "20s") -> None:
        self.config.write_text(
            f'[engine]\nbackend = "fake"\n[control]\nsocket = "c.sock"\n[log]\nlevel = "{level}"\n'
            f'[http]\nport = {port}\n[drain]\ntimeout = "{drain}"\n{extra}'
        )

    def start(self, *args: str, ready: bool = True, **env: str) -> FakeDaemon:
        command = [sys.executable, str(FAKE), "--config", str(self.config), *args]
        full = child_env(NOTIFY_SOCKET=str(self.notify.path), **env)
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(command, env=full, cwd=ROOT, stdout=out, stderr=out)
        if ready:
            self.notify.wait_for("READY", "1")
        return self

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(DEADLINE_S)

    def ctl(self, *args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "decoded.ctl", "--socket", str(self.socket), *args]
        return subprocess.run(command, env=child_env(), cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)

    def json(self, *args: str) -> Any:
        done = self.ctl(*args, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def call(self, verb: str, **params: Any) -> Any:
        from common.control_client import ControlClient, SocketPath

        with ControlClient(SocketPath(self.socket, "test"), DEADLINE_S) as client:
            return client.call(verb, params)

    def log_text(self) -> str:
        """The whole log. A running daemon is stopped first: a thread of its own writes the log."""
        assert self.process is not None
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
            self.wait()
        return self.log.read_text()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(DEADLINE_S)
        self.notify.close()


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """What an imported model looks like from outside; nothing that could be loaded."""
    from common.engine.manifest import MANIFEST, build_manifest

    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    (folder / MANIFEST).write_text(build_manifest(folder, "tiny", {}).to_json())
    return folder


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(tmp_path)
    yield fake
    fake.close()
