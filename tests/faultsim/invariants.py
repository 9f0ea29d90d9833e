"""What must hold in the memory of both ends between any two steps, and what must be left when everything is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.net.pool import PeerClient
from common.net.server_peer import ServerPeer
from common.wire.session import Session
from tests.faultsim import engine
from tests.faultsim.loop import Process
from tests.faultsim.nodes import Decoded, Node, Prefilld
from tests.faultsim.transport import SimTransport

if TYPE_CHECKING:
    from tests.faultsim.scenario import Scenario

_LATE_S = 0.2
_FRAME_BYTES = 16384 + 24 + 16  # a sealed header has a tag


class Invariants:
    """Looks at everything that is up."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.world, self.plan = scenario, scenario.world, scenario.plan
        layout, model = engine.layout_of(self.plan.model), self.plan.model
        chunk_bytes = layout.segment_bytes(0, model.chunk_tokens, tuple(range(len(layout.states))))
        # The mark may be passed by what is sent at once: a segment, which is a chunk at most.
        self.max_staged_bytes = self.plan.max_staged_bytes + chunk_bytes
        self.credit_bytes = self.plan.options.credit_bytes

    def stepped(self, process: Process) -> None:
        """Something of a process has run: what it holds of streams."""
        node = process.node
        if not node.is_serving or node.process is not process:
            return
        if isinstance(node, Decoded):
            for client in node.peers._clients.values():
                if client._session.streams:
                    self._client(node, client)
                if not client._session.is_attached and node.peers.directory.num_entries(client.name):
                    self.world.fail(f"{node.name}: {client.name} is away and counts as holding prefixes")
        else:
            for peer in node.server._peers.values():
                if peer.session.streams:
                    self._peer(node, peer)

    def received(self, end: SimTransport) -> None:
        """A link has taken bytes in: it keeps no more than a frame's header, and hands everything on at once."""
        connection = end.protocol._connection
        if len(connection._inbox) > _FRAME_BYTES:
            self.world.fail(f"{end.process.name}: an inbox of {len(connection._inbox)} bytes")
        if connection._events or connection._out:
            self.world.fail(f"{end.process.name}: a link keeps what it must hand on")

    def overflowed(self, end: SimTransport) -> None:
        """More was written to a transport than it had room for, and a frame."""
        self.world.fail(
            f"{end.process.name}: {end.out.queued} bytes wait in a transport's buffer, its mark is {end.high}"
        )

    def look_around(self) -> None:
        """As an operator would: every status must be there at every moment."""
        for decoded in self.scenario.decodeds:
            for client in decoded.clients():
                client.status()
        for prefilld in self.scenario.prefillds:
            if prefilld.is_serving:
                assert len(prefilld.server.sessions) >= prefilld.server.num_sessions

    def _client(self, node: Decoded, client: PeerClient) -> None:
        session, world = client._session, self.world
        num, pool = len(session.streams), session._credit
        if pool.outstanding_bytes > self.credit_bytes + num * pool.reserve_bytes:
            world.fail(f"{node.name}: {pool.outstanding_bytes} bytes of credit for {num} streams")
        if num != client.num_streams:
            world.fail(f"{node.name}: {num} streams, {client.num_streams} prefills")
        if not session.is_attached:
            self._lease(node, session)

    def connected(self, new: SimTransport) -> None:
        """One more socket: a session has a control link and its data links, and no more."""
        servers = [p.server for p in self.scenario.prefillds if p.is_serving]
        self.world.check(all(len(s._early) <= 128 for s in servers), "too many links in handshake")
        mine = [
            end
            for end in self.world.net.ends_of(new.process)
            if end.state == "open" and end.side == "client" and end.peer.host == new.peer.host
        ]
        most = 1 + self.plan.options.data_links
        # A peer that left the configuration and came back is another client; its sockets are closing.
        if len(mine) > most and len({id(e.protocol.owner) for e in mine if e.protocol}) == 1:
            self.world.fail(f"{new.process.name}: {len(mine)} sockets to {new.peer.process.name}, most {most}")

    def _peer(self, node: Prefilld, peer: ServerPeer) -> None:
        session, world = peer.session, self.world
        for stream in session.streams.values():
            held = sum(s.head.raw for s in stream.departures.segments.values())
            if not held == stream.staged_bytes <= self.max_staged_bytes:
                counted, most = stream.staged_bytes, self.max_staged_bytes
                world.fail(f"{node.name}: a stream holds {held} bytes, counts {counted}, most {most}")
        if len(session.streams) > self.plan.options.max_streams:
            world.fail(f"{node.name}: {len(session.streams)} streams at once")
        if not session.is_attached:
            self._lease(node, session)

    def _lease(self, node: Node, session: Session) -> None:
        away_s = self.world.now + node.process.clock_s - session.detached_at
        if away_s > session.lease_s + _LATE_S + node.process.stopped_s:
            self.world.fail(f"{node.process.name}: streams are detached for {away_s:.2f} s")

    # ---- at the end

    def is_settled(self) -> bool:
        """Everybody is connected to everybody, and nothing is in flight."""
        scenario = self.scenario
        # Who has not yet noticed that a flow went silent is in for a surprise.
        # Nor is it settled while the ends of a connection do not agree, or one is not accepted yet.
        busy = any(
            c.client.state != c.server.state
            or c.client.state in ("connecting", "closing")
            or (c.is_up and (c.is_silenced or not c.server.has_opened))
            for c in self.world.net.connections
        )
        return (
            not busy
            and all(self._is_decoded_idle(d) for d in scenario.decodeds)
            and all(self._is_prefilld_idle(p) for p in scenario.prefillds)
        )

    def is_known(self) -> bool:
        """Every decoded knows exactly what every prefilld holds, and could go on from exactly there."""
        return all(self._known(d, p) == self._held(p) for d in self.scenario.decodeds for p in self.scenario.prefillds)

    def _held(self, node: Prefilld) -> tuple[object, object]:
        cache = node.backend.cache
        if cache is None:
            return {}, {}
        held = {entry.name: holding for entry, holding in cache.books.held()}
        self.world.check(held == cache.books.index._held, f"{node.name}: a cache does not know what it holds")
        return held, cache.books.index._tails

    def _known(self, node: Decoded, peer: Prefilld) -> tuple[object, object]:
        index = node.peers.directory._peers.get(peer.name)
        return ({}, {}) if index is None else (index._held, index._tails)

    def unsettled(self) -> str:
        """Why it is not, for people."""
        out = [f"{n.name} up {n.is_up}" for n in (*self.scenario.decodeds, *self.scenario.prefillds) if not n.is_up]
        for d in self.scenario.decodeds:
            for c in d.clients():
                out.append(f"{d.name}->{c.name} {c.state} ({c.reason}), {c.num_streams} streams")
            if d.is_serving:
                out.append(f"{d.name} requests {list(d.dispatcher.active)}, sequences {d.num_sequences}")
        for p in self.scenario.prefillds:
            if p.is_serving:
                shown = ("name", "state", "num_links", "num_streams")
                out.append(f"{p.name} sessions {[[s[key] for key in shown] for s in p.server.sessions]}")
                out.append(f"{p.name} handles {len(p.handler.active)}, sequences {p.num_sequences}")
        return "; ".join(out)

    def _is_decoded_idle(self, node: Decoded) -> bool:
        if not node.is_serving:
            return False
        clients = node.clients()
        return (
            len(clients) == len(node.configured)
            and all(c.state == "ready" and not c.num_streams for c in clients)
            and all(len(c._links()) == 1 + c._dialer.num_data_links for c in clients)
            and not node.dispatcher.active
            and not node.num_sequences
            and node.is_cache_idle
        )

    def _is_prefilld_idle(self, node: Prefilld) -> bool:
        if not node.is_serving:
            return False
        names = {d.process.name for d in self.scenario.decodeds}
        links = 1 + self.plan.options.data_links
        return (
            {p.session.peer.instance for p in node.server._peers.values() if p.session.peer} == names
            and all(len(p.links) == links and not p._streams for p in node.server._peers.values())
            and not node.server._early
            and not node.handler.active
            and not node.handler.admission.running
            and not node.num_sequences
            and node.is_cache_idle
        )

    def check_settled(self) -> None:
        """Nothing may be left over: sockets, tasks, timers, credit, staged bytes, and every request has one outcome."""
        world, scenario = self.world, self.scenario
        for decoded in scenario.decodeds:
            links = sum(1 + c._dialer.num_data_links for c in decoded.clients())
            tasks = len(decoded.clients()) + sum(c._dialer.num_data_links for c in decoded.clients())
            self._left(decoded, num_links=links, num_tasks=tasks)
            for client in decoded.clients():
                world.check(client._session._credit.outstanding_bytes == 0, f"{client.name}: credit is outstanding")
            asked = sum(
                w.kind == "whole" and w.process is decoded.process and "never ready" not in w.outcomes
                for w in scenario.wants
            )
            counted = decoded.metrics.total("requests")
            world.check(asked == counted, f"{decoded.name}: {asked} requests, {counted} counted outcomes")
        for prefilld in scenario.prefillds:
            links = len(scenario.decodeds) * (1 + self.plan.options.data_links)
            self._left(prefilld, num_links=links, num_tasks=0)
            if (cache := prefilld.backend.cache) is not None and cache.counts.evicted_bytes:
                world.count("path: a full cache gave something up")
            seen, counted = prefilld.handler._num_seen, prefilld.metrics.total("prefills")
            world.check(seen == counted, f"{prefilld.name}: {seen} prefills, {counted} counted outcomes")
        self._traffic()

    def _left(self, node: Node, *, num_links: int, num_tasks: int) -> None:
        ends = [e for e in self.world.net.ends_of(node.process) if e.state != "closed"]
        self.world.check(len(ends) == num_links, f"{node.name}: {len(ends)} sockets are left, {num_links} are in use")
        tasks = [t for t in node.process.tasks if not t.done()]
        self.world.check(len(tasks) == num_tasks, f"{node.name}: {len(tasks)} tasks are left, not {num_tasks}: {tasks}")
        pending = self.world.loop.pending(node.process)
        # One heartbeat for each link, one Status for each session, and what the step under way has scheduled.
        most = 2 * num_links + 4
        self.world.check(len(pending) <= most, f"{node.name}: {len(pending)} timers, most {most}")

    def _traffic(self) -> None:
        """Every byte that crossed is counted once, at decoded over all its links."""
        net = self.world.net
        if self.plan.is_sealed:
            return  # of a control link in TLS the clear bytes that come in are counted
        for decoded in self.scenario.decodeds:
            if decoded.has_reloaded:
                continue
            for client in decoded.clients():
                ends = [e for e in net.ends_of(decoded.process) if e.peer.host == client.host and e.has_opened]
                num_in = sum(e.peer.out.num_delivered for e in ends)
                num_out = sum(e.out.num_written for e in ends)
                status = client.status()
                counted = (status["bytes_in"], status["bytes_out"])
                if counted != (num_in, num_out):
                    self.world.fail(f"{decoded.name}: counts {counted} bytes in and out, were {(num_in, num_out)}")
        for connection in net.connections:
            for end in connection.ends:
                self.world.check(
                    end.out.num_delivered <= end.out.num_written, f"{connection.name}: bytes out of nowhere"
                )
