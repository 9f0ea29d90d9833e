"""Puts the simulation's clock and chance under the product, and watches what passes between the two ends.

Everything is undone afterwards. The rules checked here are about the protocol as it is spoken, message by message; what
the ends hold in memory is looked at by invariants.py.
"""

from __future__ import annotations

import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from common.local_generation import LocalGeneration
from common.local_prefill import LocalPrefill
from common.net import codecs, dialer, link, pool, server
from common.wire import departures, outgoing, serving, session
from common.wire.connection import FAULT_CODES, Closed
from common.wire.messages import (
    Accepted,
    Ack,
    CacheEvent,
    Complete,
    Credit,
    Error,
    Message,
    Piece,
    Prefill,
    PushAck,
    Refused,
    Resume,
    Resumed,
    Started,
)
from tests.faultsim import cache_probes, engine
from tests.faultsim.cache_probes import here
from tests.faultsim.channel import SimChannel
from tests.faultsim.transport import SimTransport
from tests.faultsim.world import World

_SILENT = {"PING", "PONG", "STATUS"}


class Watch:
    """What is known of the conversation; keys are (client process, server process, stream id)."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.granted: dict[tuple[str, str, int], int] = {}
        self.push_granted: dict[tuple[str, str, int], int] = {}
        self.request_ids: dict[tuple[str, str, int], str] = {}
        self.sent_bytes: Counter[str] = Counter()
        """Payload of pieces by request id, resends and all peers included."""
        self.completed: set[tuple[str, str]] = set()
        self.handles: set[bytes] = set()
        self.given: dict[tuple[str, str, int], list[bytes]] = {}
        self._resuming: dict[tuple[str, str, int], bytes] = {}
        self.pushed_bytes: Counter[str] = Counter()
        """The same of prefixes that decodeds push."""
        self._prefills: dict[tuple[str, str, int], Prefill] = {}

    # ---- messages

    def sent(self, transport: SimTransport | None, stream_id: int, message: Message) -> None:
        """A message is written to a link that is there."""
        if transport is None or transport.state != "open":
            return
        world, key = self.world, _key(transport, stream_id)
        if world.damage_next == message.type.name:
            world.num_damages -= 1
            world.damage_next = world.damage_next if world.num_damages > 0 else ""
            transport.out.flip_after = transport.out.num_written + world.rng.randrange(*_where(message))
        if isinstance(message, Piece):
            world.trace("piece", transport.connection.name, stream_id, message.no, message.offset)
            num_bytes = min(message.piece, message.encoded - message.offset)
            is_pushed = transport.side == "client"
            (self.pushed_bytes if is_pushed else self.sent_bytes)[self.request_ids.get(key, "?")] += num_bytes
            most = (self.push_granted if is_pushed else self.granted).get(key, 0)
            if message.at + message.encoded > most:
                world.fail(f"stream {key}: bytes to {message.at + message.encoded} were sent, {most} are granted")
            return
        if message.type.name not in _SILENT:
            world.trace("says", transport.process.name, stream_id, message.type.name)
        if isinstance(message, Prefill):
            self.granted[key] = message.limit
            self.push_granted.pop(key, None)
            if key in self.request_ids:
                world.count("path: asked again after the control link was lost")
            self.request_ids[key], self._prefills[key] = message.request_id, message
            if world.clear_next and message.held:
                world.clear_next, peer = False, transport.peer.process
                world.loop.call_soon(peer.node.backend.cache.clear, context=peer.context)
        elif isinstance(message, CacheEvent) and message.is_anew and message.records:
            world.count("path: a decoded is told anew what a cache holds")
        elif isinstance(message, Started):
            asked = self._prefills[key]
            is_point = message.num_cached in (0, asked.start) or world.has_caches
            world.check(message.num_cached <= asked.num_tokens and is_point, f"stream {key}: {message} of {asked}")
        elif isinstance(message, Ack | Credit | Resume):
            world.check(key in self.request_ids, f"stream {key}: {message.type.name} to whom it was not requested from")
            world.check(message.limit >= self.granted.get(key, 0), f"stream {key}: the credit shrinks: {message}")
            self.granted[key] = message.limit
        elif isinstance(message, PushAck):
            world.check(message.limit >= self.push_granted.get(key, 0), f"stream {key}: credit shrinks: {message}")
            self.push_granted[key] = message.limit
        elif isinstance(message, Accepted):
            self._accepts(key, message)
        elif isinstance(message, Refused):
            self._resuming.pop(key, None)
            world.count(f"path: refused {message.code}")
        elif isinstance(message, Error):
            world.count(f"path: stream failed {message.code}")

    def _accepts(self, key: tuple[str, str, int], message: Accepted) -> None:
        world = self.world
        world.check(message.handle not in self.handles, f"stream {key}: handle {message.handle.hex()} is given twice")
        self.handles.add(message.handle)
        given = self.given.setdefault(key, [])
        used = self._resuming.pop(key, None)
        if used is not None:
            world.check(
                used in given, f"stream {key}: handle {used.hex()} is used after a newer one, or is not its own"
            )
            if used != given[-1]:
                world.count("path: resumed again by the handle before")
            del given[: given.index(used)]
            world.count("path: resume accepted")
        else:
            given.clear()
        given.append(message.handle)

    def received(self, transport: SimTransport | None, stream_id: int, message: Message) -> None:
        """A link hands a message to its owner."""
        if transport is None:
            return
        key = _key(transport, stream_id)
        if isinstance(message, Resume):
            self._resuming[key] = message.handle
        elif isinstance(message, Complete):
            self.completed.add((key[0], self.request_ids.get(key, "?")))
        elif isinstance(message, Refused) and message.code == "stale_handle":
            self.world.count("path: resume refused as stale")

    def closed(self, owner: Any, of_link: link.Link, closed: Closed) -> None:
        """A link is over, whoever ended it."""
        transport = _transport(of_link)
        world, text = self.world, str(closed.error)
        if transport is None:
            return
        world.trace("link over", transport.process.name, transport.connection.name, closed.code, text[:80])
        if "nothing was heard" in text:
            world.count("path: silence noticed by heartbeat")
            if transport.connection.is_silenced:
                world.count("path: a silent drop noticed by heartbeat")
        if "handshake was not finished" in text:
            world.count("path: handshake given up")
        if closed.code in FAULT_CODES or closed.code == "auth":
            where = "in handshake" if not transport.protocol.connection.peer and closed.code == "auth" else "open"
            world.count(f"path: fault {closed.code} {where}")
            if closed.code == "checksum":
                world.count("path: damaged bytes found by a frame's checksum")
            # A data link may come when the server has not finished with the control link yet, or has lost it.
            is_stray = closed.code == "auth" and of_link.index > 0
            if is_stray and isinstance(owner, server.PrefillServer) and not closed.is_remote:
                is_stray = owner._by_session(of_link.connection.session) is None
            is_known_cause = transport.connection.is_damaged or is_stray
            world.check(
                is_known_cause,
                f"{transport.process.name} {transport.connection.name}: {closed.code} between honest ends: {text}",
            )

    def imported(self, generation: Any, num_tokens: int) -> None:
        """decoded is about to make tokens from state that a peer sent."""
        request = generation._request
        if (here(), request.request_id) not in self.completed:
            # A peer may go when only that word is missing: then every byte was verified, and kept as any prefix is.
            is_kept = generation._num_kept == num_tokens
            self.world.check(is_kept, f"{request.request_id}: a token is made, and COMPLETE never came")
            self.world.count("path: all was verified and COMPLETE never came")
        if generation._filled is None:
            self._check_imported(generation, num_tokens)
        else:  # what was cached may still be on its way; the sequence waits for it, too
            generation._filled.add_done_callback(lambda _: self._check_imported(generation, num_tokens))

    def _check_imported(self, generation: Any, num_tokens: int) -> None:
        if generation not in generation._backend.owners:
            return  # cancelled meanwhile, and its memory is another's
        request, model = generation._request, self.world.model
        wrong = engine.wrong_rows(model, generation._seq.slot, request.prompt_tokens[:-1], 0, num_tokens)
        self.world.check(not wrong, f"{request.request_id}: a token is made from wrong state: {wrong}")
        self.world.count("path: remote state became tokens")

    def prefix_taken(self, job: Any) -> None:
        """prefilld is about to compute on top of state that a decoded pushed."""
        seq = job._seq
        wrong = engine.wrong_rows(self.world.model, seq.slot, tuple(seq.tokens[: seq.start]), 0, seq.start)
        self.world.check(not wrong, f"prefilld goes on from wrong state: {wrong}")
        self.world.count("path: a pushed prefix was taken")
        if job._task.held:
            self.world.count("path: a pushed prefix was taken behind what was cached")


def _where(message: Message) -> tuple[int, int]:
    """Where in its frame a message is damaged: in the payload where there is one, roughly."""
    if isinstance(message, Piece):
        return 100, 120 + min(message.piece, message.encoded - message.offset)
    if isinstance(message, Resumed):
        return 0, 25
    return (150, 170 + 4 * message.num_tokens) if isinstance(message, Prefill) else (0, 60)


def _key(transport: SimTransport, stream_id: int) -> tuple[str, str, int]:
    client, there = transport.connection.ends
    return client.process.name, there.process.name, stream_id


def _transport(owner: link.Link) -> SimTransport | None:
    found: Any = owner._transport
    return found


# ---- wrappers: (class, method, what to do around it)


def _sends(watch: Watch, real: Callable[..., None]) -> Callable[..., None]:
    def send(self: link.Link, message: Message, stream_id: int = 0, payload: bytes = b"") -> None:
        watch.sent(_transport(self), stream_id, message)
        real(self, message, stream_id, payload)

    return send


def _sends_piece(watch: Watch, real: Callable[..., None]) -> Callable[..., None]:
    def send_piece(self: link.Link, piece: departures.OutPiece) -> None:
        watch.sent(_transport(self), piece.stream_id, piece.message)
        real(self, piece)

    return send_piece


def _receives(watch: Watch, real: Callable[..., None]) -> Callable[..., None]:
    def link_received(self: Any, from_link: link.Link, event: Any) -> None:
        watch.received(_transport(from_link), event.stream_id, event.message)
        real(self, from_link, event)

    return link_received


def _closes(watch: Watch, real: Callable[..., None]) -> Callable[..., None]:
    def link_closed(self: Any, of_link: link.Link, closed: Closed) -> None:
        watch.closed(self, of_link, closed)
        real(self, of_link, closed)

    return link_closed


def _loses_link(watch: Watch, real: Callable[..., None]) -> Callable[..., None]:
    def link_lost(self: outgoing.SendStream, number: int) -> None:
        before = len(self.departures._pending)
        real(self, number)
        if self.is_attached:
            again = max(0, len(self.departures._pending) - before)
            watch.world.count("path: resent after a data link was lost", again)

    return link_lost


def _expires(watch: Watch, real: Callable[..., None], end: str) -> Callable[..., None]:
    def expire(self: Any, now: float) -> None:
        before = len(self.streams)
        real(self, now)
        if lost := before - len(self.streams):
            watch.world.count(f"path: lease ended at {end}", lost)
            away_s = watch.world.loop.monotonic() - self.detached_at
            watch.world.check(away_s >= self.lease_s - 1e-6, f"{end}: a lease of {self.lease_s} s ended after {away_s}")

    return expire


def _attaches(watch: Watch, real: Callable[..., None]) -> Callable[..., None]:
    def attach(self: session.ClientSession, peer: Any, now: float) -> None:
        if self.peer is not None and self.peer.instance != peer.instance:
            watch.world.count("path: another instance came back")
            watch.world.count("path: another instance came back while streams waited", len(self.streams))
        real(self, peer, now)

    return attach


def _goes_down(watch: Watch, real: Callable[..., None]) -> Callable[..., None]:
    refused_at: dict[pool.PeerClient, float] = {}

    def dial_down(self: pool.PeerClient, failure: dialer.Failure) -> None:
        before = len(self._session.streams)
        if not failure.is_refused:
            refused_at.pop(self, None)
        since_s = watch.world.now - refused_at.setdefault(self, watch.world.now) if failure.is_refused else 0.0
        real(self, failure)
        lost = before - len(self._session.streams)
        if "this machine" in str(failure.error):
            watch.world.count("path: local error reported as such")
            watch.world.check(not lost and failure.is_local, f"{self.name}: {lost} streams ended by {failure.error}")
        elif lost and failure.is_refused:
            watch.world.count("path: gone: its port refuses")
            is_due = since_s >= self.options.gone_after_s - 1e-3
            watch.world.check(is_due, f"{self.name}: given up after {since_s:.3f} s of refused connects")
        elif lost and failure.code in FAULT_CODES:
            watch.world.count("path: given up after repeated faults")

    return dial_down


def _imports(watch: Watch, real: Callable[..., None]) -> Callable[..., None]:
    def import_done(self: Any, num_tokens: int) -> None:
        watch.imported(self, num_tokens)
        real(self, num_tokens)

    return import_done


def _takes_prefix(watch: Watch, real: Callable[..., None]) -> Callable[..., None]:
    def import_done(self: Any) -> None:
        watch.prefix_taken(self)
        real(self)

    return import_done


def _wrappers(watch: Watch) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    yield link.Link, "send", _sends(watch, link.Link.send)
    yield link.Link, "send_piece", _sends_piece(watch, link.Link.send_piece)
    for owner in (dialer.Dialer, server.PrefillServer):
        yield owner, "link_received", _receives(watch, owner.link_received)
        yield owner, "link_closed", _closes(watch, owner.link_closed)
    yield outgoing.SendStream, "link_lost", _loses_link(watch, outgoing.SendStream.link_lost)
    yield session.ClientSession, "expire", _expires(watch, session.ClientSession.expire, "decoded")
    yield serving.ServerSession, "expire", _expires(watch, serving.ServerSession.expire, "prefilld")
    yield session.ClientSession, "attach", _attaches(watch, session.ClientSession.attach)
    yield pool.PeerClient, "dial_down", _goes_down(watch, pool.PeerClient.dial_down)
    yield LocalGeneration, "import_done", _imports(watch, LocalGeneration.import_done)
    yield LocalPrefill, "import_done", _takes_prefix(watch, LocalPrefill.import_done)


@contextmanager
def under(world: World, *, inline_bytes: int | None) -> Iterator[Watch]:
    """The product as this world sees it. `inline_bytes`: segments above are encoded and verified by other threads."""
    watch = Watch(world)
    chance = world.secrets
    with ExitStack() as stack:
        # By module and not by caller: whoever reads a clock or draws a number anew gets the simulation's too.
        replaced: list[tuple[Any, str, Any]] = [
            (time, "monotonic", world.loop.monotonic),
            (link, "monotonic", world.loop.monotonic),
            (secrets, "token_bytes", lambda num=32: chance.randbytes(num)),
            (secrets, "token_hex", lambda num=32: chance.randbytes(num).hex()),
            (secrets, "randbits", chance.getrandbits),
            (random, "uniform", chance.uniform),
            (random, "random", chance.random),
            (pool, "TlsChannel", SimChannel),
            (server, "TlsChannel", SimChannel),
            *_wrappers(watch),
            *cache_probes.wrappers(world),
        ]
        if inline_bytes is not None:
            replaced += [(codecs, "INLINE_BYTES", inline_bytes), (codecs, "_INLINE_HASH_BYTES", inline_bytes)]
        for owner, name, value in replaced:
            stack.callback(setattr, owner, name, owner.__dict__[name])
            setattr(owner, name, value)
        yield watch
