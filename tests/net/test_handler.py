"""prefilld's handler of streams behind real sockets: what it refuses, and peers that take nothing of their state."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from math import inf

import pytest
from prometheus_client import CollectorRegistry

from common.errors import PeerError, PeerInvalid, PeerShed, PeerTimeout, PromptTooLong
from common.fake import FakeExecutor, FakeOptions
from common.layout import ModelInfo
from common.local_backend import LocalBackend
from common.net.options import RemoteRequest
from common.net.pool import PeerClient, RemotePrefill
from common.net.remote import RemotePrefill as Remote
from common.net.server import PrefillServer
from common.policy.admission import AdmissionController, AdmissionLimits
from common.policy.costs import PrefillCost
from common.sched.prefix_index import ROWS
from common.state_cache import StateCache
from common.worker import WorkerOptions
from prefilld.learned import LearnedCost
from prefilld.metrics import PrefillMetrics
from prefilld.stream import StreamHandler
from tests.net.rig import FAST, end, on_uvloop
from tests.wire.kit import Sink

CONTEXT = 512
LIMITS = AdmissionLimits(4, 4, 1 << 20, 1 << 30, section="limits")


class Served:
    """A fake engine behind the real handler, and a client that is ready."""

    def __init__(
        self, handler: StreamHandler, server: PrefillServer, client: PeerClient, registry: CollectorRegistry
    ) -> None:
        self.handler, self.server, self.client, self.registry = handler, server, client, registry

    def ask(
        self,
        num_tokens: int,
        start: int = 0,
        deadline_s: float | None = None,
        name: str = "r1",
        client: PeerClient | None = None,
        due_s: float | None = None,
    ) -> RemotePrefill:
        request = RemoteRequest(name, [1] * num_tokens, start, deadline_s=deadline_s, codecs=("raw",), due_s=due_s)
        return (client or self.client).prefill(request, Sink(self.handler.backend.info.layout, num_tokens))

    def count(self, metric: str, **labels: str) -> float:
        return self.registry.get_sample_value(metric, labels) or 0.0

    async def freed(self) -> None:
        """Until no stream holds a slot."""
        async with asyncio.timeout(5):
            await self.handler.wait_idle()
        assert not self.handler.admission.running


@contextlib.asynccontextmanager
async def served(
    progress_timeout_s: float = 60.0,
    rate: float = 0.0,
    max_prompt_tokens: int = 0,
    cache_bytes: int = 0,
    limits: AdmissionLimits = LIMITS,
) -> AsyncIterator[Served]:
    options = FakeOptions(prefill_tokens_per_s=rate, decode_tokens_per_s=0.0, max_context=CONTEXT, num_layers=2)

    def make_cache(info: ModelInfo) -> StateCache | None:
        return StateCache(info.layout, {ROWS: cache_bytes}) if cache_bytes else None

    backend = LocalBackend(lambda: FakeExecutor(options), WorkerOptions(chunk_tokens=64), make_cache)
    await backend.start()
    registry = CollectorRegistry()
    handler = StreamHandler(
        backend,
        AdmissionController(limits),
        PrefillMetrics(registry),
        max_staged_bytes=1 << 20,
        max_prompt_tokens=max_prompt_tokens,
        progress_timeout_s=progress_timeout_s,
    )
    server = PrefillServer(end("prefill", info=backend.info), FAST, handler)
    await server.start("127.0.0.1", 0)
    try:
        async with connected(server, backend, "d") as client:
            yield Served(handler, server, client, registry)
    finally:
        await server.close()
        await backend.close()


@contextlib.asynccontextmanager
async def connected(server: PrefillServer, backend: LocalBackend, name: str) -> AsyncIterator[PeerClient]:
    """A decoded of that name, ready."""
    local = end("decode", instance=f"{name}-1", info=backend.info, name=name)
    client, ready = PeerClient("p", "127.0.0.1", server.port, local=local, options=FAST), asyncio.Event()
    client.on_state = lambda c: c.state == "ready" and ready.set()
    await client.start()
    try:
        await asyncio.wait_for(ready.wait(), 5)
        yield client
    finally:
        await client.close()


async def refusal(prefill: RemotePrefill) -> PeerError:
    with pytest.raises(PeerError) as e:
        await asyncio.wait_for(prefill.wait(), 10)
    assert prefill.progress.accepted_at == 0.0, "refused before Accepted"
    return e.value


@on_uvloop
async def test_what_cannot_be_computed_is_refused_before_it_is_accepted():
    async with served() as s:
        for num_tokens, start in ((0, 0), (10, 10)):
            assert isinstance(error := await refusal(s.ask(num_tokens, start)), PeerInvalid)
            assert f"start = {start} of {num_tokens} tokens" in str(error)
        assert isinstance(error := await refusal(s.ask(CONTEXT + 1)), PromptTooLong)
        assert "the model's context of 512" in str(error)
        await s.freed()
        assert s.count("prfaas_refused_total", gate="invalid") == 2
        assert s.count("prfaas_refused_total", gate="prompt_tokens") == 1
        assert s.count("prfaas_prefills_total", outcome="refused") == 3
        report = await s.ask(CONTEXT).wait()
        assert report.num_tokens == CONTEXT


@on_uvloop
async def test_limit_of_the_configuration_is_named():
    async with served(max_prompt_tokens=100) as s:
        assert "limits.max_prompt_tokens = 100" in str(await refusal(s.ask(101)))


@on_uvloop
async def test_deadline_holds_at_the_prefill_peer_too(monkeypatch):
    monkeypatch.setattr(Remote, "start_deadline", lambda self, deadline_s: None)
    async with served(rate=500.0) as s:
        assert isinstance(await refusal(s.ask(100, deadline_s=0.0)), PeerTimeout)
        began = time.monotonic()
        with pytest.raises(PeerTimeout, match=r"deadline of 0.2 s"):
            await asyncio.wait_for(s.ask(CONTEXT, deadline_s=0.2).wait(), 10)
        assert time.monotonic() - began < 0.9, "not after all of its chunks"
        await s.freed()
        assert s.count("prfaas_prefills_total", outcome="timeout") == 1
        await s.ask(100, deadline_s=5.0, name="r2").wait()


@on_uvloop
async def test_decodeds_take_turns_so_that_a_flood_of_one_does_not_starve_another():
    limits = replace(LIMITS, max_running_requests=1, max_queued_requests=40)
    async with served(rate=20000.0, limits=limits) as s, connected(s.server, s.handler.backend, "e") as other:
        order: list[str] = []

        async def finish(prefill: RemotePrefill, name: str) -> None:
            await prefill.wait()
            order.append(name)

        flood = [finish(s.ask(300, name=f"flood{n}"), f"flood{n}") for n in range(30)]
        waiting = [asyncio.ensure_future(each) for each in flood]
        while len(s.handler.active) < 30:
            await asyncio.sleep(0.005)
        num_before = len(order)
        few = [finish(s.ask(300, name=f"few{n}", client=other), f"few{n}") for n in range(3)]
        await asyncio.wait_for(asyncio.gather(*few), 10)
        # Of the flood: what ran or had been sent already, and its turn before each of the others'.
        assert len(order) - num_before <= 3 + 5 and len(order) < 20, order
        await asyncio.wait_for(asyncio.gather(*waiting), 20)
        assert [name for name in order if name.startswith("flood")] == [f"flood{n}" for n in range(30)]


@on_uvloop
@pytest.mark.parametrize(("due", "first"), [((None, None), "short"), ((90.0, 20.0), "long"), ((90.0, 0.1), "short")])
async def test_what_is_due_is_computed_first(due, first):
    async with served(rate=500.0) as s:
        prefills = {"short": s.ask(320, name="short", due_s=due[0]), "long": s.ask(500, name="long", due_s=due[1])}
        order: list[str] = []

        async def finish(name: str) -> None:
            await prefills[name].wait()
            order.append(name)

        await asyncio.wait_for(asyncio.gather(*map(finish, prefills)), 20)
        assert order[0] == first


@on_uvloop
async def test_one_decoded_cannot_fill_the_queue_of_all():
    limits = replace(LIMITS, max_running_requests=1, max_queued_requests=18)
    async with served(rate=300.0, limits=limits) as s, connected(s.server, s.handler.backend, "e") as other:
        flood = [s.ask(200, name=f"flood{n}") for n in range(18)]  # one runs, 16 wait
        error = await refusal(flood[-1])
        assert isinstance(error, PeerShed)
        told = "gate tenant_requests: 16 against a limit of 16, 8 times the room left (limits.max_queued_requests)"
        assert told in str(error)
        assert s.count("prfaas_refused_total", gate="tenant_requests") == 1
        newcomer = s.ask(10, name="newcomer", client=other)
        while not newcomer.progress.accepted_at:
            await asyncio.sleep(0.005)
        assert {r.peer for r in s.handler.active.values()} == {"d", "e"}
        for prefill in (*flood[:-1], newcomer):
            prefill.cancel()
        await s.freed()


def never_acks(s: Served) -> None:
    async def verify(*args: object) -> None:
        await asyncio.get_running_loop().create_future()

    s.client._codecs.verify = verify


def opens_no_data_link(s: Served) -> None:
    for peer in s.server._peers.values():
        peer.data.clear()


@on_uvloop
@pytest.mark.parametrize("fault", [never_acks, opens_no_data_link])
async def test_peer_that_takes_nothing_loses_its_stream_and_not_its_session(fault: Callable[[Served], None]):
    async with served(progress_timeout_s=0.8) as s:
        fault(s)
        began, prefill = time.monotonic(), s.ask(200)
        with pytest.raises(PeerTimeout, match=r"stream.progress_timeout"):
            await asyncio.wait_for(prefill.wait() if fault is opens_no_data_link else told(prefill), 10)
        assert time.monotonic() - began > 0.8, "not before it had its time"
        await s.freed()
        assert s.count("prfaas_prefills_total", outcome="timeout") == 1
        assert s.client.state == "ready"


async def told(prefill: RemotePrefill) -> None:
    """wait() would wait for the thread that never comes back."""
    async with asyncio.timeout(8):
        while prefill._stream.error is None:
            await asyncio.sleep(0.01)
    raise prefill._stream.error


@on_uvloop
async def test_slow_peer_that_takes_something_keeps_its_stream():
    async with served(progress_timeout_s=0.5) as s:
        verify = s.client._codecs.verify

        async def slowly(*args: object) -> None:
            await asyncio.sleep(0.3 * next(turns))
            await verify(*args)

        turns = iter(range(1, 100))
        report = await asyncio.wait_for(s.ask(200).wait(), 20)
        assert report.num_segments >= 3
        s.client._codecs.verify = slowly
        began = time.monotonic()
        await asyncio.wait_for(s.ask(200, name="r2").wait(), 20)
        assert time.monotonic() - began > 0.9


@on_uvloop
async def test_cost_is_learned_of_what_was_computed_alone():
    """Neither what the cache had, nor prompts that came to nothing; what the receiver has counts if it is computed."""
    async with served(rate=1000.0, cache_bytes=1 << 28) as s:
        seen: list[tuple[int, int, float]] = []
        learned = s.handler.learned.prefilled
        s.handler.learned.prefilled = lambda *what: (seen.append(what), learned(*what))[1]

        async def ask(name: str, num_tokens: int, start: int = 0) -> None:
            await s.ask(num_tokens, start, name=name).wait()
            assert s.handler.backend.cache is not None
            await s.handler.backend.cache.settle()

        assert s.handler.learned.load() == {}
        await ask("a", 130, start=100)
        await ask("b", 130)
        await ask("c", 400)
        with pytest.raises(TimeoutError):
            await s.ask(CONTEXT, deadline_s=0.02, name="d").wait()
        assert s.handler.learned.facts()["num_prompts"] == 2
        await ask("e", 500)
        await s.freed()
        # Prompts of one rig begin alike: what stays of the cut-off one is found, too.
        (first, second, third, last) = seen
        assert [first[:2], second[:2], third[:2]] == [(0, 130), (130, 0), (130, 270)]
        assert last[0] >= 400 and sum(last[:2]) == 500
        assert third[2] == pytest.approx(270 / 1000, rel=0.5)
        load, facts = s.handler.learned.load(), s.handler.learned.facts()
        assert set(load) == {"prefill_constant_s", "prefill_per_token_s", "prefill_per_square_s"}
        assert load["prefill_per_token_s"] == facts["per_token_s"]
        cost = s.handler.learned.cost
        assert cost is not None and cost.seconds(100, 300) == pytest.approx(300 / 1000, rel=0.5)
        assert (facts["num_prompts"], facts["has_profile"]) == (3, False)


@on_uvloop
async def test_each_decoded_is_told_what_the_other_leaves():
    async with served(rate=1000.0) as s, connected(s.server, s.handler.backend, "e") as other:
        s.server.load = lambda name: s.handler.sharing.load(name, inf, time.monotonic())
        for n in range(4):
            await s.ask(400, name=f"r{n}").wait()
        async with asyncio.timeout(5):
            while other.load.get("compute_share", 1.0) == 1.0:
                await asyncio.sleep(0.02)
        # 1.6 of the last 60 seconds.
        assert other.load["compute_share"] == pytest.approx(1 - 1.6 / 60, abs=0.01)
        assert s.client.load["compute_share"] == 1.0
        assert list(s.handler.sharing.busy_shares(time.monotonic())) == ["d"]


def test_a_profile_is_known_from_the_start_and_learned_on():
    prior = PrefillCost(0.01, 1e-3, 1e-8)
    learned = LearnedCost(prior)
    assert learned.cost == prior and learned.facts()["has_profile"]
    for _ in range(300):
        learned.prefilled(0, 1000, 3.0)
    assert learned.cost is not None and learned.cost.seconds(0, 1000) == pytest.approx(3.0, rel=0.05)
