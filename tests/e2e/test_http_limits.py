"""Both daemons with 64 file descriptors: idle HTTP connections starve neither probes, nor control, nor links."""

from __future__ import annotations

import contextlib
import os
import socket
import urllib.request
from pathlib import Path

from benchmarks.cluster import make_cluster

FAKE = {"engine": {"backend": "fake"}, "fake": {"prefill_tokens_per_s": 4000, "decode_tokens_per_s": 200}}


def test_idle_connections_leave_descriptors_for_everything_else(tmp_path: Path) -> None:
    cluster = make_cluster(tmp_path, None, decoded=FAKE, prefilld=FAKE)
    for daemon in cluster.daemons:
        daemon.prefix = ("prlimit", "--nofile=64:64")
    with contextlib.ExitStack() as clients:
        clients.callback(cluster.stop)
        cluster.start()
        ports = [daemon.config["http"]["port"] for daemon in cluster.daemons]
        for port in ports:
            for _ in range(100):
                clients.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
        for daemon, port in zip(cluster.daemons, ports, strict=True):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/livez", timeout=10) as response:
                assert response.status == 200
            assert daemon.ctl("status")["state"] == "ready"
            assert len(os.listdir(f"/proc/{daemon.pid}/fd")) <= 52  # noqa: PTH208
            assert daemon.log_path.read_text().count("no room for another HTTP connection") == 1
        answer = cluster.post("/v1/completions", {"prompt": [5] * 1500, "max_tokens": 2}, {"X-Prfaas-Timing": "1"})
        assert answer["prfaas"]["route"] == "remote"
