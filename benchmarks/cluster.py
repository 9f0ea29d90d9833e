"""Real daemons as real processes on this machine, for the demo, the end-to-end tests and the benchmarks.

A Cluster is one decoded and any number of prefillds with generated configurations in a temporary folder, each daemon on
cores of its own. Whatever was started is stopped, by pid.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WITH_CACHE: dict[str, dict[str, Any]] = {"cache": {"rows_bytes": 1 << 30}}
"""For `decoded` and `prefilld` of a cluster."""


def prfaas_home() -> Path:
    """Where imported models live."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("PRFAAS_HOME") or cache / "prfaas")


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago."""
    with socket.socket() as s:
        s.bind((host, 0))
        return int(s.getsockname()[1])


def to_toml(config: dict[str, Any]) -> str:
    """TOML text of {section: {key: value}} and {section: [ {..}, .. ]}."""
    lines: list[str] = []
    for section, body in config.items():
        for table in body if isinstance(body, list) else [body]:
            lines.append(f"[[{section}]]" if isinstance(body, list) else f"[{section}]")
            lines += [f"{key} = {_value(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """A value as TOML; tables within a section are written inline."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_value(inner)}" for key, inner in value.items()) + "}"
    return "[" + ", ".join(map(_value, value)) + "]" if isinstance(value, list) else json.dumps(value)


@dataclass
class Daemon:
    """One daemon process. `prefix` goes before the command (a namespace, say); `program` is run in its place."""

    name: str
    module: str
    config: dict[str, Any]
    folder: Path
    prefix: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    program: str = ""
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def socket_path(self) -> Path:
        return Path(self.config["control"]["socket"])

    @property
    def log_path(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def write_config(self) -> Path:
        path = self.folder / f"{self.name}.toml"
        path.write_text(to_toml(self.config))
        return path

    def start(self) -> Daemon:
        program = [sys.executable, "-m", self.program or self.module]
        command = [*self.prefix, *program, "--config", str(self.write_config()), *self.args]
        with self.log_path.open("ab") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        return self

    def wait_ready(self, timeout_s: float = 120.0) -> Daemon:
        """Until the daemon says so over its control socket; fails with the end of its log."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process is None or self.process.poll() is not None:
                break
            with contextlib.suppress(OSError, subprocess.CalledProcessError, ValueError):
                if self.ctl("status").get("state") == "ready":
                    return self
            time.sleep(0.1)
        raise RuntimeError(f"{self.name} is not ready after {timeout_s:g} s; its log ends:\n{self.log_tail()}")

    def ctl(self, *verb: str, timeout_s: float = 60.0) -> Any:
        """Run the daemon's CLI with --json; raises CalledProcessError."""
        module = f"{self.module}.ctl"
        command = [sys.executable, "-m", module, "--socket", str(self.socket_path), *verb, "--json"]
        done = subprocess.run(command, capture_output=True, check=True, timeout=timeout_s)
        return json.loads(done.stdout)

    def log_tail(self, num_lines: int = 30) -> str:
        if not self.log_path.exists():
            return ""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-num_lines:])

    def kill(self, sig: int = signal.SIGKILL) -> int:
        """Send a signal and wait; returns the exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(sig)
        return self.process.wait(60)

    def stop(self, timeout_s: float = 60.0) -> int:
        """SIGTERM, then SIGKILL when it does not end in time; returns the exit status."""
        if self.process is None:
            return 0
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(10)


@dataclass
class Cluster:
    """One decoded and its prefillds."""

    folder: Path
    decoded: Daemon
    prefillds: list[Daemon]

    @property
    def url(self) -> str:
        http = self.decoded.config["http"]
        return f"http://{http['host']}:{http['port']}"

    @property
    def daemons(self) -> list[Daemon]:
        return [*self.prefillds, self.decoded]

    def start(self) -> Cluster:
        for daemon in self.daemons:
            daemon.start()
        for daemon in self.daemons:
            daemon.wait_ready()
        self.wait_peers()
        return self

    def wait_peers(self, timeout_s: float = 60.0) -> None:
        """Until decoded can offload to every prefilld."""
        deadline = time.monotonic() + timeout_s
        states: list[Any] = []
        while time.monotonic() < deadline:
            states = self.decoded.ctl("peers")
            if all(p["state"] == "ready" for p in states):
                return
            time.sleep(0.1)
        raise RuntimeError(f"peers are not ready after {timeout_s:g} s: {states}\n{self.decoded.log_tail()}")

    def wait_warm(self, timeout_s: float = 300.0) -> None:
        """Until the engines have recorded their decode steps: before, the first steps of each kind take longer."""
        deadline = time.monotonic() + timeout_s
        while not all(daemon.ctl("status").get("is_warm", True) for daemon in self.daemons):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the engines are not warm after {timeout_s:g} s")
            time.sleep(0.5)

    def post(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None, timeout_s: float = 600
    ) -> Any:
        """POST JSON, return JSON; an HTTP error raises urllib's HTTPError."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **(headers or {})})
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return json.load(response)

    def get(self, path: str, timeout_s: float = 10) -> str:
        with urllib.request.urlopen(self.url + path, timeout=timeout_s) as response:
            return str(response.read().decode())

    def stop(self) -> dict[str, int]:
        """Stop everything; exit statuses by name."""
        return {daemon.name: daemon.stop() for daemon in (self.decoded, *self.prefillds)}


def beside(cluster: Cluster, name: str) -> Cluster:
    """Another decoded in front of the same prefillds, configured alike; who starts it stops it."""
    first = cluster.decoded
    config = {
        **first.config,
        "node": {"name": name, "state_dir": str(cluster.folder / f"{name}.state")},
        "http": {**first.config["http"], "port": free_port()},
        "control": {"socket": str(cluster.folder / f"{name}.sock")},
    }
    return Cluster(cluster.folder, Daemon(name, "decoded", config, cluster.folder), cluster.prefillds)


def split_cores(num: int) -> list[list[int]]:
    """A share of this process's cores for each of `num` daemons; they share when there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    return [[cores[i % len(cores)]] for i in range(num)]


def make_cluster(
    folder: Path,
    model: Path | None,
    *,
    num_prefillds: int = 1,
    decoded: dict[str, dict[str, Any]] | None = None,
    prefilld: dict[str, dict[str, Any]] | None = None,
) -> Cluster:
    """Configurations only; `decoded` and `prefilld` override {section: {key: value}}."""
    cores = split_cores(num_prefillds + 1)
    servers = []
    for i in range(num_prefillds):
        config = _common(folder, f"prefilld{i}", model, cores[i])
        config["listen"] = {"host": "127.0.0.1", "port": free_port()}
        config["http"] = {"host": "127.0.0.1", "port": free_port()}
        servers.append(Daemon(f"prefilld{i}", "prefilld", _merge(config, prefilld), folder))
    config = _common(folder, "decoded", model, cores[-1])
    config["http"] = {"host": "127.0.0.1", "port": free_port(), "allow_route_override": True}
    # Both sides are equally fast here, so predicted times would keep everything at decoded; and tests count bytes.
    config["routing"] = {"mode": "threshold", "threshold_tokens": 1000, "replicate_share": 0}
    config = _merge(config, decoded)
    if servers and "peers" not in config:
        config["peers"] = [{"name": s.name, "address": _address(s)} for s in servers]
    return Cluster(folder, Daemon("decoded", "decoded", config, folder), servers)


@contextlib.contextmanager
def running_cluster(model: Path | None, **kwargs: Any) -> Iterator[Cluster]:
    """A started cluster in a temporary folder; stopped and removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="prfaas-"))
    cluster = make_cluster(folder, model, **kwargs)
    try:
        yield cluster.start()
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _address(server: Daemon) -> str:
    return f"{server.config['listen']['host']}:{server.config['listen']['port']}"


def _common(folder: Path, name: str, model: Path | None, cpus: Sequence[int]) -> dict[str, Any]:
    return {
        "node": {"name": name, "state_dir": str(folder / f"{name}.state")},
        "model": {"path": str(model or "")},
        "engine": {"threads": len(cpus), "cpus": list(cpus)},
        # Tests and benchmarks repeat prompts, and mean to have them computed.
        "cache": {"rows_bytes": 0},
        "control": {"socket": str(folder / f"{name}.sock")},
        "log": {"level": "info"},
    }


def _merge(config: dict[str, Any], extra: dict[str, Any] | None) -> dict[str, Any]:
    for section, body in (extra or {}).items():
        config[section] = {**config.get(section, {}), **body} if isinstance(body, dict) else body
    return config


def http_status(error: urllib.error.HTTPError) -> tuple[int, Any]:
    """Status and decoded body of a failed POST."""
    text = error.read()
    with contextlib.suppress(ValueError):
        return error.code, json.loads(text)
    return error.code, text
