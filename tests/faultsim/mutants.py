"""Parts of the product broken on purpose: the simulation must find each of them, or it tests nothing.

A mutant replaces one function while it is in force. Each is a mistake that somebody could make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from common import local_prefill, state_cache
from common.errors import ChecksumMismatch
from common.net import codecs, dialer, landing, link, pool, remote, server_peer, server_stream
from common.net.codecs import Verification
from common.sched.prefixes import Prefixes
from common.wire import arrivals, connection, credit, departures, incoming, outgoing, serving, session
from common.wire.tables import Phase
from decoded import active, directory
from prefilld import cachefeed, stream


def _nothing(*_: Any, **__: Any) -> None:
    """In place of what is forgotten."""


def _verify_nothing(self: Verification, codec: Any, sink_views: Callable[[], Any]) -> None:
    _REAL_VERIFY(replace(self, digest=codecs.segment_digest(self.views)), codec, sink_views)


async def _land_before_verifying(self: landing.Landing, segment: Any) -> None:
    receiver, head = self._receiver, segment.head
    if not self._stream.wants(segment):
        return
    views, apart = tuple(segment.views), segment.is_apart
    self._sink.landed(head.start, head.stop, head.layers)
    receiver.landed(segment)
    receiver.flush()
    shape = landing.segment_shape(self._layout, head.start, head.stop, head.layers)
    try:
        await self._codecs.verify(
            Verification(head.codec, head.digest, views, apart, shape),
            lambda: self._sink.buffers(head.start, head.stop, head.layers),
        )
    except ChecksumMismatch as e:
        receiver.failed(landing.TransferIncomplete(str(e)))
    receiver.flush()


def _finish_at_complete(self: incoming.ReceiveStream, now: float) -> None:
    if self._complete is not None and not self.is_over:
        self._step(incoming.Do.VERIFIED)
        self.marks.verified_at = now
        self._close(None)


def _same_handle(self: outgoing.SendStream, resume: Any, handle: bytes) -> Any:
    return _REAL_ON_RESUME(self, resume, self.handle)


def _resend_nothing(self: departures.Departures) -> None:
    self._pending.clear()


def _retry_same_peer_as_dead(self: dialer.Dialer, error: OSError) -> dialer.Failure:
    failure = _REAL_OS_FAILURE(self, error)
    return dialer.Failure(failure.error, failure.code, is_local=failure.is_local, is_refused=True)


def _ignore_instance(self: session.ClientSession, peer: Any, now: float) -> None:
    if self.peer is not None:
        self.peer = peer
    _REAL_ATTACH(self, peer, now)


def _no_more_credit(self: credit.CreditPool, stream_id: int, num_bytes: int) -> int:
    if stream_id in self._limits:
        self._landed[stream_id] += num_bytes
    return self._limits.get(stream_id, 0)


def _send_beyond_credit(self: departures.Departures, link_no: int) -> Any:
    limit, self.limit = self.limit, 1 << 60
    try:
        return _REAL_NEXT_PIECE(self, link_no)
    finally:
        self.limit = limit


def _pump_whatever_is_full(self: server_peer.ServerPeer) -> None:
    links = [a_link for a_link in self.data.values() if a_link.is_open]
    while links:
        for a_link in links:
            piece = self.session.next_piece(a_link.index)
            if piece is None:
                return
            a_link.send_piece(piece)


def _never_silent(self: connection.Connection) -> float:
    return 1e9


def _keep_slot(self: stream.StreamHandler, record: Any) -> None:
    self.active.pop(record.key, None)
    if not self.active:
        self._idle.set()


def _leave_socket(self: link.Link) -> None:
    self._transport = None


def _stop_reading_only(self: link.Link) -> None:
    out = self.connection.data_to_send()
    if self._transport is not None and not self._transport.is_closing():
        for data in out:
            self.bytes_out += len(data)
            self._transport.write(data)


def _two_outcomes(self: Any, outcome: str) -> None:
    self._is_closed = False
    _REAL_CLOSE(self, outcome)


def _use_prefix_of_all(self: incoming.ReceiveStream) -> int:
    if self.phase is Phase.DONE:
        return self.prefill.num_tokens
    return self.arrivals._coverage.prefix(s.head for s in self.arrivals.segments.values())


def _keep_flying(self: arrivals.Arrivals, number: int | None) -> None:
    for segment in self.segments.values():
        for index, target in list(segment.flying.items()):
            if number is None or target.context.link == number:
                segment.have[index] = 1
                del segment.flying[index]


def _no_early_discard(self: incoming.ReceiveStream) -> list[Any]:
    return self.arrivals.take_whole()


def _push_done_when_said(self: outgoing.SendStream) -> None:
    self.is_pushed = self._pushed is not None


def _forget_asked_again(self: session.ClientSession, now: float) -> None:
    if self.is_attached:
        self.is_attached, self.detached_at = False, now
    self._outbox.clear()


def _cancel_without_a_word(self: session.ClientSession, given: incoming.ReceiveStream) -> None:
    given.fail(session.PeerCancelled("the request was cancelled at this end"), session.Do.CANCEL)
    self.streams.pop(given.stream_id, None)
    self._credit.close(given.stream_id)
    self._events.append(session.StreamEnded(given))


def _detach_and_give_up(self: session.ClientSession, now: float) -> None:
    _REAL_DETACH(self, now)
    self.fail_all(session.LinkLost("it is away"))


def _no_patience(self: pool.PeerClient, failure: dialer.Failure) -> None:
    _REAL_DIAL_DOWN(self, failure)
    if failure.is_refused:
        self._session.fail_all(failure.error)
        self._flush()


def _tell_no_loss(self: cachefeed.CacheFeed) -> None:
    self._cache.books._changes = [each for each in self._cache.books._changes or [] if each[1].groups]
    _REAL_TELL(self)


async def _names_without_tenant(self: state_cache.StateCache, tokens: Any, salt: bytes) -> Prefixes:
    return Prefixes(tokens)


def _forget_numbers_only(self: pool.PeerClient) -> None:
    self._next_event = 0


def _take_every_push(self: local_prefill.LocalPrefill, num_cached: int, *, wants_push: bool) -> None:
    _REAL_BEGIN(self, num_cached, wants_push=self._task.is_pushed)


def _cut_other_bytes(self: state_cache.StateCache, parts: list[Any]) -> list[Any]:
    return [part + 1 for part in _REAL_CUT(self, parts)]


_REAL_TELL = cachefeed.CacheFeed._tell
_REAL_BEGIN = local_prefill.LocalPrefill._begin
_REAL_CUT = state_cache.StateCache._cut
_REAL_DETACH = session.ClientSession.detach
_REAL_DIAL_DOWN = pool.PeerClient.dial_down
_REAL_ON_RESUME = outgoing.SendStream.on_resume
_REAL_OS_FAILURE = dialer.Dialer._os_failure
_REAL_ATTACH = session.ClientSession.attach
_REAL_NEXT_PIECE = departures.Departures.next_piece
_REAL_VERIFY = Verification.run

_REAL_CLOSE = active.ActiveRequest._close

MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "skip the digest check": (Verification, "run", _verify_nothing),
    "acknowledge before verifying": (landing.Landing, "_land", _land_before_verifying),
    "done at Complete, whatever is missing": (incoming.ReceiveStream, "_try_finish", _finish_at_complete),
    "forget what a lost link carried": (departures.Departures, "link_lost", _nothing),
    "use a handle again": (outgoing.SendStream, "on_resume", _same_handle),
    "resend nothing after Resume": (departures.Departures, "requeue", _resend_nothing),
    "detached streams live for ever at prefilld": (serving.ServerSession, "expire", _nothing),
    "detached streams live for ever at decoded": (session.ClientSession, "expire", _nothing),
    "no descriptors here means nobody there": (dialer.Dialer, "_os_failure", _retry_same_peer_as_dead),
    "another instance is taken for the same": (session.ClientSession, "attach", _ignore_instance),
    "credit is never given again": (credit.CreditPool, "landed", _no_more_credit),
    "send beyond the credit": (departures.Departures, "next_piece", _send_beyond_credit),
    "write to full links": (server_peer.ServerPeer, "pump", _pump_whatever_is_full),
    "silence is never noticed": (connection.Connection, "_silence_s", _never_silent),
    "a slot is never given back": (stream.StreamHandler, "_release", _keep_slot),
    "aborted links keep their socket": (link.Link, "abort", _leave_socket),
    "failed links keep their socket": (link.Link, "_write", _stop_reading_only),
    "the deadline is not kept": (remote.RemotePrefill, "start_deadline", _nothing),
    "unverified rows count as verified": (incoming.ReceiveStream, "verified_prefix", _use_prefix_of_all),
    "half a piece counts as whole": (arrivals.Arrivals, "link_lost", _keep_flying),
    "segments are taken before Accepted": (incoming.ReceiveStream, "take_whole", _no_early_discard),
    "streams are not detached": (session.ClientSession, "detach", _forget_asked_again),
    "an outcome is counted again": (active.ActiveRequest, "_close", _two_outcomes),
    "prompts are not hashed": (serving, "token_hash", lambda prefill, tokens: prefill.token_hash),
    "a prefilld that closes keeps its streams": (server_peer.ServerPeer, "drop", _nothing),
    "a paused prefill is not resumed": (server_stream.ServerStream, "changed", _nothing),
    "credit of a stream that ended is kept": (credit.CreditPool, "close", _nothing),
    "the peer is not told of a cancel": (session.ClientSession, "cancel", _cancel_without_a_word),
    "streams that were not mentioned live on": (serving.ServerSession, "_on_resumed", _nothing),
    "the lease ends when it begins": (session.ClientSession, "detach", _detach_and_give_up),
    "one refused connect means that nobody is there": (pool.PeerClient, "dial_down", _no_patience),
    "a pushed prefix counts before it is whole": (outgoing.SendStream, "_try_push", _push_done_when_said),
    "a push is not repeated after Resume": (incoming.ReceiveStream, "_repeat_push", _nothing),
    "a push is never said to be all": (session.ClientSession, "push_all", _nothing),
    "the lease goes on after the session is back": (pool.PeerClient, "_cancel_lease", _nothing),
}
OF_CACHES: dict[str, tuple[Any, str, Any]] = {
    "what a cache holds is told at the beginning alone": (cachefeed.CacheFeed, "_changed", _nothing),
    "what a cache gives up is not told": (cachefeed.CacheFeed, "_tell", _tell_no_loss),
    "a peer that is away counts as holding prefixes": (pool.PeerClient, "_forget_cache", _forget_numbers_only),
    "a peer that left is not forgotten": (directory.Directory, "forget", _nothing),
    "tenants share a cache": (state_cache.StateCache, "prefixes", _names_without_tenant),
    "cached state is not put in place": (state_cache.StateCache, "fill", _nothing),
    "other bytes are cached": (state_cache.StateCache, "_cut", _cut_other_bytes),
    "a push is taken whatever is cached": (local_prefill.LocalPrefill, "_begin", _take_every_push),
}
"""Only seeds with caches can show them."""
MUTANTS |= OF_CACHES


@contextmanager
def broken(name: str) -> Iterator[None]:
    """The product with this mutant in it."""
    owner, attribute, replacement = MUTANTS[name]
    real = owner.__dict__[attribute]
    setattr(owner, attribute, replacement)
    try:
        yield
    finally:
        setattr(owner, attribute, real)
