"""The dispatcher with an engine that fails: what is counted and what the log says."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from common.backend import BackendStats, Marks
from common.errors import (
    Draining,
    InvalidRequest,
    LinkLost,
    NoPeer,
    Overloaded,
    PeerCancelled,
    PeerShed,
    RequestDamaged,
    RequestFailed,
    StaleHandle,
    TransferTimeout,
)
from common.net.options import TransferProgress
from common.policy.admission import AdmissionController, AdmissionLimits
from common.policy.fallback import FallbackBudget
from common.request import Request, SamplingParams
from decoded import dispatch
from decoded.api.errors import error_body, error_headers, http_status
from decoded.deadline import GRACE_S
from decoded.dispatch import Dispatcher
from decoded.metrics import DecodeMetrics
from decoded.remote import RemoteAttempt, start_remote
from decoded.settings import DispatchSettings


class FailingBackend:
    """Takes every request and fails it."""

    info = SimpleNamespace(
        name="m",
        layout=SimpleNamespace(
            states=(), token_bytes=0, fixed_bytes=0, transfer_bytes=lambda start, stop: 8 * (stop - start)
        ),
    )

    def __init__(self, error: Exception) -> None:
        self.error = error

    def stats(self):
        return BackendStats()

    async def open(self, request):
        raise self.error

    def state_bytes(self, num_tokens, num_choices=1):
        return num_tokens


def dispatcher(error: Exception | None = None):
    registry = CollectorRegistry()
    made = Dispatcher(
        FailingBackend(error or RequestFailed("nothing")),
        lambda: [],
        admission=AdmissionController(AdmissionLimits(1, 1, 1000, 1000)),
        fallback=FallbackBudget(1000, 1000),
        settings=DispatchSettings("threshold", 1000.0, 2, 30.0, 30.0),
        metrics=DecodeMetrics(registry),
    )
    return made, lambda outcome, route="none": registry.get_sample_value(
        "prfaas_requests_total", {"route": route, "outcome": outcome}
    )


def request(name: str = "r1") -> Request:
    return Request(name, tuple(range(10)), SamplingParams(max_tokens=4))


@pytest.mark.parametrize("error", [RequestFailed("the model put out no finite logits"), KeyError("a bug")])
async def test_a_failed_request_is_a_warning_with_its_reason(caplog, error):
    made, count = dispatcher(error)
    active = made.submit(request(), arrived_at=0.0)
    with caplog.at_level(logging.INFO), pytest.raises(type(error)):
        async for _ in active:
            pass
    (record,) = [r for r in caplog.records if r.message.startswith("request ")]
    assert (record.levelno, record.message) == (logging.WARNING, "request failed")
    assert str(error) in record.why
    assert not {"peer", "reason", "ttft_s"} & set(vars(record))  # it came to none of these
    assert count("error", "local") == 1


async def test_refusals_are_counted_once_each():
    made, count = dispatcher()
    made.submit(request("a"), arrived_at=0.0)
    made.submit(request("b"), arrived_at=0.0)
    with pytest.raises(Overloaded):
        made.submit(request("c"), arrived_at=0.0)
    with pytest.raises(InvalidRequest, match="in flight"):
        made.submit(request("a"), arrived_at=0.0)
    made.admission.limits = AdmissionLimits(1, 1, 1000, 1)
    with pytest.raises(InvalidRequest, match=r"more than admission\.max_state_bytes = 1B allows") as large:
        made.submit(request("d"), arrived_at=0.0)
    assert error_body(large.value)["error"].items() >= {"param": "max_tokens", "code": "state_exceeds_memory"}.items()
    assert "needs 14 B of state" in str(large.value)
    made.is_draining = True
    with pytest.raises(Draining):
        made.submit(request("e"), arrived_at=0.0)
    made.is_stopping = True
    with pytest.raises(Draining, match="is stopping and takes no new requests; send them elsewhere"):
        made.submit(request("f"), arrived_at=0.0)
    made.count_refused(InvalidRequest("a bad temperature"))
    assert (count("shed"), count("invalid"), count("error")) == (3, 3, 0)


class Slot:
    """A generation that ends as soon as its prompt's state is there."""

    sink = prefixes = None
    num_cached_tokens = 0

    def __init__(self) -> None:
        self.marks, self.how, self.num_kept = Marks(), "", 0

    def keep(self, num_tokens):
        self.num_kept = num_tokens

    async def filled(self):
        pass

    def compute(self):
        self.how = "computed"

    def import_done(self, num_tokens):
        self.how = "imported"

    def cancel(self, choice=None):
        pass

    async def __aiter__(self):
        return
        yield


class Peer:
    """A prefill peer that fails with these errors, one after the other, and then delivers."""

    reason, num_streams, host, rtt_s = "", 0, "127.0.0.1", 0.0

    def __init__(self, name="p", state="ready", errors=()):
        self.name, self.state, self.errors, self.load, self.num_asked = name, state, list(errors), {}, 0

    def prefill(self, request, sink, source=None):
        self.num_asked += 1
        return Prefill(self.errors.pop(0) if self.errors else None)


class Prefill:
    report = SimpleNamespace(
        wire_bytes=1,
        pushed_bytes=0,
        codecs={},
        num_cached_tokens=0,
        raw_bytes=1,
        codec="raw",
        accepted_at=0.0,
        remote_queue_s=0.0,
        prefill_s=0.0,
        last_byte_at=0.0,
        verified_tokens=0,
    )
    progress = TransferProgress(first_chunk_at=1.0)

    def __init__(self, error):
        self.error = error

    async def wait(self):
        if self.error is not None:
            raise self.error
        return self.report

    async def closed(self):
        pass

    def cancel(self):
        pass


class Site:
    """A dispatcher with such peers, for prompts that go remote and may be computed here only at a rate."""

    def __init__(self, *peers, rate=0.0):
        self.peers, self.slot, self.changed = list(peers), Slot(), asyncio.Event()
        self.made, _ = dispatcher()
        self.made.backend.open = self.open
        self.made.peers, self.made._peers_changed = lambda: self.peers, self.wait
        self.made.settings.threshold_tokens = 0.0
        self.made.fallback.set_rate(rate, rate)

    async def open(self, request):
        return self.slot

    async def wait(self):
        self.changed.clear()
        await self.changed.wait()

    async def run(self):
        self.active = self.made.submit(request(), arrived_at=0.0)
        async for _ in self.active:
            pass
        return self.slot.how


@pytest.mark.parametrize("error", [StaleHandle("used"), RequestDamaged("on the way")])
async def test_what_is_no_fault_of_the_peers_is_asked_of_it_once_more(error):
    peer = Peer(errors=[error])
    assert await Site(peer).run() == "imported" and peer.num_asked == 2
    peer = Peer(errors=[error, error])
    assert await Site(peer, rate=1000.0).run() == "computed" and peer.num_asked == 2
    peer = Peer(errors=[LinkLost("gone")])
    assert await Site(peer, rate=1000.0).run() == "computed" and peer.num_asked == 1


@pytest.mark.parametrize("is_all", [True, False])
async def test_a_peer_that_goes_with_all_of_the_state_delivered_has_delivered(is_all, monkeypatch):
    """Nothing may be computed here; what is missing is asked of another peer from where the first one ended."""
    first, second = Peer("p", errors=[LinkLost("gone")]), Peer("q", errors=[])
    second.load = {"num_queued_tokens": 9}  # so that p is asked first
    site = Site(first, second)
    monkeypatch.setattr(Prefill.report, "verified_tokens", request().num_prompt_tokens - (1 if is_all else 2))
    starts = []
    prefill = second.prefill
    second.prefill = lambda wanted, *memory: starts.append(wanted.start) or prefill(wanted, *memory)
    assert await site.run() == "imported"
    assert site.active.report.peer == ("p" if is_all else "q")
    assert site.active.report.route == "remote"
    assert starts == ([] if is_all else [request().num_prompt_tokens - 2])


async def test_to_be_asked_again_a_peer_may_have_to_open_its_data_links_first():
    """A Resume is refused over the control link, before the session is ready."""
    peer = Peer()
    site = Site(peer, rate=1000.0)

    def refuse(wanted, sink, source=None):
        peer.state, peer.prefill = "connecting", ask
        asyncio.get_running_loop().call_later(0.01, arrive)
        return Prefill(StaleHandle("used"))

    def arrive():
        peer.state = "ready"
        site.changed.set()

    ask, peer.prefill = peer.prefill, refuse
    assert await site.run() == "imported" and peer.num_asked == 1


async def test_a_peer_is_told_what_is_left_of_the_deadline():
    peer, asked = Peer(), []
    prefill = peer.prefill
    peer.prefill = lambda wanted, *memory: asked.append(wanted.deadline_s) or prefill(wanted, *memory)
    site = Site(peer)
    for deadline_s in (10.0, None):
        active = site.made.submit(replace(request(), deadline_s=deadline_s), arrived_at=time.monotonic() - 4.0)
        async for _ in active:
            pass
    assert asked == [pytest.approx(6.0 + GRACE_S, abs=0.5), None]


async def test_a_request_waits_for_a_peer_that_is_just_joining():
    new = Peer("new", "connecting")
    site = Site(new)
    running = asyncio.create_task(site.run())
    while not site.made.active or site.active.stage != "waiting for a peer":
        await asyncio.sleep(0)
    new.state = "ready"
    site.changed.set()
    assert await running == "imported" and site.active.report.peer == "new"


async def test_a_spent_budget_names_gate_value_limit_and_setting():
    site = Site(Peer(state="down"), rate=1000.0)
    site.made.fallback.take(5000, time.monotonic())
    with pytest.raises(NoPeer) as refused:
        await site.run()
    body = error_body(refused.value)["error"]
    wanted = {"gate": "fallback", "value": 9, "limit": 1000.0, "setting": "fallback.local_prefill_tokens_per_s"}
    assert body.items() >= wanted.items() and body["code"] == "no_peer"
    assert http_status(refused.value) == 503
    # About 4,000 tokens are owed, at 1,000 a second.
    assert error_headers(refused.value)["Retry-After"] in ("4", "5")


async def test_it_does_not_wait_for_long_nor_for_a_peer_that_failed(monkeypatch):
    monkeypatch.setattr(dispatch, "JOIN_WAIT_S", 0.05)
    with pytest.raises(NoPeer):
        await Site(Peer(state="connecting")).run()
    monkeypatch.setattr(dispatch, "JOIN_WAIT_S", 60.0)
    for peer in (Peer(state="down"), Peer(state="incompatible"), Peer(errors=[LinkLost("gone")])):
        with pytest.raises(NoPeer):
            await asyncio.wait_for(Site(peer).run(), 5)
    assert await Site(Peer(state="connecting"), rate=1000.0).run() == "computed", "what may be computed here is"


async def test_a_peer_that_leaves_by_reload_has_not_failed():
    """Another address under the same name is another peer."""
    old, new = Peer(errors=[PeerCancelled("it leaves")]), Peer(state="connecting")
    site = Site(old)
    ask = old.prefill

    def leave(wanted, sink, source=None):
        site.peers = [new]
        asyncio.get_running_loop().call_soon(arrive)
        return ask(wanted, sink)

    def arrive():
        new.state = "ready"
        site.changed.set()

    old.prefill = leave
    assert await site.run() == "imported" and (old.num_asked, new.num_asked) == (1, 1)


async def test_what_was_kept_survives_a_peer_that_cannot_be_asked():
    """Its limits refuse the request before anything is sent: the sink was handed out, and nobody writes to it."""

    def prefill(wanted, sink, source=None):
        raise PeerShed("8 streams are open at peer q, its limit is 8")

    kept = []
    generation = SimpleNamespace(sink=object(), source=object(), keep=kept.append)
    client = SimpleNamespace(prefill=prefill)
    with pytest.raises(PeerShed):
        start_remote(
            client, generation, request(), start=5, held=0, now=0.0, progress_timeout_s=1.0,
            has_alternative=lambda: False,
        )  # fmt: skip
    assert kept == [5]


@pytest.mark.parametrize(("others_until_s", "ends_after_s"), [(0.0, 0.2), (0.9, 1.1), (60.0, 2.0)])
async def test_a_prefill_may_wait_while_its_peer_works_for_others_but_not_for_ever(
    monkeypatch, others_until_s, ends_after_s
):
    began = time.monotonic()

    class Silent:
        """Begun, and then nothing of it comes."""

        cancel = staticmethod(lambda: None)

        @property
        def progress(self):
            return TransferProgress(first_chunk_at=1.0, num_peer_moves=int(100 * min(passed(), others_until_s)))

        async def wait(self):
            await asyncio.Event().wait()

    def passed():
        return time.monotonic() - began

    monkeypatch.setattr("decoded.remote._WATCH_S", 0.02)
    client = SimpleNamespace(name="p", state="ready")
    attempt = RemoteAttempt(client, Silent(), 0.0, 0.2, lambda: True)
    with pytest.raises(TransferTimeout, match=r"stream\.progress_timeout"):
        await attempt.wait()
    assert ends_after_s - 0.01 < passed() < ends_after_s + 1.5
