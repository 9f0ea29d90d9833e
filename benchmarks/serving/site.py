"""The machine of the comparison: both daemons in real processes, warm, and reconfigured from one variant to the next.

prefilld has a core to itself. decoded has a part of the other one, held back by a CPU quota; what is left of that core
is the load generator's and the emulated link's. Both daemons reach each other over that link, and over a veth pair that
nothing slows down: "near", as within one site. Which of the two is used, and how prompts are routed, are reloads, so
every variant runs on the same processes. Without a link and a quota (the fake engine) everything is on loopback.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.cluster import Cluster, make_cluster
from benchmarks.serving.client import run_client
from benchmarks.serving.quota import CpuQuota, hierarchy
from benchmarks.wan.wan import ADDRESS, BESIDE, Wan, WanError
from common.policy.routing import Mode

T = TypeVar("T")
PORT = 7400
# Nothing is refused: what a variant cannot serve has to show as waiting.
LIMITS = {"max_queued_requests": 10_000, "max_queued_tokens": 100_000_000}


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to serve. `is_near`: without the slow link."""

    name: str
    mode: Mode
    is_near: bool = False


VARIANTS = (
    Variant("homogeneous", "remote-only", is_near=True),
    Variant("remote-only", "remote-only"),
    Variant("local-only", "local-only"),
    Variant("threshold", "threshold"),
    Variant("adaptive", "adaptive"),
)


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the daemons run on. `decoded_cores` is a part of one core; `rate_mbit` and `rtt_ms` are of the link."""

    model: Path | None
    decoded_cores: float
    rate_mbit: float
    rtt_ms: float
    max_batch: int = 16


class Site:
    """Started by `running`."""

    def __init__(self, hardware: Hardware, cluster: Cluster, wan: Wan | None, quota: CpuQuota | None) -> None:
        self.hardware, self.cluster, self._wan, self._quota = hardware, cluster, wan, quota

    def use(self, variant: Variant, threshold_tokens: float = 0.0, ttft_slo_s: float = math.inf) -> None:
        """Route as the variant says from now on; no request may be in flight. `adaptive` solves its own threshold, and
        is the one that looks at the SLO.
        """
        decoded = self.cluster.decoded
        threshold = "auto" if variant.mode == "adaptive" else _number(threshold_tokens)
        decoded.config["routing"] |= {"mode": variant.mode, "threshold_tokens": threshold}
        decoded.config["slo"] = {"ttft": "inf" if math.isinf(ttft_slo_s) else f"{1e3 * ttft_slo_s:.0f}ms"}
        decoded.config["peers"] = [self._peer(is_near=variant.is_near)]
        decoded.write_config()
        decoded.ctl("reload")
        self.cluster.wait_peers()

    def talk(self, client: Callable[[str], Awaitable[T]]) -> T:
        """Run a coroutine function of decoded's URL beside decoded."""
        return self._beside(lambda: run_client(client, self.cluster.url))

    def link_bps(self, peer: str) -> float:
        """What decoded finds the path to a peer to carry."""
        return float(self.cluster.decoded.ctl("link", "bench", peer, "--bytes", "32MiB")["goodput_bps"])

    @property
    def rtt_s(self) -> float:
        """Of the emulated link; 0 without one."""
        return self.hardware.rtt_ms / 1e3 if self._wan is not None else 0.0

    def hold_back(self) -> None:
        """decoded's quota holds from now on. Before, it prepares as fast as it can."""
        self.cluster.wait_warm()
        if self._quota is not None:
            self._quota.hold(self.cluster.decoded.pid, self.hardware.decoded_cores)

    def _peer(self, *, is_near: bool) -> dict[str, Any]:
        name = "near" if is_near else "far"
        if self._wan is None:
            return {"name": name, "address": f"127.0.0.1:{self.cluster.prefillds[0].config['listen']['port']}"}
        return {"name": name, "address": f"{(BESIDE if is_near else ADDRESS)['A']}:{PORT}"}

    def _beside(self, function: Callable[[], T]) -> T:
        return function() if self._wan is None else self._wan.call("B", function)


def _number(tokens: float) -> float | str:
    return "inf" if math.isinf(tokens) else int(tokens)


@contextlib.contextmanager
def running(hardware: Hardware, *, fake: dict[str, dict[str, float]] | None = None) -> Iterator[Site]:
    """Both daemons, warm and held back. `fake` speeds, by daemon, stand for the engine, the link and the quota.

    Raises:
        OSError, WanError: the machine lacks root, a second core, /dev/net/tun or a CPU cgroup.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prfaas-")))
        cores = sorted(os.sched_getaffinity(0))
        if fake is None and len(cores) < 2:
            raise OSError("two cores are needed: one for prefilld, one for decoded, the link and the load")
        wan, quota = (None, None) if fake is not None else _link_and_quota(stack, hardware, cores[1])
        cluster = _cluster(hardware, folder, wan, fake)
        stack.callback(cluster.stop)
        for daemon in cluster.daemons:
            daemon.start()
        for daemon in cluster.daemons:
            daemon.wait_ready()
        cluster.wait_peers()
        site = Site(hardware, cluster, wan, quota)
        site.hold_back()
        if fake is None:
            stack.enter_context(on_core(cores[1]))
        yield site


def _link_and_quota(stack: contextlib.ExitStack, hardware: Hardware, core: int) -> tuple[Wan, CpuQuota]:
    root = hierarchy()
    if root is None:
        raise OSError("no writable cgroup hierarchy with the cpu controller: decoded cannot be held back")
    # The emulator inherits the core; it must not take prefilld's.
    with on_core(core):
        wan = stack.enter_context(Wan(hardware.rate_mbit, hardware.rtt_ms / 2))
        wan.join()
    quota = CpuQuota("prfaas-bench", root)
    stack.callback(quota.close)
    return wan, quota


def _cluster(
    hardware: Hardware, folder: Path, wan: Wan | None, fake: dict[str, dict[str, float]] | None
) -> Cluster:  # fmt: skip
    decoded: dict[str, Any] = {
        "routing": {"mode": "remote-only"},
        "admission": dict(LIMITS),
        "batch": {"max_batch": hardware.max_batch},
    }
    prefilld: dict[str, Any] = {"limits": dict(LIMITS)}
    if fake is not None:
        for config, name in ((decoded, "decoded"), (prefilld, "prefilld")):
            config |= {"engine": {"backend": "fake"}, "fake": fake[name]}
        return make_cluster(folder, None, decoded=decoded, prefilld=prefilld)
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_text(secrets.token_hex(32))
    for config in (decoded, prefilld):
        config["security"] = {"key_file": str(key)}
    prefilld["listen"] = {"host": "0.0.0.0", "port": PORT}
    decoded["peers"] = [{"name": "far", "address": f"{ADDRESS['A']}:{PORT}"}]
    cluster = make_cluster(folder, hardware.model, decoded=decoded, prefilld=prefilld)
    if wan is None:
        raise WanError("real engines are compared over an emulated link")
    cluster.prefillds[0].prefix, cluster.decoded.prefix = tuple(wan.command("A")), tuple(wan.command("B"))
    return cluster


@contextlib.contextmanager
def on_core(core: int) -> Iterator[None]:
    """This process, and what it starts, runs on one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
