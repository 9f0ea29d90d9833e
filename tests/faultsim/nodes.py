"""The two daemons as pretended processes: real network ends, real handler, real dispatcher, over the fake engine.

A node is a machine on which one incarnation of its daemon after the other runs. Only what the daemons' main() does is
done here: building the objects, starting and closing them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from common.local_backend import LocalBackend
from common.net.options import LinkOptions, LocalEnd, Security, Trace
from common.net.pool import PeerClient
from common.net.server import PrefillServer
from common.policy.admission import AdmissionController, AdmissionLimits
from common.policy.egress import Egress, EgressLimits
from common.policy.fallback import FallbackBudget
from common.policy.views import PushMode
from common.sched.deadlines import send_order
from decoded.config import DecodeConfig, PeerConfig
from decoded.dispatch import Dispatcher
from decoded.peers import PeerSet
from decoded.settings import DispatchSettings
from prefilld.cachefeed import CacheFeed
from prefilld.stream import StreamHandler
from tests.faultsim import engine
from tests.faultsim.loop import Process
from tests.faultsim.world import World

KEY = b"k" * 32
PORT = 7400
_CONFIG = DecodeConfig()


@dataclass(frozen=True)
class Plan:
    """What one seed's daemons are configured to."""

    options: LinkOptions
    server_options: LinkOptions
    model: engine.Model
    prefill_tokens_per_s: float = 1000.0
    max_staged_bytes: int = 1 << 20
    progress_timeout_s: float = 8.0
    max_running: int = 4
    max_queued: int = 4
    fallback_tokens_per_s: float = 2000.0
    max_attempts: int = 2
    max_admitted: int = 8
    is_traced: bool = False
    push: PushMode = "always"
    is_sealed: bool = False
    """Mode "tls": data links are sealed."""
    cache_blocks: int = 0
    """Blocks that fit the prefix cache of a prefilld; 0: nobody has one."""
    own_cache_blocks: int = 0
    """The same of a decoded."""


class Tally:
    """Metrics that are only counted: `counts[name, *labels]`."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, ...], float] = {}

    def __getattr__(self, name: str) -> _Metric:
        metric = _Metric(self.counts, (name,))
        setattr(self, name, metric)
        return metric

    def total(self, name: str) -> float:
        """Over all labels."""
        return sum(num for key, num in self.counts.items() if key[0] == name)


class _Metric:
    def __init__(self, counts: dict[tuple[str, ...], float], key: tuple[str, ...]) -> None:
        self._counts, self._key = counts, key

    def labels(self, *values: str) -> _Metric:
        return _Metric(self._counts, (*self._key, *values))

    def inc(self, num: float = 1) -> None:
        self._counts[self._key] = self._counts.get(self._key, 0) + num

    def observe(self, _: float) -> None:
        self.inc()

    def set(self, _: object) -> None:
        """Gauges are not looked at."""

    set_function = remove = __call__ = set


class _Counted(_Metric):
    """A metric that the campaign wants to have seen."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__({}, ())
        self._world, self._name = world, name

    def inc(self, num: float = 1) -> None:
        self._world.count(self._name)


class Node:
    """A machine with one daemon. `is_up`: the process lives; `is_closed`: it was told to stop."""

    role = ""
    process: Process
    backend: LocalBackend

    def __init__(self, world: World, plan: Plan, index: int, host: str) -> None:
        self.world, self.plan, self.index, self.host = world, plan, index, host
        self.name = f"{self.role[0]}{index}"
        self.num_boots = 0
        self.is_up = self.is_serving = self.is_closed = False

    def boot(self) -> None:
        """Start the next incarnation."""
        self.num_boots += 1
        self.process = self.world.process(f"{self.name}.{self.num_boots}", self.host)
        self.process.node = self
        self.world.net.hosts_off.discard(self.host)
        self.world.trace("boot", self.process.name)
        self.is_up, self.is_serving, self.is_closed = True, False, False
        self.task(self._start)

    def kill(self, *, is_silent: bool) -> None:
        """SIGKILL, or the power goes."""
        self.world.trace("kill", self.process.name, "silent" if is_silent else "")
        self.process.is_dead, self.is_up, self.is_serving = True, False, False
        if is_silent:
            self.world.net.hosts_off.add(self.host)
        self.world.net.process_died(self.process, is_silent=is_silent)

    def run(self, call: Callable[..., Any], *args: Any) -> Any:
        """In this process."""
        return self.process.context.run(call, *args)

    def task(self, coro: Callable[..., Any], *args: Any) -> asyncio.Task[Any]:
        """A task of this process."""
        task: asyncio.Task[Any] = self.run(lambda: self.world.loop.create_task(coro(*args)))
        return task

    def end(self) -> LocalEnd:
        """Our side of every session: each incarnation has an instance id of its own."""
        tls: Any = object()  # its channels are channel.py's
        security = Security("tls", tls=tls) if self.plan.is_sealed else Security("key", (KEY,))
        return LocalEnd(self.role, self.name, self.process.name, self.backend.info, security)  # type: ignore[arg-type]

    @property
    def is_cache_idle(self) -> bool:
        """Nothing is on its way into its prefix cache."""
        return self.backend.cache is None or not self.backend.cache._tasks

    @property
    def num_sequences(self) -> int:
        """Slots that its engine holds."""
        return sum(1 for _ in self.backend.worker.scheduler.sequences())

    async def _start(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        """As on SIGTERM, without waiting for what is in flight."""
        self.is_closed = True


class Prefilld(Node):
    """A prefilld."""

    role = "prefill"
    server: PrefillServer
    handler: StreamHandler
    feed: CacheFeed | None
    metrics: Tally

    async def _start(self) -> None:
        plan, world = self.plan, self.world
        self.backend = engine.make_backend(
            world.loop, plan.model, prefill_tokens_per_s=plan.prefill_tokens_per_s, cache_blocks=plan.cache_blocks
        )
        self.metrics = Tally()
        self.metrics.paused = _Counted(world, "path: prefill paused for want of acknowledgements")
        await self.backend.start()
        limits = AdmissionLimits(plan.max_running, plan.max_queued, 1 << 20, 1 << 30, section="limits")
        self.handler = StreamHandler(
            self.backend,
            AdmissionController(limits),
            self.metrics,  # type: ignore[arg-type]
            max_staged_bytes=plan.max_staged_bytes,
            max_prompt_tokens=0,
            progress_timeout_s=plan.progress_timeout_s,
        )
        egress = Egress(EgressLimits())
        self.server = PrefillServer(
            self.end(), plan.server_options, self.handler, load=self._load, egress=egress, trace=self._trace()
        )
        self.server.order = send_order
        self.server.on_stream_refused = lambda event, peer: world.count(f"path: refused {event.error.wire_code}")
        self.feed = CacheFeed(self.backend.cache, self.server) if self.backend.cache is not None else None
        await self.server.start(self.host, PORT)
        self.is_serving = True

    def set_draining(self, is_draining: bool) -> None:
        """As `prefillctl drain` and `resume`."""
        if self.is_serving and not self.is_closed:
            self.handler.is_draining = is_draining
            self.server.set_draining(is_draining)

    async def close(self) -> None:
        await super().close()
        if self.feed is not None:
            self.feed.close()
        await self.server.close()
        await self.backend.close()

    def _load(self, _peer: str) -> dict[str, float]:
        return {"num_queued_tokens": float(self.handler.admission.num_queued_tokens)}

    def _trace(self) -> Trace | None:
        """As with log.trace_file: links then poll what has left for the kernel."""
        if not self.plan.is_traced:
            return None
        return lambda event, *, now, **fields: self.world.count(f"path: traced {event}")


@cache
def peer_config(index: int) -> PeerConfig:
    return PeerConfig(name=f"p{index}", address=f"10.0.1.{index}:{PORT}")


class Decoded(Node):
    """A decoded."""

    role = "decode"
    peers: PeerSet
    dispatcher: Dispatcher
    metrics: Tally

    def __init__(self, world: World, plan: Plan, index: int, host: str, num_peers: int) -> None:
        super().__init__(world, plan, index, host)
        self.configured = tuple(peer_config(n) for n in range(num_peers))
        self.has_reloaded = False

    async def _start(self) -> None:
        plan, world = self.plan, self.world
        self.has_reloaded = False
        self.backend = engine.make_backend(
            world.loop, plan.model, prefill_tokens_per_s=5000.0, cache_blocks=plan.own_cache_blocks
        )
        await self.backend.start()
        self.metrics = Tally()
        self.peers = PeerSet(self.end(), _CONFIG, self.metrics, None)  # type: ignore[arg-type]
        self.peers._options = plan.options
        self.dispatcher = Dispatcher(
            self.backend,
            self.peers.clients,
            admission=AdmissionController(AdmissionLimits(plan.max_admitted, 8, 1 << 20, 1 << 30)),
            fallback=FallbackBudget(plan.fallback_tokens_per_s, 300.0),
            settings=DispatchSettings("remote-only", 0, plan.max_attempts, plan.progress_timeout_s, 30.0, plan.push),
            metrics=self.metrics,  # type: ignore[arg-type]
            peers_changed=self.peers.changed,
        )
        self.dispatcher.directory = self.peers.directory
        await self.peers.update(self.configured)
        self.is_serving = True

    def clients(self) -> list[PeerClient]:
        """None before it has started, and none of a dead process."""
        return self.peers.clients() if self.is_serving else []

    async def reload(self, peers: tuple[PeerConfig, ...]) -> None:
        """Other peers from now on."""
        self.has_reloaded = True
        await self.peers.update(peers)

    async def close(self) -> None:
        await super().close()
        self.dispatcher.abort_all("this server stops")
        await self.peers.close()
        await self.backend.close()
