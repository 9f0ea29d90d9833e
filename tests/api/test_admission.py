"""Admission as the dispatcher carries it out: classes, deadlines, preemption, goodput; with the fake engine."""

from __future__ import annotations

import asyncio
import time

import pytest
from prometheus_client import CollectorRegistry

from common.errors import InvalidRequest, Overloaded
from common.fake import FakeExecutor, FakeOptions
from common.local_backend import LocalBackend
from common.policy.admission import AdmissionController, AdmissionLimits
from common.policy.fallback import FallbackBudget
from common.policy.slo import SloTargets
from common.policy.views import ServiceClass
from common.request import Request, SamplingParams
from common.worker import WorkerOptions
from decoded.api.errors import error_body, error_headers, http_status
from decoded.deadline import GRACE_S, Deadline
from decoded.demands import demand_of
from decoded.dispatch import Dispatcher
from decoded.metrics import DecodeMetrics
from decoded.settings import DispatchSettings
from decoded.verbs import class_facts, request_facts

CLASSES = (ServiceClass("normal", 0, 0.5), ServiceClass("urgent", 10, 0.2), ServiceClass("batch", -10, 0.2))


class Node:
    """A dispatcher over a fake engine of such speeds, and what its metrics say."""

    def __init__(self, *, running=8, queued=8, max_batch=2, settings=None, classes=CLASSES, **speeds) -> None:
        options = FakeOptions(num_layers=2, num_heads=1, head_dim=8, **speeds)
        worker = WorkerOptions(max_batch=max_batch, chunk_tokens=64)
        self.backend = LocalBackend(lambda: FakeExecutor(options), worker)
        self.limits = AdmissionLimits(
            running, queued, 10**6, 1 << 30, 1.0, max_rows=max_batch, classes=classes, large_prompt_tokens=10**6
        )
        self.registry = CollectorRegistry()
        self.settings = settings or DispatchSettings("local-only", 1000.0, 2, 30.0, 30.0)

    async def __aenter__(self) -> Node:
        await self.backend.start()
        self.dispatcher = Dispatcher(
            self.backend,
            lambda: [],
            admission=AdmissionController(self.limits),
            fallback=FallbackBudget(1000, 1000),
            settings=self.settings,
            metrics=DecodeMetrics(self.registry),
        )
        return self

    async def __aexit__(self, *_) -> None:
        await self.backend.close()

    def submit(self, name: str, num_prompt=10, max_tokens=4, **fields):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        tokens = tuple(3 + (i * 31) % 1000 for i in range(num_prompt))
        return self.dispatcher.submit(Request(name, tokens, sampling, **fields), arrived_at=time.monotonic())

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


async def tokens_of(active) -> list[int]:
    return [output.token_id async for output in active]


async def until(is_true) -> None:
    async with asyncio.timeout(20):
        while not is_true():
            await asyncio.sleep(0.005)


async def test_the_priority_of_a_class_reaches_the_engine_and_what_it_preempts_resumes_unchanged():
    fast = {"prefill_tokens_per_s": 0, "decode_tokens_per_s": 200}
    async with Node(**fast) as node:
        alone = [await tokens_of(node.submit(f"alone{n}", 10 + n, 60)) for n in range(2)]
        batch = [
            asyncio.create_task(tokens_of(node.submit(f"batch{n}", 10 + n, 60, service_class="batch")))
            for n in range(2)
        ]
        await until(lambda: node.backend.stats().num_rows == 2)
        assert node.backend.stats().num_preemptions == 0
        urgent = node.submit("urgent", 20, 20, service_class="urgent")
        assert urgent.request.priority == 10
        assert len(await tokens_of(urgent)) == 20
        assert not all(task.done() for task in batch), "it did not wait for them"
        assert await asyncio.gather(*batch) == alone, "token for token as if nobody had come"
        node.dispatcher.update_gauges()
        assert node.metric("prfaas_preemptions_total") >= 1


async def test_lower_classes_get_rows_of_the_batch_while_higher_ones_come_without_end():
    """Two rows: one is the batch class's as long as it has a request, whatever else comes."""
    fast = {"prefill_tokens_per_s": 0, "decode_tokens_per_s": 500}
    async with Node(queued=1000, **fast) as node:
        done = []

        async def stream(name: str, num: int):
            async def one(n: int):
                done.append((name, len(await tokens_of(node.submit(f"{name}{n}", 10, 20, service_class=name)))))

            await asyncio.gather(*(one(n) for n in range(num)))

        await asyncio.gather(stream("urgent", 60), stream("batch", 6))
        assert len(done) == 66 and all(num == 20 for _, num in done)
        last = max(n for n, (name, _) in enumerate(done) if name == "batch")
        assert last < 60, f"the last of six batch requests was number {last + 1} of 66 to end"


async def test_an_unknown_class_is_refused_with_the_known_ones():
    async with Node() as node:
        with pytest.raises(InvalidRequest, match="'gold'; the classes of this server are normal, urgent, batch") as e:
            node.submit("a", service_class="gold")
        body = error_body(e.value)["error"]
        assert (body["param"], body["code"], http_status(e.value)) == ("X-Prfaas-Class", "unknown_class", 400)
        assert node.submit("b").request.service_class == "normal", "the first one is for those that name none"


async def test_a_deadline_that_passes_in_the_queue_ends_the_request_and_frees_its_place():
    async with Node(running=1, prefill_tokens_per_s=0, decode_tokens_per_s=20) as node:
        first = asyncio.create_task(tokens_of(node.submit("first", 10, 30)))
        waits = node.submit("waits", deadline_s=0.2)
        assert waits.stage == "queued"
        with pytest.raises(Overloaded) as e:
            await tokens_of(waits)
        body = error_body(e.value)["error"]
        assert (body["gate"], body["limit"], body["setting"]) == ("deadline", 0.2, "X-Prfaas-Deadline")
        assert body["value"] == pytest.approx(0.2, abs=0.15) and "(queued)" in body["message"]
        assert (http_status(e.value), error_headers(e.value)["Retry-After"]) == (503, "1")
        assert node.metric("prfaas_shed_total", gate="deadline") == 1
        assert node.metric("prfaas_deadline_misses_total", stage="queue") == 1
        assert node.metric("prfaas_requests_total", route="local", outcome="shed") == 1
        assert not node.dispatcher.admission.queue
        assert len(await first) == 30


async def test_a_deadline_that_passes_while_the_prompt_is_computed_stops_that():
    """Nothing was computed yet, so nobody knows how slow this engine is."""
    async with Node(prefill_tokens_per_s=200) as node:
        active = node.submit("slow", 2000, deadline_s=0.5)
        with pytest.raises(Overloaded, match=r"no token after 0\.\d+ s \(prefill local\), the deadline is 0\.5 s"):
            await tokens_of(active)
        assert node.metric("prfaas_deadline_misses_total", stage="prefill") == 1
        await until(lambda: not any(node.backend.stats().state_bytes.values()))
        with pytest.raises(Overloaded, match=r"expected within \d+(\.\d+)? s"):
            node.submit("again", 2000, deadline_s=0.5)  # now it is known
        assert node.metric("prfaas_shed_total", gate="deadline") == 2
        assert node.metric("prfaas_requests_total", route="none", outcome="shed") == 1


async def test_a_deadline_is_for_the_first_token_alone():
    settings = DispatchSettings("local-only", 1000.0, 2, 30.0, 30.0, deadline_s=0.4)
    async with Node(settings=settings, prefill_tokens_per_s=0, decode_tokens_per_s=40) as node:
        active = node.submit("long", 10, 40)
        assert len(await tokens_of(active)) == 40
        assert node.metric("prfaas_deadline_misses_total", stage="prefill") == 0
        with pytest.raises(Overloaded) as e:
            await asyncio.gather(*(tokens_of(node.submit(f"{n}", 10, 40)) for n in range(6)))
        assert e.value.setting == "admission.deadline"


async def test_a_peer_gets_what_is_left_of_the_deadline():
    request = Request("r", (1, 2, 3), SamplingParams(max_tokens=1), deadline_s=10.0, due_s=7.0)
    now = time.monotonic()
    deadline = Deadline(demand_of(request, 1, "admission.deadline", 0.0), now - 4.0, lambda: None)
    assert deadline.from_now(request, now + 1.0).deadline_s == pytest.approx(5.0 + GRACE_S)
    assert deadline.from_now(request, now + 1.0).due_s == pytest.approx(2.0)
    assert deadline.from_now(request, now + 100.0).deadline_s == GRACE_S
    assert deadline.from_now(request, now + 100.0).due_s == 0.0
    deadline.cancel()


@pytest.mark.parametrize("tpot_s", [10.0, 0.001])
async def test_goodput_counts_who_met_the_targets(tpot_s):
    settings = DispatchSettings("local-only", 1000.0, 2, 30.0, 30.0, slo=SloTargets(5.0, tpot_s))
    async with Node(settings=settings, running=1, prefill_tokens_per_s=0, decode_tokens_per_s=100) as node:
        await tokens_of(node.submit("a", 10, 5))
        await tokens_of(node.submit("one token has no gap", 10, 1))
        blocks = asyncio.create_task(tokens_of(node.submit("blocks", 10, 50)))
        late = node.submit("late", deadline_s=0.05)
        with pytest.raises(Overloaded):
            await tokens_of(late)
        leaves = node.submit("leaves")
        leaves.cancel()
        await blocks

        def count(target: str, result: str) -> float:
            return node.metric("prfaas_slo_requests_total", target=target, result=result, **{"class": "normal"})

        num_ok = 3 if tpot_s == 10.0 else 1
        assert (count("ttft", "met"), count("ttft", "missed")) == (3, 1)
        assert (count("tpot", "met"), count("tpot", "missed")) == (num_ok, 4 - num_ok)
        assert (count("all", "met"), count("all", "missed")) == (num_ok, 4 - num_ok)


async def test_status_and_requests_say_class_tenant_and_wait():
    async with Node(running=1, prefill_tokens_per_s=0, decode_tokens_per_s=20) as node:
        first = node.submit("first", 10, 20, tenant="0123456789abcdef")
        running = asyncio.create_task(tokens_of(first))
        node.submit("second", service_class="batch")
        await asyncio.sleep(0.1)
        now = time.monotonic()
        rows = [request_facts(a, now) for a in node.dispatcher.active.values()]
        assert [(r["class"], r["tenant"]) for r in rows] == [("normal", "01234567"), ("batch", "")]
        assert rows[0]["wait_s"] < 0.1 <= rows[1]["wait_s"]
        facts = {c["class"]: c for c in class_facts(node.dispatcher)}
        assert list(facts) == ["urgent", "normal", "batch"]
        assert (facts["normal"]["num_running"], facts["batch"]["num_queued"]) == (1, 1)
        assert facts["batch"]["longest_wait_s"] >= 0.1
        assert node.metric("prfaas_queued_requests", **{"class": "batch"}) == 1
        assert node.metric("prfaas_queue_seconds_count", **{"class": "normal"}) == 1
        running.cancel()


async def test_every_refusal_is_one_sample_of_one_gate():
    async with Node(running=1, queued=2, classes=(), prefill_tokens_per_s=0, decode_tokens_per_s=20) as node:
        answers, waiting = [], []
        for n in range(12):
            try:
                waiting.append(node.submit(f"{n}", tenant="t" if n % 2 else "u"))
            except Overloaded as e:
                answers.append(e.gate)
        node.dispatcher.abort_all("enough")
        ended = await asyncio.gather(*(tokens_of(a) for a in waiting), return_exceptions=True)
        assert len(ended) == 3 and len(answers) == 9
        samples = [s for family in node.registry.collect() for s in family.samples]
        shed = {s.labels["gate"]: s.value for s in samples if s.name == "prfaas_shed_total" and s.value}
        assert shed == {"queued_requests": 9, "draining": 3}
        assert sum(s.value for s in samples if s.name == "prfaas_requests_total") == 12


async def test_reload_moves_the_classes_and_starts_who_fits():
    async with Node(running=1, prefill_tokens_per_s=0, decode_tokens_per_s=100) as node:
        tasks = [asyncio.create_task(tokens_of(node.submit(f"{n}", 10, 20, service_class="batch"))) for n in range(3)]
        await asyncio.sleep(0.05)
        node.dispatcher.set_limits(AdmissionLimits(8, 8, 10**6, 1 << 30, max_rows=2, classes=CLASSES[:1]))
        assert len(node.dispatcher.admission.running) == 3
        assert [len(t) for t in await asyncio.gather(*tasks)] == [20] * 3
        assert not node.dispatcher.admission.running and not node.dispatcher.admission.state_bytes
        with pytest.raises(InvalidRequest):
            node.submit("late", service_class="batch")


def test_targets():
    targets = SloTargets(1.0, 0.1)
    assert targets.judge(1.0, 0.1) == {"ttft": True, "tpot": True, "all": True}
    assert targets.judge(1.1, 0.1) == {"ttft": False, "tpot": True, "all": False}
    assert SloTargets().judge(float("inf"), 0.0)["all"] is False, "what never came met no target"
    assert SloTargets().judge(1e9, 1e9)["all"] is True
