"""What goes wrong, when, and for how long. Each fault is counted when it happened, not when it was planned.

A fault comes at the n-th arrival of bytes anywhere, so that every moment of a handshake, a transfer or a resume is hit,
or at an instant, so that quiet times are hit too.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tests.faultsim.network import Connection
from tests.faultsim.nodes import Decoded, Node, Prefilld, peer_config
from tests.faultsim.transport import Way

if TYPE_CHECKING:
    from tests.faultsim.scenario import Scenario

LOCAL_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM)


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong: at an arrival, counted from the first request on (else from the start) or, with None,
    at an instant. `for_s` is what it lasts where it lasts.
    """

    kind: str
    at_delivery: int | None
    at_s: float
    for_s: float
    is_from_start: bool = False


def draw_faults(rng: random.Random, num: int, lease_s: float) -> list[Fault]:
    """That many faults, often several close together: a second one while the first is being mended."""
    out, where, is_from_start = [], 0, False
    for _ in range(num):
        kind = rng.choice(KINDS + _OFTEN)
        if where and rng.random() < 0.6:
            where += rng.randrange(1, 30)
        else:
            where, is_from_start = rng.randrange(1, rng.choice((20, 80))), rng.random() < 0.15
        for_s = rng.choice((0.02, 0.2, 1.0, 0.5 * lease_s, 1.3 * lease_s)) * rng.uniform(0.5, 1.5)
        is_timed = rng.random() < 0.1
        out.append(Fault(kind, None if is_timed else where, rng.uniform(0.0, 3.0), for_s, is_from_start))
    return out


class Faults:
    """Carries them out."""

    def __init__(self, scenario: Scenario, faults: list[Fault]) -> None:
        self.scenario, self.world, self.net = scenario, scenario.world, scenario.world.net
        self.rng = scenario.world.rng
        self.waiting = [f for f in faults if f.at_delivery is not None]
        self.struck: list[str] = []
        self.num_open = 0
        self._num_before = 0
        self.is_healed = False
        for fault in faults:
            if fault.at_delivery is None:
                self._later(fault.at_s, self._strike, fault)

    def delivered(self) -> None:
        """Bytes arrived somewhere."""
        num = self.net.num_deliveries
        if not self.scenario.has_asked:
            self._num_before = num
        for fault in self.waiting[:]:
            if num - (0 if fault.is_from_start else self._num_before) >= (fault.at_delivery or 0):
                self.waiting.remove(fault)
                self.world.loop.call_soon(self._strike, fault, context=self.net.world)

    def _strike(self, fault: Fault) -> None:
        if self.is_healed:
            return
        # What an operator does when something is wrong.
        self.scenario.invariants.look_around()
        if _ACTIONS[fault.kind](self, fault):
            self.struck.append(fault.kind)
            self.world.count(f"fault: {fault.kind}")
            self.world.trace("fault", fault.kind, f"{fault.for_s:.3f}")

    def heal(self) -> None:
        """No new fault from here on; what lasts ends by itself, flows that went silent stay so."""
        self.is_healed = True
        self.waiting.clear()
        self.world.damage_next, self.world.clear_next = "", False
        for connection in self.net.connections:
            for end in connection.ends:
                end.out.flip_after = -1
        self.world.trace("heal")

    def _later(self, seconds: float, call: Callable[..., object], *args: object) -> None:
        self.world.loop.at(self.world.now + seconds, call, *args, context=self.net.world)

    def _for(self, seconds: float, undo: Callable[..., object], *args: object) -> None:
        """Undo it after so long."""
        self.num_open += 1

        def end() -> None:
            self.num_open -= 1
            undo(*args)

        self._later(seconds, end)

    # ---- connections

    def _pick(self, is_control: bool | None = None) -> Connection | None:
        found = self.net.open_connections()
        if is_control is not None:
            found = [c for c in found if self._is_control(c) is is_control]
        return self.rng.choice(found) if found else None

    def _is_control(self, connection: Connection) -> bool:
        state = connection.client.protocol._connection
        return state is not None and state.link == 0

    def cut_data(self, fault: Fault) -> bool:
        return self._cut(self._pick(is_control=False))

    def cut_control(self, fault: Fault) -> bool:
        return self._cut(self._pick(is_control=True))

    def _cut(self, connection: Connection | None) -> bool:
        if connection is not None:
            self.net.cut(connection)
        return connection is not None

    def cut_all(self, fault: Fault) -> bool:
        found = self.net.open_connections()
        for connection in found:
            self.net.cut(connection)
        return bool(found)

    def cut_again(self, fault: Fault) -> bool:
        """The control link, and the next one as well a few packets later: answers to a Resume are lost."""
        at = self.net.num_deliveries + self.rng.randrange(6, 40)
        self.waiting.append(Fault("cut_control", at, 0.0, 0.0, is_from_start=True))
        return self._cut(self._pick(is_control=True))

    def half_close(self, fault: Fault) -> bool:
        """A middlebox ends one direction."""
        connection = self._pick()
        if connection is not None:
            self.rng.choice(connection.ends).out.end()
        return connection is not None

    def one_reset(self, fault: Fault) -> bool:
        """Only one end hears of it."""
        connection = self._pick()
        if connection is not None:
            self.net.reset(self.rng.choice(connection.ends), 0.0)
        return connection is not None

    def silent_drop(self, fault: Fault) -> bool:
        connection = self._pick()
        if connection is not None:
            self.net.silence(connection, ("client", "server"))
        return connection is not None

    def silent_one_way(self, fault: Fault) -> bool:
        connection = self._pick()
        if connection is not None:
            self.net.silence(connection, (self.rng.choice(("client", "server")),))
        return connection is not None

    def damage(self, fault: Fault) -> bool:
        connection = self._pick()
        if connection is None:
            return False
        # Mostly what prefilld sends; sooner or later within what is to come.
        end = connection.server if self.rng.random() < 0.7 else connection.client
        reach = self.rng.choice((40, 400, 4000))
        end.out.flip_after = end.out.num_delivered + self.rng.randrange(reach)
        return True

    def damage_message(self, fault: Fault) -> bool:
        """The next message of a kind, wherever in it: see probes.py."""
        kinds = (
            "PIECE",
            "PIECE",
            "PIECE",
            "PREFILL",
            "PREFILL",
            "PREFILL",
            "ACCEPTED",
            "PROGRESS",
            "COMPLETE",
            "ACK",
            "RESUME",
            "ERROR",
        )
        self.world.damage_next, self.world.num_damages = self.rng.choice(kinds), 1
        return True

    def damage_often(self, fault: Fault) -> bool:
        """Whatever goes on after a new handshake is damaged, again and again."""
        self.world.damage_next, self.world.num_damages = "RESUMED", 4
        return self._cut(self._pick(is_control=True))

    def slow(self, fault: Fault) -> bool:
        ways = list(self.scenario.ways.values())
        before = [replace(way) for way in ways]
        for way in ways:
            way.rate, way.latency_s, way.burst = way.rate / 20, way.latency_s + 0.1, 1400
            # What is on the way already arrives at this pace, whatever comes after.
            way.capacity = min(way.capacity, 3000)
        self._for(min(fault.for_s, 2.0), self._unslow, ways, before)
        return True

    def _unslow(self, ways: list[Way], before: list[Way]) -> None:
        for way, old in zip(ways, before, strict=True):
            way.__dict__.update(old.__dict__)
        for connection in self.net.connections:
            for end in connection.ends:  # one that was opened meanwhile on a detour has a way of its own
                usual = self.net.way(end.host, end.peer.host)
                end.way.rate, end.way.capacity, end.way.burst = usual.rate, usual.capacity, usual.burst

    # ---- hosts

    def _decoded(self) -> Decoded | None:
        up = [n for n in self.scenario.decodeds if n.is_serving and not n.is_closed]
        return self.rng.choice(up) if up else None

    def _prefilld(self) -> Prefilld | None:
        up = [n for n in self.scenario.prefillds if n.is_serving and not n.is_closed]
        return self.rng.choice(up) if up else None

    def partition(self, fault: Fault) -> bool:
        pair = frozenset((self.rng.choice(self.scenario.decodeds).host, self.rng.choice(self.scenario.prefillds).host))
        if pair in self.net.apart:
            return False
        self.net.apart.add(pair)
        self._for(fault.for_s, self.net.rejoin, pair)
        return True

    def _kill(self, node: Node | None, fault: Fault, *, is_silent: bool) -> bool:
        if node is None or node.process.is_stopped:
            return False
        node.kill(is_silent=is_silent)
        self._for(fault.for_s, self._reboot, node)
        return True

    def kill_prefilld(self, fault: Fault) -> bool:
        return self._kill(self._prefilld(), fault, is_silent=False)

    def kill_decoded(self, fault: Fault) -> bool:
        return self._kill(self._decoded(), fault, is_silent=False)

    def power_off_prefilld(self, fault: Fault) -> bool:
        return self._kill(self._prefilld(), fault, is_silent=True)

    def power_off_decoded(self, fault: Fault) -> bool:
        return self._kill(self._decoded(), fault, is_silent=True)

    def _stop(self, node: Node | None, fault: Fault) -> bool:
        if node is None or node.process.is_stopped:
            return False
        self.world.stop(node.process, fault.for_s)
        self._for(fault.for_s, bool)
        return True

    def stop_prefilld(self, fault: Fault) -> bool:
        return self._stop(self._prefilld(), fault)

    def stop_decoded(self, fault: Fault) -> bool:
        return self._stop(self._decoded(), fault)

    # ---- daemons told to

    def drain(self, fault: Fault) -> bool:
        node = self._prefilld()
        if node is None or node.process.is_stopped:
            return False
        node.run(node.set_draining, True)
        self._for(fault.for_s, self._undrain, node)
        return True

    def _undrain(self, node: Prefilld) -> None:
        if node.is_up:
            node.run(node.set_draining, False)

    def _restart(self, node: Node | None, fault: Fault) -> bool:
        """Closed in order, then started again as another process."""
        if node is None or node.process.is_stopped:
            return False
        node.is_closed = True
        node.task(node.close)
        self._for(fault.for_s, self._reboot, node)
        return True

    def _reboot(self, node: Node) -> None:
        if node.is_up and node.is_closed:
            node.kill(is_silent=False)
        if not node.is_up:
            node.boot()

    def restart_prefilld(self, fault: Fault) -> bool:
        return self._restart(self._prefilld(), fault)

    def restart_decoded(self, fault: Fault) -> bool:
        return self._restart(self._decoded(), fault)

    def peer_leaves(self, fault: Fault) -> bool:
        """A reload without one of the peers, and one with it again."""
        node = self._decoded()
        if node is None or node.process.is_stopped or len(node.configured) < 2:
            return False
        gone = self.rng.randrange(len(node.configured))
        node.task(node.reload, tuple(peer_config(n) for n in range(len(node.configured)) if n != gone))
        self._for(fault.for_s, self._peer_returns, node, node.process)
        return True

    def _peer_returns(self, node: Decoded, process: object) -> None:
        if node.is_up and node.process is process and not node.is_closed:
            node.task(node.reload, node.configured)

    def clear_cache(self, fault: Fault) -> bool:
        """As `prefillctl cache clear`."""
        node = self._prefilld()
        if node is None or node.process.is_stopped or node.backend.cache is None:
            return False
        node.run(node.backend.cache.clear)
        return True

    def clear_when_asked(self, fault: Fault) -> bool:
        """The same when somebody next counts on what is cached: see probes.py."""
        self.world.clear_next = self.world.has_caches
        return self.world.has_caches

    # ---- connecting

    def refuse(self, fault: Fault) -> bool:
        """Nobody listens for a while, and all connections are cut: the port of a daemon that is gone."""
        host = self.rng.choice(self.scenario.prefillds).host
        self.net.refusing.add(host)
        self._for(fault.for_s, self.net.refusing.discard, host)
        return self.cut_all(fault) or True

    def drop_syn(self, fault: Fault) -> bool:
        host = self.rng.choice(self.scenario.prefillds).host
        self.net.dropping_syn.add(host)
        self._for(fault.for_s, self.net.dropping_syn.discard, host)
        return self.cut_all(fault) or True

    def no_data_links(self, fault: Fault) -> bool:
        """A control link alone: data links are cut and do not come up for a while."""
        found = [c for c in self.net.open_connections() if not self._is_control(c)]
        for connection in found:
            self.net.cut(connection)
            self.net.dropping_syn.add(connection.server.host)
            self._for(fault.for_s, self.net.dropping_syn.discard, connection.server.host)
        return bool(found)

    def local_error(self, fault: Fault) -> bool:
        """This machine has no descriptors or ports left, just when it needs them."""
        node = self._decoded()
        if node is None:
            return False
        self.net.local_errnos[node.process.name] = self.rng.choice(LOCAL_ERRNOS)
        self._for(fault.for_s, self.net.local_errnos.pop, node.process.name, None)
        return self.cut_all(fault) or True


KINDS = (
    *("cut_data", "cut_control", "cut_all", "cut_again", "half_close", "one_reset", "silent_drop", "silent_one_way"),
    *("damage", "damage_message", "damage_often", "slow", "partition", "no_data_links", "refuse", "drop_syn"),
    *("kill_prefilld", "kill_decoded", "power_off_prefilld", "power_off_decoded", "stop_prefilld", "stop_decoded"),
    *("drain", "restart_prefilld", "restart_decoded", "peer_leaves", "local_error"),
)
CACHE_KINDS = ("clear_cache", "clear_when_asked")
"""Where there are caches only."""
_OFTEN = ("cut_data", "silent_drop", "damage_message")
MENDED = ("cut_data", "cut_control", "cut_all", "cut_again", "half_close", "one_reset", "silent_drop", *CACHE_KINDS)
"""What costs no request."""
_ACTIONS: dict[str, Callable[[Faults, Fault], bool]] = {kind: getattr(Faults, kind) for kind in KINDS + CACHE_KINDS}
