"""Runs one script: boots everything, asks, lets faults strike, heals, and looks at what is left.

draw.py        seed -> Script: settings, paths, requests, faults      test_found.py writes scripts by hand
nodes.py       both daemons, real from the dispatcher and the handler down to the links, over engine.py's fake engine
users.py       who asks for tokens or for state, and compares every byte
loop.py, network.py, transport.py      virtual time, processes, TCP       channel.py  what stands for TLS
faults.py      what goes wrong                                        mutants.py: what somebody could get wrong
probes.py, invariants.py, outcomes.py  rules: of the protocol as spoken, of memory between steps, of how requests end
cache_probes.py                        rules of prefix caches; an eighth of the seeds has them
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tests.faultsim import probes
from tests.faultsim.draw import Script, draw
from tests.faultsim.faults import Faults
from tests.faultsim.invariants import Invariants
from tests.faultsim.loop import START_AT
from tests.faultsim.nodes import Decoded, Node, Prefilld
from tests.faultsim.outcomes import Outcomes
from tests.faultsim.transport import Pipe
from tests.faultsim.users import User, Want
from tests.faultsim.world import World

_STRIKING_S = 4.0


@dataclass
class Result:
    """What came of a run. `violation` is "" when every rule held."""

    violation: str
    num_steps: int
    virtual_s: float
    counts: Counter[str]
    world: World


class Scenario:
    """Everything that takes part in one run."""

    def __init__(self, world: World, script: Script, watch: probes.Watch) -> None:
        self.world, self.plan, self.watch = world, script.plan, watch
        self.wants = [replace(want, outcomes=[]) for want in script.wants]
        self.prefillds = [Prefilld(world, self.plan, n, f"10.0.1.{n}") for n in range(script.num_prefillds)]
        self.decodeds = [
            Decoded(world, self.plan, n, f"10.0.2.{n}", script.num_prefillds) for n in range(script.num_decodeds)
        ]
        self.nodes: list[Node] = [*self.decodeds, *self.prefillds]
        pairs = [frozenset((d.host, p.host)) for d in self.decodeds for p in self.prefillds]
        self.ways = dict(zip(pairs, script.ways, strict=True))
        world.net.way = lambda a, b: self.ways[frozenset((a, b))]
        world.net.on_delivery = self._delivered
        both = (self.plan.options, self.plan.server_options)
        self.heartbeat_s, self.lease_s = max(o.heartbeat_s for o in both), min(o.lease_s for o in both)
        self.piece_bytes = max(o.piece_bytes for o in both)
        self.faults = Faults(self, script.faults)
        self.invariants, self.outcomes = Invariants(self), Outcomes(self)
        world.loop.after_step = self.invariants.stepped
        world.net.on_connect, world.net.on_received = self.invariants.connected, self.invariants.received
        world.net.on_overflow, world.net.most_beyond_mark = self.invariants.overflowed, self.piece_bytes + 4096

    @property
    def has_asked(self) -> bool:
        """Whether a request is on its way."""
        return any(w.asked_at for w in self.wants)

    async def run(self) -> None:
        """The whole story."""
        for node in self.nodes:
            node.boot()
        for want in self.wants:
            User(self.decodeds[want.decoded], want)
        await self._until(self._is_answered, _STRIKING_S)
        self.faults.heal()
        if not self._note("all requests have outcomes", await self._until(self._is_answered, self._patience_s())):
            return
        if not self._note("all is settled", await self._until(self.invariants.is_settled, self._patience_s())):
            return
        if not self._note("directories hold what caches do", await self._until(self.invariants.is_known, 1.0)):
            return
        self.outcomes.check()
        if not self._note("a peer serves a probe", await self._probe()):
            return
        if self._note("all is settled again", await self._until(self.invariants.is_settled, 3.0)):
            self.invariants.check_settled()
            await self._close()

    async def _probe(self) -> bool:
        """A request that a peer must prefill; a peer may still be busy with what its requester has just given up."""
        for number in range(3):
            probe = Want(f"probe{number}", "whole", num_tokens=12)
            self.wants.append(probe)
            User(self.decodeds[0], probe)
            await self._until(lambda: bool(self.wants[-1].outcomes), 30.0)
            if probe.outcomes == ["ok"] and probe.report.route == "remote":
                return True
        return False

    async def _close(self) -> None:
        for node in self.nodes:
            await node.task(node.close)
        # What was said last lingers for a second.
        await self._until(lambda: not any(self._left(n) for n in self.nodes), 1.3)
        for node in self.nodes:
            self.world.check(not self._left(node), f"{node.name}: closed, and there is left: {self._left(node)}")
            # What nobody asked for is reported when it goes.
            node.process.tasks.clear()
        gc.collect(0)

    def _left(self, node: Node) -> list[object]:
        """Sockets, tasks and timers of a process that has closed everything."""
        ends = [e.connection.name for e in self.world.net.ends_of(node.process) if e.state != "closed"]
        tasks = [t for t in node.process.tasks if not t.done()]
        return [*ends, *tasks, *(h.callback for h in self.world.loop.pending(node.process))]

    def _delivered(self, pipe: Pipe, num_bytes: int) -> None:
        self.faults.delivered()

    def _is_answered(self) -> bool:
        return all(w.is_over for w in self.wants) and not self.faults.num_open

    def _note(self, what: str, is_so: bool) -> bool:
        if not is_so:
            open_wants = [w.name for w in self.wants if not w.is_over]
            self.world.fail(f"never: {what}; open requests {open_wants}; {self.invariants.unsettled()}")
        return is_so

    async def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        ends_at, step_s = self.world.now + seconds, 0.02
        while not condition():
            if self.world.now >= ends_at or self.world.violation:
                return False
            await asyncio.sleep(step_s)
            step_s = min(step_s * 1.3, 0.25)
        return True

    def _patience_s(self) -> float:
        """More than anybody may take after the last fault ends."""
        o = self.plan.options
        once = 2.5 * self.heartbeat_s + o.lease_s + 2 * o.connect_timeout_s + o.reconnect_max_s
        return 25.0 + 3 * once + 2 * self.plan.progress_timeout_s


def simulate(seed: int, script: Script | None = None) -> Result:
    """Run one seed, or a script that a test wrote, to its end. The same again gives the same trace."""
    script = script or draw(seed)
    world = World(seed, is_coarse=script.is_uvloop)
    world.net.is_uvloop = script.is_uvloop
    world.loop.executor_s = script.executor_s
    world.model, world.has_caches = script.plan.model, script.plan.cache_blocks > 0
    with _quiet(world), probes.under(world, inline_bytes=script.inline_bytes) as watch:
        scenario = Scenario(world, script, watch)
        main: asyncio.Task[None] = world.net.world.run(world.loop.create_task, scenario.run())
        try:
            world.loop.run(main.done)
            if main.done() and (error := main.exception()) is not None:
                raise error
        except TimeoutError as e:
            world.fail(f"{e}; {scenario.invariants.unsettled()}")
        finally:
            world.loop.close()
            _bury(world, main)
    return Result(world.violation, world.loop.step, world.now - START_AT, world.counts, world)


class _Errors(logging.Handler):
    """What the product logs as an error is a violation."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._world.fail(f"logged as an error: {record.getMessage()} {error!r}")


@contextlib.contextmanager
def _quiet(world: World) -> Iterator[None]:
    """Warnings are expected here; garbage goes at the end, so that what it has to say comes at the same instant."""
    handler, was_enabled, was_off = _Errors(world), gc.isenabled(), logging.root.manager.disable
    logging.disable(logging.WARNING)
    logging.root.addHandler(handler)
    gc.disable()
    try:
        yield
    finally:
        logging.root.removeHandler(handler)
        logging.disable(was_off)
        if was_enabled:
            gc.enable()


def _bury(world: World, main: asyncio.Task[None]) -> None:
    """End what killed processes have left half done, without a word."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for task in [main, *(t for p in world.processes for t in p.tasks)]:
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                with contextlib.suppress(RuntimeError):  # it waits in a `finally`
                    task.get_coro().close()  # type: ignore[union-attr]
        gc.collect(0)
