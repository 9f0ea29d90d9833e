"""Other transfer engines for the transport benchmark, in a folder of packages of their own; fetched once.

Each runs as two processes (mooncake_end.py, nixl_end.py) that speak to pair.py as ours do.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cluster import prfaas_home

PACKAGES = ("mooncake-transfer-engine-non-cuda==0.3.13", "nixl-cu12==1.5.1")


@dataclass(frozen=True)
class Peer:
    """One engine with one setting. `is_default`: as it comes."""

    name: str
    module: str
    is_default: bool
    env: dict[str, str] = field(default_factory=dict)
    setup: dict[str, Any] = field(default_factory=dict)


PEERS = (
    Peer("mooncake", "mooncake_end", True),
    Peer("mooncake-pool", "mooncake_end", False, {"MC_TCP_ENABLE_CONNECTION_POOL": "1"}),
    Peer("nixl", "nixl_end", True, {"UCX_TLS": "tcp"}),
    Peer("nixl-tuned", "nixl_end", False, {"UCX_TLS": "tcp"}, {"is_tuned": True}),
)


def environment(peer: Peer) -> dict[str, str]:
    """Of its processes."""
    path = os.pathsep.join(filter(None, [str(folder()), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, **peer.env, "PYTHONPATH": path, "MC_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "error"}


def folder() -> Path:
    """Where their packages are."""
    return prfaas_home() / "bench" / "transfer-engines"


def make_ready(say: Callable[[str], None]) -> list[Peer]:
    """Those that can be measured here, their packages fetched; `say` tells why others are left out."""
    home = folder()
    if not (home / ".complete").exists():
        say(f"fetching {' '.join(PACKAGES)} into {home} (once)")
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-deps"]
        done = subprocess.run([*command, "--target", str(home), *PACKAGES], capture_output=True, text=True, check=False)
        if done.returncode:
            say(f"other transfer engines are left out, they could not be fetched: {done.stderr.strip()[-300:]}")
            return []
        (home / ".complete").touch()
    found = []
    for peer in PEERS:
        module = {"mooncake_end": "mooncake.engine", "nixl_end": "nixl_cu12._api"}[peer.module]
        done = subprocess.run(
            [sys.executable, "-c", f"import {module}"],
            env=environment(peer),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            say(f"{peer.name} is left out: {done.stderr.strip().splitlines()[-1]}")
        else:
            found.append(peer)
    return found
